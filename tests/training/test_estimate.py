"""What a run would take: measured on the target once, and a function of its counts; nothing of the run is written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import outrider.training.estimate as estimates
from outrider.cli import bench, calibrate, data, demo, evaluate, train
from outrider.training.estimate import (
    Estimate,
    MeasuredTarget,
    Measurements,
    Rates,
    Texts,
    estimate,
    responding,
    training,
)
from outrider.training.recipe import Recipe, load_recipe
from outrider.utils import machine
from tests.toys.command_line import Run, check_error, in_process
from tests.toys.target_directory import save_toy_recipe

RATES = Rates(load=1.0, prefill=100.0, steps=[(1, 0.1), (8, 0.15), (64, 0.71)], ended=0.01, parameters=10, memory=1e9)
RECIPE = "optimizer: {steps: 6, sequences_per_step: 2, anchors_per_sequence: 2}\nprecision: float32\n"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's cache directory: the toy target is measured once for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def directory(tmp_path: Path, toy: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target, its drafter, prompts and a recipe."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache))
    monkeypatch.setattr(machine, "is_busy", lambda: False)
    for name in ("target", "drafter"):
        (tmp_path / name).symlink_to(toy / name)
    save_toy_recipe(tmp_path, RECIPE)
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    for module in (bench, calibrate, data, demo, evaluate, train):
        monkeypatch.setattr(module, "set_up", lambda threads: None)
    return in_process(monkeypatch, capfd)


def recipe_of(directory: Path, *overrides: str) -> Recipe:
    return load_recipe(directory / "recipe.yaml", overrides)


def parts(found: Estimate) -> dict[str, estimates.Part]:
    return {part.name: part for part in found.parts}


def test_steps_between_measured_batches_and_the_length_of_replies() -> None:
    assert RATES.step(1) == 0.1 and RATES.step(8) == 0.15
    assert RATES.step(36) == pytest.approx(0.43) and RATES.step(120) == pytest.approx(0.71 + 0.56)
    assert RATES.reply_tokens(1000) == pytest.approx(100, rel=1e-3) and RATES.reply_tokens(1) == pytest.approx(
        1, rel=0.01
    )
    forever = Rates(**{**RATES.__dict__, "ended": 0.0})
    assert forever.reply_tokens(77) == 77 and forever.batch(8, 10) == pytest.approx(1.5)
    assert RATES.batch(64, 500) < 500 * RATES.step(64)  # sequences leave as they end


def test_an_estimate_follows_its_counts(directory: Path) -> None:
    """More steps, prompts, tokens or precision of stored features: more of what they cost, and of nothing else."""
    base = parts(estimate(recipe_of(directory)))
    assert list(base) == ["load", "responses", "features", "steps", "checks"]
    assert all(part.seconds > 0 and part.memory > 0 for part in base.values())
    longer = parts(estimate(recipe_of(directory, "optimizer.steps=12", "watch.decode_every=3")))
    assert longer["steps"].seconds == pytest.approx(2 * base["steps"].seconds)
    assert longer["checks"].seconds > base["checks"].seconds
    assert longer["responses"] == base["responses"] and longer["load"] == base["load"]
    more = directory / "more.jsonl"
    more.write_text("".join(json.dumps({"turns": [f"prompt {i % 10}"]}) + "\n" for i in range(20)))
    doubled = parts(estimate(recipe_of(directory, f"data.prompts=[{{path: {more}}}]")))
    assert doubled["responses"].disk == pytest.approx(2 * base["responses"].disk)
    assert doubled["responses"].seconds > base["responses"].seconds
    bf16 = parts(estimate(recipe_of(directory, "features.mode=store")))
    int8 = parts(estimate(recipe_of(directory, "features.mode=store", "features.dtype=int8")))
    assert bf16["features"].disk == pytest.approx(2 * int8["features"].disk) and not base["features"].disk


def test_features_that_memory_does_not_hold_are_computed_again(directory: Path) -> None:
    many = "optimizer.steps=400"
    kept = parts(estimate(recipe_of(directory, many)))
    none = parts(estimate(recipe_of(directory, many, "feature_cache_gb=0")))
    assert none["features"].seconds > 50 * kept["features"].seconds
    assert none["steps"].memory < kept["steps"].memory and none["steps"].seconds == kept["steps"].seconds


def test_replies_that_are_there_are_not_made_again(directory: Path) -> None:
    rows = [{"format": 2, "settings": {"target": "t", "max_new_tokens": 12}}]
    rows += [{"id": f"p{i}", "turn": 0, "prompt": [5] * 9, "response": [7] * 4, "finished": True} for i in range(8)]
    (directory / "there.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = parts(estimate(recipe_of(directory, f"data.responses={directory / 'there.jsonl'}")))
    assert found["responses"].source.startswith("2 of about 4 tokens")


def test_max_minutes_bounds_responses_and_what_is_trained_on(directory: Path) -> None:
    measured = MeasuredTarget(str(directory / "target"), torch.device("cpu"), torch.float32)
    measured.__dict__["rates"] = RATES
    texts, recipe = (
        Texts(100, 100, 100, prompt=20, response=60),
        recipe_of(directory, "data.max_minutes=0.5", "optimizer.steps=90"),
    )
    part, there = responding(measured, texts, recipe.data)
    assert part.seconds == 30 and "max_minutes" in part.source and 0 < there.turns < 100
    whole = training(measured, recipe, texts)
    assert sum(p.seconds for p in training(measured, recipe, there)) < sum(p.seconds for p in whole)
    assert sum(p.seconds for p in training(measured, recipe, texts, first_step=5)) < sum(p.seconds for p in whole)


def test_a_measurement_is_kept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By target, precision and recipe: where it is there no weights are loaded."""
    said: list[str] = []
    before = estimate(recipe_of(directory), Measurements(said.append))
    monkeypatch.setattr(estimates, "load_target", lambda *_: pytest.fail("loaded again"))
    said.clear()
    assert estimate(recipe_of(directory), Measurements(said.append)).seconds == before.seconds and not said
    with pytest.raises(pytest.fail.Exception, match="loaded again"):
        estimate(recipe_of(directory, "drafter.num_hidden_layers=2"))


