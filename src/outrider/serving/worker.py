"""The engine in a thread of its own, for requests of one asyncio loop.

    loop    submit ----> commands ----+                    +--> queue of a submission --> its reader
            close  ----> commands --+ |                    |
    thread                          take -> engine.step -> outputs, counts of the step

The thread takes commands between two steps, so that a request that nobody waits for any more is freed after one step at
most. What the loop knows of a request (its queue, its record) only the loop touches.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from queue import SimpleQueue
from threading import Thread

from outrider.decoding.engine import Engine
from outrider.decoding.request import Output, Request, StepRecord
from outrider.serving.inspector import Watch
from outrider.serving.metrics import RequestRecord, ServerMetrics

_REMEMBERED = 32  # finished requests; their times say when a refused client should come again


class Overloaded(Exception):
    """Too many requests wait already. `retry_after`: seconds after which some of them will have finished."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("the server's queue is full; try again later.")
        self.retry_after = retry_after


class Unavailable(Exception):
    """The engine does not run: it has failed, or the server stops."""


class Submission:
    """Requests that the engine decodes; iterate over their outputs as they come, until all have finished.

    `records` counts what each of them got so far. `close` it in any case: requests that have not finished are freed.
    """

    def __init__(self, worker: Worker, records: dict[str, RequestRecord]) -> None:
        self.records = records
        self._worker, self._open = worker, set(records)
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Output]:
        left = len(self.records)
        while left:
            output = await self._outputs.get()
            left -= output.finish is not None
            yield output

    def close(self) -> None:
        """Free what has not finished."""
        self._worker.cancel(self._open)
        self._open.clear()

    def put(self, output: Output) -> None:
        if output.finish is not None:
            self._open.discard(output.id)
        self._outputs.put_nowait(output)


_Command = tuple[Sequence[Request], "asyncio.Future[None]"] | Collection[str] | None  # submit | cancel | stop


class Worker:
    """Runs an engine in a thread of its own. Its methods are for one asyncio loop.

    Args:
        most_waiting: requests that may wait for a place among the engine's `max_requests`.

    `watches` get every step.
    """

    def __init__(self, engine: Engine, metrics: ServerMetrics, most_waiting: int) -> None:
        self.engine, self.metrics, self.most_waiting = engine, metrics, most_waiting
        self.watches: set[Watch] = set()
        self.failure: Exception | None = None
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._live: dict[str, Submission] = {}
        self._finished: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # (when, after how many seconds)

    @property
    def healthy(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    async def start(self) -> None:
        """Start the thread; on return the engine has warmed up."""
        self._loop = asyncio.get_running_loop()
        self._warm = self._loop.create_future()
        self._thread.start()
        await self._warm

    async def stop(self) -> None:
        """End the thread after the step at hand; requests that have not finished end with an error."""
        self.failure = self.failure or Unavailable("the server stops.")
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self._abandon(self.failure)

    def check_room(self, requests: int) -> None:
        """Whether so many more could be submitted now."""
        if self.failure is not None:
            raise Unavailable(str(self.failure)) from self.failure
        if len(self._live) + requests > self.engine.config.max_requests + self.most_waiting:
            raise Overloaded(self._retry_after(requests))

    async def submit(self, requests: Sequence[Request]) -> Submission:
        """Hand requests with ids of their own to the engine: all of them, or none.

        Raises:
            Overloaded: more would wait than may.
            Unavailable: the engine does not run.
            ValueError: the engine refuses one of them, see `Engine.submit`.
        """
        self.check_room(len(requests))
        now = time.perf_counter()
        records = {one.id: RequestRecord(now, len(one.prompt), self.metrics.slots) for one in requests}
        submission = Submission(self, records)
        self._live |= dict.fromkeys(records, submission)
        accepted = self._loop.create_future()
        self._commands.put((requests, accepted))
        try:
            await accepted
        except Exception:  # the engine has none of them
            for id in records:
                self._live.pop(id, None)
            raise
        except BaseException:  # the client has gone meanwhile
            submission.close()
            raise
        return submission

    def cancel(self, ids: Collection[str]) -> None:
        """Free requests, those that are unknown left out."""
        freed = [id for id in ids if self._live.pop(id, None) is not None]
        if freed:
            self.metrics.aborted(len(freed))
            self._commands.put(freed)

    def _retry_after(self, places: int) -> int:
        """Seconds until so many places are free, if requests finish as the last ones did; 1 if none has."""
        if not self._finished:
            return 1
        taken = sum(seconds for _, seconds in self._finished) / len(self._finished)
        return max(1, math.ceil(taken * places / self.engine.config.max_requests))

    # ------------------------------------------------------------------------
    # In the thread.
    # ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.engine.warm_up()
            self._call(_settle, self._warm, None)
            while self._take():
                started = time.perf_counter()
                outputs = self.engine.step()
                now, waiting = time.perf_counter(), {id for id, _ in self.engine.scheduler.waiting}
                self._call(self._deliver, outputs, self.engine.last, started, now, waiting)
        except Exception as error:
            self._call(self._fail, error)

    def _take(self) -> bool:
        """Carry out all commands, waiting for some while there is nothing to decode; False to stop."""
        while self.engine.idle or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            if isinstance(command, tuple):
                self._submit(*command)
            else:
                for id in command:
                    self.engine.cancel(id)
        return True

    def _submit(self, requests: Sequence[Request], accepted: asyncio.Future[None]) -> None:
        for done, request in enumerate(requests):
            try:
                self.engine.submit(request)
            except Exception as error:
                for earlier in requests[:done]:
                    self.engine.cancel(earlier.id)
                self._call(_settle, accepted, error)
                return
        self._call(_settle, accepted, None)

    def _call(self, function: Callable[..., object], *values: object) -> None:
        self._loop.call_soon_threadsafe(function, *values)

    # ------------------------------------------------------------------------
    # In the loop.
    # ------------------------------------------------------------------------

    def _deliver(
        self, outputs: Sequence[Output], step: StepRecord | None, started: float, now: float, waiting: set[str]
    ) -> None:
        """Hand out a step's outputs. It ran from `started` to `now`; `waiting` requests had no part in it."""
        for id, submission in self._live.items():
            if id not in waiting:
                submission.records[id].begin(started)
        if step is not None:
            self.metrics.step(step)
            for watch in self.watches:
                watch.add(step, outputs)
        for output in outputs:
            submission_of = self._live.get(output.id)
            if submission_of is None:
                continue  # cancelled during the step
            record = submission_of.records[output.id]
            self.metrics.output(output, record, now)
            if output.finish is not None:
                del self._live[output.id]
                self._finished.append((now, now - record.arrived))
            submission_of.put(output)

    def _fail(self, error: Exception) -> None:
        """The engine cannot go on: all requests end with its error."""
        self.failure = error
        _settle(self._warm, error)
        self._abandon(error)

    def _abandon(self, error: Exception) -> None:
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, tuple):
                _settle(command[1], Unavailable(str(error)))
        live, self._live = self._live, {}
        for id, submission in live.items():
            submission.put(Output(id, [], "", finish="error", error=error))


def _settle(accepted: asyncio.Future[None], error: Exception | None) -> None:
    if accepted.done():
        return  # whoever waited has gone
    if error is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(error)
