"""bench-objective and bench-training at toy size: real processes, the figures they promise."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.objective import MemoryCase, measure_apart
from benchmarks.training import run_speed, training_speed
from outrider.cli.main import app
from outrider.training.recipe import Recipe
from outrider.training.step import Precision
from tests.toys.targets import toy_samples, toy_target

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")


@linux
def test_bench_objective_finds_less_memory_and_the_same_gradients(tmp_path: Path) -> None:
    size = ["--anchors", "16", "--gamma", "4", "--vocab", "300", "--hidden", "16", "--rank", "4"]
    where = ["--threads", "1", "--out", str(tmp_path)]
    outcome = CliRunner().invoke(app, ["bench-objective", *size, *where], catch_exceptions=False)
    assert outcome.exit_code == 0
    figures = json.loads((tmp_path / "objective_memory.json").read_text())
    assert {r["case"]["anchors"] for r in figures["results"]} == {4, 8, 16}
    assert max(figures["gradient_relative_error"].values()) <= 1e-5
    assert (tmp_path / "objective_memory.png").stat().st_size > 5000


@linux
def test_peak_memory_is_seen() -> None:
    """The straightforward peak holds several [N, V] buffers; the process reports at least two and at most ten."""
    case = MemoryCase("straightforward", anchors=64, gamma=4, vocab=40_000, hidden=8, rank=4)
    buffer = 64 * 4 * 40_000 * 4
    assert 2 * buffer < measure_apart(case).peak_bytes < 10 * buffer


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
                "mask_token": "x",
            },
            "optimizer": {"sequences_per_step": 2, "anchors_per_sequence": 5},
        }
    )


def test_every_variant_trains_on_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    target, recipe = toy_target(), toy_recipe()
    monkeypatch.setattr("outrider.drafters.base.mask_token_id", lambda *_: 3)  # the toy target has no tokenizer
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
    ("arguments", "message"),
    [
        (["bench-training", "{recipe}", "--precision", "float8"], "float8"),
        (["bench-training", "{recipe}", "--responses", "missing.jsonl"], "missing.jsonl"),
        (["bench-objective", "--dtype", "int8"], "int8"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    recipe = str(Path(__file__).parents[2] / "recipes" / "smollm2-135m" / "dspark.yaml")
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(app, [a.replace("{recipe}", recipe) for a in arguments], catch_exceptions=False)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_counts_the_target_too(monkeypatch: pytest.MonkeyPatch, precision: Precision) -> None:
    monkeypatch.setattr("outrider.drafters.base.mask_token_id", lambda *_: 3)
    forwards: list[int] = []
    target = toy_target()
    target.model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    straightforward, ours = run_speed(toy_recipe(), target, toy_samples(8), precision, epochs=2)
    assert (straightforward.variant, ours.variant) == ("straightforward", "outrider") and straightforward.ratio == 1
    assert len(straightforward.epochs) == len(ours.epochs) == 2 and ours.ratio == ours.whole / straightforward.whole
    assert len(forwards) >= 8, "the straightforward side runs the target in every step of every epoch"
