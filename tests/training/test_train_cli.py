"""`outrider train` on a toy target: what `auto` became is said, kept on resume, and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import outrider.cli.train as train
from outrider.training.trainer import Trainer
from outrider.utils import machine
from tests.toys.command_line import Run, check_error, in_process


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`outrider train ARGS` in this process; bfloat16 products take half as long as float32 ones."""
    monkeypatch.setattr(train, "set_up", lambda threads: None)
    monkeypatch.setattr(machine, "_cached_ratio", lambda: 0.5)
    return in_process(monkeypatch, capfd, "train")


@pytest.fixture
def recipe(toy: Path, tmp_path: Path) -> Path:
    prompts = [json.dumps({"id": str(i), "turns": [f"add {i} and 3"]}) for i in range(6)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    (tmp_path / "recipe.yaml").write_text(
        f"target: {toy / 'target'}\nout: {tmp_path / 'out'}\n"
        "data: {prompts: [{path: prompts.jsonl}], max_new_tokens: 12, max_prompt_tokens: 100, held_out: 2}\n"
        "drafter: {num_aux_layers: 2, num_hidden_layers: 1, markov_rank: 4, mask_token: <|end|>}\n"
        "optimizer: {steps: 3, sequences_per_step: 2, anchors_per_sequence: 2}\n"
        "watch: {decode_prompts: 1, decode_tokens: 4}\n"
    )
    return tmp_path / "recipe.yaml"


@pytest.fixture
def began(run: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """OUT of a run that was stopped after one of its three steps."""
    with monkeypatch.context() as patched:
        whole = Trainer.train
        patched.setattr(Trainer, "train", lambda self: whole(self, stop_after=1))
        status, said, errors = run(recipe)
    assert status == 0, errors
    assert "precision: bfloat16 (2.0x the products per second of float32 on this processor)" in said
    return recipe.parent / "out"


def state(out: Path) -> dict:
    return json.loads((out / "state" / "state.json").read_text())


def test_a_resumed_run_keeps_the_precision_it_began_with(
    run: Run, recipe: Path, began: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert state(began)["settings"]["precision"] == "bfloat16"
    changed = {**state(began), "threads": 64}
    (began / "state" / "state.json").write_text(json.dumps(changed))
    monkeypatch.setattr(machine, "_cached_ratio", lambda: 22.0)
    status, said, errors = run(recipe)
    assert status == 0, errors
    assert "precision: bfloat16 (as the run began)" in said and "the run was at 64" in said
    assert state(began)["step"] == 3 and state(began)["threads"] < 64
    recorded = json.loads((began / "drafter" / "outrider.json").read_text())["recipe"]
    assert (recorded["precision"], recorded["device"]) == ("bfloat16", "cpu")


def test_another_precision_than_the_runs_is_refused(run: Run, recipe: Path, began: Path) -> None:
    check_error(run(recipe, "precision=float32"), "precision was bfloat16, is now float32")
