"""A load on a backend: clock, arrivals, prompts, sampling, and the window in which requests are counted.

    closed loop   N users:   ask ---- answer, ask -- answer, ask ------ answer, ...     never more than N at once
    Poisson       a rate:    ask  ask      ask ask  ask           ask    ...            whatever happens

A closed loop shows what the machine can give; open arrivals show how long requests wait for it.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from outrider.backends.base import Acceptance, Backend, ReportsAcceptance
from outrider.data.chat import render, response_text
from outrider.data.conversations import Conversation, chat_messages
from outrider.data.sources import load_prompts, prompts_label
from outrider.decoding.request import Output, Request, StepRecord, StopRules
from outrider.sampling import SamplingParams


class Clock(Protocol):
    """The time a load test goes by, in seconds: measured or simulated."""

    def now(self) -> float: ...

    def stepped(self, last: StepRecord | None) -> None:
        """Called after each step of the backend."""
        ...

    def wait_until(self, moment: float) -> None: ...


class WallClock:
    """Measured time."""

    def now(self) -> float:
        return time.perf_counter()

    def stepped(self, last: StepRecord | None) -> None:
        """Nothing to do: measured time passes by itself."""

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now()))


class Arrivals(Protocol):
    """When requests come."""

    def next(self, now: float, live: int) -> float | None:
        """When the next request comes, with `live` under way; None: once one of those has finished."""
        ...

    def taken(self) -> None:
        """Called when that request is submitted."""
        ...


class ClosedLoop:
    """A closed loop of `users`, each of which asks again as soon as it is answered."""

    def __init__(self, users: int) -> None:
        self.users = users

    def next(self, now: float, live: int) -> float | None:
        return now if live < self.users else None

    def taken(self) -> None:
        """Nothing to do: arrivals depend on `live` alone."""


class Poisson:
    """Poisson arrivals: exponential gaps, `rate` requests per second on average."""

    def __init__(self, rate: float, seed: int, start: float) -> None:
        self._rate, self._random, self._next = rate, random.Random(seed), start

    def next(self, now: float, live: int) -> float | None:
        return self._next

    def taken(self) -> None:
        self._next += self._random.expovariate(self._rate)


# ----------------------------------------------------------------------------
# What is asked: a prompt, and how its response is sampled.
#
# A coupled response, as a greedy one, is a function of prompt and seed, whatever drafts were verified: it is compared
# with plain decoding's. Other sampled responses are one of many right ones and are not compared; each repeat draws them
# anew, so that the spread over repeats holds what sampling varies.
# ----------------------------------------------------------------------------


class Ask(NamedTuple):
    """A prompt and the sampling parameters of its response."""

    prompt: Sequence[int]
    params: SamplingParams = SamplingParams()

    @property
    def comparable(self) -> bool:
        """Whether its response has to be plain decoding's, token by token."""
        return self.params.fixed_text


# ----------------------------------------------------------------------------
# Mixed prompts: each task shuffled by the seed, then one of each in turn, so that any beginning holds all tasks alike.
#
# a3 b1 c2 | a0 b0 c1 | a2 b4 | ...        a task that runs out leaves the round
#
# Later turns need what was said before them, and every variant must be asked the same: the baseline answers first, and
# its answers are the history for all, as in an evaluation.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """Tokens of the prompt for one turn of a conversation; `said`: the responses to the turns before."""

    name: str
    tokens: tuple[int, ...]
    conversation: Conversation = field(repr=False, compare=False)
    said: tuple[str, ...] = ()

    def goes_on_after(self, turn: int) -> bool:
        """Whether this is the prompt of that turn, counted from 1, and its conversation has more."""
        return len(self.said) == turn - 1 and len(self.conversation.turns) > turn

    @property
    def chat(self) -> dict[str, Any]:
        """Fields `messages` and `tools` (where there are any) of a chat request, for servers that render prompts."""
        messages = chat_messages(self.conversation.turns[: len(self.said) + 1], self.said)
        tools = {"tools": list(self.conversation.tools)} if self.conversation.tools else {}
        return {"messages": messages, **tools}


