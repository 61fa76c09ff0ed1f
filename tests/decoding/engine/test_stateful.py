"""Any order of submitting, stepping, cancelling, running out of blocks and changing limits: every request says what it
says alone, and every block and every drafter session comes back.

Greedy and coupled requests say what plain decoding says, whatever is drafted; without a drafter all others do too. What
else is drawn depends on how far a request drafts and how many drafts are verified in each step. So these are noted, and
the request alone repeats them: it then says the same only if its random numbers, its caches and what its drafter has
read are the same. The target is in float64, so that no rounding decides between two tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import outrider.decoding.backoff as backoff_module
import outrider.decoding.drafting as drafting_module
import outrider.decoding.verification as verification_module
from outrider.decoding.cost import Ints, SpsTable
from outrider.decoding.engine import Engine
from outrider.decoding.generate import Generation, generate
from outrider.decoding.policies import BY_COST, FixedPolicy, PlanView, Policy, SkipDrafting, StepView, ThresholdPolicy
from outrider.decoding.request import FinishReason, Output, Request, StopRules
from outrider.decoding.scheduler import EngineConfig, StepPlan
from outrider.decoding.verification import PendingVerdict, TargetRows, TypicalAcceptance, accept
from outrider.drafters.base import DraftCall, Drafter, DrafterWeights, WrappedDrafter
from outrider.drafters.dflash import BlockDrafter
from outrider.drafters.draft import Draft
from outrider.drafters.dspark import DSpark, DSparkConfig
from outrider.drafters.ngram import NgramDrafter
from outrider.sampling import Randomness, RandomSource, SamplingParams, SeededSource
from outrider.target.model import Target
from tests.toys.oracle import SelfDrafter
from tests.toys.policies import gated
from tests.toys.targets import randomise, toy_config, toy_target
from tests.toys.tokenizer import TOKENIZER
from tests.toys.trees import SelfTrees, prompt_of

LONGEST = 20  # new tokens of a request
MOST = 8  # requests
COSTS = SpsTable([1 / (20 + b + 6 * (b > 8)) for b in range(1, 200)])
FIXED: list[Policy] = [FixedPolicy(), FixedPolicy(3)]
POLICIES: list[Policy] = [  # with drafts that have confidences
    *FIXED,
    ThresholdPolicy(0.5),
    *(policy(COSTS) for policy in BY_COST.values()),
]
SAMPLING = {
    "greedy": SamplingParams(),
    "greedy, penalty": SamplingParams(repetition_penalty=1.4),
    "coupled": SamplingParams(0.8, coupled=True),
    "coupled, narrow": SamplingParams(1.3, 8, 0.9, min_p=0.02, repetition_penalty=1.2, coupled=True),
    "drawn": SamplingParams(0.8),
    "drawn, narrow": SamplingParams(1.3, 8, 0.9, min_p=0.02, repetition_penalty=0.8),
}


@cache
def target() -> Target:
    """Few likely tokens, so that drafts are right now and then, and attention that counts; its tokens are single
    characters, or bytes of some.
    """
    model = toy_target(dtype=torch.float64).model
    model.model.layers.requires_grad_(False).apply(_enlarge)
    model.lm_head.weight.data[12:] *= 0.3
    return Target(model, TOKENIZER, "toy")


def _enlarge(module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.Linear):
        module.weight.mul_(2)


@cache
def drafter(name: str) -> Drafter | None:
    if name == "block":
        config = toy_config()
        assert isinstance(config, DSparkConfig)
        module = DSpark(config)
        randomise(module)
        return BlockDrafter(DrafterWeights(module.eval()), target())
    kinds: dict[str, Drafter | None] = {
        "none": None,
        "chain": SelfDrafter(target(), temperature=0.5, gamma=4),
        "ngram": NgramDrafter(),
        "tree": SelfTrees(target()),
        "tree, replaced": SelfTrees(target(), replaced=True),
    }
    return kinds[name]


class Wanted(NamedTuple):
    """A request that a machine submits. `stop`: what ends it besides its length, taken from `place` of its text."""

    length: int
    seed: int
    sampling: str
    new: int
    stop: str
    place: int

    @property
    def prompt(self) -> list[int]:
        return prompt_of(self.length, self.seed)

    @property
    def params(self) -> SamplingParams:
        return replace(SAMPLING[self.sampling], seed=self.seed)


REQUESTS = st.builds(
    Wanted,
    length=st.sampled_from([1, 4, 13, 33]),
    seed=st.integers(0, 2),
    sampling=st.sampled_from(list(SAMPLING)),
    new=st.sampled_from([1, 8, 16, LONGEST]),
    stop=st.sampled_from(["none", "own", "id", "text", "texts"]),
    place=st.integers(0, LONGEST - 2),
)


@cache
def _plain(length: int, seed: int, sampling: str, rules: StopRules) -> Generation:
    return generate(target(), prompt_of(length, seed), None, replace(SAMPLING[sampling], seed=seed), rules)


def plain(wanted: Wanted, rules: StopRules) -> Generation:
    """What plain decoding says alone."""
    return _plain(wanted.length, wanted.seed, wanted.sampling, rules)


# ----------------------------------------------------------------------------
# What each request drafts and has verified, noted in the engine and repeated by the request alone.
# ----------------------------------------------------------------------------


class Round(NamedTuple):
    """`asked`: limit and nodes of the request's `DraftCall`, None where it did not draft; `verified` draft tokens."""

    asked: tuple[int | None, int | None] | None
    verified: int


