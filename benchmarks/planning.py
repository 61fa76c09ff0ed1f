"""Measure how long a policy takes to plan one step: microseconds of `policy.lengths(view)`, without any model.

    python -m benchmarks.planning --out FILE.json

The step is drawn at random, with two steps of acceptance behind it: R requests that all draft gamma tokens, confidences
spread as a mixture of easy and hard texts would spread them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from outrider.decoding.acceptance import Acceptance
from outrider.decoding.cost import SpsTable
from outrider.decoding.policies import BY_COST, FixedPolicy, PlanView, Policy, SkipDrafting, StepView, ThresholdPolicy
from outrider.utils.measure import machine, versions

# Cliffs every 32 tokens: the search has something to search.
CLIFFS = SpsTable([1 / (0.02 + 0.001 * (tokens // 32)) for tokens in range(5000)])
POLICIES: dict[str, Policy] = {
    "fixed": FixedPolicy(5),
    "threshold": ThresholdPolicy(0.5),
    **{name: policy(CLIFFS) for name, policy in BY_COST.items()},
}


def planning_medians(requests: int, gamma: int, repeats: int, rounds: int) -> dict[str, list[float]]:
    """Per policy, and for who drafts (`SkipDrafting`), `rounds` medians in microseconds, taking turns."""
    found: dict[str, list[float]] = {name: [] for name in [*POLICIES, "who drafts"]}
    for _ in range(rounds):
        for name, policy in POLICIES.items():
            found[name].append(planning_microseconds(policy, requests, gamma, repeats))
        found["who drafts"].append(depths_microseconds(SkipDrafting(CLIFFS), requests, gamma, repeats))
    return found


def planning_microseconds(policy: Policy, requests: int = 256, gamma: int = 16, repeats: int = 200) -> float:
    """Median over repeats."""
    _, view = busy_step(requests, gamma)
    return _median_microseconds(lambda: policy.lengths(view), repeats)


def depths_microseconds(policy: Policy, requests: int = 256, gamma: int = 16, repeats: int = 200) -> float:
    """Median over repeats."""
    before, _ = busy_step(requests, gamma)
    return _median_microseconds(lambda: policy.depths(before), repeats)


def busy_step(requests: int, gamma: int, seed: int = 0) -> tuple[PlanView, StepView]:
    """A step before its draft and before its verification."""
    generator = np.random.default_rng(seed)
    ease_R = generator.uniform(1.0, 8.0, requests)  # mean confidence 0.5 to 0.9
    acceptance, ids = Acceptance(gamma), list(range(requests))
    contexts = generator.integers(50, 2000, requests).tolist()
    for _ in range(3):
        before = acceptance.plan_view(ids, contexts)
        confidences = generator.beta(ease_R[:, None], 1.0, (requests, gamma)).tolist()
        view = acceptance.step_view(ids, confidences, [gamma] * requests, contexts)
        verified_R = view.drafted_R
        acceptance.observe(ids, view, verified_R=verified_R, accepted_R=generator.binomial(verified_R, 0.5))
    return before, view


def _median_microseconds(call: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return 1e6 * statistics.median(taken)


def main(
    requests: Annotated[int, typer.Option(min=1, help="requests that draft")] = 256,
    gamma: Annotated[int, typer.Option(min=1, help="drafts each")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="decisions behind one median")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="medians per policy, taking turns")] = 9,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures")] = None,
) -> None:
    """Microseconds of planning one step, for every policy and for `SkipDrafting`, which decides who drafts."""
    found = planning_medians(requests, gamma, repeats, rounds)
    view = Table(title=f"planning one step of {requests} requests with {gamma} drafts each: microseconds")
    for heading in ("policy", "median", "least", "most"):
        view.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for name, medians in found.items():
        view.add_row(name, *(f"{value:.0f}" for value in (statistics.median(medians), min(medians), max(medians))))
    Console().print(view)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        setting = {"requests": requests, "gamma": gamma, "repeats": repeats}
        about = {"machine": machine(), "versions": versions()}
        out.write_text(json.dumps({"microseconds": found, **setting, **about}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
