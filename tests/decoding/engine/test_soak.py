"""Two thousand requests in and out: greedy and sampled, random arrivals, stops and limits of drafts, a pool too small.

The outputs of greedy and of coupled requests are their solo runs'. Those are plain decoding of each prompt, once and as
long as may be asked for: a shorter or stopped response is a beginning of it.
"""

from __future__ import annotations

import gc
import random
import resource
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.checkpoints.published import shipped_drafter
from outrider.data.chat import render
from outrider.data.sources import load_prompts
from outrider.decoding.cost import SpsTable
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.learned_cost import LearnedCost
from outrider.decoding.policies import FixedPolicy, LookAhead, Policy, PrefixScheduler, SkipDrafting, ThresholdPolicy
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.decoding.text import TextStream
from outrider.drafters.base import Drafter, DrafterWeights
from outrider.drafters.dflash import BlockDrafter
from outrider.drafters.dspark import DSpark, DSparkConfig
from outrider.drafters.ngram import HybridDrafter
from outrider.evaluation.evaluate import compare_greedy
from outrider.sampling import SamplingParams
from outrider.target.linear import warm_up
from outrider.target.model import Target
from tests.toys.targets import randomise, toy_config, toy_target

LONGEST = 64


@dataclass
class Tally:
    finished: int
    compared: int
    cancelled: int
    preempted: int
    ties: int
    stopped: int
    grown_mib: float


class Solo:
    """Plain responses of a pool of prompts, decoded at first use: greedy, or sampled by noise of seed and position."""

    def __init__(self, target: Target, pool: Sequence[list[int]]) -> None:
        self.target, self.pool = target, pool
        self.known: dict[tuple[int, SamplingParams], list[int]] = {}

    def tokens(self, index: int, params: SamplingParams) -> list[int]:
        if (index, params) not in self.known:
            rules = StopRules(LONGEST, stop_ids=())
            self.known[index, params] = generate(self.target, self.pool[index], params=params, rules=rules).tokens
        return self.known[index, params]

    def expected(self, index: int, params: SamplingParams, rules: StopRules) -> list[int]:
        text = TextStream(self.target.tokenizer, rules.stop_strings)
        return text.cut(self.tokens(index, params)[: rules.max_new_tokens], rules.ids(self.target))[0]


def soak(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    pool: list[list[int]],
    count: int,
    config: EngineConfig,
) -> Tally:
    """Run `count` requests, check each that was not cancelled, and count what happened."""
    chance = random.Random(count)
    solo, engine = Solo(target, pool), Engine(target, drafter, policy, config=config)
    chosen: dict[str, tuple[int, SamplingParams, StopRules]] = {}
    found: dict[str, list[int]] = {}
    tally = Tally(0, 0, 0, 0, 0, 0, 0.0)
    submitted, memory = 0, 0.0
    plan = engine.scheduler.plan

    def counting() -> object:
        made = plan()
        tally.preempted += len(made.preempted)
        return made

    engine.scheduler.plan = counting  # type: ignore[method-assign, assignment]
    while submitted < count or not engine.idle:
        while submitted < count and len(chosen) < 3 * config.max_requests and chance.random() < 0.6:
            index, id = chance.randrange(len(pool)), str(submitted)
            params = random_params(chance, index)
            rules = random_rules(chance, target, solo, index)
            chosen[id], found[id] = (index, params, rules), []
            most = chance.choice([None, None, None, 0, 1, 3])
            engine.submit(Request(id, pool[index], params, rules=rules, most_drafts=most))
            submitted += 1
        for output in engine.step():
            found[output.id] += output.tokens
            if output.finish is not None:
                index, params, rules = chosen.pop(output.id)
                tokens = found.pop(output.id)
                assert 0 < len(tokens) <= rules.max_new_tokens
                tally.finished += 1
                tally.stopped += output.finish == "stop"
                if params.temperature and not params.coupled:
                    continue
                tally.compared += 1
                expected = solo.expected(index, params, rules)
                if tokens != expected:
                    same_row = not params.temperature and compare_greedy(target, pool[index], expected, tokens) == "tie"
                    assert same_row, f"request {output.id}, {params}: {tokens} instead of {expected}"
                    tally.ties += 1
        if chosen and chance.random() < 0.03:
            gone = chance.choice(list(chosen))
            assert engine.cancel(gone)
            del chosen[gone], found[gone]
            tally.cancelled += 1
        assert engine.scheduler.allocator.used == sum(len(p.blocks) for p in engine.scheduler.running.values())
        if submitted >= count // 2 and not memory:
            memory = resident_mib()
    assert engine.scheduler.allocator.used == 0 and not engine.scheduler.waiting
    tally.grown_mib = resident_mib() - memory
    return tally


