"""Any order of submitting, stepping, cancelling, running out of blocks and changing limits: every request says what it
says alone in plain decoding, and every block comes back.

The requests are those whose tokens no company changes: greedy ones, coupled ones and, where nothing is drafted, any
with a seed. The target is in float64, so that no rounding decides between two tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outrider.decoding.generate import Generation, generate
from outrider.decoding.request import FinishReason, StopRules
from outrider.drafters.base import Drafter, DrafterWeights
from outrider.drafters.dflash import BlockDrafter
from outrider.drafters.dspark import DSpark, DSparkConfig
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.batch import Request
from outrider.engine.engine import Engine
from outrider.engine.scheduler import EngineConfig
from outrider.sampling import SamplingParams
from outrider.scheduling.cost import SpsTable
from outrider.scheduling.gate import SkipDrafting
from outrider.scheduling.policies import FixedPolicy, LookAhead, Policy, PrefixScheduler, ThresholdPolicy
from outrider.target.model import Target
from tests.toys.targets import randomise, toy_config, toy_target
from tests.toys.tokenizer import TOKENIZER
from tests.toys.trees import SelfTrees, prompt_of

LONGEST = 20
COSTS = SpsTable([1 / (20 + b + 6 * (b > 8)) for b in range(1, 200)])
POLICIES: list[Policy] = [FixedPolicy(), FixedPolicy(2), ThresholdPolicy(0.5), PrefixScheduler(COSTS), LookAhead(COSTS)]
SAMPLING = {
    "greedy": SamplingParams(),
    "penalty": SamplingParams(repetition_penalty=1.4),
    "coupled": SamplingParams(0.8, seed=3, coupled=True),
    "narrow": SamplingParams(1.3, 8, 0.9, min_p=0.02, repetition_penalty=1.2, seed=4, coupled=True),
    "drawn": SamplingParams(0.8, seed=5),
}


@cache
def target() -> Target:
    """Few likely tokens, so that drafts are right now and then; its tokens are single characters."""
    model = toy_target().model.double()
    model.lm_head.weight.data[12:] *= 0.3
    return Target(model, TOKENIZER, "toy")


@cache
def drafter(name: str) -> Drafter | None:
    if name == "chain":
        config = toy_config()
        assert isinstance(config, DSparkConfig)
        module = DSpark(config)
        randomise(module)
        return BlockDrafter(DrafterWeights(module.double().eval()), target())
    return {"none": None, "ngram": NgramDrafter(), "tree": SelfTrees(target())}[name]


@cache
def alone(length: int, seed: int, sampling: str, rules: StopRules) -> Generation:
    return generate(target(), prompt_of(length, seed), None, SAMPLING[sampling], rules)


@dataclass
class Live:
    """A submitted request: what it says alone, and what it has said so far."""

    expected: Generation
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None


class EngineMachine(RuleBasedStateMachine):
    """Rules are an engine's events; `taken` blocks are lent to nobody, which makes it preempt."""

    @initialize(
        name=st.sampled_from(["none", "chain", "ngram", "tree"]),
        policy=st.sampled_from(POLICIES),
        gated=st.booleans(),
        blocks=st.integers(14, 40),
    )
    def start(self, name: str, policy: Policy, gated: bool, blocks: int) -> None:
        self.drafts, self.number = name != "none", 0
        if name in ("ngram", "tree"):  # without confidences
            policy = POLICIES[blocks % 2]
        gate = SkipDrafting(COSTS) if gated and policy.min_confidence == 0 else None
        config = EngineConfig(max_requests=4, token_budget=24, block_size=4, num_blocks=blocks)
        self.engine = Engine(target(), drafter(name), policy, gate, config)
        self.live: dict[str, Live] = {}
        self.taken: list[int] = []

    @rule(
        length=st.sampled_from([1, 4, 13]),
        seed=st.integers(0, 2),
        sampling=st.sampled_from(list(SAMPLING)),
        new=st.integers(1, LONGEST),
        stop=st.sampled_from(["none", "own", "id", "text", "texts"]),
        place=st.integers(0, LONGEST - 2),
    )
    def submit(self, length: int, seed: int, sampling: str, new: int, stop: str, place: int) -> None:
        if sampling == "drawn" and self.drafts:
            return
        whole = alone(length, seed, sampling, StopRules(LONGEST, stop_ids=()))
        part = whole.text[place : place + 2]
        rules = {
            "none": StopRules(new, stop_ids=()),
            "own": StopRules(new),
            "id": StopRules(new, stop_ids=(whole.tokens[place],)),
            "text": StopRules(new, stop_ids=(), stop_strings=(part,)),
            "texts": StopRules(new, stop_strings=("no such", part[::-1], part)),
        }[stop if part else "none"]
        id = str(self.number)
        self.number += 1
        self.live[id] = Live(alone(length, seed, sampling, rules))
        self.engine.submit(Request(id, prompt_of(length, seed), SAMPLING[sampling], rules))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for output in self.engine.step():
                said = self.live[output.id]
                assert said.finish is None
                said.tokens += output.tokens
                said.text += output.text
                said.finish = output.finish
                assert said.tokens == said.expected.tokens[: len(said.tokens)]
                assert said.expected.text.startswith(said.text)
                if said.finish is not None:
                    expected = self.live.pop(output.id).expected
                    assert (said.tokens, said.text, said.finish) == (expected.tokens, expected.text, expected.finish)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        id = sorted(self.live)[which % len(self.live)]
        assert self.engine.cancel(id) and not self.engine.cancel(id)
        del self.live[id]

    @rule(count=st.integers(1, 40))
    def take_blocks(self, count: int) -> None:
        allocator = self.engine.scheduler.allocator
        self.taken += allocator.allocate(min(count, allocator.available))

    @precondition(lambda self: self.taken)
    @rule()
    def give_blocks_back(self) -> None:
        self.engine.scheduler.allocator.release(self.taken)
        self.taken = []

    @rule(most=st.integers(1, 6), budget=st.integers(6, 40))
    def change_limits(self, most: int, budget: int) -> None:
        scheduler = self.engine.scheduler
        scheduler.config = replace(scheduler.config, max_requests=most, token_budget=budget)

    @invariant()
    def every_block_has_one_owner(self) -> None:
        scheduler = self.engine.scheduler
        held = [block for progress in scheduler.running.values() for block in progress.blocks] + self.taken
        assert len(held) == len(set(held)) == scheduler.allocator.used
        waiting = [id for id, _ in scheduler.waiting]
        assert sorted([*scheduler.running, *waiting]) == sorted(self.live) and self.engine.idle == (not self.live)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.allocator.release(self.taken)
            self.taken = []
            for _ in range(1000):
                if self.engine.idle:
                    break
                self.step(1)
            assert self.engine.idle and not self.live and self.engine.scheduler.allocator.used == 0


def run(examples: int, steps: int, derandomize: bool) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    run_state_machine_as_test(EngineMachine, settings=chosen)


def test_any_order_of_events() -> None:
    run(examples=30, steps=25, derandomize=True)


@pytest.mark.soak
def test_any_order_of_many_events() -> None:
    run(examples=1500, steps=60, derandomize=False)
