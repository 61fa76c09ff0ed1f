"""benchmarks/features.py at toy size: a row for every type that a store can hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import features
from outrider.checkpoints.checkpoint import Checkpoint, save_drafter
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dspark import DSpark, DSparkConfig
from tests.toys.target_directory import save_toy_target
from tests.toys.targets import randomise


def test_a_row_for_every_dtype(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(features, "set_up", lambda threads: None)
    vocab = save_toy_target(tmp_path / "target", layers=5)
    prompts = [json.dumps({"id": f"p{i}", "turns": [f"prompt {i}"]}) for i in range(10)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    (tmp_path / "recipe.yaml").write_text(
        f"target: {tmp_path / 'target'}\nout: {tmp_path / 'out'}\n"
        "data: {prompts: [{path: prompts.jsonl}], max_new_tokens: 12, max_prompt_tokens: 100, held_out: 3}\n"
        "drafter: {num_aux_layers: 2, num_hidden_layers: 1, markov_rank: 4, mask_token: <|end|>}\n"
    )
    shapes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "head_dim": 8, "markov_rank": 4}
    shapes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_target_layers": 5, "mask_token_id": 3}
    drafter = DSpark(DSparkConfig(**shapes, vocab_size=vocab, draft_vocab_size=vocab, target_layer_ids=(1, 3)))
    randomise(drafter)
    save_drafter(Checkpoint(DrafterWeights(drafter)), tmp_path / "drafter")
    features.main(tmp_path / "recipe.yaml", drafter=tmp_path / "drafter")
    said = capsys.readouterr().out
    assert all(name in said for name in ("float16", "bf16", "int8", "fp8", "tau"))
