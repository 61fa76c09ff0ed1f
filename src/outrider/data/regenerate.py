"""Regenerates responses: the target, here or behind servers, writes the text a drafter is trained on.

Here it decodes plainly, in batches:

sort a window of prompts by length -> left-pad a batch -> prefill -> one token per sequence per step
finished sequences leave the batch when a quarter of it is done (`KVCache.keep_rows`)

Sampling is x = min{v : u < P(0) + .. + P(v)} with uniform numbers u drawn per sequence from a seed of its own, so what
a sequence says does not depend on which others share its batch, nor on when a stopped run was taken up again.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import torch
from torch import Tensor

from outrider.backends.openai import (
    LONGEST_REASON,
    Endpoint,
    OpenAIClient,
    Part,
    read_answer,
    retry_after,
    served_model,
)
from outrider.data.chat import Chat, response_text
from outrider.data.conversations import Conversation, Message, chat_messages
from outrider.data.responses import Failure, Reply, ResponseFile
from outrider.sampling import SamplingParams, warp
from outrider.target.model import Target
from outrider.utils.measure import dtype_name

_WINDOW = 8  # batches whose prompts are sorted together: less padding, still a fair sample of the whole
_COMPACT_BELOW = 0.75  # drop finished sequences once fewer than this share of the batch is alive


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


@torch.inference_mode()
def generate_batch(
    target: Target,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    params: SamplingParams,
    seeds: Sequence[int],
) -> list[Response]:
    """Decode one batch to its end, without speculation. Repetition penalty is not applied here.

    Args:
        seeds: one per prompt, in place of `params.seed`.
    """
    width = max(len(p) for p in prompts)
    tokens_BT = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, width - len(prompt) :] = torch.tensor(prompt)
    pad_B = torch.tensor([width - len(p) for p in prompts])
    cache = target.new_cache(width + max_new_tokens, pad_B.to(target.device))
    uniform_BN = _uniform(seeds, max_new_tokens).to(target.device) if params.temperature > 0 else None
    out: list[list[int]] = [[] for _ in prompts]
    finished = [False] * len(prompts)
    alive = list(range(len(prompts)))
    stop_ids = target.eos_ids
    step_BT = tokens_BT.to(target.device)
    for step in range(max_new_tokens):
        logits_BTV = target.forward(step_BT, cache).logits_BTV
        assert logits_BTV is not None
        if uniform_BN is None:
            next_B = logits_BTV[:, -1].argmax(-1)
        else:
            next_B = _draw(warp(logits_BTV[:, -1].float(), params, None), uniform_BN[alive, step])
        for row, token in zip(alive, next_B.tolist(), strict=True):
            if not finished[row]:
                out[row].append(token)
                finished[row] = token in stop_ids
        going = [i for i, row in enumerate(alive) if not finished[row]]
        if not going:
            break
        if len(going) < _COMPACT_BELOW * len(alive):
            keep = torch.tensor(going, device=target.device)
            cache.keep_rows(keep)
            next_B = next_B[keep]
            alive = [alive[i] for i in going]
        step_BT = next_B[:, None]
    return [Response(tokens, done) for tokens, done in zip(out, finished, strict=True)]


def _uniform(seeds: Sequence[int], count: int) -> Tensor:
    """[B, count] float64 in [0, 1), a row per seed; drawn on the CPU, so every device samples the same text."""
    rows = [torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows)


def _draw(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """[B] tokens: the first one whose cumulative probability exceeds u. Zero probabilities are never drawn."""
    cumulative_BV = probs_BV.double().cumsum(-1)
    aim_B1 = (uniform_B * cumulative_BV[:, -1])[:, None]
    return torch.searchsorted(cumulative_BV, aim_B1, right=True)[:, 0].clamp_(max=probs_BV.shape[-1] - 1)


# ----------------------------------------------------------------------------
# Who answers: the interface of a source of responses, and the local engine behind it. Servers follow below.
#
# requests (all of a turn, done or not)  ->  source  ->  commits: lists of replies that are kept together or not at all
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class RegenerationConfig:
    """Settings that decide a response, beside the target and the prompt. Lengths in tokens."""

    max_new_tokens: int = 256
    max_prompt_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    thinking: bool = False

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p, seed=self.seed)

    def seed_of(self, conversation: str, turn: int) -> int:
        """The seed of one response, below 2^31."""
        digest = hashlib.sha256(f"{self.seed}\n{turn}\n{conversation}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


@dataclass(frozen=True)
class Request:
    """One response to make; one that is `done` is listed too, as batches are planned by all."""

    id: str
    turn: int
    prompt: list[int]
    seed: int
    done: bool
    messages: list[Message]
    tools: tuple[dict[str, Any], ...]


class ResponseSource(Protocol):
    """Where responses come from: the target itself or servers."""

    @property
    def description(self) -> dict[str, Any]:
        """Settings that decide what it answers: `generator`, and `dtype` where it is known."""
        ...

    @property
    def renders_prompts(self) -> bool:
        """Whether prompts are tokenised by the source itself, by a template that need not be ours."""
        ...

    def answer(
        self, requests: Sequence[Request], config: RegenerationConfig, stop: Callable[[], bool]
    ) -> Iterator[list[Reply | Failure]]:
        """Answers to the requests that are not done, in commits; ends early when `stop` says so."""
        ...


@dataclass(frozen=True)
class LocalSource:
    """Responses by the target itself, batch by batch. A commit is a batch, so a batch is always decoded whole."""

    target: Target
    batch_size: int = 64
    renders_prompts: bool = False

    @property
    def description(self) -> dict[str, Any]:
        return {"generator": "outrider", "dtype": dtype_name(self.target.dtype)}

    def answer(
        self, requests: Sequence[Request], config: RegenerationConfig, stop: Callable[[], bool]
    ) -> Iterator[list[Reply | Failure]]:
        for batch in plan_batches([len(r.prompt) for r in requests], self.batch_size):
            wanted = [requests[i] for i in batch if not requests[i].done]
            if not wanted:
                continue
            if stop():
                return
            prompts, seeds = [r.prompt for r in wanted], [r.seed for r in wanted]
            said = generate_batch(self.target, prompts, config.max_new_tokens, config.params, seeds)
            yield [Reply(r.id, r.turn, r.prompt, s.tokens, s.finished) for r, s in zip(wanted, said, strict=True)]


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


def payload(request: Request, config: RegenerationConfig, model: str, chat_api: bool) -> dict[str, Any]:
    """The JSON body for one request. Its seed is its own, so that the order of the requests does not matter."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "seed": request.seed,
        "return_token_ids": True,
    }
    if config.top_k:
        body["top_k"] = config.top_k
    if not chat_api:
        return {**body, "prompt": request.prompt}
    body |= {"messages": request.messages, "chat_template_kwargs": {"enable_thinking": config.thinking}}
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
    return Reply(request.id, request.turn, prompt, tokens, finished, exact)


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
#             [server B: `concurrency` workers] -> 429, 5xx, lost connection: back to the jobs after
#                                                  min(cap, base 2^n) * (1/2 .. 1) seconds, or what Retry-After says
#                                               -> other 4xx: failed, not asked again
#
# The next free worker of any server takes a job. A server that cannot be reached, or says 429, rests as a whole while
# the others go on. One that stays unreachable through all its retries, or refuses our key or model (401, 403, 404), is
# given up; with the last one the run ends early, what is not done keeps waiting, and `trouble` says why.
# ----------------------------------------------------------------------------


