"""SIGINT and SIGTERM end a run after the step at hand, with its state saved: what a pre-empted machine needs."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Inside the `with` block `received` is the first signal's number, or 0. A second one acts as it always did."""

    def __init__(self) -> None:
        self.received = 0
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            self._former = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}

    def __exit__(self, *_: object) -> None:
        self._restore()
