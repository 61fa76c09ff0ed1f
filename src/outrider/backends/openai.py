"""One streamed answer of an OpenAI-compatible server: server-sent events, each with a part of the response.

    data: {"choices": [{"text": " four", "token_ids": [2, 9], "finish_reason": null}]}
    data: {"choices": [], "usage": {...}, "metrics": {...}}        after the last part, where the server is asked for it
    data: [DONE]

Accepted length of one request: vLLM tells it (`metrics.speculative_decoding`, started with
--per-request-spec-decode-metrics summary); llama.cpp counts drafts (`timings`), and each round gives one token that is
no draft: tokens / (tokens - accepted).
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from outrider.backends.base import Acceptance, MetricNames, RequestStats, acceptance_between, read_metrics
from outrider.engine.batch import Output, Request, StepRecord

DONE = "[DONE]"


@dataclass(frozen=True)
class Part:
    """What one event brought. `tokens` None: the server gives text only."""

    text: str
    tokens: list[int] | None
    finished: bool
    accepted_length: float | None


def parse_event(line: str) -> Part | None:
    """The part in a line of the stream; None: no event, or the end.

    Raises:
        ValueError: an error of the server, or something else than an answer of this protocol.
    """
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == DONE:
        return None
    try:
        event = json.loads(data)
        if "error" in event:
            raise ValueError(f"the server says {json.dumps(event['error'])[:300]}")
        choices = event.get("choices") or [{}]
        choice: Mapping[str, Any] = choices[0]
        delta: Mapping[str, Any] = choice.get("delta") or choice
        if delta.get("tool_calls"):
            raise ValueError("the server parsed tool calls out of the text: start it without a tool call parser")
        spoken = [delta.get(name) for name in ("reasoning_content", "reasoning", "content", "text")]
        tokens = choice.get("token_ids")
        return Part(
            "".join(part for part in spoken if isinstance(part, str)),
            None if tokens is None else [int(token) for token in tokens],
            choice.get("finish_reason") is not None,
            _accepted_length(event),
        )
    except (json.JSONDecodeError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"not an event of this protocol ({type(error).__name__}): {data[:200]}") from error


def _accepted_length(event: Mapping[str, Any]) -> float | None:
    told = (event.get("metrics") or {}).get("speculative_decoding")
    if told and told["num_spec_steps"]:
        return float(told["mean_acceptance_length"])
    timings = event.get("timings") or {}
    if timings.get("draft_n"):
        return float(timings["predicted_n"] / (timings["predicted_n"] - timings["draft_n_accepted"]))
    return None


# ----------------------------------------------------------------------------
# An OpenAI-compatible server under load: one streamed request per user, so first and later tokens have real times.
#
#     submit -> POST /v1/completions        prompt = our own tokens: the prompt is the same for every engine
#               POST /v1/chat/completions   messages: for servers that take text only; their template renders it
#     step   <- parts of any response, as they come (after a few milliseconds: nothing)
#
# Where a server names no token ids, a part counts as many tokens as its text has, and a finished response is the tokens
# of its whole text: parts may end inside a token.
# ----------------------------------------------------------------------------


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
        self._told: dict[str, RequestStats] = {}
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

    def told(self, id: str) -> RequestStats:
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
        self._told[id] = RequestStats(tokens, lengths[-1] if lengths else None)
        self._outputs.append(Output(id, [], "", "stop"))
        self._tasks.pop(id, None)
        self._arrived.set()

    def _split(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
