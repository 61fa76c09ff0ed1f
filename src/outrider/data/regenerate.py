"""Regenerates responses: the target, here or behind servers, writes the text a drafter is trained on.

Here the engine decodes plainly, batch by batch: a window of prompts is sorted by length, and a batch of them decoded
together. A finished sequence is handed on at once.

Sampling is x = min{v : u < P(0) + .. + P(v)} with uniform numbers u drawn per sequence from a seed of its own, so what
a sequence says does not depend on which others share its batch, on their order, nor on when a stopped run was taken up
again. One exception: a matrix product may round differently for another number of rows (GPUs, bfloat16), and then a
token that is as likely as another up to rounding may change; `batch_size: 1` excludes that.
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

_WINDOW = 8  # batches whose prompts are sorted together: less padding, still a fair sample of the whole
_PROMPT_ROWS = 4096  # of a step that reads prompts


class PromptSource(Section):
    """A prompt file, prompts by name (data/sources.py), or `hf:owner/name[/config][:split]`."""

    path: str
    """A JSONL file, beside the recipe or where you are; a shipped set; prompts by name (gsm8k-train); hf:owner/name."""
    limit: int | None = Field(None, ge=1)
    """Conversations to take; null: all."""
    max_turns: int | None = Field(None, ge=1)
    """User turns to take of each conversation; null: all."""
    max_characters: int | None = Field(None, ge=1)
    """Before the first response; longer conversations are passed over."""


Temperature = Annotated[float, Field(ge=0, strict=True)]


class DataSection(Section):
    """A recipe's `data`: the prompts, how they are answered, and by whom."""

    prompts: list[PromptSource] = Field([])
    """Where prompts come from; none: `responses` exists and is used as it is."""
    not_in: list[str] = Field([])
    """Sets to measure with (gsm8k, humaneval, a JSONL file): prompts that share 13 words in a row with one of their
    prompts are dropped."""
    directory: str | None = None
    """Where prompts by name are looked for without network: NAME.jsonl; null: $OUTRIDER_DATA."""
    responses: str | None = None
    """Where regenerated responses live; OUT/responses.jsonl when null."""
    max_new_tokens: int = Field(256, ge=2)
    """Longest response, in tokens."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longer prompts are skipped."""
    temperature: Temperature | Annotated[list[Temperature], Field(min_length=1)] = 0.0
    """Of the responses; 0: the likeliest token. Of several, each conversation has one."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens of this total probability."""
    top_k: int = Field(0, ge=0)
    """Sample from the k likeliest tokens; 0: all."""
    thinking: bool = False
    """Ask the chat template for thinking."""
    batch_size: int = Field(64, ge=1)
    """Responses decoded at once here."""
    max_minutes: float | None = Field(None, gt=0)
    """Stop regenerating after this long and train on what there is; null: no limit."""
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
    """Of a failed request."""

    @field_validator("temperature", mode="wrap")
    @classmethod
    def _temperatures(cls, value: object, check: ValidatorFunctionWrapHandler) -> float | list[float]:
        try:
            checked: float | list[float] = check(value)
        except ValidationError as error:  # names each kind of value that it might have been
            raise ValueError("give a number that is not negative, or a list of at least one") from error
        return checked

    @model_validator(mode="after")
    def _has_a_source(self) -> DataSection:
        if not self.prompts and self.responses is None:
            raise ValueError("give prompts (at least 1 source), or responses that exist already")
        return self

    def sampling(self, conversation: str) -> SamplingParams:
        """How the responses of the conversation with this id are drawn, without their seeds."""
        return SamplingParams(temperature_of(conversation, self.temperature), self.top_k, self.top_p)

    def response_settings(self, seed: int) -> dict[str, Any]:
        """What decides a response beside the target and the prompt, and which prompts were dropped, as a responses
        file records it."""
        names = ("max_new_tokens", "max_prompt_tokens", "temperature", "top_p", "top_k")
        settings = {**{name: getattr(self, name) for name in names}, "seed": seed, "thinking": self.thinking}
        apart = sorted(prompts_label(name, self.directory) for name in self.not_in)
        return {**settings, "not_in": apart} if apart else settings


def temperature_of(conversation: str, temperatures: float | list[float]) -> float:
    """The temperature of a conversation's responses, by its id: one of several, whichever others there are."""
    if not isinstance(temperatures, list):
        return temperatures
    return temperatures[_hash(conversation) % len(temperatures)]


