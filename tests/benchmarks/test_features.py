"""benchmarks/features.py at toy size: a row for every type that a store can hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import features
from tests.toys.target_directory import save_toy_drafter, save_toy_recipe, save_toy_target


def test_a_row_for_every_dtype(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(features, "set_up", lambda threads: None)
    vocab = save_toy_target(tmp_path / "target", layers=5)
    recipe = save_toy_recipe(tmp_path)
    save_toy_drafter(tmp_path / "drafter", vocab)
    features.main(recipe, drafter=tmp_path / "drafter")
    said = capsys.readouterr().out
    assert all(name in said for name in ("float16", "bf16", "int8", "fp8", "tau"))
