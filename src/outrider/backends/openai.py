"""The client of OpenAI-compatible servers: whole answers and streams of /v1/completions and /v1/chat/completions.

    POST /v1/completions        prompt = our own tokens: the prompt is the same for every engine
    POST /v1/chat/completions   messages: for servers that render prompts themselves, with their own template

    data: {"choices": [{"text": " four", "token_ids": [2, 9], "finish_reason": null}]}      an event of a stream
    data: {"choices": [], "usage": {...}, "metrics": {...}}        after the last part, if the request asks for it
    data: [DONE]

vLLM gives `token_ids` and `prompt_token_ids` when asked for `return_token_ids`; others call the first `output_ids`.
Regeneration (data/regenerate.py) and load tests (loadtest/) ask through it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

import httpx
from httpx_sse import aconnect_sse
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedTokenizerBase

from outrider.backends.base import Acceptance, ExternalEngine, MetricNames, RequestStats, rounds_by_accepted
from outrider.decoding.request import Output, Request, StepRecord
from outrider.utils.documents import parse_json
from outrider.utils.terminal import printable

_LONGEST_REASON = 300  # characters of a server's error that are shown
_DONE = "[DONE]"
_CONNECT_SECONDS = 10.0


class OpenAICompatible(ExternalEngine):
    """A server of unknown make, which gets standard fields only.

    Args:
        engines: it may be one of these, so an accepted length is read as they tell it.
    """

    name = "openai"
    takes_thinking = False

    def __init__(self, engines: Sequence[ExternalEngine] = ()) -> None:
        self._engines = engines

    def accepted_length(self, event: Mapping[str, Any]) -> float | None:
        lengths = (engine.accepted_length(event) for engine in self._engines)
        return next((length for length in lengths if length is not None), None)


_UNKNOWN = OpenAICompatible()


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes longer than many a request."""
    return httpx.create_ssl_context()


def shown_url(url: str) -> str:
    """A URL as it is printed and stored: without the user and password that may be in it."""
    return re.sub(r"^(\w+://)?.*@", r"\1***@", url, flags=re.DOTALL)


