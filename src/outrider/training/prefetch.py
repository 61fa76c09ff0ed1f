"""The features of coming steps, fetched ahead of their use.

    store    step s trains  |  a thread reads s+1, s+2, ... into a bounded queue
    online   step s trains, then step s+1 is prefilled together with what the steps after it lack (one packed group)

A thread only where fetching waits for a disk: prefilling on a CPU would fight the training step for the same cores, and
on a GPU it is asynchronous by itself. Features do not depend on when they are fetched, so neither do results.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from outrider.training.features import FeatureCache, Features

_AHEAD = 4  # steps
_POLL_SECONDS = 0.1


@contextmanager
def step_features(
    source: FeatureCache, steps: Iterable[Sequence[int]], ahead: int = _AHEAD
) -> Iterator[Iterator[list[Features]]]:
    """Yields an iterator over the features of each step's samples, in the order of `steps`.

    While it is open nobody else may use `source`. An exception met while fetching is raised by the `next` that would
    have returned those features.
    """
    if not source.background:
        yield _inline(source, steps, ahead)
        return
    ready: queue.Queue[list[Features] | BaseException | None] = queue.Queue(maxsize=ahead)
    stop = threading.Event()

    def fetch() -> None:
        try:
            for indices in steps:
                if not _put(ready, source.gather(indices), stop):
                    return
            _put(ready, None, stop)
        except BaseException as error:
            _put(ready, error, stop)

    worker = threading.Thread(target=fetch, name="features", daemon=True)
    worker.start()
    try:
        yield _drain(ready)
    finally:
        stop.set()
        worker.join()


def _put(
    ready: queue.Queue[list[Features] | BaseException | None],
    item: list[Features] | BaseException | None,
    stop: threading.Event,
) -> bool:
    while not stop.is_set():
        try:
            ready.put(item, timeout=_POLL_SECONDS)
            return True
        except queue.Full:
            continue
    return False


def _drain(ready: queue.Queue[list[Features] | BaseException | None]) -> Iterator[list[Features]]:
    while (item := ready.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item


def _inline(source: FeatureCache, steps: Iterable[Sequence[int]], ahead: int) -> Iterator[list[Features]]:
    coming: deque[Sequence[int]] = deque()
    for indices in steps:
        coming.append(indices)
        if len(coming) > ahead:
            yield _first(source, coming)
    while coming:
        yield _first(source, coming)


def _first(source: FeatureCache, coming: deque[Sequence[int]]) -> list[Features]:
    now = coming.popleft()
    return source.gather(now, [index for indices in coming for index in indices])
