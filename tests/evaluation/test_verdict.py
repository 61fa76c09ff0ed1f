"""Verdicts: sentences from plain figures, each kind once; that the verbs end in one; what is a tie of two texts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import outrider.evaluation.evaluate as evaluate
from outrider.api.drafter import DrafterChoice
from outrider.evaluation.verbs import _how_to_train
from outrider.evaluation.verdict import (
    Speedup,
    comparison_verdict,
    cost_verdict,
    drafter_verdict,
    grade,
    load_verdict,
    pooled,
)
from outrider.target.model import Target


def speedup(ratio: float, half: float = 0.05, count: int = 12, name: str = "gsm8k", seconds: float = 1.0) -> Speedup:
    return Speedup(name, ratio, ratio - half, high=ratio + half, samples=count, seconds=seconds)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (speedup(1.82), "faster"),
        (speedup(0.77), "slower"),
        (speedup(1.01), "same"),  # within 2 %, whatever the quartiles
        (speedup(1.01, 0.0, 1000), "same"),
        (speedup(1.1, 0.3), "same"),  # 0.6 / 1.35 standard deviations of 12 turns: an error of 0.26
        (speedup(1.1, 0.3, 120), "faster"),
        (Speedup("gsm8k", 1.25, 0.88, high=1.17, samples=4), "same"),  # one long turn made the ratio
        (speedup(1.08, 0.0, 1), "same"),  # one turn may be off by 10 %
        (speedup(1.3, 0.0, 1), "faster"),
    ],
)
def test_a_difference_is_one_beyond_the_error(measured: Speedup, expected: str) -> None:
    assert grade(measured.ratio, measured.error) == expected


def test_pooled_is_the_ratio_of_all_seconds() -> None:
    # 2 s instead of 4 s, and 6 s instead of 3 s: 8 s instead of 7 s
    ratio, error = pooled([speedup(2.0, 0.0, seconds=2.0), speedup(0.5, 0.0, seconds=6.0)])
    assert ratio == pytest.approx(7 / 8)
    assert error == pytest.approx(((2.0 * 0.02 * 2) ** 2 + (0.5 * 0.02 * 6) ** 2) ** 0.5 / 8)


TRAIN = "outrider train RECIPE start_from=runs/mine/best"


@pytest.mark.parametrize(
    ("tasks", "others", "lines"),
    [
        (
            [speedup(1.82, 0.15)],
            {},
            ["Verdict: 1.82x plain (quartiles 1.67-1.97): keep it.", "Next: outrider bench"],
        ),
        (
            [speedup(1.0, 0.1)],
            {},
            [
                "Verdict: no difference from plain decoding can be seen: 1.00x (quartiles 0.90-1.10).",
                "Verifying fewer drafts may help: --draft-length 2.",
                "Serve without a drafter (--drafter none) until a better one is there.",
                f"Next: {TRAIN}",
            ],
        ),
        (
            [speedup(0.77)],
            {"--drafter ngram": [speedup(1.11, count=4)]},
            [
                "Verdict: slower than plain decoding: 0.77x (quartiles 0.72-0.82).",
                "Verifying fewer drafts may help: --draft-length 2.",
                "`--drafter ngram` on 4 of these turns: 1.11x (quartiles 1.06-1.16).",
                "Use `--drafter ngram` until a better drafter is there.",
                f"Next: {TRAIN}",
            ],
        ),
        (
            [speedup(0.77)],
            {"--drafter ngram": [speedup(0.9)]},
            [
                "Verdict: slower than plain decoding: 0.77x (quartiles 0.72-0.82).",
                "Verifying fewer drafts may help: --draft-length 2.",
                "`--drafter ngram` on 12 of these turns: 0.90x (quartiles 0.85-0.95).",
                "Serve without a drafter (--drafter none) until a better one is there.",
                f"Next: {TRAIN}",
            ],
        ),
        (
            [speedup(1.8), speedup(0.8, name="mt-bench")],
            {},
            [
                "Verdict: 1.30x plain over 24 turns (gsm8k 1.80x, mt-bench 0.80x): keep it.",
                "Slower than plain on mt-bench 0.80x.",
                "Verifying fewer drafts may help: --draft-length 2.",
                "Next: outrider bench",
            ],
        ),
        (
            [speedup(1.15), speedup(0.85, name="mt-bench")],
            {},
            [
                "Verdict: no difference from plain decoding can be seen: 1.00x over 24 turns (gsm8k 1.15x, mt-bench "
                "0.85x).",
                "Faster than plain on gsm8k 1.15x.",
                "Slower than plain on mt-bench 0.85x.",
                "Verifying fewer drafts may help: --draft-length 2.",
                "Serve without a drafter (--drafter none) until a better one is there.",
                f"Next: {TRAIN}",
            ],
        ),
        (
            [speedup(1.5, 0.0, 1)],
            {},
            [
                "Verdict: 1.50x plain: keep it.",
                "That is 1 turn: measure more before you rely on it (--max-samples, or a longer file of --tasks).",
                "Next: outrider bench",
            ],
        ),
        (
            [speedup(1.46, 0.28, 3)],
            {"--drafter mine": [speedup(1.0)]},
            [
                "Verdict: not known yet: 1.46x (quartiles 1.18-1.74), give or take 0.48.",
                "That is 3 turns: measure more before you rely on it (--max-samples, or a longer file of --tasks).",
                "Verifying fewer drafts may help: --draft-length 2.",
                "`--drafter mine` on 12 of these turns: 1.00x (quartiles 0.95-1.05).",
                f"Next: {TRAIN}",
            ],
        ),
        (
            [speedup(1.04)],
            {"--drafter ngram": [speedup(1.39, 0.28, 3)]},
            [
                "Verdict: no difference from plain decoding can be seen: 1.04x (quartiles 0.99-1.09).",
                "Verifying fewer drafts may help: --draft-length 2.",
                "`--drafter ngram` on 3 of these turns: 1.39x (quartiles 1.11-1.67).",
                "`--drafter ngram` looks faster: measure it on more prompts.",
                f"Next: {TRAIN}",
            ],
        ),
    ],
)
def test_a_drafter(tasks: list[Speedup], others: dict[str, list[Speedup]], lines: list[str]) -> None:
    found = drafter_verdict(tasks, others, fewer="--draft-length 2", train=TRAIN, keep=["Next: outrider bench"])
    assert found == lines


def users(*ratios: float, count: int = 5) -> list[Speedup]:
    return [speedup(ratio, 0.02, count, f"{8**i} users") for i, ratio in enumerate(ratios)]


@pytest.mark.parametrize(
    ("variants", "lines"),
    [
        (
            {"fixed-1": users(1.2, 1.1), "fixed-3": users(1.6, 0.9)},
            [
                "Verdict: fixed-3: 1.25x plain on average over the loads (0.90x with 8 users, 1.60x with 1 users): "
                "keep it.",
                "Slower than plain with 8 users 0.90x: serve without a drafter there.",
                "Next: outrider profile",
            ],
        ),
        ({"fixed-1": users(1.2, 1.1)}, ["Verdict: fixed-1: 1.15x plain on average over the loads (1.10x with 8 users, "
                                        "1.20x with 1 users): keep it."]),
        (
            {"fixed-1": users(1.0, count=1)},
            [
                "Verdict: no difference from plain can be seen. The best is fixed-1: 1.00x plain with 1 users.",
                "Measured once: more --repeats show the spread.",
                "Serve without a drafter under these loads (--drafter none).",
                "Next: outrider profile",
            ],
        ),
        (
            {"fixed-1": users(0.8), "fixed-3": users(0.5)},
            [
                "Verdict: every variant is slower than plain. The best is fixed-1: 0.80x plain with 1 users.",
                "Serve without a drafter under these loads (--drafter none).",
                "Next: outrider profile",
            ],
        ),
    ],
)  # fmt: skip
def test_a_load(variants: dict[str, list[Speedup]], lines: list[str]) -> None:
    assert load_verdict(variants, adapt="outrider profile") == lines


@pytest.mark.parametrize(
    ("drafters", "lines"),
    [
        (
            {"a": 1.2, "b": 1.6, "c": 0.7},
            [
                "Verdict: b is the fastest, 1.60x plain on average over the tasks.",
                "Next is a 1.20x.",
                "Slower than plain: c 0.70x.",
            ],
        ),
        (
            {"a": 1.59, "b": 1.6},
            [
                "Verdict: b is the fastest, 1.60x plain on average over the tasks.",
                "No difference from b can be seen: a 1.59x.",
            ],
        ),
        (
            {"a": 0.9, "b": 0.5},
            [
                "Verdict: every drafter is slower than plain. The best is a, 0.90x plain on average over the tasks.",
                "Next is b 0.50x.",
            ],
        ),
        ({"a": 1.4}, ["Verdict: a, 1.40x plain on average over the tasks."]),
    ],
)
def test_a_comparison(drafters: dict[str, float], lines: list[str]) -> None:
    assert comparison_verdict({name: [speedup(ratio)] for name, ratio in drafters.items()}) == lines


@pytest.mark.parametrize(
    ("break_even", "line"),
    [
        ({1: 1.2, 8: 1.9, 32: 4.0}, "of 1.5 up to 1 request, of 2 up to 8, of 3 up to 8, of 5 up to 32 at once"),
        ({1: 2.5, 8: 1.9}, "of 3 up to 8"),  # what one request does not pay for, eight do not
        ({1: 9.0}, "drafts hardly pay here: a round of them costs 9.0 plain steps."),
    ],
)
def test_what_drafts_cost(break_even: dict[int, float], line: str) -> None:
    assert line in cost_verdict(break_even, 8)[0]


@pytest.mark.parametrize(
    ("dtype", "gap", "verdict"),
    [
        (torch.float32, 0.0009, "tie"),
        (torch.float32, 0.0011, "mismatch"),
        (torch.float64, 0.0011, "mismatch"),
        (torch.bfloat16, 0.24, "tie"),
        (torch.bfloat16, 0.26, "mismatch"),
        (torch.float16, 0.03, "tie"),
        (torch.float16, 0.04, "mismatch"),
    ],
)
def test_a_tie_is_as_wide_as_the_type_is_coarse(
    dtype: torch.dtype, gap: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the two likeliest tokens where the texts part; two steps of bfloat16 between 16 and 32 are 0.25."""
    asked: list[list[int]] = []

    def logits(_: Target, tokens: list[int]) -> torch.Tensor:
        asked.append(tokens)
        return torch.tensor([20.0, 20.0 - gap, 3.0], dtype=torch.float64)

    monkeypatch.setattr(evaluate, "_last_logits", logits)
    target = cast(Target, SimpleNamespace(dtype=dtype))
    assert evaluate.compare_greedy(target, [5, 6], [7, 0, 2], [7, 1, 2]) == verdict
    assert asked == [[5, 6, 7]]