class Noted(SeededSource):
    """A request's random source that knows the request's rounds."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.asked: tuple[int | None, int | None] | None = None
        self.rounds: list[Round] = []
        self.accepted = 0


def noting_accept(
    draft: Draft, rows: TargetRows, source: RandomSource, typical: TypicalAcceptance | None = None
) -> PendingVerdict:
    """`accept` that notes the round if its source does."""
    verdict = accept(draft, rows, source, typical)
    if isinstance(source, Noted):
        source.rounds.append(Round(source.asked, len(draft.tokens)))
        source.asked = None
        source.accepted += len(verdict.path)
    return verdict


class Watched(WrappedDrafter):
    """Notes the calls of each request; `sessions` are those begun and not ended."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.sessions: list[Any] = []

    def new_session(self, capacity: int) -> Any:
        self.sessions.append(super().new_session(capacity))
        return self.sessions[-1]

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> Sequence[Draft]:
        for call in calls:
            assert isinstance(call.source, Noted), "random numbers of another source"
            call.source.asked = call.limit, call.nodes
        return super().propose(calls, min_confidence)

    def end(self, session: Any) -> None:
        left = [open for open in self.sessions if open is not session]
        assert len(left) == len(self.sessions) - 1, "a session that is not open"
        self.sessions = left
        super().end(session)


class Repeated(WrappedDrafter, Policy):
    """Drafter and policy of a request alone whose rounds are to be these."""

    def __init__(self, inner: Drafter, policy: Policy, rounds: Iterable[Round]) -> None:
        super().__init__(inner)
        self.least, self.rounds = policy.min_confidence, deque(rounds)

    @property
    def min_confidence(self) -> float:
        return self.least

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> Sequence[Draft]:
        self.round = self.rounds.popleft()
        if (asked := self.round.asked) is None:
            return [Draft.empty()]
        return super().propose([replace(call, limit=asked[0], nodes=asked[1]) for call in calls], min_confidence)

    def lengths(self, view: StepView) -> Ints:
        return np.array([self.round.verified])


@dataclass(frozen=True)
class Now(Policy):
    """A request drafts at every `period`-th of its tokens, two tokens at most now and then."""

    period: int

    @property
    def skips(self) -> bool:
        return True

    def depths(self, view: PlanView) -> Ints:
        longest = np.where(view.contexts_R % 5 > 0, view.expected_RK.shape[1], 2)
        return np.where(view.contexts_R % self.period == 0, longest, 0)


# ----------------------------------------------------------------------------
# The machine.
# ----------------------------------------------------------------------------


