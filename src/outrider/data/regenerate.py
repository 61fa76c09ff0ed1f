"""Regenerate responses: the target, local or on servers, writes the text that a drafter is trained on.

Locally the engine decodes without drafts: prompts are sorted by length within a window and decoded in batches; each
finished response is returned at once.

Sampling is x = min{v : u < P(0) + .. + P(v)} with uniform numbers u from a seed per sequence, so a response does not
depend on the other sequences of its batch, their order, or interruptions. One exception: a matrix product may round
differently for another number of rows (GPUs, bfloat16), which may swap tokens that are equally likely up to rounding;
`batch_size: 1` excludes that.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Annotated, Any

import httpx
import torch
from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from torch import Tensor

from outrider.backends.openai import Endpoint, OpenAIClient, Part, parse_answer, retry_after, served_model, shown_url
from outrider.data.chat import Chat, printable_lines, response_text
from outrider.data.conversations import Conversation, Message, chat_messages
from outrider.data.responses import Failure, Reply, ResponseFile
from outrider.data.sources import prompts_label
from outrider.decoding.engine import Engine
from outrider.decoding.request import Request as DecodingRequest
from outrider.decoding.request import StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.sampling import Randomness, SamplingParams, SeededSource
from outrider.target.model import Target
from outrider.utils.documents import Section
from outrider.utils.measure import dtype_name

_WINDOW = 8  # batches whose prompts are sorted together: less padding, while early responses stay a fair sample
_PROMPT_ROWS = 4096  # rows of a prefill step


class PromptSource(Section):
    """A source of prompts: a file, a name (data/sources.py), or `hf:owner/name[/config][:split]`."""

    path: str
    """A JSONL file (relative to the recipe or here), a shipped set, a name (gsm8k-train), or hf:owner/name."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of conversations; null: all."""
    max_turns: int | None = Field(None, ge=1)
    """Maximum user turns of each conversation; null: all."""
    max_characters: int | None = Field(None, ge=1)
    """Maximum characters before the first response; longer conversations are skipped."""


Temperature = Annotated[float, Field(ge=0, strict=True)]


class DataSection(Section):
    """A recipe's `data`: the prompts, how they are answered, and the servers that answer, if any."""

    prompts: list[PromptSource] = Field([])
    """Sources of prompts; none: the existing `responses` are used unchanged."""
    not_in: list[str] = Field([])
    """Evaluation sets (gsm8k, humaneval, a JSONL file): prompts that share 13 words in a row with one of their prompts
    are dropped."""
    directory: str | None = None
    """Directory of NAME.jsonl files for prompts by name without network; null: $OUTRIDER_DATA."""
    responses: str | None = None
    """File of regenerated responses; null: OUT/responses.jsonl."""
    max_new_tokens: int = Field(256, ge=2)
    """Longest response, in tokens."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longer prompts are skipped."""
    temperature: Temperature | Annotated[list[Temperature], Field(min_length=1)] = 0.0
    """Sampling temperature; 0: greedy. If several are given, each conversation gets one of them."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens of this total probability."""
    top_k: int = Field(0, ge=0)
    """Sample from the k likeliest tokens; 0: all."""
    thinking: bool = False
    """Switch on thinking in the chat template."""
    batch_size: int = Field(64, ge=1)
    """Responses decoded at once here."""
    max_minutes: float | None = Field(None, gt=0)
    """Stop regenerating after this time and train on the responses so far; null: no limit."""
    held_out: int = Field(32, ge=1)
    """Conversations kept for the held-out metrics."""
    base_urls: list[str] = Field([])
    """OpenAI-compatible servers that serve the target; none: decode here."""
    served_model: str | None = None
    """The target's name there; null: the one the servers list."""
    chat_api: bool = False
    """Use /v1/chat/completions, for servers without /v1/completions."""
    concurrency: int = Field(16, ge=1)
    """Requests in flight per server."""
    timeout: float = Field(600.0, gt=0)
    """Seconds per request."""
    retries: int = Field(8, ge=0)
    """Maximum retries of a failed request."""

    @field_validator("temperature", mode="wrap")
    @classmethod
    def _temperatures(cls, value: object, check: ValidatorFunctionWrapHandler) -> float | list[float]:
        try:
            checked: float | list[float] = check(value)
        except ValidationError as error:  # pydantic's message names every alternative
            raise ValueError("give a number >= 0, or a list of at least one") from error
        return checked

    @model_validator(mode="after")
    def _has_a_source(self) -> DataSection:
        if not self.prompts and self.responses is None:
            raise ValueError("give prompts (at least 1 source), or a file of existing responses")
        return self

    def sampling(self, conversation: str) -> SamplingParams:
        """Return the sampling parameters of a conversation's responses, without seeds."""
        return SamplingParams(temperature_of(conversation, self.temperature), self.top_k, self.top_p)

    def response_settings(self, seed: int) -> dict[str, Any]:
        """Return the settings that a responses file records: those that, with target and prompt, decide a response, and
        the sets whose prompts were dropped."""
        names = ("max_new_tokens", "max_prompt_tokens", "temperature", "top_p", "top_k")
        settings = {**{name: getattr(self, name) for name in names}, "seed": seed, "thinking": self.thinking}
        apart = sorted(prompts_label(name, self.directory) for name in self.not_in)
        return {**settings, "not_in": apart} if apart else settings