def mixed_prompts(
    tokenizer: PreTrainedTokenizerBase, tasks: Sequence[str], count: int, seed: int, thinking: bool = False
) -> list[Prompt]:
    """First turns of at most `count` conversations from task files (JSONL), shipped sets or tasks by name; fewer where
    they hold fewer.

    Raises:
        ValueError: a file is missing or malformed, or a prompt cannot be rendered (file and conversation are named).
    """
    shuffled = []
    for task in tasks:
        name = prompts_label(task)
        conversations = [(name, conversation) for conversation in load_prompts(task)]
        random.Random(f"{seed} {name}").shuffle(conversations)
        shuffled.append(conversations)
    turns = (entry for entry in chain.from_iterable(zip_longest(*shuffled)) if entry is not None)
    prompts = []
    for (name, conversation), _ in zip(turns, range(count), strict=False):
        prompts.append(_prompt(tokenizer, f"{name}/{conversation.id}", conversation, said=(), thinking=thinking))
    return prompts


def with_next_turn(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    answers: Mapping[Prompt, Sequence[int]],
    thinking: bool,
) -> list[Prompt]:
    """The prompts, each one that was answered followed by the prompt of its conversation's next turn.

    Raises:
        ValueError: a turn cannot be rendered.
    """
    grown = []
    for prompt in prompts:
        grown.append(prompt)
        if prompt in answers:
            said = (*prompt.said, response_text(tokenizer, answers[prompt]))
            name = f"{prompt.name.partition('#')[0]}#{len(said) + 1}"
            grown.append(_prompt(tokenizer, name, prompt.conversation, said=said, thinking=thinking))
    return grown


def _prompt(
    tokenizer: PreTrainedTokenizerBase, name: str, conversation: Conversation, said: tuple[str, ...], thinking: bool
) -> Prompt:
    try:
        tokens = render(
            tokenizer, conversation.turns[: len(said) + 1], said, tools=conversation.tools, thinking=thinking
        )
    except ValueError as error:
        raise ValueError(f"{name.replace('/', ', prompt ', 1)}: {error}") from error
    return Prompt(name, tuple(tokens), conversation, said=said)


# ----------------------------------------------------------------------------
# The window of a load test: which requests count, and when each token came.
#
#     warm-up requests         |  window: every step counts                                      |
#     of growing lengths -----> opens                counted requests 0, 1, .. M - 1  all finished
#     fillers: requests that do not count, submitted so that the load never falls
#
# Closed loop: N users, each asks again when answered. Fillers keep all N busy until the last counted request is done,
# so the window has no drain tail, and no counted request is cut off for being long. Counted requests are the same
# prompts in the same order for every variant. Warm-up requests end one after the other, so users do not move in step.
# Poisson: requests come at a rate whatever happens; waiting counts as time to the first token.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadConfig:
    """Size of a load: how many requests count, how long their responses are, and the warm-up.

    Args:
        requests: counted ones; the window ends when all are finished. None: it ends after `seconds`, and the requests
            are those that came and finished within it, which favours short ones: prefer a number.
        warmup: requests before the window, of up to `warmup_tokens` tokens each.
    """

    requests: int | None = 32
    seconds: float | None = None
    max_new_tokens: int = 64
    warmup: int = 1
    warmup_tokens: int = 16

    def __post_init__(self) -> None:
        if (self.requests is None) == (self.seconds is None):
            raise ValueError(f"requests={self.requests}, seconds={self.seconds}: give one of the two.")
        for name in ("requests", "seconds", "max_new_tokens", "warmup", "warmup_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be above 0.")


@dataclass
class MeasuredRequest:
    """One request with its tokens; `times[i]`: when its i-th output came; `sizes[i]`: how many tokens that held."""

    id: str
    index: int | None  # of its prompt, if it counts
    arrived: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    finished: bool = False
    accepted_length: float | None = None

    def take(self, output: Output, now: float) -> None:
        if output.error is not None:
            raise output.error
        self.tokens += output.tokens
        if output.tokens:
            self.times.append(now)
            self.sizes.append(len(output.tokens))
        self.finished = output.finish is not None

    def end(self, backend: Backend) -> None:
        """Take the accepted length of the finished request, and its response where the outputs were parts of a text."""
        if isinstance(backend, ReportsAcceptance):
            stats = backend.request_stats(self.id)
            self.accepted_length = stats.accepted_length
            self.tokens = self.tokens if stats.tokens is None else stats.tokens
        elif backend.last is not None and self.times:
            self.accepted_length = len(self.tokens) / len(self.times)


@dataclass(frozen=True)
class Window:
    """What happened in the window of a load test.

    `tokens`, `finished` and `histogram` (numbers of rounds that accepted 0, 1, 2 ... drafts; None: not told) are of all
    requests, counted or not. `acceptance` is what the backend reports, None where `steps` say more.
    """

    seconds: float
    tokens: int
    finished: int
    requests: list[MeasuredRequest]
    steps: list[StepRecord]
    acceptance: Acceptance | None = None
    histogram: tuple[int, ...] | None = None


