"""Profiles: exact where measured, sane elsewhere, refused where they do not belong, and measured end to end."""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from outrider.scheduling.additive import Additive, Cell
from outrider.scheduling.profile import Curve, Profile, Setting

SETTING = Setting(target="t (5 x 32)", dtype="float32", processor="a CPU", threads=2, drafter="d")
Shape = tuple[int, int, int]


def linear(requests: float, tokens: float, context: float) -> float:
    return 0.01 + 0.002 * requests + 0.0005 * tokens + 1e-6 * requests * context


def staircase(requests: float, tokens: float, context: float) -> float:
    """Cliffs behind 4, 8, 12, ... tokens; 8 tokens are even cheaper than 7."""
    return linear(requests, 4 * np.ceil(tokens / 4), context) - 0.001 * (tokens == 8)


def cells_of(
    cost: object, requests: tuple[int, ...] = (1, 2, 4, 8), contexts: tuple[int, ...] = (64, 256)
) -> list[Cell]:
    assert callable(cost)
    found = []
    for r, s in product(requests, contexts):
        tokens = sorted({*range(r, 17), *(r * k for k in range(1, 9)), *((64, 128) if r == 1 else ())})
        for b in tokens:
            seconds = float(cost(r, b, s))
            found.append(Cell(requests=r, tokens=b, context=s, low=0.9 * seconds, median=seconds, high=1.1 * seconds))
    return found


def curve(per_request: float, counts: tuple[int, ...] = (1, 2, 4, 8)) -> Curve:
    return Curve(requests=list(counts), seconds=[(0.0, 0.001 + per_request * n, 1.0) for n in counts])


def profile_of(cells: list[Cell]) -> Profile:
    return Profile(
        setting=SETTING,
        cells=cells,
        fit=Additive.fit(cells),
        draft=curve(0.001),
        extend=curve(0.0001),
        other=curve(0.0002),
        repeats=3,
        machine={"cpu": "a CPU"},
        versions={"torch": "2"},
    )


def verify(profile: Profile, requests: int, tokens: int, context: float) -> float:
    return float(profile.verify_seconds(np.array([tokens]), requests, context)[0])


def test_measured_cells_are_exact() -> None:
    profile = profile_of(cells_of(staircase))
    for cell in profile.cells:
        assert verify(profile, cell.requests, cell.tokens, cell.context) == pytest.approx(cell.median, rel=1e-12)
    falls = profile.verify_seconds(np.array([7, 8, 9]), 1, 64.0)
    assert falls[1] < falls[0] < falls[2], "a staircase is kept as it is"


@pytest.mark.parametrize(
    ("requests", "tokens", "context"),
    [
        (3, 9, 100.0),  # between rows and contexts
        (6, 7, 256.0),  # fewer tokens than the row of 8 requests was measured with
        (8, 100, 64.0),  # behind the row's own end, where another was measured
        (1, 400, 64.0),  # behind all
        (40, 320, 64.0),  # more requests
        (5, 20, 2000.0),  # longer contexts
        (40, 320, 2000.0),
    ],
)
def test_between_and_beyond_a_linear_table_is_that_line(requests: int, tokens: int, context: float) -> None:
    found = verify(profile_of(cells_of(linear)), requests, tokens, context)
    assert found == pytest.approx(linear(requests, tokens, context), rel=1e-9)


def test_between_cells_a_staircase_stays_between_them() -> None:
    profile = profile_of(cells_of(staircase))
    for requests, tokens, context in product((1, 3, 5, 7, 8), (8, 9, 12, 13, 30), (64.0, 150.0, 256.0)):
        around = [
            staircase(r, b, s)
            for r, b, s in product((requests - 1, requests, requests + 1), range(tokens - 4, tokens + 6), (64, 256))
        ]
        assert min(around) <= verify(profile, requests, tokens, context) <= max(around)
    assert verify(profile, 6, 8, 64) < verify(profile, 6, 9, 64), "the cliff is there between measured requests too"