_IDLE_SECONDS = 0.02
_BACKOFF_CAP = 30.0


@dataclass(frozen=True)
class ServerConfig:
    """Servers to ask, requests at once, and retries. Times in seconds.

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
        self.endpoints()  # a URL that is none is found now

    def endpoints(self) -> list[Endpoint]:
        """The servers, each once."""
        each = [Endpoint(url, self.model, self.api_key) for url in self.base_urls]
        return list({endpoint.base: endpoint for endpoint in each}.values())


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
    """Responses by servers that serve the target.

    Raises:
        ValueError: no model was named and no server lists one, or they list different ones.
    """

    def __init__(self, chat: Chat, config: ServerConfig) -> None:
        self.chat, self.config = chat, config
        self.renders_prompts = config.chat
        self.trouble: str | None = None
        self.endpoints = config.endpoints()
        self.model = served_model(self.endpoints)

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


@dataclass
class _Pool:
    """The jobs of one turn, shared by all servers."""

    source: ServerSource
    config: RegenerationConfig
    jobs: list[_Job]
    stop: Callable[[], bool]
    waiting: deque[_Job] = field(default_factory=deque)

    async def run(self) -> AsyncGenerator[Reply | Failure, None]:
        self.waiting.extend(self.jobs)
        servers = [_Server(endpoint.client(self.source.config.timeout)) for endpoint in self.source.endpoints]
        results: asyncio.Queue[Reply | Failure | None] = asyncio.Queue()
        workers = [
            asyncio.create_task(self._work(server, results))
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
            for server in servers:
                await server.client.aclose()
        if all(server.given_up for server in servers):
            self.source.trouble = "; ".join(f"{server.client.endpoint.base} {server.given_up}" for server in servers)

    async def _work(self, server: _Server, results: asyncio.Queue[Reply | Failure | None]) -> None:
        while not server.given_up and not self.stop():
            if not self.waiting or server.rest_until > time.monotonic():
                await asyncio.sleep(_IDLE_SECONDS)
                continue
            job = self.waiting.popleft()
            answer = await self._ask(server, job)
            if answer is not None:
                results.put_nowait(answer)

    async def _ask(self, server: _Server, job: _Job) -> Reply | Failure | None:
        """Ask a server for a reply; a final failure; or None when the job goes back to the queue."""
        source, request, chat_api = self.source, job.request, self.source.config.chat
        started = time.monotonic()
        try:
            got = await server.client.post(payload(request, self.config, source.model, chat_api), chat_api)
            server.strikes = 0
            if got.status_code == httpx.codes.OK:
                return reply_of(read_answer(got.json(), server.client.endpoint.engine), request, source.chat, chat_api)
            reason = f"{got.status_code}: {got.text}"[:LONGEST_REASON]
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
        except (httpx.HTTPError, ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
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


# ----------------------------------------------------------------------------
# Every turn of every conversation, answered by the target: turn by turn, by whatever source gives responses.
#
#     for turn 0, 1, ...:   conversations + earlier replies  ->  requests  ->  source  ->  commits to the response file
#
# What a source is asked, and in which batches, follows from the list of conversations alone; what is done already is
# only left out. A resumed run therefore ends with the same bytes, and a longer list keeps the replies that are there.
# ----------------------------------------------------------------------------


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
    chat: Chat,
    source: ResponseSource,
    conversations: Sequence[Conversation],
    config: RegenerationConfig,
    path: Path,
    on_progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
    stop: Callable[[], bool] = lambda: False,
) -> Regeneration:
    """Complete the responses file at `path`: a response to every turn of every conversation.

    Args:
        on_progress: called after each commit, and first for what is there already, with (turns done, turns in all,
            response tokens so far).
        stop: asked between commits; True ends early with what there is.

    Raises:
        ValueError: `path` holds responses made with other settings, or to another conversation of the same id; the
            template cannot express a conversation.
    """
    settings = {"target": chat.name, **asdict(config), "chat_template_sha256": chat.template_sha256}
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
            request, stored = _request(chat, source, conversation, replies, config, file)
            if stored is not None:
                summary.add([stored])
            elif len(request.prompt) > config.max_prompt_tokens:
                lost.add(conversation.id)
                summary.skipped += turns_left[conversation.id]
                continue
            requests.append(request)
        if summary.done and not new_tokens:
            on_progress(summary.done, summary.total, summary.tokens)  # what an earlier run did
        for answers in source.answer(requests, config, stop):
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
            on_progress(summary.done, summary.total, summary.tokens)
    summary.waiting = summary.total - summary.done - summary.skipped - summary.failed
    file.finish([c.id for c in conversations], asdict(summary), failures)
    wanted = [(c.id, turn) for c in conversations for turn in range(len(c.turns))]
    kept = [file.replies[key] for key in wanted if key in file.replies]
    return Regeneration(kept, summary, failures, new_tokens)


def _request(
    chat: Chat,
    source: ResponseSource,
    conversation: Conversation,
    replies: list[Reply],
    config: RegenerationConfig,
    file: ResponseFile,
) -> tuple[Request, Reply | None]:
    """The request for the turn after `replies`, and its reply where there is one already."""
    turn = len(replies)
    prompts = chat.prompts(conversation, replies, config.thinking)
    stored = file.replies.get((conversation.id, turn))
    if stored is not None and stored.prompt not in prompts and not source.renders_prompts:
        raise ValueError(
            f"{file.path} holds a response to another prompt with the id {conversation.id!r}. "
            "Give the new prompt its own id, or delete the file."
        )
    said = [response_text(chat.tokenizer, reply.response) for reply in replies]
    messages = chat_messages(conversation.turns[: turn + 1], said)
    seed = config.seed_of(conversation.id, turn)
    prompt = stored.prompt if stored is not None else prompts[0]
    return Request(conversation.id, turn, prompt, seed, stored is not None, messages, conversation.tools), stored
