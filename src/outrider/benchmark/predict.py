"""the sweep of a load test on simulated machines, and how far it is from the real one

    error = predicted / measured - 1     of aggregate tokens per second, per variant and level

Load generator, numbers, verdicts and plots are those of real runs (load.py, metrics.py, summary.py, plots.py): only
engine and clock are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from outrider.benchmark.cluster import Cluster, Routing
from outrider.benchmark.frontier import Sweep
from outrider.benchmark.journal import Point
from outrider.benchmark.load import run_load
from outrider.benchmark.machines import Machine
from outrider.benchmark.metrics import summarise
from outrider.benchmark.simulate import SimulatedEngine
from outrider.benchmark.summary import PointSummary
from outrider.benchmark.traces import Traces
from outrider.benchmark.variants import build_variant
from outrider.engine import EngineConfig

_SAME = ("arrivals", "max_new_tokens", "requests", "seed", "token_budget")


class Comparison(BaseModel):
    """Aggregate tokens per second of one point, simulated and measured; `error` in per cent."""

    variant: str
    level: float
    measured: float
    predicted: float
    error: float


def serve(
    name: str,
    traces: Traces,
    machine: Machine,
    engine: EngineConfig,
    threshold: float | None,
    replicas: int = 1,
    routing: Routing = "least-loaded",
) -> Cluster:
    """Replicas that serve by the variant of that name (variants.py).

    Raises:
        ValueError: no such variant, or it needs what is not there.
    """
    variant = build_variant(name, traces.gamma, threshold, machine)
    parts = (traces, machine, variant.policy, variant.gate, engine, variant.drafts)
    return Cluster([SimulatedEngine(*parts) for _ in range(replicas)], routing)


def simulate_sweep(
    sweep: Sweep,
    serving: Callable[[str, float], Cluster],
    prompts: Sequence[Sequence[int]],
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Point]:
    """Every point of a sweep; `serving` gives an idle cluster for a variant and a level.

    Raises:
        ValueError: the traces do not answer what the load asks.
    """
    turns, points = list(sweep.turns()), list[Point]()
    for number, (variant, level, repeat) in enumerate(turns):
        on_progress(f"{variant} at {level:g}", number, len(turns))
        cluster = serving(variant, level)
        arrivals = sweep.arriving(level, repeat, cluster.now())
        window = run_load(cluster, prompts, arrivals, sweep.load(level), cluster)
        metrics, same = summarise(window, sweep.sla), len(window.requests)  # the text is the recorded one
        points.append(
            Point(variant=variant, level=level, repeat=repeat, metrics=metrics, same=same, ties=0, mismatches=0)
        )
    on_progress("done", len(turns), len(turns))
    return points


def check_comparable(simulated: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Settings of a simulation and of what it is to be compared with: the load must be the same.

    Raises:
        ValueError: naming each field that differs.
    """
    differing = [
        f"{name} is {measured.get(name)}, here it is {simulated[name]}"
        for name in _SAME
        if measured.get(name) != simulated[name]
    ]
    if differing:
        raise ValueError(
            f"--validate: measured under another load: {'; '.join(differing)}. Simulate what was measured."
        )


def compare(predicted: Sequence[PointSummary], measured: Sequence[PointSummary]) -> list[Comparison]:
    """The points both have, in the order of the predicted ones; medians over repeats.

    Raises:
        ValueError: they have none in common.
    """
    real = {(point.variant, point.level): point.throughput for point in measured}
    found = [
        Comparison(
            variant=point.variant,
            level=point.level,
            measured=real[point.variant, point.level],
            predicted=point.throughput,
            error=100 * (point.throughput / real[point.variant, point.level] - 1),
        )
        for point in predicted
        if (point.variant, point.level) in real
    ]
    if not found:
        raise ValueError("no measured point has the variant and level of a simulated one: choose the same for both.")
    return found
