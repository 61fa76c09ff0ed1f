"""Profiles of step costs made from a formula instead of a measurement."""

from __future__ import annotations

from itertools import product

from outrider.decoding.cost import Additive, Cell, Curve, Profile, Setting

SETTING = Setting(target="t (5 x 32)", dtype="float32", processor="a CPU", threads=2, drafter="d")
Shape = tuple[int, int, int]


def linear(requests: float, tokens: float, context: float) -> float:
    return 0.01 + 0.002 * requests + 0.0005 * tokens + 1e-6 * requests * context


def cells_of(
    cost: object, requests: tuple[int, ...] = (1, 2, 4, 8), contexts: tuple[int, ...] = (64, 256)
) -> list[Cell]:
    assert callable(cost)
    found = []
    for r, s in product(requests, contexts):
        tokens = sorted({*range(r, 17), *(r * k for k in range(1, 9)), *((64, 128) if r == 1 else ())})
        for b in tokens:
            seconds = float(cost(r, b, s))
            found.append(Cell(requests=r, tokens=b, context=s, low=seconds, median=seconds, high=seconds))
    return found


def curve(per_request: float, counts: tuple[int, ...] = (1, 2, 4, 8)) -> Curve:
    return Curve(requests=list(counts), seconds=[(0.001 + per_request * n,) * 3 for n in counts])


def profile_of(cells: list[Cell]) -> Profile:
    return Profile(
        setting=SETTING,
        cells=cells,
        fit=Additive.fit(cells),
        gamma=7,
        draft=curve(0.001),
        draft_one=curve(0.0005),
        extend=curve(0.0001),
        other=curve(0.0002),
        repeats=3,
        machine={"cpu": "a CPU"},
        versions={"torch": "2"},
    )