def temperature_of(conversation: str, temperatures: float | list[float]) -> float:
    """Choose the temperature of a conversation's responses by its id alone."""
    if not isinstance(temperatures, list):
        return temperatures
    return temperatures[_hash(conversation) % len(temperatures)]


def _hash(text: str) -> int:
    """Hash a text to a number below 2^31."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True)
class Response:
    """A response: its tokens with the stop token, if any."""

    tokens: list[int]
    finished: bool


def plan_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Group prompt numbers into batches of similar lengths; the result depends on the lengths alone."""
    batches = []
    for start in range(0, len(lengths), batch_size * _WINDOW):
        window = sorted(range(start, min(start + batch_size * _WINDOW, len(lengths))), key=lambda i: lengths[i])
        batches += [window[first : first + batch_size] for first in range(0, len(window), batch_size)]
    return batches


def decode_batch(
    target: Target, prompts: Sequence[list[int]], max_new_tokens: int, params: Sequence[SamplingParams]
) -> Iterator[dict[int, Response]]:
    """Decode a batch without speculation.

    Yields after every step the responses that finished, by prompt number; mostly none.

    Args:
        params: sampling parameters of each prompt; a seed of None is 0.

    Raises:
        Exception: the error of a request that failed.
    """
    rules, count = StopRules(max_new_tokens), len(prompts)
    requests = [
        DecodingRequest(str(number), prompt, replace(sampling, seed=sampling.seed or 0), rules=rules)
        for number, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
    ]
    blocks = sum(-(-(len(prompt) + max_new_tokens) // EngineConfig.block_size) for prompt in prompts)
    config = EngineConfig(count, max(count, _PROMPT_ROWS), num_blocks=blocks)
    engine = Engine(target, config=config, randomness=Randomness(UniformSource))
    tokens: list[list[int]] = [[] for _ in prompts]
    for outputs in engine.run(requests):
        ended: dict[int, Response] = {}
        for output in outputs:
            if output.error is not None:
                raise output.error
            number = int(output.id)
            tokens[number] += output.tokens
            if output.finish is not None:
                ended[number] = Response(tokens[number], finished=output.finish == "stop")
        if outputs:
            yield ended


class UniformSource(SeededSource):
    """Draws x = min{v : u < P(0) + .. + P(v)} with one number u per token, even if it is certain: token t of a response
    uses number t of its seed."""

    def choose(self, probs_V: Tensor) -> int:
        cumulative_V = probs_V.double().cumsum(-1)
        threshold = self.uniform() * cumulative_V[-1]
        return min(int(torch.searchsorted(cumulative_V, threshold, right=True)), len(probs_V) - 1)


# ----------------------------------------------------------------------------
# Sources of responses: the interface and the local engine; servers follow below.
#
# requests (all of a turn, done or not)  ->  source  ->  commits: lists of replies that are stored atomically
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A response to generate; finished ones (`done`) are listed too, because batches depend on all."""

    id: str
    turn: int
    prompt: list[int]
    sampling: SamplingParams  # with a seed
    done: bool
    messages: list[Message]
    tools: tuple[dict[str, Any], ...]


class ResponseSource(ABC):
    """A source of responses: the local target or servers, with the settings of `data`."""

    renders_prompts = False  # whether the source tokenises prompts, perhaps with another template
    trouble: str | None = None  # why it ended before answering everything
    tokens_under_way = 0  # tokens of unfinished responses, if known

    def __init__(self, chat: Chat, data: DataSection) -> None:
        self.chat, self.data = chat, data

    @property
    def longest_prompt(self) -> int:
        """Maximum tokens of a prompt; longer ones are skipped."""
        return self.data.max_prompt_tokens

    @property
    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Settings that decide its answers: `generator`, and `dtype` if known."""

    @abstractmethod
    def answer(self, requests: Sequence[Request], stop: Callable[[], bool]) -> Iterator[list[Reply | Failure]]:
        """Yield answers to the unfinished requests, in commits, as soon as they finish; end early if `stop()` is true.

        An empty commit reports progress of `tokens_under_way`.
        """


class LocalSource(ResponseSource):
    """Responses by the local target, batch by batch. `stop` is called between batches, so that no token is lost."""

    def __init__(self, target: Target, data: DataSection) -> None:
        super().__init__(Chat.of(target), data)
        self.target = target

    @property
    def longest_prompt(self) -> int:
        return min(self.data.max_prompt_tokens, self.target.max_context - 1)

    @property
    def description(self) -> dict[str, Any]:
        return {"generator": "outrider", "dtype": dtype_name(self.target.dtype)}

    def answer(self, requests: Sequence[Request], stop: Callable[[], bool]) -> Iterator[list[Reply | Failure]]:
        for batch in plan_batches([len(r.prompt) for r in requests], self.data.batch_size):
            pending = [requests[i] for i in batch if not requests[i].done]
            if not pending:
                continue
            if stop():
                return
            prompts, params = [r.prompt for r in pending], [r.sampling for r in pending]
            steps = decode_batch(self.target, prompts, self.data.max_new_tokens, params=params)
            left = len(pending)
            for step, ended in enumerate(steps, start=1):
                left -= len(ended)
                self.tokens_under_way = step * left
                yield [
                    Reply(r.id, r.turn, r.prompt, response=response.tokens, finished=response.finished)
                    for r, response in ((pending[number], response) for number, response in ended.items())
                ]


# ----------------------------------------------------------------------------
# Requests to a server, and replies in its answers.
#
#     POST /v1/completions        prompt = our prompt tokens; the response starts directly after them
#     POST /v1/chat/completions   messages; the server's template renders them; the result is known only from token ids
#
# If a server returns only text, tokenising it may give other tokens than those generated.
# ----------------------------------------------------------------------------


class Unusable(Exception):
    """The error for an answer that a retry cannot improve."""


def payload(request: Request, data: DataSection, model: str) -> dict[str, Any]:
    """Write the JSON body of a request. It has its own seed, so that the order of requests does not matter."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": data.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "return_token_ids": True,
    }
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if not data.chat_api:
        return {**body, "prompt": request.prompt}
    body |= {"messages": request.messages, "chat_template_kwargs": {"enable_thinking": data.thinking}}
    if request.tools:
        body["tools"] = list(request.tools)
    return body


def reply_of(answer: Part, request: Request, chat: Chat, chat_api: bool) -> Reply:
    """Read the reply from a server's answer.

    Raises:
        Unusable: its tokens cannot be determined, or are not the target's.
        ValueError: the answer is incomplete (a retry may help).
    """
    if answer.finish_reason not in ("stop", "length", "tool_calls"):
        raise ValueError(f"finish_reason {answer.finish_reason!r}")
    prompt = answer.prompt or request.prompt
    if not chat_api and prompt != request.prompt:
        raise Unusable("the server changed the prompt's tokens")
    exact = bool(answer.tokens)
    tokens = answer.tokens or _split(answer, chat, chat_api)
    finished = answer.finish_reason != "length"
    if finished and not (tokens and tokens[-1] in chat.eos_ids):
        # Append the stop token, which was generated but is not in the text.
        stop = answer.stop
        end = stop if isinstance(stop, int) and stop in chat.eos_ids else chat.tokenizer.eos_token_id
        if not exact and end in chat.eos_ids:
            tokens = [*tokens, end]
    if not tokens:
        raise ValueError("an empty response")
    if max(tokens) >= chat.vocab_size or max(prompt) >= chat.vocab_size:
        raise Unusable(f"token {max(*tokens, *prompt)} is not in the target's vocabulary of {chat.vocab_size}")
    return Reply(request.id, request.turn, prompt, response=tokens, finished=finished, exact=exact)


def _split(answer: Part, chat: Chat, chat_api: bool) -> list[int]:
    """Tokenise an answer without token ids."""
    if chat_api and answer.parsed_out:
        raise Unusable(
            f"the server removed {' and '.join(answer.parsed_out)} from the text and returns no token ids; leave out "
            "--chat"
        )
    if answer.text is None:
        raise ValueError("an answer without text or token ids")
    return list(chat.tokenizer(answer.text, add_special_tokens=False)["input_ids"])


# ----------------------------------------------------------------------------
# Responses from OpenAI-compatible servers, several at once.
#
#     jobs -> [server A: `concurrency` workers] -> reply
#             [server B: `concurrency` workers] -> 429, 5xx, lost connection, no proper answer: back to the jobs after
#                                                  min(cap, base 2^n) * (1/2 .. 1) seconds, or after Retry-After
#                                                  (at most `timeout`)
#                                               -> 3xx, other 4xx, any other exception: failed, no retry
#
# The next free worker of any server takes a job. A server that cannot be reached, or answers 429, pauses as a whole
# while the others continue. A server that stays unreachable through all retries, or refuses the key or model (401, 403,
# 404), is given up. Without servers the run ends early, unfinished turns stay waiting, and `trouble` has the reason.
# ----------------------------------------------------------------------------


_IDLE_SECONDS = 0.02
_BACKOFF_CAP = 30.0


@dataclass
class _Job:
    request: Request
    attempts: int = 0


@dataclass
class _Server:
    client: OpenAIClient
    strikes: int = 0  # consecutive failed connections
    struck_at: float = 0.0
    paused_until: float = 0.0
    given_up: str | None = None  # the reason, if the server is given up


class ServerSource(ResponseSource):
    """Responses by the servers of `data.base_urls`, which serve the target.

    Args:
        backoff: seconds before the first retry, doubled with each further one.

    Raises:
        ValueError: a URL is invalid; or no model is given and the servers list none or different ones.
    """

    def __init__(self, chat: Chat, data: DataSection, *, api_key: str | None = None, backoff: float = 0.5) -> None:
        super().__init__(chat, data)
        self.renders_prompts, self.backoff = data.chat_api, backoff
        endpoints = [Endpoint(url, data.served_model, api_key) for url in data.base_urls]
        self.endpoints = list({endpoint.base: endpoint for endpoint in endpoints}.values())  # each once
        self.model = served_model(self.endpoints)

    @property
    def description(self) -> dict[str, Any]:
        return {"generator": f"{'chat' if self.data.chat_api else 'completions'}:{self.model}"}

    def answer(self, requests: Sequence[Request], stop: Callable[[], bool]) -> Iterator[list[Reply | Failure]]:
        """Yield answers as they arrive, each in its own commit; none after all servers are given up.

        The event loop runs in its own thread: KeyboardInterrupt, which Python raises in the main thread between any two
        instructions, would leave an event loop (or `Thread.start`) in a state that cannot end.
        """
        if self.trouble:
            return  # a later turn would wait for the same servers again
        answers: SimpleQueue[Reply | Failure | None] = SimpleQueue()
        jobs = deque(_Job(request) for request in requests if not request.done)
        loop, ended = asyncio.new_event_loop(), Event()
        work = loop.create_task(self._ask_all(jobs, stop, answers.put))

        def run() -> None:
            try:
                loop.run_until_complete(asyncio.wait([work]))
            finally:
                loop.close()
                ended.set()
                answers.put(None)

        thread: int | None = None
        try:
            thread = start_new_thread(run, ())
            while (answer := answers.get()) is not None:
                yield [answer]
            work.result()  # raises what ended it
        finally:
            with suppress(RuntimeError):  # the loop is closed: all is done
                loop.call_soon_threadsafe(work.cancel)
            if thread is not None:
                ended.wait()

    async def _ask_all(
        self, jobs: deque[_Job], stop: Callable[[], bool], deliver: Callable[[Reply | Failure], None]
    ) -> None:
        servers = [_Server(endpoint.client(self.data.timeout)) for endpoint in self.endpoints]
        left = len(jobs)

        async def work(server: _Server) -> None:
            nonlocal left
            while left and not server.given_up and not stop():
                if not jobs or server.paused_until > time.monotonic():
                    await asyncio.sleep(_IDLE_SECONDS)
                elif (answer := await self._outcome(server, jobs.popleft(), jobs)) is not None:
                    left -= 1
                    deliver(answer)

        workers = [asyncio.create_task(work(server)) for server in servers for _ in range(self.data.concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            for server in servers:
                await server.client.aclose()
        if all(server.given_up for server in servers):
            self.trouble = "; ".join(
                f"{shown_url(server.client.endpoint.base)} {server.given_up}" for server in servers
            )

    async def _outcome(self, server: _Server, job: _Job, jobs: deque[_Job]) -> Reply | Failure | None:
        """Call `_ask`; an unexpected exception fails only this request."""
        try:
            return await self._ask(server, job, jobs)
        except Exception as error:
            return _failure(server, job, f"{type(error).__name__}: {error}")

    async def _ask(self, server: _Server, job: _Job, jobs: deque[_Job]) -> Reply | Failure | None:
        """Request a reply from a server; return it, a final failure, or None if the job is queued again."""
        request, chat_api = job.request, self.data.chat_api
        started = time.monotonic()
        delay = self._delay(job.attempts + 1)
        try:
            answer = await server.client.post(payload(request, self.data, self.model), chat_api)
            server.strikes = 0
            if answer.status_code == httpx.codes.OK:
                part = parse_answer(answer.text, server.client.endpoint.engine)
                return reply_of(part, request, self.chat, chat_api=chat_api)
            reason = f"{answer.status_code}: {answer.text}"
            if answer.has_redirect_location:
                reason = f"{answer.status_code}: it redirects to {shown_url(answer.headers['Location'])}; give that URL"
            if answer.status_code in (401, 403, 404):
                server.given_up = f"refuses the request ({server.client.endpoint.printable(reason)})"
                jobs.appendleft(job)
                return None
            if answer.status_code not in (408, 425, 429) and answer.status_code < 500:
                return _failure(server, job, reason)
            wait = retry_after(answer.headers.get("Retry-After"))
            if wait is not None or answer.status_code == 429:  # the server pauses; another one may take the job now
                pause = delay if wait is None else min(wait, self.data.timeout)
                server.paused_until = max(server.paused_until, time.monotonic() + pause)
                delay = 0.0
        except Unusable as error:
            return _failure(server, job, str(error))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            # The server never received the request, so the attempt does not count for this job.
            self._strike(server, started, f"{type(error).__name__}: {error}")
            jobs.appendleft(job)
            return None
        except (httpx.HTTPError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        job.attempts += 1
        if job.attempts > self.data.retries:
            return _failure(server, job, reason)
        asyncio.get_running_loop().call_later(delay, jobs.append, job)
        return None

    def _strike(self, server: _Server, started: float, reason: str) -> None:
        """Count a failed connection, once for all requests in flight."""
        if started < server.struck_at:
            return
        server.strikes += 1
        server.struck_at = time.monotonic()
        server.paused_until = server.struck_at + self._delay(server.strikes)
        if server.strikes > self.data.retries:
            server.given_up = f"cannot be reached ({server.client.endpoint.printable(reason)})"

    def _delay(self, attempt: int) -> float:
        return min(_BACKOFF_CAP, self.backoff * 2 ** min(attempt - 1, 32)) * random.uniform(0.5, 1.0)


def _failure(server: _Server, job: _Job, reason: str) -> Failure:
    return Failure(job.request.id, job.request.turn, server.client.endpoint.printable(reason))


# ----------------------------------------------------------------------------
# Every turn of every conversation is answered by the source, turn by turn.
#
#     for turn 0, 1, ...:   conversations + earlier replies  ->  requests  ->  source  ->  commits to the response file
#
# Requests and batches depend on the list of conversations alone; finished replies are skipped. A resumed run therefore
# ends with the same bytes, and a longer list keeps existing replies.
# ----------------------------------------------------------------------------


Progress = Callable[[int, int, int], None]  # (turns done, total turns, response tokens so far)


def no_progress(done: int, total: int, tokens: int) -> None:
    """Ignore progress."""


@dataclass
class Summary:
    """Counts of turns, total = done + skipped (prompt too long) + failed + waiting, and response tokens."""

    total: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    waiting: int = 0
    tokens: int = 0
    finished: int = 0
    inexact: int = 0

    def add(self, replies: Iterable[Reply]) -> None:
        """Count finished replies."""
        for reply in replies:
            self.done += 1
            self.tokens += len(reply.response)
            self.finished += reply.finished
            self.inexact += not reply.exact


@dataclass(frozen=True)
class Regeneration:
    """The result of a run: replies in the order of the conversations, counts, and failures of servers.

    `new_tokens`: response tokens generated by this run.
    """

    replies: list[Reply]
    summary: Summary
    failures: list[Failure]
    new_tokens: int


def regenerate(
    source: ResponseSource,
    conversations: Sequence[Conversation],
    path: Path,
    *,
    seed: int = 0,
    on_progress: Progress = no_progress,
    say: Callable[[str], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
) -> Regeneration:
    """Complete the responses file at `path`: a response to every turn of every conversation.

    Args:
        on_progress: called first for the existing replies, then after each commit.
        say: called with lines of text before the first new response.
        stop: called by the source; True ends the run early with the replies so far.

    Raises:
        ValueError: `path` holds responses made with other settings, or to another conversation of the same id; or the
            template cannot express a conversation.
    """
    chat, data = source.chat, source.data
    settings = {"target": chat.name, **data.response_settings(seed), "chat_template_sha256": chat.template_sha256}
    file = ResponseFile(path, {**settings, **source.description})
    summary = Summary(total=sum(len(c.turns) for c in conversations))
    lost: set[str] = set()  # conversations with a skipped or failed turn, whose later turns have no prompt
    failures: list[Failure] = []
    new_tokens = 0
    for turn in range(max((len(c.turns) for c in conversations), default=0)):
        requests: list[Request] = []
        turns_left: dict[str, int] = {}
        for conversation in conversations:
            earlier = [file.replies.get((conversation.id, t)) for t in range(turn)]
            replies = [reply for reply in earlier if reply is not None]
            if turn >= len(conversation.turns) or conversation.id in lost or len(replies) < turn:
                continue
            turns_left[conversation.id] = len(conversation.turns) - turn
            request, stored = _request(source, conversation, replies, seed=seed, file=file)
            if stored is not None:
                summary.add([stored])
            elif len(request.prompt) > source.longest_prompt:
                lost.add(conversation.id)
                summary.skipped += turns_left[conversation.id]
                continue
            requests.append(request)
        if not new_tokens and not all(request.done for request in requests):
            for note in chat.notes(data.thinking):
                say(note)
            existing = f"; {len(file.replies)} replies exist" if file.replies else ""
            servers = f" at {', '.join(map(shown_url, data.base_urls))}" if data.base_urls else ""
            say(f"answering {len(conversations)} prompts with {chat.name}{servers}{existing}")
            if not source.renders_prompts:
                first = next(request.prompt for request in requests if not request.done)
                say("the first one, as the target reads it:")
                for line in printable_lines(str(chat.tokenizer.decode(first, skip_special_tokens=False))):
                    say(f"  {line}")
        if not new_tokens:
            on_progress(summary.done, summary.total, summary.tokens)  # includes replies of earlier runs
        for answers in source.answer(requests, stop):
            new = [answer for answer in answers if isinstance(answer, Reply)]
            if new:
                file.commit(new)
                summary.add(new)
                new_tokens += sum(len(reply.response) for reply in new)
            for answer in answers:
                if isinstance(answer, Failure):
                    lost.add(answer.id)
                    failures.append(answer)
                    summary.failed += turns_left[answer.id]
            on_progress(summary.done, summary.total, summary.tokens + source.tokens_under_way)
    summary.waiting = summary.total - summary.done - summary.skipped - summary.failed
    file.finish([c.id for c in conversations], asdict(summary), failures)
    keys = [(c.id, turn) for c in conversations for turn in range(len(c.turns))]
    replies = [file.replies[key] for key in keys if key in file.replies]
    return Regeneration(replies, summary, failures, new_tokens=new_tokens)


def _request(
    source: ResponseSource, conversation: Conversation, replies: list[Reply], seed: int, file: ResponseFile
) -> tuple[Request, Reply | None]:
    """Make the request for the turn after `replies`; return it and the stored reply, if any."""
    chat, turn = source.chat, len(replies)
    prompts = chat.prompts(conversation, replies, source.data.thinking)
    stored = file.replies.get((conversation.id, turn))
    if stored is not None and stored.prompt not in prompts and not source.renders_prompts:
        raise ValueError(
            f"{file.path} holds a response to another prompt with the id {conversation.id!r}. "
            "Give the new prompt another id or none, or delete the file."
        )
    responses = [response_text(chat.tokenizer, reply.response) for reply in replies]
    messages = chat_messages(conversation.turns[: turn + 1], responses)
    request_seed = _hash(f"{seed}\n{turn}\n{conversation.id}")
    prompt = stored.prompt if stored is not None else prompts[0]
    return Request(
        conversation.id,
        turn,
        prompt,
        sampling=replace(source.data.sampling(conversation.id), seed=request_seed),
        done=stored is not None,
        messages=messages,
        tools=conversation.tools,
    ), stored
