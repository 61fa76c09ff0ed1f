"""`make test-gpu` on a CPU at toy size: what is run on a GPU the first time has run here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu


def test_predictions_are_written_first_and_figures_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "USERS", (1, 2))
    monkeypatch.setattr(gpu, "prototypes", lambda target: 1 / 0)  # a part that fails leaves the others theirs
    with pytest.raises(gpu.typer.Exit):
        gpu.main(tmp_path, "tiny", "cpu", "h100", 8.0, "decoding,prototypes,training")
    predicted = json.loads((tmp_path / "predictions.json").read_text())["figures"]
    measured = json.loads((tmp_path / "measured.json").read_text())["figures"]
    assert (tmp_path / "predictions.json").stat().st_mtime_ns <= (tmp_path / "measured.json").stat().st_mtime_ns
    assert measured["compilations after two steps"]["as predicted"] and predicted["compilations after two steps"]
    assert measured["prototypes failed"]["measured"].startswith("ZeroDivisionError")
    for name in ("plain step, 2 users, graph", "dspark round, 1 user, eager", "training step"):
        assert measured[name]["measured"] > 0


@pytest.mark.parametrize("kind", ["h100", "h200"])
def test_predictions_of_an_8b_target(kind: str) -> None:
    expected = gpu.predictions("8b", kind)
    assert all(0 <= one.low <= one.high for one in expected.values())
    assert 0.002 < expected["plain step, 1 user, graph"].low < 0.006  # 15 GB at 3.35 or 4.8 TB/s


def test_a_part_begins_only_while_there_is_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(tmp_path, "tiny", "cpu", "h100", 0.1, "decoding,training")
    assert capsys.readouterr().out.count("no time left") == 2 and not (tmp_path / "measured.json").exists()