@dataclass(frozen=True)
class Endpoint:
    """Where a server is and how it is asked.

    Args:
        url: with or without /v1. It is printed by `shown_url` alone, and what the server says by `printable`.
        model: as the server calls it; None: the one it lists.
        engine: what it is.
        chat_of: a prompt's tokens -> `messages` and `tools` of a chat; given, the chat endpoint is asked instead.
        thinking: sent as `enable_thinking`; None: not sent, for servers that know no such field.

    Raises:
        ValueError: the URL is none of a server, or the key cannot be sent.
    """

    url: str = field(repr=False)
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    engine: ExternalEngine = _UNKNOWN
    chat_of: Callable[[Sequence[int]], dict[str, Any]] | None = None
    thinking: bool | None = False

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
            usable = url.scheme in ("http", "https") and bool(url.host) and not url.query and not url.fragment
            usable = usable and (url.port is None or 0 < url.port < 2**16)
        except httpx.InvalidURL:
            usable = False
        if not usable:
            raise ValueError(f"base URL {shown_url(self.url)!r} must start with http://HOST or https://HOST.")
        if self.api_key and not re.fullmatch(r"[!-~]+", self.api_key):
            raise ValueError("the server's key holds spaces, line ends or other characters that no header may hold")

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def base(self) -> str:
        return f"{self.root}/v1"

    def get(self, url: str) -> httpx.Response:
        return httpx.get(url, headers=self._headers, timeout=_CONNECT_SECONDS, verify=_certificates())

    def client(self, timeout: float) -> OpenAIClient:
        """A client whose requests may wait so many seconds for their next byte."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        patience = httpx.Timeout(timeout, connect=_CONNECT_SECONDS, pool=None)
        http = httpx.AsyncClient(headers=self._headers, timeout=patience, limits=limits, verify=_certificates())
        return OpenAIClient(self, http)

    def readings(self) -> dict[str, list[float]]:
        """Values of /metrics by name; none if there is no such page."""
        try:
            page = self.get(f"{self.root}/metrics")
            return read_metrics(page.text) if page.is_success else {}
        except httpx.HTTPError:
            return {}

    def printable(self, text: object) -> str:
        """A message of a server or its client, in one line that may be printed and stored.

        The key, user and password that it may repeat are masked, and characters that steer a terminal are escaped.
        """
        line = " ".join(str(text).split())
        url = httpx.URL(self.url)
        user = url.userinfo.decode()
        secrets = [self.api_key or "", user, url.password or url.username, user.partition(":")[2]]
        if user:
            secrets.append(base64.b64encode(f"{url.username}:{url.password}".encode()).decode())  # as it is sent
        for secret in filter(None, secrets):
            line = line.replace(secret, "***")
        return printable(line[:_LONGEST_REASON])

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def served_model(endpoints: Sequence[Endpoint]) -> str:
    """The model to ask for: the one that is named, or that the servers list."""
    models: dict[str, str] = {}
    for endpoint in endpoints:
        if endpoint.model is not None:
            return endpoint.model
        try:
            listed = endpoint.get(f"{endpoint.base}/models").raise_for_status()
            name = listed.json()["data"][0]["id"]
            if not isinstance(name, str):
                raise TypeError("a model without a name")
            models[shown_url(endpoint.base)] = name
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            reason = endpoint.printable(f"{type(error).__name__}: {error}")
    if not models:
        urls = ", ".join(shown_url(endpoint.base) for endpoint in endpoints)
        raise ValueError(f"no model is listed at {urls} ({reason}): start the server, or name it (--served-model).")
    if len(set(models.values())) > 1:
        raise ValueError(f"the servers list different models ({models}); name the one to ask for.")
    return next(iter(models.values()))


@dataclass
class OpenAIClient:
    """Requests to one server, as many at once as are made; `aclose` it when done."""

    endpoint: Endpoint
    http: httpx.AsyncClient

    def url(self, chat: bool) -> str:
        return f"{self.endpoint.base}/{'chat/completions' if chat else 'completions'}"

    async def post(self, body: Mapping[str, Any], chat: bool) -> httpx.Response:
        """The whole answer, of whatever status.

        Raises:
            httpx.HTTPError: there is none, or it did not end in time: `timeout` holds for the next byte alone.
        """
        patience = (self.http.timeout.read or 0.0) + _CONNECT_SECONDS
        try:
            return await asyncio.wait_for(self.http.post(self.url(chat), json=body), patience)
        except asyncio.TimeoutError as error:
            raise httpx.ReadTimeout(f"the answer did not end within {patience:g} seconds") from error

    async def stream(self, body: Mapping[str, Any], chat: bool) -> AsyncGenerator[Part, None]:
        """The parts of an answer as they come.

        Raises:
            ValueError: the server refuses the request, reports an error, or says something else.
            httpx.HTTPError: the connection fails, or the answer is no stream of events.
        """
        async with aconnect_sse(self.http, "POST", self.url(chat), json=body) as source:
            if not source.response.is_success:
                reason = (await source.response.aread()).decode(errors="replace")
                raise ValueError(f"{source.response.status_code}: {reason}")
            async for event in source.aiter_sse():
                if event.data and event.data != _DONE:
                    yield parse_event(event.data, self.endpoint.engine)

    async def aclose(self) -> None:
        await self.http.aclose()


@dataclass(frozen=True)
class Part:
    """The contents of a stream's event, or of a whole answer.

    Attributes:
        text: None: there is no field for text.
        reasoning: text that the server took out of `text`.
        tokens: ids of the response's tokens; None: the server gives text only.
        finish_reason: None: the response goes on.
        accepted_length: of the whole request; None: not reported.
        prompt: ids of the prompt's tokens; None: not reported.
        stop: the stop token or string that ended the response.
        parsed_out: names of the fields that hold what is not in `text`.
    """

    text: str | None
    reasoning: str
    tokens: list[int] | None
    finish_reason: str | None
    accepted_length: float | None
    prompt: list[int] | None
    stop: object
    parsed_out: tuple[str, ...]


def parse_event(data: str, engine: ExternalEngine) -> Part:
    """The part in the data of one server-sent event; ValueError also if the server hides tool calls from the text."""
    part = parse_answer(data, engine)
    if "tool_calls" in part.parsed_out:
        raise ValueError("the server parsed tool calls out of the text: start it without a tool call parser")
    return part


def parse_answer(data: str, engine: ExternalEngine) -> Part:
    """The fields of an answer, streamed or whole; ValueError: an error of the server, or none of this protocol."""
    try:
        answer = parse_json(data)
        reported = answer.get("error")
        if not reported:
            return _read_answer(answer, engine)
    except (ValueError, AttributeError, LookupError, TypeError, ArithmeticError) as error:
        raise ValueError(f"not an answer of this protocol ({type(error).__name__}: {error}): {data}") from error
    raise ValueError(f"the server says {json.dumps(reported)}")


def _read_answer(answer: Mapping[str, Any], engine: ExternalEngine) -> Part:
    choice: Mapping[str, Any] = (answer.get("choices") or [{}])[0]
    message: Mapping[str, Any] = choice.get("delta") or choice.get("message") or choice
    parsed_out = tuple(name for name in (*_REASONING, "tool_calls") if message.get(name))
    texts = [message[name] for name in _TEXT if name in message]
    tokens, finish, length = choice.get("token_ids"), choice.get("finish_reason"), engine.accepted_length(answer)
    if not isinstance(finish, str | None):
        raise TypeError("finish_reason is no text")
    if length is not None and not 1 <= length < math.inf:
        raise ValueError(f"an accepted length of {length}")
    return Part(
        text=_joined(texts) if texts else None,
        reasoning=_joined([message.get(name) for name in _REASONING]),
        tokens=_ids(choice.get("output_ids") if tokens is None else tokens),
        finish_reason=finish,
        accepted_length=length,
        prompt=_ids(choice.get("prompt_token_ids") or answer.get("prompt_token_ids")),
        stop=choice.get("stop_reason"),
        parsed_out=parsed_out,
    )


_REASONING, _TEXT = ("reasoning_content", "reasoning"), ("content", "text")


def _joined(texts: Sequence[Any]) -> str:
    return "".join(text for text in texts if text is not None)  # TypeError for what is neither text nor null


def _ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise ValueError("token ids that are not a list of numbers")
    return list(value)


def retry_after(header: str | None) -> float | None:
    """Seconds from a Retry-After header, which holds seconds or a date; None if it says neither."""
    if header is None:
        return None
    with suppress(ValueError):
        return max(0.0, float(header)) if math.isfinite(float(header)) else None
    with suppress(ValueError, TypeError, OverflowError):
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(timezone.utc)).total_seconds())
    return None


# ----------------------------------------------------------------------------
# What an engine counts, from its /metrics page (Prometheus text format).
#
# vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 17.0        name, labels, value
#
# accepted length   1 + accepted / rounds         acceptance   accepted / drafted         of two readings' difference
# ----------------------------------------------------------------------------


def read_metrics(text: str) -> dict[str, list[float]]:
    """Values by name, one for every set of labels; lines that are no samples are passed over."""
    values: dict[str, list[float]] = {}
    for line in text.splitlines():
        with suppress(Exception):  # one line at a time: a bad one costs no other
            for family in text_string_to_metric_families(line):
                for sample in family.samples:
                    values.setdefault(sample.name, []).append(sample.value)
    return values


def acceptance_between(
    names: MetricNames, before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]
) -> Acceptance:
    """Acceptance between two readings; None if the engine does not report it, or nothing was drafted."""

    def grown(name: str | None) -> float | None:
        return None if name is None or name not in after else sum(after[name]) - sum(before.get(name, ()))

    rounds, drafted, accepted = grown(names.rounds), grown(names.drafted), grown(names.accepted)
    shown = [] if names.length is None else [value for value in after.get(names.length, ()) if value > 0]
    length = sum(shown) / len(shown) if shown else None
    if accepted is not None and rounds:
        length = 1 + accepted / rounds
    new = names.accepted_K(after)
    old = names.accepted_K(before) or [0.0] * len(new)
    histogram = None
    if rounds and new and len(after[names.rounds or ""]) == 1:
        accepted_K = [round(b - a) for a, b in zip(old, new, strict=True)]
        histogram = rounds_by_accepted(round(rounds), accepted_K)
    share = accepted / drafted if accepted is not None and drafted else None
    return Acceptance(length, share, rounds, histogram=histogram)


# ----------------------------------------------------------------------------
# A server under load: one streamed request per user, so first and later tokens have real times.
#
#     submit -> POST           step <- parts of any response, as they come (after a few milliseconds: nothing)
#
# If a server sends no token ids, a part counts as many tokens as its text has, and a finished response is the tokens
# of its whole text: parts may end inside a token.
# ----------------------------------------------------------------------------


_STEP_SECONDS = 0.005  # that a step waits, so that a request that is due is not late
_TIMEOUT = 600.0


class ServerBackend:
    """Users of one server; `close` it when done.

    Raises:
        ValueError: the server cannot be reached, or refuses a request: figures with gaps in them would mean nothing.
    """

    last: StepRecord | None = None

    def __init__(self, endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase) -> None:
        self.endpoint, self.tokenizer, self.model = endpoint, tokenizer, served_model([endpoint])
        self._loop = asyncio.new_event_loop()
        self._client = endpoint.client(_TIMEOUT)
        self._arrived = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outputs: list[Output] = []
        self._stats: dict[str, RequestStats] = {}
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
        self._stats.pop(id, None)
        if task is None:
            return False
        task.cancel()
        self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        return True

    def step(self) -> list[Output]:
        if not self._outputs and self._tasks:
            self._arrived.clear()
            with suppress(asyncio.TimeoutError):
                self._loop.run_until_complete(asyncio.wait_for(self._arrived.wait(), _STEP_SECONDS))
        if self._failure is not None:
            raise self._failure
        outputs, self._outputs = self._outputs, []
        return outputs

    def start_window(self) -> None:
        self._before = self.endpoint.readings()

    def acceptance(self) -> Acceptance:
        return acceptance_between(self.endpoint.engine.metrics, self._before, self.endpoint.readings())

    def request_stats(self, id: str) -> RequestStats:
        return self._stats.pop(id)

    def close(self) -> None:
        """End what is under way and give the connections back."""
        if self._loop.is_closed():
            return
        for id in list(self._tasks):
            self.cancel(id)
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()

    async def _ask(self, request: Request) -> None:
        chat = self.endpoint.chat_of is not None
        parts: list[Part] = []
        try:
            async with aclosing(self._client.stream(self._body(request), chat)) as stream:
                async for part in stream:
                    parts.append(part)
                    self._deliver(request.id, part)
            if all(part.finish_reason is None for part in parts):
                raise ValueError("the answer ends without a finish_reason")
            self._finish(request.id, parts)
        except Exception as error:  # any: it would reach nobody else, and the load would wait for ever
            url, reason = shown_url(self._client.url(chat)), self.endpoint.printable(error) or type(error).__name__
            self._failure = ValueError(f"{url} did not answer a request: {reason}")
            self._arrived.set()

    def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.rules.max_new_tokens,
            "temperature": request.params.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.endpoint.engine.request_fields,
        }
        if request.params.temperature > 0:
            body |= {"top_p": request.params.top_p, "seed": request.params.seed}
        if self.endpoint.chat_of is None:
            return {**body, "prompt": list(request.prompt)}
        if self.endpoint.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.endpoint.thinking}
        return body | self.endpoint.chat_of(request.prompt)

    def _deliver(self, id: str, part: Part) -> None:
        text = _spoken(part)
        tokens = part.tokens if part.tokens is not None else self._split(text)
        if tokens:
            self._outputs.append(Output(id, tokens, text, finish=None))
            self._arrived.set()

    def _finish(self, id: str, parts: Sequence[Part]) -> None:
        named = any(part.tokens is not None for part in parts)
        tokens = None if named else self._split("".join(map(_spoken, parts)))
        lengths = [part.accepted_length for part in parts if part.accepted_length is not None]
        self._stats[id] = RequestStats(tokens, lengths[-1] if lengths else None)
        self._outputs.append(Output(id, [], "", finish="stop"))
        self._tasks.pop(id, None)
        self._arrived.set()

    def _split(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _spoken(part: Part) -> str:
    return part.reasoning + (part.text or "")
