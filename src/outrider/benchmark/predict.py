"""what the simulated machine gives under a load, and how far that is from what a real one gave

    closed loop   `users` users, each with one request at a time, the next one sent when it ends
    Poisson       requests arrive at `rate` per second, whoever is still waiting

Counting starts when as many requests have ended as run side by side (a load from nothing is no steady one) and stops
with the last of `requests` more, while others still run: neither the ramp nor a draining tail is in it.
error = predicted / measured - 1, of aggregate tokens per second.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import BaseModel

from outrider.benchmark.cluster import Cluster
from outrider.engine import Request, StepRecord


@dataclass(frozen=True)
class Load:
    """Exactly one of `users` (closed loop) and `rate` (Poisson, requests per second)."""

    users: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.users is None) == (self.rate is None):
            raise ValueError(f"users={self.users} and rate={self.rate}: give one of the two.")
        if (self.users or self.rate or 0) <= 0:
            raise ValueError(f"a load of {self.users or self.rate} is none: give numbers above 0.")


class Point(BaseModel):
    """A variant under a load. Speeds are tokens per second; a user's is over its response, waiting included."""

    variant: str
    concurrency: int | None
    rate: float | None
    replicas: int
    requests: int  # counted
    seconds: float
    tokens_per_second: float
    user_tokens_per_second_p50: float
    user_tokens_per_second_p95: float  # what 95 % of users exceed
    ttft_p50: float
    ttft_p95: float
    verified_per_request: float  # rows per request and step, anchor included
    acceptance_rate: float | None  # accepted / verified drafts; None: none were verified
    accepted_length: float
    draft_share: float  # of the time of steps


class Comparison(BaseModel):
    """One point of both kinds; `error` in per cent of the measured throughput."""

    variant: str
    concurrency: int | None
    rate: float | None
    measured: float
    predicted: float
    error: float


@dataclass
class _Timeline:
    sent: float
    first: float | None = None
    tokens: int = 0


@dataclass
class _Window:
    """What happened while counting."""

    began: float = 0.0
    tokens: int = 0
    steps: list[StepRecord] = field(default_factory=list)
    ended: list[tuple[float, float]] = field(default_factory=list)  # speed and time to first token

    def point(self, variant: str, load: Load, replicas: int, now: float) -> Point:
        speeds_N, ttft_N = np.array(self.ended).T
        admitted, accepted, rounds = (
            sum(getattr(step, name) for step in self.steps) for name in ("admitted", "accepted", "requests")
        )
        busy = sum(step.seconds for step in self.steps)
        return Point(
            variant=variant,
            concurrency=load.users,
            rate=load.rate,
            replicas=replicas,
            requests=len(self.ended),
            seconds=now - self.began,
            tokens_per_second=self.tokens / (now - self.began),
            user_tokens_per_second_p50=float(np.median(speeds_N)),
            user_tokens_per_second_p95=float(np.quantile(speeds_N, 0.05)),
            ttft_p50=float(np.median(ttft_N)),
            ttft_p95=float(np.quantile(ttft_N, 0.95)),
            verified_per_request=(admitted + rounds) / rounds,
            acceptance_rate=accepted / admitted if admitted else None,
            accepted_length=sum(step.committed for step in self.steps) / rounds,
            draft_share=sum(step.draft_seconds for step in self.steps) / busy,
        )


def predict(variant: str, cluster: Cluster, requests: Iterator[Request], load: Load, measured: int, seed: int) -> Point:
    """One point: `measured` of endless `requests`, whose ids differ.

    Raises:
        ValueError: a request that no trace answers.
    """
    arrivals = _arrivals(load, seed)
    due = next(arrivals)
    live, window = dict[str, _Timeline](), _Window()
    warm = load.users or len(cluster.replicas)
    ended = 0
    while len(window.ended) < measured:
        if cluster.idle and load.rate is not None:
            cluster.wait(due - cluster.now)
        while (len(live) < load.users) if load.users else (due <= cluster.now):
            request = next(requests)
            cluster.submit(request)
            live[request.id] = _Timeline(cluster.now if load.users else due)
            due = next(arrivals)
        outputs = cluster.step()
        if ended >= warm and cluster.last is not None:
            window.steps.append(cluster.last)
            window.tokens += sum(len(output.tokens) for output in outputs)
        for output in outputs:
            timeline = live[output.id]
            timeline.first = cluster.now if timeline.first is None else timeline.first
            timeline.tokens += len(output.tokens)
            if output.finish is not None:
                del live[output.id]
                if ended >= warm:
                    window.ended.append(
                        (timeline.tokens / (cluster.now - timeline.sent), timeline.first - timeline.sent)
                    )
                ended += 1
                if ended == warm:
                    window.began = cluster.now
    return window.point(variant, load, len(cluster.replicas), cluster.now)


def _arrivals(load: Load, seed: int) -> Iterator[float]:
    """Times of Poisson arrivals; of no interest in a closed loop."""
    chooser, now = random.Random(seed), 0.0
    while True:
        yield now
        now += chooser.expovariate(load.rate or 1.0)


def compare(predicted: Sequence[Point], measured: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """The points both have, in the order of the measured ones.

    Raises:
        ValueError: they have none in common.
    """
    ours = {(p.variant, p.concurrency, p.rate): p.tokens_per_second for p in predicted}
    found = []
    for point in measured:
        key = point["variant"], point.get("concurrency"), point.get("rate")
        if key in ours:
            real = float(point["tokens_per_second"])
            error = 100 * (ours[key] / real - 1)
            found.append(
                Comparison(
                    variant=key[0], concurrency=key[1], rate=key[2], measured=real, predicted=ours[key], error=error
                )
            )
    if not found:
        raise ValueError("no measured point has the variant and load of a simulated one: choose the same for both.")
    return found