@pytest.mark.parametrize(("place", "out"), [("run/best", "run-longer"), ("copied", "copied-longer")])
def test_a_longer_training_goes_on_from_this_drafter_elsewhere(tmp_path: Path, place: str, out: str) -> None:
    """A run's own directory refuses a recipe with other steps."""
    drafter, recipe = tmp_path / place, tmp_path / "recipe.yaml"
    drafter.mkdir(parents=True)
    recipe.touch()
    (drafter / "outrider.json").write_text('{"format": 1, "recipe": {"optimizer": {"steps": 20}}}')
    command = _how_to_train(DrafterChoice("directory", str(drafter)), "t", [], tasks=[str(tmp_path / "test.jsonl")])
    assert command == f"outrider train {recipe} start_from={drafter} out={tmp_path / out} optimizer.steps=40"


def test_a_difference_without_drafts_is_the_machines() -> None:
    """A gate that expects nothing of drafts leaves them out: what is measured then says nothing about the drafter."""
    faster = speedup(1.3)
    undrafted = faster._replace(accepted_length=1.01)
    assert drafter_verdict([faster], {})[0].startswith("Verdict: 1.30x plain")
    first = drafter_verdict([undrafted], {}, keep=["Use it"])
    assert "no difference" in first[0] and "1.01" in first[0] and "Use it" not in first
    drafted = faster._replace(accepted_length=1.8)
    assert drafter_verdict([drafted, undrafted], {})[0].startswith("Verdict: 1.30x plain")


def test_a_verdict_beside_uneven_costs_is_in_doubt() -> None:
    said = drafter_verdict([speedup(1.0)], {}, uneven=True)
    assert any("in doubt" in line for line in said)
    assert not any("in doubt" in line for line in drafter_verdict([speedup(1.4)], {}, uneven=True))
