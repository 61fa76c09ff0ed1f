"""Metrics beside metrics.jsonl: W&B gets the same figures, and its run goes on when training does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from outrider.training.trainer import Trainer
from tests.toys.command_line import check_error, in_process
from tests.toys.target_directory import save_toy_recipe
from tests.toys.targets import toy_target
from tests.toys.training import make_run, recipe

STUB = """
class Error(Exception): ...

calls = []
refusal = None

class Run:
    def log(self, values, step):
        calls.append(("log", step, values))

    def finish(self):
        calls.append(("finish",))

def init(**settings):
    if refusal:
        raise Error(refusal)
    calls.append(("init", settings))
    return Run()
"""


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of that name that records calls."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "wandb.py").write_text(STUB)
    monkeypatch.syspath_prepend(str(tmp_path / "stub"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    import wandb

    monkeypatch.setitem(sys.modules, "wandb", wandb)  # and taken out again afterwards
    return wandb


def test_a_resumed_training_goes_on_in_its_run(wandb: ModuleType, tmp_path: Path) -> None:
    asked = recipe(tmp_path / "out", log=["wandb"])
    for stop in (6, None):
        Trainer(asked, make_run(toy_target())).train(stop)
    begun = [call[1] for call in wandb.calls if call[0] == "init"]
    assert len(begun) == 2 == wandb.calls.count(("finish",)) and begun[0]["id"] == begun[1]["id"]
    assert begun[1]["resume"] == "allow" and begun[0]["name"] == "out" and begun[0]["dir"] == str(tmp_path / "out")
    assert begun[0]["config"]["optimizer"]["steps"] == 12 and "out" not in begun[0]["config"]
    logged = [(step, values) for kind, step, values in (c for c in wandb.calls if c[0] == "log")]
    lines = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    entries = [
        (e.pop("step"), {f"{group}/{name}": v for name, v in e.items()}) for e in lines for group in [e.pop("group")]
    ]
    assert len(logged) == len(entries) > 12
    for (step, values), (same_step, same) in zip(logged, entries, strict=True):
        assert step == same_step and values == pytest.approx(same, abs=1e-6)
    assert not (tmp_path / "out" / "tensorboard").exists()


def test_another_training_in_that_directory_is_another_run(wandb: ModuleType, tmp_path: Path) -> None:
    for _ in range(2):
        Trainer(recipe(tmp_path / "out", log=["wandb"], save_every=12), make_run(toy_target())).train(1)
        for file in (tmp_path / "out" / "state").iterdir():
            file.unlink()
    first, second = (call[1]["id"] for call in wandb.calls if call[0] == "init")
    assert first != second


def test_what_wandb_refuses_is_said_with_a_way_on(wandb: ModuleType, tmp_path: Path) -> None:
    wandb.refusal = "No API key configured.\nUse wandb login."
    with pytest.raises(ValueError, match=r"^wandb: No API key configured\. Use wandb login\. WANDB_MODE=offline keeps"):
        Trainer(recipe(tmp_path / "out", log=["wandb"]), make_run(toy_target())).train(1)


def test_without_the_package_nothing_is_loaded(
    tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    (tmp_path / "target").symlink_to(toy / "target")
    path = save_toy_recipe(tmp_path, "log: [tensorboard, wandb]\n")
    check_error(in_process(monkeypatch, capfd, "train")(path), "wandb is not installed: pip install wandb")
    assert not (tmp_path / "out").exists()
