"""An OpenAI-compatible server under load: one streamed request per user, so first and later tokens have real times.

    submit -> POST /v1/completions        prompt = our own tokens: the prompt is the same for every engine
              POST /v1/chat/completions   messages: for servers that take text only; their template renders it
    step   <- parts of any response, as they come (after a few milliseconds: nothing)

Where a server names no token ids, a part counts as many tokens as its text has, and a finished response is the tokens
of its whole text: parts may end inside a token.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from outrider.benchmark.backends.prometheus import MetricNames, acceptance_between, read_metrics
from outrider.benchmark.backends.stream import Part, parse_event
from outrider.benchmark.load import Acceptance, Told
from outrider.engine import Output, Request, StepRecord

_PATIENCE = 0.005  # seconds that a step waits, so that a request that is due is not late
_TIMEOUT = httpx.Timeout(600.0, connect=10.0, pool=None)
_LONGEST_REASON = 300


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes longer than many a request."""
    return httpx.create_ssl_context()


@dataclass(frozen=True)
class Endpoint:
    """Where a server is and how it is asked.

    Args:
        url: with or without /v1.
        model: as the server calls it; None: the one it lists.
        extra: further fields of every request.
        metrics: under which names /metrics tells of drafts.
        chat_of: a prompt's tokens -> `messages` and `tools` of a chat; given, the chat endpoint is asked instead.
        thinking: what the server's chat template is told; None: nothing, for servers that know no such field.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    metrics: MetricNames = field(default_factory=MetricNames)
    chat_of: Callable[[Sequence[int]], dict[str, Any]] | None = None
    thinking: bool | None = False

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"base URL {self.url!r} must start with http:// or https://, as in http://localhost:8000")

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def named(self) -> str:
        """The model to ask for.

        Raises:
            ValueError: none was given and the server lists none.
        """
        if self.model is not None:
            return self.model
        try:
            listed = httpx.get(f"{self.root}/v1/models", headers=self.headers, timeout=10.0, verify=_certificates())
            listed.raise_for_status()
            return str(listed.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"no model is listed at {self.root}/v1/models ({type(error).__name__}: {error}). Start the server, or "
                "name its model (--served-model)."
            ) from error

    def readings(self) -> dict[str, list[float]]:
        """What /metrics says now; nothing where there is no such page."""
        try:
            page = httpx.get(f"{self.root}/metrics", headers=self.headers, timeout=10.0, verify=_certificates())
            return read_metrics(page.text) if page.is_success else {}
        except httpx.HTTPError:
            return {}


class ServerBackend:
    """Users of one server; `close` it when done.

    Raises:
        ValueError: the server cannot be reached, or refuses a request: figures with gaps in them would mean nothing.
    """

    last: StepRecord | None = None

    def __init__(self, endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase) -> None:
        self.endpoint, self.tokenizer, self.model = endpoint, tokenizer, endpoint.named()
        self._loop = asyncio.new_event_loop()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(
            headers=endpoint.headers, timeout=_TIMEOUT, limits=limits, verify=_certificates()
        )
        self._arrived = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outputs: list[Output] = []
        self._told: dict[str, Told] = {}
        self._before: dict[str, list[float]] = {}
        self._failure: ValueError | None = None

    @property
    def idle(self) -> bool:
        return not self._tasks and not self._outputs

    def submit(self, request: Request) -> None:
        self._tasks[request.id] = self._loop.create_task(self._ask(request))
        self._loop.run_until_complete(asyncio.sleep(0))  # it leaves now, not with the next step

    def cancel(self, id: str) -> bool:
        task = self._tasks.pop(id, None)
        self._outputs = [output for output in self._outputs if output.id != id]
        self._told.pop(id, None)
        if task is None:
            return False
        task.cancel()
        self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        return True

    def step(self) -> list[Output]:
        if not self._outputs and self._tasks:
            self._arrived.clear()
            self._loop.run_until_complete(self._wait())
        if self._failure is not None:
            raise self._failure
        found, self._outputs = self._outputs, []
        return found

    def mark(self) -> None:
        self._before = self.endpoint.readings()

    def acceptance(self) -> Acceptance:
        return acceptance_between(self.endpoint.metrics, self._before, self.endpoint.readings())

    def told(self, id: str) -> Told:
        return self._told.pop(id)

    def close(self) -> None:
        """End what is under way and give the connections back."""
        if self._loop.is_closed():
            return
        for id in list(self._tasks):
            self.cancel(id)
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()

    async def _wait(self) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), _PATIENCE)

    async def _ask(self, request: Request) -> None:
        chat = self.endpoint.chat_of is not None
        url = f"{self.endpoint.root}/v1/{'chat/completions' if chat else 'completions'}"
        said: list[Part] = []
        try:
            async with self._client.stream("POST", url, json=self._body(request)) as answer:
                if not answer.is_success:
                    reason = (await answer.aread()).decode(errors="replace")[:_LONGEST_REASON]
                    raise ValueError(f"{answer.status_code}: {reason}")
                async for line in answer.aiter_lines():
                    part = parse_event(line)
                    if part is not None:
                        said.append(part)
                        self._deliver(request.id, part)
            if not any(part.finished for part in said):
                raise ValueError("the answer ends without a finish_reason")
            self._finish(request.id, said)
        except (httpx.HTTPError, ValueError) as error:
            self._failure = ValueError(f"{url} did not answer a request: {error or type(error).__name__}")
            self._arrived.set()

    def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.rules.max_new_tokens,
            "temperature": request.params.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.endpoint.extra,
        }
        if self.endpoint.chat_of is None:
            return {**body, "prompt": list(request.prompt)}
        if self.endpoint.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.endpoint.thinking}
        return body | self.endpoint.chat_of(request.prompt)

    def _deliver(self, id: str, part: Part) -> None:
        tokens = part.tokens if part.tokens is not None else self._split(part.text)
        if tokens:
            self._outputs.append(Output(id, tokens, part.text, None))
            self._arrived.set()

    def _finish(self, id: str, said: Sequence[Part]) -> None:
        named = any(part.tokens is not None for part in said)
        tokens = None if named else self._split("".join(part.text for part in said))
        lengths = [part.accepted_length for part in said if part.accepted_length is not None]
        self._told[id] = Told(tokens, lengths[-1] if lengths else None)
        self._outputs.append(Output(id, [], "", "stop"))
        self._tasks.pop(id, None)
        self._arrived.set()

    def _split(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