def _hash(text: str) -> int:
    """A number below 2^31."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True)
class Response:
    """Tokens of one response, its stop token included where there was one."""

    tokens: list[int]
    finished: bool


def plan_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Batches of prompt numbers, of similar lengths each; a function of all prompts' lengths and nothing else."""
    batches = []
    for start in range(0, len(lengths), batch_size * _WINDOW):
        window = sorted(range(start, min(start + batch_size * _WINDOW, len(lengths))), key=lambda i: lengths[i])
        batches += [window[first : first + batch_size] for first in range(0, len(window), batch_size)]
    return batches


def decode_batch(
    target: Target, prompts: Sequence[list[int]], max_new_tokens: int, params: Sequence[SamplingParams]
) -> Iterator[dict[int, Response]]:
    """Decode one batch to its end, without speculation.

    Yields after every step the responses that ended with it, by their prompts' numbers; most steps end none.

    Args:
        params: one per prompt; a seed of None is 0.

    Raises:
        Exception: what ended one of the requests.
    """
    rules, count = StopRules(max_new_tokens), len(prompts)
    requests = [
        DecodingRequest(str(number), prompt, replace(own, seed=own.seed or 0), rules=rules)
        for number, (prompt, own) in enumerate(zip(prompts, params, strict=True))
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
    """Draws x = min{v : u < P(0) + .. + P(v)} with one number u per token, also for certain tokens: token t of a
    response has the number t of its seed."""

    def choose(self, probs_V: Tensor) -> int:
        cumulative_V = probs_V.double().cumsum(-1)
        aim = self.uniform() * cumulative_V[-1]
        return min(int(torch.searchsorted(cumulative_V, aim, right=True)), len(probs_V) - 1)


# ----------------------------------------------------------------------------
# Who answers: the interface of a source of responses, and the local engine behind it. Servers follow below.
#
# requests (all of a turn, done or not)  ->  source  ->  commits: lists of replies that are kept together or not at all
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One response to make; one that is `done` is listed too, as batches are planned by all."""

    id: str
    turn: int
    prompt: list[int]
    sampling: SamplingParams  # with a seed of its own
    done: bool
    messages: list[Message]
    tools: tuple[dict[str, Any], ...]


class ResponseSource(ABC):
    """Where responses come from: the target itself or servers, with the settings of `data`."""

    renders_prompts = False  # whether prompts are tokenised by the source, by a template that need not be ours
    trouble: str | None = None  # why it ended before everything was answered
    tokens_under_way = 0  # of responses that are not finished yet, where the source knows them

    def __init__(self, chat: Chat, data: DataSection) -> None:
        self.chat, self.data = chat, data

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that is answered; longer ones are skipped."""
        return self.data.max_prompt_tokens

    @property
    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Settings that decide what it answers: `generator`, and `dtype` where it is known."""

    @abstractmethod
    def answer(self, requests: Sequence[Request], stop: Callable[[], bool]) -> Iterator[list[Reply | Failure]]:
        """Answers to the requests that are not done, in commits, as soon as they are finished; ends early when `stop`
        says so. An empty commit is a sign of life: `tokens_under_way` has grown."""


class LocalSource(ResponseSource):
    """Responses by the target itself, batch by batch. `stop` is asked between batches, so that no token is lost."""

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
            wanted = [requests[i] for i in batch if not requests[i].done]
            if not wanted:
                continue
            if stop():
                return
            prompts, params = [r.prompt for r in wanted], [r.sampling for r in wanted]
            steps = decode_batch(self.target, prompts, self.data.max_new_tokens, params=params)
            left = len(wanted)
            for step, ended in enumerate(steps, start=1):
                left -= len(ended)
                self.tokens_under_way = step * left
                yield [
                    Reply(r.id, r.turn, r.prompt, response=said.tokens, finished=said.finished)
                    for r, said in ((wanted[number], said) for number, said in ended.items())
                ]


# ----------------------------------------------------------------------------
# What a server is asked, and the reply in its answer.
#
#     POST /v1/completions        prompt = our own prompt tokens; the response starts exactly behind them
#     POST /v1/chat/completions   messages; the server's template renders them, and says so only if it returns token ids
#
# Where a server gives text only, the text is split into tokens again, which need not be the tokens that were generated.
# ----------------------------------------------------------------------------


class Unusable(Exception):
    """An answer that asking again will not improve."""


def payload(request: Request, data: DataSection, model: str) -> dict[str, Any]:
    """The JSON body for one request. Its seed is its own, so that the order of the requests does not matter."""
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
    """The reply in a server's answer.

    Raises:
        Unusable: no tokens can be made of it, or they are not the target's.
        ValueError: it is not whole (asking again may help).
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
        # The stop token was generated too; servers that give text leave it out.
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
    """The tokens of an answer that is text."""
    if chat_api and answer.parsed_out:
        raise Unusable(
            f"the server took {' and '.join(answer.parsed_out)} out of the text and gives no token ids; leave out "
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
#                                                  min(cap, base 2^n) * (1/2 .. 1) seconds, or what Retry-After says
#                                                  (at most `timeout`)
#                                               -> 3xx, other 4xx, an exception of any other kind: failed, not asked
#                                                  again
#
# The next free worker of any server takes a job. A server that cannot be reached, or says 429, rests as a whole while
# the others go on. One that stays unreachable through all its retries, or refuses our key or model (401, 403, 404), is
# given up; with the last one the run ends early, what is not done keeps waiting, and `trouble` says why.
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
    strikes: int = 0  # times in a row that it could not be reached
    struck_at: float = 0.0
    rest_until: float = 0.0
    given_up: str | None = None  # why


class ServerSource(ResponseSource):
    """Responses by the servers of `data.base_urls`, which serve the target.

    Args:
        backoff: seconds before the first retry; they double with each one.

    Raises:
        ValueError: a URL is none; no model was named and no server lists one, or they list different ones.
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
        """Answers in the order in which they come, each a commit of its own; none once all servers are given up.

        The event loop has a thread of its own. Python raises KeyboardInterrupt in the main thread between any two
        instructions, and an event loop that loses a step to it cannot be brought to an end. Nor can `Thread.start`.
        """
        if self.trouble:
            return  # a later turn would wait for them all over again
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
        self, jobs: deque[_Job], stop: Callable[[], bool], tell: Callable[[Reply | Failure], None]
    ) -> None:
        servers = [_Server(endpoint.client(self.data.timeout)) for endpoint in self.endpoints]
        left = len(jobs)

        async def work(server: _Server) -> None:
            nonlocal left
            while left and not server.given_up and not stop():
                if not jobs or server.rest_until > time.monotonic():
                    await asyncio.sleep(_IDLE_SECONDS)
                elif (answer := await self._outcome(server, jobs.popleft(), jobs)) is not None:
                    left -= 1
                    tell(answer)

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
        """`_ask`, where an exception that it does not know is a failure of this one request: the others go on."""
        try:
            return await self._ask(server, job, jobs)
        except Exception as error:
            return _failure(server, job, f"{type(error).__name__}: {error}")

    async def _ask(self, server: _Server, job: _Job, jobs: deque[_Job]) -> Reply | Failure | None:
        """Ask a server for a reply; a final failure; or None when the job goes back to the queue."""
        request, chat_api = job.request, self.data.chat_api
        started = time.monotonic()
        delay = self._delay(job.attempts + 1)
        try:
            got = await server.client.post(payload(request, self.data, self.model), chat_api)
            server.strikes = 0
            if got.status_code == httpx.codes.OK:
                part = parse_answer(got.text, server.client.endpoint.engine)
                return reply_of(part, request, self.chat, chat_api=chat_api)
            reason = f"{got.status_code}: {got.text}"
            if got.has_redirect_location:
                reason = f"{got.status_code}: it redirects to {shown_url(got.headers['Location'])}, to be given instead"
            if got.status_code in (401, 403, 404):
                server.given_up = f"refuses the request ({server.client.endpoint.printable(reason)})"
                jobs.appendleft(job)
                return None
            if got.status_code not in (408, 425, 429) and got.status_code < 500:
                return _failure(server, job, reason)
            wait = retry_after(got.headers.get("Retry-After"))
            if wait is not None or got.status_code == 429:  # the server rests; another one may take the job now
                rest = delay if wait is None else min(wait, self.data.timeout)
                server.rest_until = max(server.rest_until, time.monotonic() + rest)
                delay = 0.0
        except Unusable as error:
            return _failure(server, job, str(error))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            # It never saw the request: the server's fault, not this job's.
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
        """Count a failed connection, once for all requests that were under way together."""
        if started < server.struck_at:
            return
        server.strikes += 1
        server.struck_at = time.monotonic()
        server.rest_until = server.struck_at + self._delay(server.strikes)
        if server.strikes > self.data.retries:
            server.given_up = f"cannot be reached ({server.client.endpoint.printable(reason)})"

    def _delay(self, attempt: int) -> float:
        return min(_BACKOFF_CAP, self.backoff * 2 ** min(attempt - 1, 32)) * random.uniform(0.5, 1.0)


def _failure(server: _Server, job: _Job, reason: str) -> Failure:
    return Failure(job.request.id, job.request.turn, server.client.endpoint.printable(reason))


# ----------------------------------------------------------------------------
# Every turn of every conversation, answered by the target: turn by turn, by whatever source gives responses.
#
#     for turn 0, 1, ...:   conversations + earlier replies  ->  requests  ->  source  ->  commits to the response file
#
# What a source is asked, and in which batches, follows from the list of conversations alone; what is done already is
# only left out. A resumed run therefore ends with the same bytes, and a longer list keeps the replies that are there.
# ----------------------------------------------------------------------------


Progress = Callable[[int, int, int], None]  # told turns done, turns in all, response tokens so far


def no_progress(done: int, total: int, tokens: int) -> None:
    """Reports nothing."""


@dataclass
class Summary:
    """Counts of turns: total = done + skipped (prompt too long) + failed + waiting; tokens of the done responses."""

    total: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    waiting: int = 0
    tokens: int = 0
    finished: int = 0
    inexact: int = 0

    def add(self, replies: Iterable[Reply]) -> None:
        """Count replies as done."""
        for reply in replies:
            self.done += 1
            self.tokens += len(reply.response)
            self.finished += reply.finished
            self.inexact += not reply.exact


@dataclass(frozen=True)
class Regeneration:
    """Replies to the conversations in their order, counts, and failures of servers.

    `new_tokens`: response tokens that this run made.
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
        on_progress: called after each commit, and first for what is there already.
        say: told one line at a time what begins, before the first response that is not there yet.
        stop: asked by the source, see there; True ends early with what there is.

    Raises:
        ValueError: `path` holds responses made with other settings, or to another conversation of the same id; the
            template cannot express a conversation.
    """
    chat, data = source.chat, source.data
    settings = {"target": chat.name, **data.response_settings(seed), "chat_template_sha256": chat.template_sha256}
    file = ResponseFile(path, {**settings, **source.description})
    summary = Summary(total=sum(len(c.turns) for c in conversations))
    lost: set[str] = set()  # conversations with a turn that is skipped or failed: later turns cannot be asked
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
            there = f"; {len(file.replies)} replies are there" if file.replies else ""
            by = f" at {', '.join(map(shown_url, data.base_urls))}" if data.base_urls else ""
            say(f"answering {len(conversations)} prompts with {chat.name}{by}{there}")
            if not source.renders_prompts:
                first = next(request.prompt for request in requests if not request.done)
                say("the first one, as the target reads it:")
                for line in printable_lines(str(chat.tokenizer.decode(first, skip_special_tokens=False))):
                    say(f"  {line}")
        if not new_tokens:
            on_progress(summary.done, summary.total, summary.tokens)  # what an earlier run did
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
    wanted = [(c.id, turn) for c in conversations for turn in range(len(c.turns))]
    kept = [file.replies[key] for key in wanted if key in file.replies]
    return Regeneration(kept, summary, failures, new_tokens=new_tokens)


def _request(
    source: ResponseSource, conversation: Conversation, replies: list[Reply], seed: int, file: ResponseFile
) -> tuple[Request, Reply | None]:
    """The request for the turn after `replies`, and its reply where there is one already."""
    chat, turn = source.chat, len(replies)
    prompts = chat.prompts(conversation, replies, source.data.thinking)
    stored = file.replies.get((conversation.id, turn))
    if stored is not None and stored.prompt not in prompts and not source.renders_prompts:
        raise ValueError(
            f"{file.path} holds a response to another prompt with the id {conversation.id!r}. "
            "Give the new prompt its own id, or none, or delete the file."
        )
    said = [response_text(chat.tokenizer, reply.response) for reply in replies]
    messages = chat_messages(conversation.turns[: turn + 1], said)
    own_seed = _hash(f"{seed}\n{turn}\n{conversation.id}")
    prompt = stored.prompt if stored is not None else prompts[0]
    return Request(
        conversation.id,
        turn,
        prompt,
        sampling=replace(source.data.sampling(conversation.id), seed=own_seed),
        done=stored is not None,
        messages=messages,
        tools=conversation.tools,
    ), stored