@dataclass
class Live:
    """A submitted request: what it says alone, None where that is known at its end only, and what it has said."""

    request: Request
    source: Noted
    expected: Generation | None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None

    def say(self, output: Output) -> None:
        """Take what the engine put out."""
        assert self.finish is None and output.error is None and output.seed == self.request.params.seed
        self.tokens += output.tokens
        self.text += output.text
        self.finish = output.finish
        if self.expected is not None:
            assert self.tokens == self.expected.tokens[: len(self.tokens)]
            assert self.expected.text.startswith(self.text)

    def check(self, inner: Drafter | None, policy: Policy) -> None:
        """At its end it has said what it says alone."""
        expected, request = self.expected, self.request
        if expected is None:
            assert inner is not None
            alone = Repeated(inner, policy, self.source.rounds)
            expected = generate(target(), request.prompt, alone, request.params, request.rules, alone)
            # The drafter is not asked in a round that may commit one token only.
            assert list(alone.rounds) in ([], [Round(None, 0)])
        assert (self.tokens, self.text, self.finish) == (expected.tokens, expected.text, expected.finish)


class EngineMachine(RuleBasedStateMachine):
    """Rules are an engine's events. `met` counts what they met with, in all machines of a run."""

    met: ClassVar[Counter[str]] = Counter()

    @initialize(
        name=st.sampled_from(["none", "block", "chain", "ngram", "tree", "tree, replaced"]),
        policy=st.integers(0, len(POLICIES) - 1),
        gate=st.integers(0, 3),
        slots=st.integers(56, 160),
        budget=st.sampled_from([8, 24]),
        block_size=st.sampled_from([2, 4]),
        cached=st.booleans(),
    )
    def start(self, name: str, policy: int, gate: int, slots: int, budget: int, block_size: int, cached: bool) -> None:
        self.inner = drafter(name)
        self.watched = None if self.inner is None else Watched(self.inner)
        self.policy = POLICIES[policy] if name == "block" else FIXED[policy % 2]
        gates: list[Policy | None] = [None, SkipDrafting(COSTS), Now(2), Now(3)]
        sizes = {"token_budget": budget, "block_size": block_size, "num_blocks": slots // block_size}
        config = EngineConfig(4, **sizes, prefix_cache=cached)
        self.engine = Engine(
            target(),
            self.watched,
            gated(self.policy, None if self.policy.min_confidence > 0 else gates[gate]),
            config,
            randomness=Randomness(source=self.new_source),
        )
        self.plan = self.engine.scheduler.plan
        self.engine.scheduler.plan = self.checked_plan  # type: ignore[method-assign]
        self.live: dict[str, Live] = {}
        self.taken: list[int] = []

    def new_source(self, seed: int) -> Noted:
        self.source = Noted(seed)
        return self.source

    def checked_plan(self) -> StepPlan:
        """The scheduler's plan keeps the limits of now."""
        scheduler = self.engine.scheduler
        plan = self.plan()
        rows = sum(work.prefill + (1 + work.limit if work.decodes else 0) for work in plan.work)
        assert rows <= scheduler.config.token_budget
        assert not plan.admitted or len(scheduler.running) <= scheduler.config.max_requests
        assert set(scheduler.running).isdisjoint(plan.preempted)
        self.met["preempted"] += len(plan.preempted)
        self.met["begun in the cache"] += sum(scheduler.running[id].cached > 0 for id in plan.admitted)
        if self.watched is not None:
            self.met["preempted in prefill"] += sum(not self.live[id].tokens for id in plan.preempted)
        return plan

    @rule(wanted=st.lists(REQUESTS, min_size=3, max_size=5), steps=st.integers(1, 4))
    def submit(self, wanted: list[Wanted], steps: int) -> None:
        for one in wanted[: MOST - len(self.live)]:
            whole = plain(one, StopRules(LONGEST, stop_ids=()))
            part = whole.text[one.place : one.place + 1 + one.place % 2]
            rules = {
                "none": StopRules(one.new, stop_ids=()),
                "own": StopRules(one.new),
                "id": StopRules(one.new, stop_ids=(whole.tokens[one.place],)),
                "text": StopRules(one.new, stop_ids=(), stop_strings=(part,)),
                "texts": StopRules(one.new, stop_strings=("no such", part[::-1], part)),
            }[one.stop if part else "none"]
            id = next(str(number) for number in range(MOST) if str(number) not in self.live)  # of one that ended, too
            request = Request(id, one.prompt, one.params, rules)
            self.engine.submit(request)
            known = self.inner is None or one.params.coupled or one.params.temperature == 0
            self.live[id] = Live(request, self.source, plain(one, rules) if known else None)
        for bad, prompt in (("0", [5]), ("long", [5] * 200), ("unknown", [97]), ("empty", [])):
            if bad != "0" or bad in self.live:
                with pytest.raises(ValueError, match=r"in use|KV blocks|vocabulary|empty"):
                    self.engine.submit(Request(bad, prompt))
        self.step(steps)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            before, scheduler = self.engine.last, self.engine.scheduler
            outputs = self.engine.step()
            for output in outputs:
                self.live[output.id].say(output)
                if output.finish is not None:
                    said = self.live.pop(output.id)
                    said.check(self.inner, self.policy)
                    self.met[f"finished by {output.finish}"] += 1
                    self.met["repeated alone"] += said.expected is None
                    self.met["accepted"] += said.source.accepted
                    self.met["accepted, coupled"] += said.request.params.coupled * said.source.accepted
            if (record := self.engine.last) is not None and record is not before:
                assert record.committed == sum(len(output.tokens) for output in outputs)
                assert record.requests == len(outputs) and record.used_blocks == scheduler.allocator.used

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, MOST - 1))
    def cancel(self, which: int) -> None:
        id = sorted(self.live)[which % len(self.live)]
        self.met["cancelled while running"] += id in self.engine.scheduler.running
        assert self.engine.cancel(id) and not self.engine.cancel(id)
        del self.live[id]

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(steps=st.integers(2, 8), left=st.integers(0, 2))
    def run_out_of_blocks(self, steps: int, left: int) -> None:
        """A few steps with hardly a free block: drafts give way, then the youngest requests."""
        allocator = self.engine.scheduler.allocator
        self.taken = allocator.allocate(max(0, allocator.available - left))
        try:
            self.step(steps)
            self.everything_has_one_owner()
        finally:
            allocator.release(self.taken)
            self.taken = []

    @rule(most=st.integers(1, 6), budget=st.integers(6, 40))
    def change_limits(self, most: int, budget: int) -> None:
        scheduler = self.engine.scheduler
        scheduler.config = replace(scheduler.config, max_requests=most, token_budget=budget)

    @invariant()
    def everything_has_one_owner(self) -> None:
        scheduler = self.engine.scheduler
        held = [block for progress in scheduler.running.values() for block in progress.blocks] + self.taken
        assert len(set(held)) == scheduler.allocator.used and not set(held) & set(scheduler.allocator.prefixes.idle)
        assert len(held) == len(set(held)) or scheduler.config.prefix_cache
        waiting = [id for id, _ in scheduler.waiting]
        assert sorted([*scheduler.running, *waiting]) == sorted(self.live) and self.engine.idle == (not self.live)
        assert set(self.engine.drafting.acceptance._slots) <= set(self.live)
        if self.watched is not None:
            assert len(self.watched.sessions) == len(scheduler.running)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for _ in range(1000):
                if self.engine.idle:
                    break
                self.step(1)
            assert self.engine.idle and not self.live and self.engine.scheduler.allocator.used == 0
            self.everything_has_one_owner()