def test_a_step_is_draft_verify_and_the_rest() -> None:
    profile, tokens = profile_of(cells_of(linear)), np.array([4, 5, 12])
    whole = profile.seconds(tokens, 4, 3, 100.0)
    parts = profile.verify_seconds(tokens, 4, 100.0) + profile.draft_seconds(3) + profile.other_seconds(4)
    assert np.array_equal(whole, parts)
    assert profile.draft_seconds(0) == 0.0
    assert profile.draft_seconds(3) == pytest.approx(0.004)
    assert profile.draft_seconds(20) == pytest.approx(0.021)
    assert profile.other_seconds(4) == pytest.approx(0.0018 + 0.0014)
    plain = profile.plain()
    assert plain.draft_seconds(3) == 0.0 and plain.other_seconds(4) == pytest.approx(0.0018)
    assert np.array_equal(plain.verify_seconds(tokens, 4, 100.0), profile.verify_seconds(tokens, 4, 100.0))


def test_the_additive_fit() -> None:
    fit = Additive.fit(cells_of(linear))
    assert (fit.bias, fit.alpha, fit.theta, fit.sigma) == pytest.approx((0.01, 0.002, 0.0005, 1e-6), rel=1e-6)
    assert fit.spread < 1e-9
    cells = cells_of(staircase)
    fit = Additive.fit(cells)
    for cell, residual in zip(cells, fit.residuals, strict=True):
        line = fit.bias + fit.alpha * cell.requests + fit.theta * cell.tokens + fit.sigma * cell.requests * cell.context
        assert residual == pytest.approx(line / cell.median - 1)
    assert 0.005 < fit.spread < 0.1
    one = Additive.fit(cells_of(linear, (1,), (64,))[:1])  # one cell says nothing of slopes; the line passes through it
    assert one.residuals == pytest.approx([0.0])


def test_a_profile_is_of_what_it_is_used_with() -> None:
    profile = profile_of(cells_of(linear))
    profile.check(SETTING)
    profile.check(SETTING.model_copy(update={"drafter": None}))
    changes = {"target": "u", "dtype": "bfloat16", "processor": "another", "threads": 4, "drafter": "e"}
    for name, value in changes.items():
        with pytest.raises(ValueError, match=rf"else: {name} is .*, here it is {value}\. Measure"):
            profile.check(SETTING.model_copy(update={name: value}))
    with pytest.raises(ValueError) as every:
        profile.check(SETTING.model_copy(update=changes))
    assert all(f"{name} is " in str(every.value) for name in changes)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    profile = profile_of(cells_of(staircase))
    profile.save(path)
    again = Profile.load(path)
    assert again == profile and [p.name for p in path.parent.iterdir()] == ["profile.json"]
    assert verify(again, 3, 9, 100.0) == verify(profile, 3, 9, 100.0)

    raw = json.loads(path.read_text())
    wrongs: list[tuple[str, object, str]] = [
        ("format", 2, "format: Input should be 1"),
        ("setting", {**raw["setting"], "threads": "many"}, "setting.threads"),
        ("cells", [{**raw["cells"][0], "median": -1.0}], "cells.0.median"),
        ("cells", raw["cells"][:1] * 2, "come twice"),
        ("cells", [c for c in raw["cells"] if (c["requests"], c["context"]) != (4, 64)], "4 requests .* at context 64"),
        ("draft", {"requests": [2, 1], "seconds": [[1, 1, 1]] * 2}, "draft: .*ascending"),
        ("unheard", 1, "unheard: Extra"),
    ]
    for name, value, message in wrongs:
        path.write_text(json.dumps({**raw, name: value}))
        with pytest.raises(ValueError, match=rf"profile\.json: not a profile this version reads: .*{message}"):
            Profile.load(path)
    path.write_text(json.dumps(raw)[:-30])
    with pytest.raises(ValueError, match="the file: Invalid JSON"):
        Profile.load(path)
    with pytest.raises(ValueError, match="no such profile"):
        Profile.load(tmp_path / "none.json")


def test_policies_may_ask_at_every_step() -> None:
    """A generous bound on one call, for 32 requests that drafted 7 tokens each."""
    profile, tokens = profile_of(cells_of(staircase)), np.arange(32, 257)
    best = float("inf")
    for _ in range(50):
        started = time.perf_counter()
        for _ in range(20):
            profile.seconds(tokens, 7, 7, 123.4)
        best = min(best, (time.perf_counter() - started) / 20)
    assert best < 100e-6, best
