"""Load generators and the frontier on a fake engine and a simulated clock, exact numbers; the verb on a toy model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.checkpoints.checkpoint import Checkpoint, save_drafter
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dspark import DSpark, DSparkConfig
from tests.toys.target_directory import save_toy_target
from tests.toys.targets import randomise


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, drafter/ and tasks.jsonl."""
    directory = tmp_path_factory.mktemp("toy")
    vocab = save_toy_target(directory / "target", layers=5)
    shapes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "head_dim": 8, "markov_rank": 4}
    shapes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_target_layers": 5, "mask_token_id": 3}
    drafter = DSpark(DSparkConfig(**shapes, vocab_size=vocab, draft_vocab_size=vocab, target_layer_ids=(1, 3)))
    randomise(drafter)
    save_drafter(Checkpoint(DrafterWeights(drafter)), directory / "drafter")
    lines = [json.dumps({"turns": [f"number {i}"]}) for i in range(6)]
    (directory / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    return directory