def test_what_a_busy_machine_measures_is_not_kept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_busy", lambda: True)
    asked, said = recipe_of(directory, "drafter.num_hidden_layers=3"), []
    for _ in range(2):
        estimate(asked, Measurements(said.append))
    assert len([line for line in said if "not kept" in line]) == len([line for line in said if "steps" in line]) == 2


def commands(directory: Path) -> dict[str, list[object]]:
    target, out = ["--target", directory / "target"], ["--out", directory / "made"]
    drafter, tasks = ["--drafter", directory / "drafter"], ["--tasks", directory / "prompts.jsonl"]
    (directory / "replies.jsonl").write_text(
        json.dumps({"format": 2, "settings": {}})
        + "\n"
        + json.dumps({"id": "a", "turn": 0, "prompt": [5] * 9, "response": [7] * 9, "finished": True})
        + "\n"
    )
    return {
        "train": [directory / "recipe.yaml"],
        "prepare": [*target, "--prompts", directory / "prompts.jsonl", "--out", directory / "made.jsonl"],
        "eval": [*target, *drafter, *tasks, *out],
        "calibrate": [*target, *drafter, *tasks],
        "doctor": [*target, *drafter, "--data", directory / "replies.jsonl"],
        "bench": [*target, *drafter, *tasks, *out, "--concurrency", "1,4"],
        "features write": [directory / "recipe.yaml", "--of", "2"],
        "profile": [*target, *drafter, "--out", directory / "made.json", "--contexts", "8,16", "--max-requests", "2"],
        "bench-drafters": [directory / "drafter", "ngram", *target, "--out", directory / "made.json"],
        "simulate": ["--record", directory / "made.npz", *target, *drafter, *tasks],
        "demo": [*overrides(directory / "recipe.yaml"), *out],
    }


def overrides(recipe: Path) -> list[str]:
    """A recipe as changes of the packaged one, which `outrider demo` takes."""
    fields = yaml.safe_load(recipe.read_text())
    fields["data"]["prompts"] = [{"path": str(recipe.with_name("prompts.jsonl"))}]
    return [f"{name}={json.dumps(value)}" for name, value in fields.items() if name != "out"]


