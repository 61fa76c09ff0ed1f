"""Whose seconds count, and when the next request comes.

    closed loop   N users:   ask ---- answer, ask -- answer, ask ------ answer, ...     never more than N at once
    Poisson       a rate:    ask  ask      ask ask  ask           ask    ...            whatever happens

A closed loop shows what the machine can give; open arrivals show how long requests wait for it.
"""

from __future__ import annotations

import random
import time
from typing import Protocol

from outrider.engine import StepRecord


class Clock(Protocol):
    """Seconds, measured or simulated."""

    def now(self) -> float: ...

    def stepped(self, last: StepRecord | None) -> None:
        """A step is over."""
        ...

    def wait_until(self, moment: float) -> None: ...


class WallClock:
    """The time that passes."""

    def now(self) -> float:
        return time.perf_counter()

    def stepped(self, last: StepRecord | None) -> None:
        """Steps take the time they take."""

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))


class Arrivals(Protocol):
    def next(self, now: float, live: int) -> float | None:
        """When the next request comes, `live` being in; None: once one of them has left."""
        ...

    def taken(self) -> None:
        """That request has come."""
        ...


class ClosedLoop:
    """`users` of which each asks again as soon as it is answered."""

    def __init__(self, users: int) -> None:
        self.users = users

    def next(self, now: float, live: int) -> float | None:
        return now if live < self.users else None

    def taken(self) -> None:
        """Nothing to remember."""


class Poisson:
    """Independent users: exponential gaps, `rate` requests per second on average."""

    def __init__(self, rate: float, seed: int, start: float) -> None:
        self._rate, self._random, self._next = rate, random.Random(seed), start

    def next(self, now: float, live: int) -> float | None:
        return self._next

    def taken(self) -> None:
        self._next += self._random.expovariate(self._rate)
