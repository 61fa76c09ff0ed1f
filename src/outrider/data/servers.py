"""Responses from OpenAI-compatible servers, several at once.

    jobs -> [server A: `concurrency` workers] -> reply
            [server B: `concurrency` workers] -> 429, 5xx, lost connection: back to the jobs after
                                                 min(cap, base 2^n) * (1/2 .. 1) seconds, or what Retry-After says
                                              -> other 4xx: failed, not asked again

The next free worker of any server takes a job. A server that cannot be reached, or says 429, rests as a whole while the
others go on. One that stays unreachable through all its retries, or refuses our key or model (401, 403, 404), is given
up; with the last one the run ends early, what is not done keeps waiting, and `trouble` says why.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from outrider.data.chat import Chat
from outrider.data.completions import Unusable, parse, payload, retry_after
from outrider.data.responses import Failure
from outrider.data.samples import Reply
from outrider.data.sources import RegenerationConfig, Request

_IDLE_SECONDS = 0.02
_CONNECT_SECONDS = 10.0
_BACKOFF_CAP = 30.0
_LONGEST_REASON = 300


@dataclass(frozen=True)
class ServerConfig:
    """Which servers to ask and how patiently. Times in seconds.

    `model` None: the one the servers list. `chat`: /v1/chat/completions instead of /v1/completions.
    """

    base_urls: tuple[str, ...]
    model: str | None = None
    chat: bool = False
    concurrency: int = 16  # requests in flight per server
    timeout: float = 600.0
    retries: int = 8
    backoff: float = 0.5
    api_key: str | None = None

    def __post_init__(self) -> None:
        for url in self.base_urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(
                    f"base URL {url!r} must start with http:// or https://, as in http://localhost:8000/v1"
                )


@dataclass
class _Job:
    request: Request
    attempts: int = 0


@dataclass
class _Server:
    url: str
    strikes: int = 0  # times in a row that it could not be reached
    struck_at: float = 0.0
    rest_until: float = 0.0
    given_up: str | None = None  # why

    def strike(self, config: ServerConfig, started: float, reason: str) -> None:
        """Count a failed connection, once for all requests that were under way together."""
        if started < self.struck_at:
            return
        self.strikes += 1
        self.struck_at = time.monotonic()
        self.rest_until = self.struck_at + _delay(config, self.strikes)
        if self.strikes > config.retries:
            self.given_up = f"cannot be reached ({reason})"


class ServerSource:
    """A pool of servers that serve the target.

    Raises:
        ValueError: no model was named and no server lists one, or they list different ones.
    """

    def __init__(self, chat: Chat, config: ServerConfig) -> None:
        self.chat, self.config = chat, config
        self.renders_prompts = config.chat
        self.trouble: str | None = None
        urls = [url.rstrip("/") for url in config.base_urls]
        self.urls = list(dict.fromkeys(url if url.endswith("/v1") else f"{url}/v1" for url in urls))
        self.headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self.model = config.model or self._served_model()

    @property
    def description(self) -> dict[str, Any]:
        return {"generator": f"{'chat' if self.config.chat else 'completions'}:{self.model}"}

    def answer(
        self, requests: Sequence[Request], config: RegenerationConfig, stop: Callable[[], bool]
    ) -> Iterator[list[Reply | Failure]]:
        """Answers in the order in which they come, each a commit of its own; none once all servers are given up."""
        if self.trouble:
            return  # a later turn would wait for them all over again
        jobs = [_Job(request) for request in requests if not request.done]
        loop = asyncio.new_event_loop()
        answers = _Pool(self, config, jobs, stop).run()
        try:
            while True:
                try:
                    yield [loop.run_until_complete(anext(answers))]
                except StopAsyncIteration:
                    return
        finally:
            loop.run_until_complete(answers.aclose())
            loop.close()

    def _served_model(self) -> str:
        found: dict[str, str] = {}
        for url in self.urls:
            try:
                listed = httpx.get(f"{url}/models", headers=self.headers, timeout=_CONNECT_SECONDS)
                listed.raise_for_status()
                found[url] = str(listed.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}"
        if not found:
            raise ValueError(
                f"no model is listed at {', '.join(self.urls)} ({reason}). Start the server, or name its model."
            )
        if len(set(found.values())) > 1:
            raise ValueError(f"the servers list different models ({found}); name the one to ask for.")
        return next(iter(found.values()))


@dataclass
class _Pool:
    """One turn's jobs on their way through the servers."""

    source: ServerSource
    config: RegenerationConfig
    jobs: list[_Job]
    stop: Callable[[], bool]
    waiting: deque[_Job] = field(default_factory=deque)

    async def run(self) -> AsyncGenerator[Reply | Failure, None]:
        self.waiting.extend(self.jobs)
        servers = [_Server(url) for url in self.source.urls]
        results: asyncio.Queue[Reply | Failure | None] = asyncio.Queue()
        patience = httpx.Timeout(self.source.config.timeout, connect=_CONNECT_SECONDS, pool=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(headers=self.source.headers, timeout=patience, limits=limits) as client:
            workers = [
                asyncio.create_task(self._work(server, client, results))
                for server in servers
                for _ in range(self.source.config.concurrency)
            ]
            ended = asyncio.gather(*workers, return_exceptions=True)
            ended.add_done_callback(lambda _: results.put_nowait(None))
            try:
                for _ in self.jobs:
                    answer = await results.get()
                    if answer is None:  # every worker left: stopped, or no server is there any more
                        for error in filter(None, await ended):
                            raise error
                        break
                    yield answer
            finally:
                for worker in workers:
                    worker.cancel()
                await ended
        if all(server.given_up for server in servers):
            self.source.trouble = "; ".join(f"{server.url} {server.given_up}" for server in servers)

    async def _work(
        self, server: _Server, client: httpx.AsyncClient, results: asyncio.Queue[Reply | Failure | None]
    ) -> None:
        while not server.given_up and not self.stop():
            if not self.waiting or server.rest_until > time.monotonic():
                await asyncio.sleep(_IDLE_SECONDS)
                continue
            job = self.waiting.popleft()
            answer = await self._ask(server, client, job)
            if answer is not None:
                results.put_nowait(answer)

    async def _ask(self, server: _Server, client: httpx.AsyncClient, job: _Job) -> Reply | Failure | None:
        """A reply, or a final failure; None when the job goes back to the others."""
        source, request = self.source, job.request
        url = f"{server.url}/{'chat/completions' if source.config.chat else 'completions'}"
        started = time.monotonic()
        try:
            got = await client.post(url, json=payload(request, self.config, source.model, source.config.chat))
            server.strikes = 0
            if got.status_code == httpx.codes.OK:
                return parse(got.json(), request, source.chat, source.config.chat)
            reason = f"{got.status_code}: {got.text}"[:_LONGEST_REASON]
            if got.status_code in (401, 403, 404):
                server.given_up = f"refuses the request ({reason})"
                self.waiting.appendleft(job)
                return None
            if got.status_code not in (408, 425, 429) and got.status_code < 500:
                return self._failure(job, reason)
            wait = retry_after(got.headers.get("Retry-After"))
            if wait is not None or got.status_code == 429:
                pause = _delay(source.config, job.attempts + 1) if wait is None else wait
                server.rest_until = max(server.rest_until, time.monotonic() + pause)
                return self._again(job, reason, 0.0)
        except Unusable as error:
            return self._failure(job, str(error))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            # It never saw the request: the server's fault, not this job's.
            server.strike(source.config, started, f"{type(error).__name__}: {error}")
            self.waiting.appendleft(job)
            return None
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        return self._again(job, reason, _delay(source.config, job.attempts + 1))

    def _again(self, job: _Job, reason: str, delay: float) -> Failure | None:
        job.attempts += 1
        if job.attempts > self.source.config.retries:
            return self._failure(job, reason)
        asyncio.get_running_loop().call_later(delay, self.waiting.append, job)
        return None

    def _failure(self, job: _Job, reason: str) -> Failure:
        return Failure(job.request.id, job.request.turn, reason)


def _delay(config: ServerConfig, attempt: int) -> float:
    return min(_BACKOFF_CAP, config.backoff * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
