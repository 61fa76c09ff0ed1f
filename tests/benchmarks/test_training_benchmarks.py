"""benchmarks/objective.py and benchmarks/training.py at toy size: real processes, the figures they promise."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import objective, training
from benchmarks.objective import MemoryCase, measure_apart
from benchmarks.training import run_speed, training_speed
from outrider.target.model import Target
from outrider.training.recipe import Precision, Recipe
from tests.toys.targets import toy_samples, toy_target


def run(command: Callable[..., None], *arguments: str) -> None:
    app = typer.Typer()
    app.command()(command)
    outcome = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output


def masked_target(monkeypatch: pytest.MonkeyPatch) -> Target:
    """A toy target that says which token is its mask token."""
    target = toy_target()
    monkeypatch.setattr(target, "tokenizer", SimpleNamespace(mask_token_id=3))
    return target


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")


@linux
@pytest.mark.slow  # nine processes that import PyTorch
def test_bench_objective_finds_less_memory_and_the_same_gradients(tmp_path: Path) -> None:
    size = ["--anchors", "16", "--gamma", "4", "--vocab", "300", "--hidden", "16", "--rank", "4"]
    where = ["--threads", "1", "--out", str(tmp_path)]
    run(objective.main, *size, *where)
    figures = json.loads((tmp_path / "objective_memory.json").read_text())
    assert {r["case"]["anchors"] for r in figures["results"]} == {4, 8, 16}
    assert max(figures["gradient_relative_error"].values()) <= 1e-5
    assert (tmp_path / "objective_memory.png").stat().st_size > 5000


@linux
@pytest.mark.slow
def test_peak_memory_is_seen() -> None:
    """The straightforward peak holds several [N, V] buffers; the process reports at least two and at most ten."""
    case = MemoryCase("straightforward", anchors=64, gamma=4, vocab=40_000, hidden=8, rank=4)
    buffer = 64 * 4 * 40_000 * 4
    assert 2 * buffer < measure_apart(case).peak_bytes < 10 * buffer


@pytest.mark.slow
def test_a_failed_measurement_says_what_to_lower() -> None:
    case = MemoryCase("ours", anchors=2, gamma=4, vocab=100, hidden=8, device="nowhere")
    with pytest.raises(ValueError, match="lower --anchors"):
        measure_apart(case)


def toy_recipe() -> Recipe:
    return Recipe.model_validate(
        {
            "target": "toy",
            "out": "nowhere",
            "data": {"prompts": [{"path": "none"}]},
            "drafter": {
                "block_size": 4,
                "num_aux_layers": 2,
                "markov_rank": 6,
                "draft_vocab_size": 40,
            },
            "optimizer": {"sequences_per_step": 2, "anchors_per_sequence": 5},
        }
    )


def test_every_variant_trains_on_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    target, recipe = masked_target(monkeypatch), toy_recipe()
    found = training_speed(recipe, target, toy_samples(8), ["float32", "bfloat16"], steps=3)
    assert [(f.variant, f.precision) for f in found] == [
        ("straightforward", "float32"),
        ("outrider", "float32"),
        ("straightforward", "bfloat16"),
        ("outrider", "bfloat16"),
    ]
    assert found[0].ratio == (1, 1, 1) and found[1].ratio != found[0].ratio
    assert found[1].losses == pytest.approx(found[0].losses, rel=1e-4)  # three optimizer steps later, too
    assert found[3].losses == pytest.approx(found[0].losses, rel=3e-2)
    assert all(low <= middle <= high for low, middle, high in (f.tokens_per_second for f in found))


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="sequences_per_step=2"):
        training_speed(toy_recipe(), toy_target(), toy_samples(1), ["float32"], steps=2)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (training.main, ["{recipe}", "--precision", "float8"], "float8"),
        (training.main, ["{recipe}", "--responses", "missing.jsonl"], "missing.jsonl"),
        (objective.main, ["--dtype", "int8"], "int8"),
    ],
)
def test_mistakes_are_named(command: Callable[..., None], arguments: list[str], message: str) -> None:
    recipe = "smollm2-135m/dspark"
    with pytest.raises(ValueError, match=message):
        run(command, *(argument.replace("{recipe}", recipe) for argument in arguments))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_counts_the_target_too(monkeypatch: pytest.MonkeyPatch, precision: Precision) -> None:
    forwards: list[int] = []
    target = masked_target(monkeypatch)
    target.model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    straightforward, ours = run_speed(toy_recipe(), target, toy_samples(8), precision, epochs=2)
    assert (straightforward.variant, ours.variant) == ("straightforward", "outrider") and straightforward.ratio == 1
    assert len(straightforward.epochs) == len(ours.epochs) == 2 and ours.ratio == ours.whole / straightforward.whole
    assert len(forwards) >= 8, "the straightforward side runs the target in every step of every epoch"