def run_load(backend: Backend, asks: Sequence[Ask], arrivals: Arrivals, config: LoadConfig, clock: Clock) -> Window:
    """Put a load on a backend for one window; it is idle before and after."""
    assert backend.idle and asks
    return _LoadRun(backend, asks, arrivals, config=config, clock=clock).run()


class _LoadRun:
    def __init__(
        self, backend: Backend, asks: Sequence[Ask], arrivals: Arrivals, config: LoadConfig, clock: Clock
    ) -> None:
        self.backend, self.asks, self.arrivals, self.config, self.clock = backend, asks, arrivals, config, clock
        self.live: dict[str, MeasuredRequest] = {}
        self.counted: list[MeasuredRequest] = []
        self.steps: list[StepRecord] = []
        self.rounds: Counter[int] = Counter()  # by accepted drafts, of a backend whose steps are seen
        self.submitted = self.warm = self.tokens = self.finished = 0
        self.opened: float | None = None

    def run(self) -> Window:
        while not self._over():
            self._admit()
            outputs = self.backend.step()
            self.clock.stepped(self.backend.last)
            self._take(outputs)
        assert self.opened is not None
        seconds = self.clock.now() - self.opened
        acceptance = self.backend.acceptance() if isinstance(self.backend, ReportsAcceptance) else None
        seen = tuple(self.rounds[accepted] for accepted in range(max(self.rounds, default=-1) + 1))
        for id in self.live:
            self.backend.cancel(id)
        requests = [served for served in self.counted if served.finished]
        return Window(
            seconds,
            self.tokens,
            self.finished,
            requests=requests,
            steps=self.steps,
            acceptance=acceptance,
            histogram=(seen or None) if acceptance is None else acceptance.histogram,
        )

    def _over(self) -> bool:
        if self.opened is None:
            return False
        if self.config.seconds is not None:
            return self.clock.now() - self.opened >= self.config.seconds
        return len(self.counted) == self.config.requests and all(served.finished for served in self.counted)

    def _admit(self) -> None:
        """Submit the requests that have arrived; if none is under way, wait for the next."""
        while (moment := self.arrivals.next(self.clock.now(), len(self.live))) is not None:
            if moment > self.clock.now():
                if self.live:
                    return
                self.clock.wait_until(moment)
            self._submit(moment)
            self.arrivals.taken()

    def _submit(self, arrived: float) -> None:
        config, number = self.config, self.submitted
        length, index = config.max_new_tokens, None
        if number < config.warmup:
            length = max(1, config.warmup_tokens * (number + 1) // config.warmup)
        elif self.opened is not None and (config.requests is None or len(self.counted) < config.requests):
            index = len(self.counted) % len(self.asks)
        # Warm-up and fillers come from the other end, so that counted requests do not depend on how many there were.
        ask = self.asks[-1 - number % len(self.asks) if index is None else index]
        served = MeasuredRequest(str(number), index, arrived)
        if index is not None:
            self.counted.append(served)
        self.live[served.id] = served
        self.submitted += 1
        rules = StopRules(min(length, config.max_new_tokens))
        self.backend.submit(Request(served.id, list(ask.prompt), ask.params, rules=rules))

    def _take(self, outputs: Sequence[Output]) -> None:
        now, counting = self.clock.now(), self.opened is not None
        if counting and self.backend.last is not None:
            self.steps.append(self.backend.last)
        for output in outputs:
            served = self.live[output.id]
            served.take(output, now)
            if counting:
                self.tokens += len(output.tokens)
                self.finished += served.finished
                if output.tokens and self.backend.last is not None:
                    self.rounds[output.accepted] += 1
            if served.finished:
                parts = len(served.tokens)
                served.end(self.backend)
                self.tokens += (len(served.tokens) - parts) * counting
                del self.live[output.id]
                self.warm += int(output.id) < self.config.warmup
        if self.opened is None and self.warm == self.config.warmup:
            if isinstance(self.backend, ReportsAcceptance):
                self.backend.start_window()
            self.opened = self.clock.now()


Serve = Callable[[str, float], Backend]  # (variant, level) -> an idle backend
Compare = Callable[[Ask, Sequence[int], Sequence[int]], str]  # (ask, plain, other) -> same, tie, mismatch
