"""`train --dry-run`: a run is measured on some of its work, and multiplied by its counts; nothing of it is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import outrider.training.estimate as estimates
from outrider.target.model import Target, load_target
from outrider.training.estimate import Estimate, estimate
from outrider.training.recipe import load_recipe
from outrider.training.setup import prepare
from outrider.training.trainer import Trainer
from tests.toys.command_line import Run, check_error, in_process
from tests.toys.target_directory import save_toy_recipe

RECIPE = "optimizer: {steps: 6, sequences_per_step: 2, anchors_per_sequence: 2}\nprecision: float32\n"
Estimator = Callable[..., Estimate]


@pytest.fixture(scope="module")
def target(toy: Path) -> Target:
    return load_target(str(toy / "target"))


@pytest.fixture
def directory(tmp_path: Path, toy: Path) -> Path:
    """A target, its drafter, prompts and a recipe."""
    for name in ("target", "drafter"):
        (tmp_path / name).symlink_to(toy / name)
    save_toy_recipe(tmp_path, RECIPE)
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    return in_process(monkeypatch, capfd)


@pytest.fixture
def estimated(directory: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> Estimator:
    """The estimate of the directory's recipe with changes; every clock says one second, so that counts show."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(estimates.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(estimates.Clock, "take", lambda clock: 1.0)
    rehearse = Trainer.rehearse
    monkeypatch.setattr(Trainer, "rehearse", lambda *what: {**rehearse(*what), "step_seconds": 1.0})
    return lambda *overrides: estimate(load_recipe(directory / "recipe.yaml", overrides), target)


def responses(directory: Path, count: int) -> str:
    """An override that names a file with responses to the first so many prompts."""
    path = directory / "there.jsonl"
    from outrider.data.chat import Chat

    chat = Chat.load(str(directory / "target"))
    settings = {"target": str(directory / "target"), "chat_template_sha256": chat.template_sha256}
    rows: list[dict[str, Any]] = [{"format": 2, "settings": settings}]
    rows += [{"id": f"p{i}", "turn": 0, "prompt": [5] * 9, "response": [7] * 4, "finished": True} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.responses={path}"


def test_an_estimate_follows_its_counts(directory: Path, estimated: Estimator) -> None:
    """More steps, prompts or precision of stored features: more of what they cost, and of nothing else."""
    base = estimated()
    assert [part.name for part in base.parts] == ["responses", "features", "steps", "checks"]
    assert base.steps == base.part("steps").seconds == 6 and base.step_seconds == 1
    assert base.memory > 0 and base.cached > 0 and base.ranks.startswith("1; a step of 2 conversations")
    longer = estimated("optimizer.steps=12", "watch.decode_every=3")
    assert longer.part("steps").seconds == 12 and longer.part("checks").seconds > base.part("checks").seconds
    assert longer.part("responses") == base.part("responses")
    assert base.with_steps(9).seconds == base.seconds + 3
    more = directory / "more.jsonl"
    more.write_text("".join(json.dumps({"turns": [f"prompt {i % 10}"]}) + "\n" for i in range(20)))
    doubled = estimated(f"data.prompts=[{{path: {more}}}]").part("responses")
    assert doubled.disk == pytest.approx(2 * base.part("responses").disk, rel=0.1)
    stored = [estimated("features.mode=store", f"features.dtype={kind}").part("features") for kind in ("bf16", "int8")]
    assert stored[0].disk == pytest.approx(2 * stored[1].disk, rel=0.2) and not base.part("features").disk
    assert estimated("features.mode=store", "features.max_gb=1e-6").part("features").disk == pytest.approx(1e-6 * 2**30)


def test_epochs_become_steps(estimated: Estimator) -> None:
    """Seven conversations are trained on, two a step."""
    changes = ["optimizer={epochs: 5, sequences_per_step: 2, anchors_per_sequence: 2}"]
    assert estimated(*changes).steps == 5 * 3


def test_features_that_memory_does_not_hold_are_computed_again(estimated: Estimator) -> None:
    many = "optimizer.steps=400"
    kept, none = estimated(many), estimated(many, "feature_cache_gb=0")
    assert none.part("features").seconds > 50 * kept.part("features").seconds
    assert none.cached < kept.cached and none.part("steps") == kept.part("steps")


def test_responses_that_are_there_are_not_made_again(directory: Path, estimated: Estimator) -> None:
    some, every = responses(directory, 8), estimated()
    assert estimated(some).part("responses").seconds < every.part("responses").seconds / 2
    whole = estimated(responses(directory, 10)).part("responses")
    assert (whole.seconds, whole.disk) == (0, 0)
    assert estimated(responses(directory, 10), "data.prompts=[]").part("features").seconds > 0
    with pytest.raises(ValueError, match="held_out=3"):
        estimated(responses(directory, 3), "data.prompts=[]")


def test_max_minutes_bounds_responses_and_what_is_trained_on(estimated: Estimator) -> None:
    short = estimated("data.max_minutes=0.005")
    assert short.part("responses").seconds == pytest.approx(0.3)
    assert short.part("features").seconds < estimated().part("features").seconds


def test_prompts_that_are_too_long_are_refused(estimated: Estimator) -> None:
    with pytest.raises(ValueError, match=r"data\.max_prompt_tokens=2"):
        estimated("data.max_prompt_tokens=2")


def test_a_run_that_has_begun_has_fewer_steps_left(directory: Path, target: Target, estimated: Estimator) -> None:
    recipe = load_recipe(directory / "recipe.yaml")
    Trainer(recipe, prepare(recipe, target)).train(stop_after=4)
    left = estimated()
    assert left.steps == 2 and left.part("responses").seconds == 0


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("more", [[], ["features.mode=store", "watch.decode_every=2"]], ids=["online", "stored"])
def test_a_dry_run_shows_a_table_and_writes_nothing(directory: Path, run: Run, more: list[str]) -> None:
    before = files(directory)
    status, said, errors = run("train", directory / "recipe.yaml", *more, "--dry-run")
    assert status == 0, errors
    assert re.search(r"^part +time +disk +from", said, re.MULTILINE)
    assert re.search(r"^total +(< )?\S+ \w+ +\S+ [MG]B", said, re.MULTILINE)
    assert re.search(r"^memory: .+ features$", said, re.MULTILINE) and re.search(
        r"^ranks: 1; a step of 2 ", said, re.MULTILINE
    )
    assert "nothing of the run was written" in said and files(directory) == before


def test_the_overlap_with_evaluation_prompts_is_shown_alone(directory: Path, run: Run) -> None:
    """`prepare --overlap`: no target is loaded and nothing is written."""
    prompts, out = directory / "prompts.jsonl", directory / "made.jsonl"
    words = " ".join(f"word{i}" for i in range(20))
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in (words, "another prompt")))
    shared = directory / "evaluated.jsonl"
    shared.write_text(json.dumps({"turns": [words]}) + "\n")
    before = files(directory)
    common = ["prepare", "--target", directory / "target", "--prompts", prompts, "--out", out, "--overlap"]
    status, said, errors = run(*common, "--not-in", shared)
    assert status == 0, errors
    assert "evaluated" in said and files(directory) == before
    check_error(run(*common), "--not-in")