def run(examples: int, steps: int, fixed: bool = True) -> Counter[str]:
    """What the machines met with.

    Args:
        fixed: the same events every time, and a failure is shown as it was found; else it is made small first, which
            takes minutes.
    """
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=fixed,
        phases=[Phase.generate] if fixed else list(Phase),
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    EngineMachine.met = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification_module, "accept", noting_accept)
        patch.setattr(drafting_module, "_MOST_UNREAD", 10)  # of the requests here, too, some are read early
        patch.setattr(backoff_module, "_LONGEST", 1)
        run_state_machine_as_test(EngineMachine, settings=chosen)
    return EngineMachine.met


def test_any_order_of_events() -> None:
    """What is asked for at least is far below what the machines meet with: they are not idle unnoticed."""
    met = run(examples=50, steps=20)
    least = {
        "preempted": 5,
        "preempted in prefill": 1,
        "cancelled while running": 10,
        "begun in the cache": 3,
        "repeated alone": 30,
        "finished by stop": 60,
        "finished by length": 60,
        "accepted": 60,
        "accepted, coupled": 15,  # drafts and target with the noise of one position
    }
    assert all(met[event] >= count for event, count in least.items()), met


@pytest.mark.soak
def test_any_order_of_many_events() -> None:
    run(examples=1500, steps=60, fixed=False)