def random_params(chance: random.Random, index: int) -> SamplingParams:
    """Greedy, sampled, or sampled by noise of seed and position."""
    kind = chance.randrange(4)
    if kind < 2:
        return SamplingParams()
    if kind == 2:
        return SamplingParams(chance.choice([0.7, 1.0]), top_p=chance.choice([0.9, 1.0]), seed=chance.randrange(2**31))
    return SamplingParams(1.0, seed=index, coupled=True)


def random_rules(chance: random.Random, target: Target, solo: Solo, index: int) -> StopRules:
    """Exact length, the target's own stop tokens, a token from the middle of the response, or a string."""
    length = chance.randint(8, LONGEST)
    kind = chance.randrange(4)
    if kind == 0:
        return StopRules(length, stop_ids=())
    if kind == 1:
        return StopRules(length)
    if kind == 2 or target.tokenizer is None:
        return StopRules(length, stop_ids=(solo.tokens(index, SamplingParams())[chance.randrange(LONGEST)],))
    return StopRules(length, stop_ids=(), stop_strings=(chance.choice(["the", ".", "1", "\n\n"]),))


def resident_mib() -> float:
    """What this process holds now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def check(tally: Tally, count: int) -> None:
    assert tally.finished + tally.cancelled == count
    assert tally.compared >= count // 2
    assert tally.preempted >= 10 and tally.cancelled >= 10 and tally.stopped >= count // 10
    assert tally.ties <= count // 200
    assert tally.grown_mib < 32, "the second half of the requests needs no more memory than the first"


COSTS = SpsTable([1 / (20 + b + 6 * (b > 16)) for b in range(1, 200)])


@pytest.mark.soak
def test_soak_of_a_small_model() -> None:
    target = toy_target()
    target.model.lm_head.weight.data[3:] *= 0.01
    target = Target(target.model, None, "toy")
    config = toy_config()
    assert isinstance(config, DSparkConfig)
    module = DSpark(config)
    randomise(module)
    chance = random.Random(7)
    pool = [[chance.randrange(4, 97) for _ in range(chance.randint(1, 60))] for _ in range(100)]
    engine = EngineConfig(max_requests=8, token_budget=48, block_size=4, num_blocks=56)
    total = Counter[str]()
    drafter = BlockDrafter(DrafterWeights(module.eval()), target)
    learned = LearnedCost(COSTS)
    cases: list[tuple[Drafter, Policy]] = [
        (drafter, policy) for policy in (FixedPolicy(), ThresholdPolicy(0.5), PrefixScheduler(COSTS), LookAhead(COSTS))
    ]
    for case in (*cases, (HybridDrafter(drafter), SkipDrafting(learned, LookAhead(learned)))):
        tally = soak(target, *case, pool, 425, engine)
        check(tally, 425)
        total.update({name: int(value) for name, value in vars(tally).items()})
    print(dict(total))


@pytest.mark.soak
def test_soak_of_the_real_model(smollm: Target) -> None:
    path = shipped_drafter("SmolLM2-135M-Instruct")
    assert path is not None and smollm.tokenizer is not None
    prompts = [p for name in ("train_math", "train_chat", "train_code") for p in load_prompts(name, 34)][:100]
    pool = [render(smollm.tokenizer, prompt.turns[:1], [], prompt.tools) for prompt in prompts]
    drafter = HybridDrafter(load_checkpoint(path).serve(smollm))
    learned = LearnedCost(COSTS)
    config = EngineConfig(max_requests=12, token_budget=96, block_size=16, num_blocks=40)
    warm_up(config.token_budget)  # kernels that are kept are no leak
    tally = soak(smollm, drafter, SkipDrafting(learned, LookAhead(learned)), pool, 300, config)
    check(tally, 300)
    print(tally)
