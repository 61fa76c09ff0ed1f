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


class Stopping(Unavailable):
    """The server ends."""

    def __init__(self) -> None:
        super().__init__("the server stops.")


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


class Room:
    """Places of requests on their way to the engine, from their arrival until they are submitted or the block ends.

    They count among those that wait, so that prompts being tokenised are bounded as well.
    """

    def __init__(self, worker: Worker, places: int) -> None:
        self._worker, self._places, self._arrived = worker, places, time.perf_counter()

    def __enter__(self) -> Room:
        self._worker.reserved += self._places
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what has not been used."""
        self._worker.reserved -= self._places
        self._places = 0

    async def submit(self, requests: Sequence[Request]) -> Submission:
        """Hand them to the engine, see `Worker.submit`."""
        self.close()  # the engine counts them from here on
        return await self._worker.submit(requests, self._arrived)


_Command = tuple[Sequence[Request], "asyncio.Future[None]"] | Collection[str] | None  # submit | cancel | stop


class Worker:
    """Runs an engine in a thread of its own. Its methods are for one asyncio loop.

    Args:
        most_waiting: requests that may wait for a place among the engine's `max_requests`.

    Attributes:
        watches: get every step.
        reserved: places that `room` has given and that are not used yet.
    """

    def __init__(self, engine: Engine, metrics: ServerMetrics, most_waiting: int) -> None:
        self.engine, self.metrics, self.most_waiting = engine, metrics, most_waiting
        self.watches: set[Watch] = set()
        self.reserved = 0
        self.failure: Exception | None = None
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._live: dict[str, Submission] = {}
        self._finished: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # (when, after how many seconds)

    @property
    def healthy(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """Whether a request is decoded, waits, or is on its way."""
        return bool(self._live) or self.reserved > 0

    async def start(self) -> None:
        """Start the thread; on return the engine has warmed up."""
        self._loop = asyncio.get_running_loop()
        self._warm = self._loop.create_future()
        self._thread.start()
        await self._warm

    async def stop(self) -> None:
        """End the thread after the step at hand; requests that have not finished end with an error, at once."""
        self.failure = self.failure or Stopping()
        self._end_all(self.failure)
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self._refuse_all(self.failure)

    def room(self, requests: int) -> Room:
        """Places for so many requests; they are taken by a `with`.

        Raises:
            Overloaded: more would wait than may.
            Unavailable: the engine does not run.
        """
        if self.failure is not None:
            raise Unavailable(str(self.failure)) from self.failure
        if len(self._live) + self.reserved + requests > self.engine.config.max_requests + self.most_waiting:
            raise Overloaded(self._retry_after(requests))
        return Room(self, requests)

    async def submit(self, requests: Sequence[Request], arrived: float) -> Submission:
        """Hand requests with ids of their own to the engine: all of them, or none.

        Args:
            arrived: when they came, by `time.perf_counter`.

        Raises:
            Unavailable: the engine does not run.
            ValueError: the engine refuses one of them, see `Engine.submit`.
        """
        if self.failure is not None:
            raise Unavailable(str(self.failure)) from self.failure
        records = {one.id: RequestRecord(arrived, len(one.prompt), self.metrics.slots) for one in requests}
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
                now = time.perf_counter()
                began = {*self.engine.scheduler.running, *(output.id for output in outputs)}
                self._call(self._deliver, outputs, self.engine.last, started, now, began)
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
        self, outputs: Sequence[Output], step: StepRecord | None, started: float, now: float, began: set[str]
    ) -> None:
        """Hand out a step's outputs. It ran from `started` to `now`; the requests `began` were in it, or before."""
        for id in began & self._live.keys():
            self._live[id].records[id].begin(started)
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
        self._end_all(error)
        self._refuse_all(error)

    def _end_all(self, error: Exception) -> None:
        """End the requests that the engine has."""
        live, self._live = self._live, {}
        for id, submission in live.items():
            submission.put(Output(id, [], "", finish="error", error=error))

    def _refuse_all(self, error: Exception) -> None:
        """Refuse what has been submitted since the thread ended."""
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, tuple):
                _settle(command[1], Unavailable(str(error)))


def _settle(accepted: asyncio.Future[None], error: Exception | None) -> None:
    if accepted.done():
        return  # whoever waited has gone
    if error is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(error)
