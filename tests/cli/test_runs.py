"""`outrider runs`: what a real training leaves is found, and what happens to it is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.training import runs
from outrider.training.trainer import Trainer
from outrider.utils.locks import LOCK, sole_process
from tests.toys.command_line import Run, check_error, in_process
from tests.toys.targets import toy_target
from tests.toys.training import make_run, recipe


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    return in_process(monkeypatch, capfd, "runs")


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainings of 12 steps, one ended after 6 of them; a directory that is no training; two evaluations."""
    directory = tmp_path_factory.mktemp("runs")
    target = toy_target()
    for name, stop in (("half", 6), ("whole", None)):
        asked = recipe(directory / "mine" / name, watch={"decode_every": 3, "decode_prompts": 1, "decode_tokens": 4})
        Trainer(asked, make_run(target)).train(stop)
    (directory / "notes").mkdir()
    for name, rate in (("first", 20.0), ("second", 30.0)):  # two tasks, the slower one with three times the tokens
        tasks = [
            {"tokens": 30, "tokens_per_second": rate, "baseline_tokens_per_second": 10.0},
            {"tokens": 90, "tokens_per_second": 10.0, "baseline_tokens_per_second": 10.0},
        ]
        (directory / "eval" / name).mkdir(parents=True)
        found = {"tasks": tasks, "settings": {"drafter": str(directory / "mine" / "whole" / "best")}}
        (directory / "eval" / name / "results.json").write_text(json.dumps(found))
    return directory


def listed(run: Run, top: Path) -> dict[str, dict]:
    status, said, errors = run(top, "--json")
    assert status == 0, errors
    return {one["run"]: one for one in json.loads(said)}


def test_trainings_are_found_with_how_far_and_how_good_they_are(run: Run, top: Path) -> None:
    found = listed(run, top)
    assert list(found) == ["mine/half", "mine/whole"]
    half, whole = found.values()
    assert (half["step"], half["steps"], half["status"]) == (6, 12, "stopped")
    assert (whole["step"], whole["steps"], whole["status"]) == (12, 12, "done")
    state = json.loads((top / "mine/whole/state/state.json").read_text())
    assert whole["best"] == state["watch"]["best"] and whole["metric"] == "decode_tau"
    assert whole["algorithm"] == "dspark" and whole["target"] == "toy" and 0 <= whole["seconds"] < 3600
    assert whole["bytes"] == sum(p.stat().st_size for p in (top / "mine/whole").rglob("*") if p.is_file())
    assert whole["speedup"] == pytest.approx(12 / 10) and half["speedup"] is None  # (3 + 9) s against (1 + 9) s
    assert listed(run, top / "mine" / "half")["half"]["step"] == 6


def test_a_run_that_is_going_on_is_seen_and_not_joined(run: Run, top: Path) -> None:
    out = top / "mine" / "half"
    with sole_process(out / LOCK):
        assert listed(run, top)["mine/half"]["status"] == "running"
        with pytest.raises(ValueError, match="is being trained by another process"):
            Trainer(recipe(out), make_run(toy_target())).train()
    assert listed(run, top)["mine/half"]["status"] == "stopped"


def test_steps_after_the_last_save_count_and_damage_does_not(run: Run, top: Path) -> None:
    """A killed process leaves metrics of later steps, the last line cut short."""
    out = top / "killed"
    (out / "state").mkdir(parents=True)
    (out / "state" / "state.json").write_text('{"step": 4, "settings"')
    (out / "metrics.jsonl").write_text(
        '{"step": 5, "group": "held_out", "expected_length_greedy": 1.5}\n{"step": 7, "group": "train"}\n{"step": 8,'
    )
    killed = listed(run, top)["killed"]
    assert (killed["step"], killed["steps"], killed["best"]) == (7, None, 1.5)


def test_the_table_fits_80_columns(run: Run, top: Path, tmp_path: Path) -> None:
    status, said, _ = run(top)
    assert status == 0 and "12/12" in said and "1.20x" in said and "stopped" in said
    out = tmp_path / ("a-long-name-" * 4) / "state"
    out.mkdir(parents=True)
    settings = {"target": "someone/" + "m" * 40, "optimizer": {"steps": 100000}, "drafter": {"algorithm": "eagle3"}}
    (out / "state.json").write_text(json.dumps({"step": 100000, "settings": settings}))
    said = run(tmp_path)[1]
    assert "100000/100000" in said and "eagle3" in said
    assert max(map(len, said.splitlines())) <= 80 and len(said.splitlines()) == 3


def test_where_there_is_nothing(run: Run, tmp_path: Path) -> None:
    assert "no trainings" in run(tmp_path)[1] and run(tmp_path, "--json")[1] == "[]\n"
    check_error(run(tmp_path / "absent"), "no directory")


def test_a_whole_disk_is_not_walked_through(
    run: Run, top: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_MOST_DIRECTORIES", 30)
    assert len(listed(run, top)) >= 2
    for number in range(30):
        (tmp_path / str(number)).mkdir()
    check_error(run(tmp_path), "has more than 30 directories below it")