VERBS = ["train", "prepare", "eval", "calibrate", "doctor", "bench"]
VERBS += ["features write", "profile", "bench-drafters", "simulate", "demo"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_dry_run_shows_a_table_and_writes_nothing(directory: Path, run: Run, verb: str) -> None:
    arguments = commands(directory)[verb]
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    status, said, errors = run(*verb.split(), *arguments, "--dry-run")
    assert status == 0, errors
    assert re.search(r"^part +time +memory +disk +from", said, re.MULTILINE) and re.search(
        r"^load ", said, re.MULTILINE
    )
    assert re.search(r"^total +(< )?\S+ \w+ +\S+ GB", said, re.MULTILINE) and "nothing of the run was written" in said
    assert all(len(line) <= 80 for line in said.splitlines() if not line.startswith(("loading", "rates of")))
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


def test_the_commands_of_an_experiment_and_their_time(
    directory: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands first, then the time of what is prepared, trained and evaluated, of one loaded target."""
    table: dict[str, object] = {"out": str(directory / "made"), "recipe": "recipe.yaml", "tasks": ["prompts.jsonl"]}
    rows = {"mine": {}, "deeper": {"set": {"drafter.num_hidden_layers": 2}}, "lookup": {"drafter": "ngram"}}
    table |= {"evaluate": {"max_new_tokens": 6}, "rows": rows, "draft_cost": None}
    (directory / "table.yaml").write_text(json.dumps(table))
    monkeypatch.setenv("OUTRIDER_CACHE", str(directory / "nothing-measured"))
    loaded: list[object] = []
    load = estimates.load_target
    monkeypatch.setattr(estimates, "load_target", lambda *what: loaded.append(what) or load(*what))
    status, said, errors = run("experiment", directory / "table.yaml", "--dry-run")
    assert status == 0 and len(loaded) == 1, errors
    verbs = ["prepare", "train", "train", "eval", "eval", "eval", "compare"]
    assert re.findall(r"^\[\d/7\] outrider (\S+)", said, re.MULTILINE) == verbs
    timed = re.findall(r"^\[\d/7\] (\w+) ?(\w*): about .+$", said[said.index("times; ") :], re.MULTILINE)
    assert [verb for verb, _ in timed] == verbs[:-1] and said.index("[7/7]") < said.index("times; "), said
    assert [row for _, row in timed] == ["", "mine", "deeper", "mine", "deeper", "lookup"]
    assert re.search("^in all about", said, re.MULTILINE) and not (directory / "made").exists()
    (directory / "recipe.yaml").write_text((directory / "recipe.yaml").read_text().replace("/target", "/absent"))
    status, said, _ = run("experiment", directory / "table.yaml", "--dry-run")
    assert status == 0 and said.count("\n[") + 1 == 7 and "about" not in said and "is not on this machine" in said


def test_a_step_of_many_recipes_is_measured_on_two_conversations(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And multiplied by the recipe's conversations; the optimizer's part is not."""
    asked = recipe_of(directory, "optimizer.sequences_per_step=8", "optimizer.anchors_per_sequence=4")
    texts = Texts(10, 10, 0, prompt=20, response=12)
    rehearsed, rehearse = [], estimates.Trainer.rehearse

    def counted(trainer: estimates.Trainer, *what: Any) -> dict[str, float]:
        rehearsed.append(len(trainer.run.samples))
        return {**rehearse(trainer, *what), "step_seconds": 3.0, "optimizer_seconds": 1.0}

    monkeypatch.setattr(estimates.Trainer, "rehearse", counted)
    brief, whole = (
        MeasuredTarget(str(directory / "target"), torch.device("cpu"), torch.float32, brief=brief).step(asked, texts)
        for brief in (True, False)
    )
    assert rehearsed == [2, 8] and (brief.seconds, whole.seconds) == (8 / 2 * 2.0 + 1.0, 3.0)
    assert brief.parameters == whole.parameters


def test_what_cannot_be_estimated_is_said(directory: Path, run: Run) -> None:
    verbs = commands(directory)
    check_error(run("bench", *verbs["bench"], "--backend", "vllm", "--dry-run"), "only a run of it can tell")
    check_error(run("doctor", "--data", directory / "replies.jsonl", "--dry-run"), "give --target")
    check_error(run("simulate", "--dry-run"), "--dry-run is for --record")
