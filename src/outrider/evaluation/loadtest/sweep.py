"""A sweep: every variant at every level, repeated; over one process or several.

Several processes, each with an engine of its own, share one load:

    rank 0:  users/N,  prompts 0, N, 2N, ..         seconds  the longest         tokens, requests  all together
    rank 1:  users/N,  prompts 1, N+1, ..           steps and rounds  all together: tau is that of one process

Every counted prompt is decoded once, by whichever rank, so greedy responses and accepted lengths are those of one
process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from outrider.backends.base import Acceptance, Backend, ReportsAcceptance
from outrider.backends.local import NO_SPECULATION
from outrider.decoding.request import Request, StopRules
from outrider.evaluation.loadtest.config import Sla, Traffic, check_levels
from outrider.evaluation.loadtest.engines import MeasuredEngine
from outrider.evaluation.loadtest.load import (
    Arrivals,
    Ask,
    Clock,
    ClosedLoop,
    Compare,
    LoadConfig,
    MeasuredRequest,
    Poisson,
    Prompt,
    Serve,
    WallClock,
    Window,
    run_load,
    with_next_turn,
)
from outrider.evaluation.loadtest.metrics import Journal, Point, RequestFigures, summarise, summed
from outrider.training.parallel import ALONE, Ranks


@dataclass(frozen=True)
class Share:
    """A rank's share of a load. `prompts`: indices of its counted prompts, in order; None: it has all."""

    ranks: Ranks
    prompts: list[int] | None

    @staticmethod
    def of(ranks: Ranks, prompts: int, counted: int | None) -> Share:
        """The share of `counted` requests over so many prompts.

        Raises:
            ValueError: several ranks and fewer requests than ranks, or a window by seconds.
        """
        if ranks.world == 1:
            return Share(ranks, None)
        if counted is None or counted < ranks.world:
            raise ValueError(
                f"{ranks.world} processes share counted requests, and there are {counted}: give "
                "--requests-per-point of at least as many."
            )
        return Share(ranks, [index % prompts for index in range(counted)][ranks.rank :: ranks.world])

    def users(self, arrivals: str, level: float) -> float:
        """Users of this rank, or requests per second.

        Raises:
            ValueError: users cannot be shared evenly.
        """
        if arrivals == "closed" and level % self.ranks.world:
            raise ValueError(f"concurrency {level:g} cannot be shared by {self.ranks.world} processes: take multiples.")
        return level / self.ranks.world

    def config(self, config: LoadConfig) -> LoadConfig:
        """The load with this rank's number of requests and warm-ups."""
        if self.prompts is None:
            return config
        return replace(config, requests=len(self.prompts), warmup=max(1, config.warmup // self.ranks.world))

    def of_asks(self, asks: Sequence[Ask]) -> Sequence[Ask]:
        """What this rank asks."""
        return asks if self.prompts is None else [asks[index] for index in self.prompts]

    def merged(self, window: Window) -> Window:
        """The windows of all ranks as one; a collective."""
        if self.prompts is None:
            return window
        for served in window.requests:
            assert served.index is not None
            served.index = self.prompts[served.index]
        windows = self.ranks.gather(window)
        reported = [found.acceptance for found in windows if found.acceptance is not None]
        return Window(
            max(found.seconds for found in windows),
            sum(found.tokens for found in windows),
            sum(found.finished for found in windows),
            requests=_in_turn([found.requests for found in windows]),
            steps=[step for found in windows for step in found.steps],
            acceptance=_mean_acceptance(reported) if reported else None,
            histogram=summed(found.histogram for found in windows),
        )


def _in_turn(shares: Sequence[Sequence[MeasuredRequest]]) -> list[MeasuredRequest]:
    """Requests in the order of one process: the first of every rank, the second of every rank, ..."""
    return [served for turn in zip_longest(*shares) for served in turn if served is not None]


def _mean_acceptance(parts: Sequence[Acceptance]) -> Acceptance:
    """Their accepted length, weighted by rounds."""
    known = [(p.accepted_length, p.rounds) for p in parts if p.accepted_length is not None and p.rounds]
    rounds = sum(count for _, count in known)
    length = sum(length * count for length, count in known) / rounds if rounds else None
    return Acceptance(length, rounds=rounds)


# ----------------------------------------------------------------------------
# Throughput against user speed: every variant at every level, again and again, taking turns.
#
#     repeat 0:  level 1: A B C   level 2: B C A   ...        the order changes, so drift of the machine falls on all
#     repeat 1:  level 1: B C A   level 2: C A B   ...        variants alike
#
# Figures 7 and 8 of DSpark (arXiv 2607.05147) are made of such points. Every measurement starts with an idle backend of
# its own. Responses that have to be plain decoding's are compared with it; those are made before the first point (and
# warm the machine up).
# ----------------------------------------------------------------------------


_MAY_CHANGE = ("levels", "variants", "repeats", "grouped")  # they decide what is measured when, not any single figure


@dataclass(frozen=True)
class Sweep:
    """Settings of a sweep.

    `levels`: concurrent users (closed), or requests per second (poisson). `requests` are counted at each, and one per
    user where that is more.
    """

    arrivals: Literal["closed", "poisson"]
    levels: tuple[float, ...]
    variants: tuple[str, ...]
    repeats: int
    requests: int | None
    seconds: float | None
    max_new_tokens: int
    sla: Sla
    seed: int = 0
    warmup_tokens: int = 16
    grouped: bool = False
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats} must be at least 1.")
        check_levels(self.arrivals, self.levels)
        if len(set(self.variants)) < len(self.variants):
            raise ValueError(f"variants {', '.join(self.variants)}: one is named twice.")
        for level in self.levels:
            self.load(level)

    @property
    def baseline(self) -> str:
        """The variant that all others' responses are compared with."""
        return NO_SPECULATION if NO_SPECULATION in self.variants else self.variants[0]

    def settings(self) -> dict[str, Any]:
        """The settings that each measurement depends on: not levels, variants and repeats, which may grow."""
        return {name: value for name, value in asdict(self).items() if name not in _MAY_CHANGE}

    def load(self, level: float) -> LoadConfig:
        """The load at a level, with a warm-up request per user, so that all are served when the window opens."""
        warmup = int(level) if self.arrivals == "closed" else 4
        return LoadConfig(
            self.counted(level), self.seconds, self.max_new_tokens, warmup=warmup, warmup_tokens=self.warmup_tokens
        )

    def counted(self, level: float) -> int | None:
        """How many requests count at a level; None: those of a time."""
        if self.requests is None or self.arrivals != "closed":
            return self.requests
        return max(self.requests, int(level))

    def arriving(self, level: float, repeat: int, now: float) -> Arrivals:
        """Arrivals at a level, at the same moments for every variant."""
        if self.arrivals == "closed":
            return ClosedLoop(int(level))
        return Poisson(level, 1000 * self.seed + repeat, now)

    def turns(self) -> Iterator[tuple[str, float, int]]:
        """(variant, level, repeat) in the order they are measured.

        `grouped`: all levels of a variant together, and the variants to and fro, so that each engine is started once
        per repeat or less.
        """
        if self.grouped:
            for repeat in range(self.repeats):
                for variant in self.variants[:: 1 if repeat % 2 == 0 else -1]:
                    for level in self.levels:
                        yield variant, level, repeat
            return
        for repeat in range(self.repeats):
            for place, level in enumerate(self.levels):
                first = (repeat + place) % len(self.variants)
                for variant in self.variants[first:] + self.variants[:first]:
                    yield variant, level, repeat


def run_sweep(
    sweep: Sweep,
    serve: Serve,
    prompts: Sequence[Sequence[int]],
    compare: Compare,
    journal: Journal,
    clock: Callable[[], Clock],
    *,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ranks: Ranks = ALONE,
) -> None:
    """Measure the points that the journal does not hold yet; each has a clock of its own.

    Several ranks each take a share of the users and of the counted prompts; the journal is the main rank's.
    """
    turns = list(sweep.turns())
    done, known = ranks.from_main(lambda: ({point.key for point in journal.points}, journal.reference()))
    if all(turn in done for turn in turns):
        return
    on_progress("plain responses", 0, len(turns))
    reference = _reference(sweep, serve, prompts, known=known, ranks=ranks)
    if ranks.main and reference is not known:
        journal.keep_reference(reference)
    for number, (variant, level, repeat) in enumerate(turns):
        on_progress(f"{variant} at {level:g}", number, len(turns))
        if (variant, level, repeat) in done:
            continue
        asks = sweep.traffic.asks(prompts, sweep.seed, repeat=repeat)
        window = _window(sweep, serve(variant, level), asks, level=level, repeat=repeat, clock=clock, ranks=ranks)
        if not ranks.main:
            continue
        verdicts = _verdicts(window, asks, reference, compare=compare)
        journal.append(
            Point(
                variant=variant,
                level=level,
                repeat=repeat,
                metrics=summarise(window, sweep.sla),
                same=verdicts["same"],
                ties=verdicts["tie"],
                mismatches=verdicts["mismatch"],
                acceptance_histogram=window.histogram,
                requests=[RequestFigures.of(served) for served in window.requests],
            )
        )
    on_progress("done", len(turns), len(turns))


def _window(
    sweep: Sweep,
    backend: Backend,
    asks: Sequence[Ask],
    level: float,
    repeat: int,
    clock: Callable[[], Clock],
    ranks: Ranks,
) -> Window:
    """The window of one point, that of all ranks together, on every rank."""
    share = Share.of(ranks, len(asks), sweep.counted(level))
    config = share.config(sweep.load(level))
    ranks.wait()
    ticking = clock()
    arrivals = sweep.arriving(share.users(sweep.arrivals, level), repeat, ticking.now())
    window = run_load(backend, share.of_asks(asks), arrivals, config=config, clock=ticking)
    return share.merged(window)


def _reference(
    sweep: Sweep, serve: Serve, prompts: Sequence[Sequence[int]], known: list[list[int]] | None, ranks: Ranks
) -> list[list[int]]:
    """Plain decoding's responses to every prompt that may count; [] where they are not compared."""
    asks = sweep.traffic.asks(prompts, sweep.seed)
    count = len(prompts[: sweep.counted(max(sweep.levels))])
    if known is not None and len(known) >= count:
        return known
    mine = [index for index in range(count) if asks[index].comparable][ranks.rank :: ranks.world]
    asked = [asks[index] for index in mine]
    said = responses(serve(sweep.baseline, max(sweep.levels)), asked, sweep.max_new_tokens)
    found: list[list[int]] = [[] for _ in range(count)]
    for part in ranks.gather(list(zip(mine, said, strict=True))):
        for index, tokens in part:
            found[index] = tokens
    return found


def responses(backend: Backend, asks: Sequence[Ask], max_new_tokens: int) -> list[list[int]]:
    """The responses to all that is asked."""
    rules = StopRules(max_new_tokens)
    found: list[list[int]] = [[] for _ in asks]
    for index, ask in enumerate(asks):
        backend.submit(Request(str(index), list(ask.prompt), ask.params, rules=rules))
    while not backend.idle:
        for output in backend.step():
            if output.error is not None:
                raise output.error
            found[int(output.id)] += output.tokens
            if output.finish is not None and isinstance(backend, ReportsAcceptance):
                found[int(output.id)] = backend.request_stats(output.id).tokens or found[int(output.id)]
    return found


def _verdicts(
    window: Window, asks: Sequence[Ask], reference: Sequence[Sequence[int]], compare: Compare
) -> Counter[str]:
    verdicts: Counter[str] = Counter()
    for served in window.requests:
        assert served.index is not None
        ask, plain = asks[served.index], reference[served.index]
        if ask.comparable:
            same = served.tokens == list(plain)
            verdicts["same" if same else compare(ask, plain, served.tokens)] += 1
    return verdicts


# ----------------------------------------------------------------------------
# The prompts of a sweep: first turns are known beforehand, later turns follow the baseline's responses.
# ----------------------------------------------------------------------------


Respond = Callable[[int, Sequence[Sequence[int]]], list[list[int]]]  # (turn, prompts) -> the baseline's answers
_TEMPLATE = 64  # tokens that a chat template puts around a turn, at most


class Workload:
    """The prompts of a sweep: at most `turns` turns of each conversation, answered with at most `max_new_tokens`."""

    def __init__(self, first: Sequence[Prompt], turns: int, max_new_tokens: int) -> None:
        self.asked, self.turns, self._most = list(first), turns, max_new_tokens
        self._known = 1  # turns whose prompts are there

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [prompt.tokens for prompt in self.asked]

    @property
    def longest(self) -> int:
        """Most tokens that a prompt can have; responses to come count as whole, and a byte of text as a token."""
        return max(len(prompt.tokens) + self._to_come(prompt) for prompt in self.asked)

    def _to_come(self, prompt: Prompt) -> int:
        later = prompt.conversation.turns[self._known : self.turns]
        return sum(self._most + len(str(turn).encode()) + _TEMPLATE for turn in later)

    def capacity(self, users: int) -> tuple[int, int]:
        """(users, most tokens of a request): what a server must have room for."""
        return users, self.longest + self._most

    def chat_of(self, tokens: Sequence[int]) -> dict[str, Any]:
        """The messages and tools that a prompt was rendered from."""
        wanted = tuple(tokens)
        return next(prompt.chat for prompt in self.asked if prompt.tokens == wanted)

    def grow(self, tokenizer: PreTrainedTokenizerBase, thinking: bool, respond: Respond) -> None:
        """Add the later turns."""
        for turn in range(1, self.turns):
            going_on = [prompt for prompt in self.asked if prompt.goes_on_after(turn)]
            if not going_on:
                return
            answers = respond(turn, [prompt.tokens for prompt in going_on])
            self.asked = with_next_turn(
                tokenizer, self.asked, dict(zip(going_on, answers, strict=True)), thinking=thinking
            )
            self._known = turn + 1


def run_workload(
    sweep: Sweep,
    engine: MeasuredEngine,
    work: Workload,
    tokenizer: PreTrainedTokenizerBase,
    journal: Journal,
    *,
    thinking: bool,
    ranks: Ranks,
    on_progress: Callable[[str, int, int], None],
) -> None:
    """Make the prompts of later turns, then `run_sweep`; the greedy answers they follow are kept beside the points."""
    said = ranks.from_main(journal.said)
    known = len(said)

    def respond(turn: int, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        if turn > len(said):
            on_progress(f"answers to turn {turn}", turn - 1, work.turns - 1)
            plain = engine.serve(sweep.baseline, max(sweep.levels))
            asks = [Ask(prompt) for prompt in prompts]
            said.append(ranks.from_main(lambda: responses(plain, asks, sweep.max_new_tokens)))
        return said[turn - 1]

    work.grow(tokenizer, thinking, respond)
    if ranks.main and len(said) > known:
        journal.keep_said(said)
    run_sweep(
        sweep,
        engine.serve,
        work.prompts,
        compare=engine.compare,
        journal=journal,
        clock=WallClock,
        on_progress=on_progress,
        ranks=ranks,
    )
