"""Replicas side by side on one clock: each starts its next step when its last one ended and it has work.

    replica 0   |--step--|----step----|      |-step-|
    replica 1   |------step------|--step--|
    step()               ^       ^    ^   ^      ^     gives the outputs of the step that ends next, at the time it ends

One replica is the simulation of one engine. A submission is seen between two of these events, as by an engine between
two of its steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

from outrider.benchmark.simulate import SimulatedEngine
from outrider.engine import Output, Request, StepRecord

Routing = Literal["round-robin", "least-loaded"]


class Cluster:
    """Simulated engines behind a router: to a load generator one engine (`Backend`), and the `Clock` it goes by.

    Attributes:
        last: the step whose outputs came last.
    """

    def __init__(self, replicas: Sequence[SimulatedEngine], routing: Routing = "least-loaded") -> None:
        if not replicas:
            raise ValueError("a cluster needs at least one replica.")
        self.replicas, self.routing = list(replicas), routing
        self._now = 0.0
        self.last: StepRecord | None = None
        self._routed = 0
        self._flying: list[tuple[float, int, StepRecord, list[Output]]] = []  # a heap by end, then by replica
        self._resting = set(range(len(self.replicas)))

    @property
    def idle(self) -> bool:
        return not self._flying and all(replica.idle for replica in self.replicas)

    def now(self) -> float:
        """Simulated seconds."""
        return self._now

    def stepped(self, last: StepRecord | None) -> None:
        """`step` moves the time itself."""

    def wait_until(self, moment: float) -> None:
        """Nothing happens for a while."""
        assert self.idle, "time passes by steps while there is work"
        self._now = max(self._now, moment)

    def submit(self, request: Request) -> None:
        """Send a request to the next replica, or to the one with the fewest requests."""
        if self.routing == "round-robin":
            chosen = self.replicas[self._routed % len(self.replicas)]
        else:
            chosen = min(self.replicas, key=lambda replica: replica.load)
        self._routed += 1
        chosen.submit(request)

    def cancel(self, id: str) -> bool:
        """Forget a request; False where no replica has it. What its step in flight gives still comes out."""
        return any(replica.cancel(id) for replica in self.replicas)

    def step(self) -> list[Output]:
        """Move to the end of the step that ends next; its outputs."""
        for number in sorted(self._resting):
            replica = self.replicas[number]
            if not replica.idle:
                outputs = replica.step()
                assert replica.last is not None
                heapq.heappush(self._flying, (self._now + replica.last.seconds, number, replica.last, outputs))
                self._resting.remove(number)
        if not self._flying:
            return []
        self._now, number, self.last, outputs = heapq.heappop(self._flying)
        self._resting.add(number)
        return outputs
