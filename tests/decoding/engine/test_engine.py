"""The engine: every output its solo run's, whatever else is in the batch; no block lost; limits obeyed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NoReturn

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from numpy.typing import NDArray
from torch import Tensor

import outrider.decoding.backoff as backoff_module
import outrider.decoding.drafting as drafting_module
from outrider.decoding.cost import SpsTable
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.policies import FixedPolicy, PlanView, Policy, PrefixScheduler, SkipDrafting, ThresholdPolicy
from outrider.decoding.request import Output, Request, StopRules
from outrider.decoding.scheduler import BlockAllocator, EngineConfig, Scheduler
from outrider.drafters.base import DraftCall
from outrider.drafters.cache import DraftSession
from outrider.drafters.dflash import BlockDrafter
from outrider.drafters.draft import Draft
from outrider.sampling import SamplingParams, SeededSource
from outrider.target.model import Target
from tests.toys.engine import assert_solo, finish, prompts, toy_drafter, watch_preemptions
from tests.toys.targets import toy_target

POLICIES: list[Policy] = [
    FixedPolicy(),
    FixedPolicy(0),
    ThresholdPolicy(0.5),
    PrefixScheduler(SpsTable([1 / (1 + 0.02 * b) for b in range(1, 200)])),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_greedy_outputs_are_solo_outputs(target: Target, drafter: BlockDrafter, policy: Policy) -> None:
    config = EngineConfig(max_requests=6, token_budget=40, block_size=4, num_blocks=120)
    engine = Engine(target, drafter, policy, config=config)
    requests = [
        Request(str(i), prompt, rules=StopRules(5 + 3 * i, stop_ids=())) for i, prompt in enumerate(prompts(12))
    ]
    rows: list[int] = []

    def look() -> None:
        assert engine.last is not None
        rows.append(engine.last.tokens)
        assert engine.last.used_blocks == sum(len(p.blocks) for p in engine.scheduler.running.values())

    found = finish(engine, requests, look)
    assert max(rows) <= config.token_budget and engine.scheduler.allocator.used == 0
    for request in requests:
        assert len(found[request.id]) == request.rules.max_new_tokens
        assert_solo(target, request, found[request.id])


def test_drafts_are_accepted_in_batches(target: Target, drafter: BlockDrafter) -> None:
    """Otherwise the test above would say nothing about commits of several tokens."""
    engine = Engine(target, drafter)
    accepted = []
    finish(
        engine,
        [Request(str(i), p, rules=StopRules(40, stop_ids=())) for i, p in enumerate(prompts(8))],
        lambda: accepted.append(engine.last.accepted if engine.last else 0),
    )
    assert sum(accepted) > 20


def sampled(coupled: bool) -> list[Request]:
    """Requests with settings and seeds of their own."""
    settings = [(0, 1.0, 1.0), (5, 0.9, 1.0), (0, 0.95, 1.3)] * 2
    return [
        Request(str(i), prompt, SamplingParams(0.8, k, p, 0.0, penalty, i, coupled), StopRules(20, stop_ids=()))
        for i, (prompt, (k, p, penalty)) in enumerate(zip(prompts(6, seed=1), settings, strict=True))
    ]


def test_a_seed_decides_where_drafts_are_equally_long(target: Target, drafter: BlockDrafter) -> None:
    requests = sampled(coupled=False)
    for chosen in (drafter, None):
        together = finish(Engine(target, chosen), requests)
        for request in requests:
            assert finish(Engine(target, chosen), [request])[request.id] == together[request.id]
    for request in requests:  # without a drafter the engine asks for randomness as the single request does
        assert generate(target, request.prompt, None, request.params, request.rules).tokens == together[request.id]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_coupled_tokens_depend_on_the_seed_alone(target: Target, drafter: BlockDrafter, policy: Policy) -> None:
    """No policy, no drafter, no company, no preemption changes a token."""
    requests = sampled(coupled=True)
    config = EngineConfig(max_requests=6, token_budget=40, block_size=4, num_blocks=40)
    together = finish(Engine(target, drafter, policy, config=config), requests)
    for request in requests:
        for chosen in (drafter, None):
            solo = generate(target, request.prompt, chosen, request.params, request.rules, policy)
            assert solo.tokens == together[request.id]
    seeds = {
        tuple(generate(target, [5, 6], None, SamplingParams(0.8, seed=s, coupled=True)).tokens[:8]) for s in range(9)
    }
    assert len(seeds) == 9


def test_requests_without_a_seed_differ_and_report_one_that_repeats_them(target: Target) -> None:
    unseeded = [Request(str(i), [5, 6], SamplingParams(0.8), StopRules(20, stop_ids=())) for i in range(6)]
    engine = Engine(target)
    for request in unseeded:
        engine.submit(request)
    seeds: dict[str, int] = {}
    found: dict[str, list[int]] = {request.id: [] for request in unseeded}
    while not engine.idle:
        for output in engine.step():
            assert output.seed is not None
            assert seeds.setdefault(output.id, output.seed) == output.seed
            found[output.id] += output.tokens
    assert len(set(seeds.values())) == len({tuple(tokens) for tokens in found.values()}) == 6
    for request in unseeded:
        params = SamplingParams(0.8, seed=seeds[request.id])
        again = generate(target, request.prompt, None, params, request.rules)
        assert (again.tokens, again.seed) == (found[request.id], seeds[request.id])
    alone = [generate(target, [5, 6], None, SamplingParams(0.8), StopRules(20, stop_ids=())) for _ in range(2)]
    assert alone[0].seed != alone[1].seed and alone[0].tokens != alone[1].tokens


@pytest.mark.parametrize("coupled", [False, True])
def test_preempted_requests_keep_their_randomness(target: Target, drafter: BlockDrafter, coupled: bool) -> None:
    """Drafts ask the same source, so without coupling the number of questions is fixed in plain decoding alone."""
    requests = [
        Request(str(i), prompt, SamplingParams(0.8, seed=i, coupled=coupled), StopRules(40, stop_ids=()))
        for i, prompt in enumerate(prompts(6, 3, longest=20))
    ]
    chosen = drafter if coupled else None
    tight = Engine(target, chosen, config=EngineConfig(max_requests=6, token_budget=64, block_size=4, num_blocks=28))
    preempted = watch_preemptions(tight)
    assert finish(tight, requests) == finish(Engine(target, chosen), requests)
    assert len(preempted) >= 3


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"])
def test_other_families(family: str) -> None:
    target = toy_target(family)
    engine = Engine(target, toy_drafter(target), config=EngineConfig(4, 24, 4, 64))
    requests = [Request(str(i), p, rules=StopRules(12, stop_ids=())) for i, p in enumerate(prompts(5, longest=25))]
    found = finish(engine, requests)
    for request in requests:
        assert_solo(target, request, found[request.id])


def test_preemption_recomputes_and_loses_nothing(target: Target, drafter: BlockDrafter) -> None:
    """Six requests that need 4 x 60 slots of 128: the young give way, and all come out as alone."""
    engine = Engine(target, drafter, config=EngineConfig(max_requests=6, token_budget=64, block_size=4, num_blocks=32))
    preempted = watch_preemptions(engine)
    requests = [Request(str(i), p, rules=StopRules(45, stop_ids=())) for i, p in enumerate(prompts(6, 3, longest=20))]
    found = finish(engine, requests)
    assert len(preempted) >= 3 and engine.scheduler.allocator.used == 0
    for request in requests:
        assert_solo(target, request, found[request.id])


def test_stops_inside_blocks(target: Target, drafter: BlockDrafter) -> None:
    for i, prompt in enumerate(prompts(6, seed=5)):
        plain = generate(target, prompt, rules=StopRules(30, stop_ids=())).tokens
        rules = StopRules(30, stop_ids=(plain[7],))
        expected = generate(target, prompt, rules=rules)
        engine = Engine(target, drafter)
        engine.submit(Request("a", prompt, rules=rules))
        outputs: list[Output] = []
        while not engine.idle:
            outputs += engine.step()
        assert [t for output in outputs for t in output.tokens] == expected.tokens, i
        assert [output.finish for output in outputs if output.finish] == [expected.finish]


def test_cancelling_frees_everything(target: Target, drafter: BlockDrafter) -> None:
    engine = Engine(target, drafter, config=EngineConfig(max_requests=2, token_budget=16, block_size=4, num_blocks=40))
    for i, prompt in enumerate(prompts(4, longest=30)):
        engine.submit(Request(str(i), prompt, rules=StopRules(20, stop_ids=())))
    for _ in range(3):
        engine.step()
    assert engine.cancel("0") and not engine.cancel("0") and engine.cancel("3") and not engine.cancel("nobody")
    assert {"0", "3"}.isdisjoint(engine.scheduler.running)
    left = {output.id for _ in range(60) for output in ([] if engine.idle else engine.step())}
    assert left == {"1", "2"} and engine.idle and engine.scheduler.allocator.used == 0
    assert engine.step() == []


class Breaking(SeededSource):
    """A random source that breaks at the `last`-th question of a kind."""

    def __init__(self, kind: str, last: int) -> None:
        super().__init__(0)
        self.kind, self.left = kind, last

    def _ask(self, kind: str) -> None:
        self.left -= kind == self.kind
        if self.left == 0:
            raise RuntimeError("broken on purpose")

    def accept(self, probability: float) -> bool:
        self._ask("accept")
        return super().accept(probability)

    def choose(self, probs_V: Tensor) -> int:
        self._ask("choose")
        return super().choose(probs_V)


@pytest.mark.parametrize("fault", ["session", "drafting", "verification", "plain verification", "text"])
def test_what_fails_in_one_request_ends_it_alone(
    target: Target, drafter: BlockDrafter, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> NoReturn:
        raise RuntimeError("broken on purpose")

    def new_session(capacity: int) -> DraftSession:
        return broken() if capacity == 7 + 55 else BlockDrafter.new_session(drafter, capacity)

    chosen = None if fault.startswith("plain") else drafter
    engine = Engine(target, chosen, config=EngineConfig(max_requests=8, token_budget=40, block_size=4, num_blocks=80))
    greedy = [Request(f"greedy {i}", prompt, rules=StopRules(20, ())) for i, prompt in enumerate(prompts(3))]
    for request in (others := [*sampled(coupled=True), *greedy]):
        engine.submit(request)
        if request.id == "1":
            engine.submit(Request("bad", [9] * 7, SamplingParams(1.0, seed=1), StopRules(55, stop_ids=())))
    state = engine._states["bad"]
    if fault == "session":
        monkeypatch.setattr(drafter, "new_session", new_session)
    elif fault == "text":
        monkeypatch.setattr(state.text, "cut", broken)
    else:
        state.source = Breaking("accept" if fault == "verification" else "choose", last=3)
    outputs: list[Output] = []
    while not engine.idle:
        outputs += engine.step()
    (last,) = [output for output in outputs if output.finish == "error"]
    assert last.id == "bad" and not last.tokens and str(last.error).endswith("broken on purpose")
    assert outputs.index(last) == max(i for i, output in enumerate(outputs) if output.id == "bad")
    assert engine.scheduler.allocator.used == 0 and engine.last is not None and engine.last.running == 0
    for request in others:
        tokens = [token for output in outputs if output.id == request.id for token in output.tokens]
        assert tokens == generate(target, request.prompt, None, request.params, request.rules).tokens


def test_refusals(target: Target) -> None:
    engine = Engine(target, config=EngineConfig(max_requests=2, token_budget=8, block_size=4, num_blocks=4))
    engine.submit(Request("a", [5, 6], rules=StopRules(4)))
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.submit(Request("a", [5]))
    with pytest.raises(ValueError, match=r"5 KV blocks of 4, the pool has 4"):
        engine.submit(Request("b", [5] * 7, rules=StopRules(10)))
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.submit(Request("c", []))
    with pytest.raises(ValueError, match="prompt token 4000 is outside toy's vocabulary of 97"):
        engine.submit(Request("d", [5, 4000]))
    with pytest.raises(ValueError, match="ends drafts at its min_confidence"):
        Engine(target, policy=SkipDrafting(SpsTable([1.0]), ThresholdPolicy(0.5)))
    with pytest.raises(ValueError, match=r"token_budget=8 is below max_requests=9"):
        EngineConfig(max_requests=9, token_budget=8)
    with pytest.raises(ValueError, match="num_blocks=0"):
        EngineConfig(num_blocks=0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=60), st.integers(12, 40))
@settings(max_examples=200, deadline=None)
def test_blocks_are_never_handed_out_twice(actions: list[tuple[int, int]], total: int) -> None:
    allocator = BlockAllocator(total)
    held: dict[int, list[int]] = {}
    for owner, count in actions:
        if owner in held and count > 6:
            allocator.release(held.pop(owner))
        elif count <= allocator.available:
            mine = held.setdefault(owner, [])
            mine += allocator.allocate(count, mine[-1] if mine else None)
        taken = [block for blocks in held.values() for block in blocks]
        assert len(set(taken)) == len(taken) == allocator.used and all(0 <= b < total for b in taken)


def test_requests_of_one_size_stay_in_one_piece() -> None:
    """Eight requests that grow in turns to an eighth of the pool less a block each: no copy for attention."""
    allocator = BlockAllocator(128)
    held = [allocator.allocate(4) for _ in range(8)]
    for _ in range(3):
        for blocks in held:
            blocks += allocator.allocate(1, blocks[-1])
    assert all(blocks == list(range(blocks[0], blocks[0] + len(blocks))) for blocks in held)


sizes = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=8)


@given(sizes, st.integers(1, 6), st.integers(6, 40), st.integers(0, 7), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_the_scheduler_serves_everyone(
    requests: list[tuple[int, int]], most: int, budget: int, reach: int, chance: random.Random
) -> None:
    """Any sizes, any accepted lengths, a pool as small as may be: everybody ends, no limit is broken."""
    blocks = max(-(-(length + new) // 4) for length, new in requests)
    scheduler = Scheduler(EngineConfig(most, budget, 4, blocks), reach)
    for i, (length, new) in enumerate(requests):
        scheduler.add(str(i), length, new)
    for _ in range(3000):
        plan = scheduler.plan()
        if not plan.work:
            break
        assert sum(work.prefill + (1 + work.limit if work.decodes else 0) for work in plan.work) <= budget
        assert len(scheduler.running) <= most and {work.id for work in plan.work} <= set(scheduler.running)
        for work in plan.work:
            progress = scheduler.running[work.id]
            rows = work.prefill + (1 + work.limit if work.decodes else 0)
            assert progress.cached + rows <= len(progress.blocks) * 4, "a row without a slot"
            if not work.decodes:
                scheduler.advance(work.id, work.prefill)
                continue
            scheduler.commit(work.id, chance.randint(1, work.limit + 1))
            assert progress.length <= progress.capacity
            if progress.length == progress.capacity:
                scheduler.remove(work.id)
                assert work.id not in scheduler.running
    assert not scheduler.running and not scheduler.waiting and scheduler.allocator.used == 0


def test_slots_of_unused_drafts_come_back_before_anybody_is_preempted() -> None:
    """Two requests and five blocks: the first drafted over three of them and kept one token."""
    scheduler = Scheduler(EngineConfig(max_requests=2, token_budget=16, block_size=4, num_blocks=5), draft_slots=7)
    scheduler.add("a", 1, 12)
    assert scheduler.plan().work[0].decodes
    scheduler.commit("a", 1)
    scheduler.add("b", 4, 8)
    assert [work.limit for work in scheduler.plan().work if work.id == "a"] == [7]
    scheduler.commit("a", 1)
    scheduler.commit("b", 1)
    plan = scheduler.plan()
    assert not plan.preempted and {work.id for work in plan.work} == {"a", "b"}
    scheduler.commit("a", 2)
    for _ in range(5):
        scheduler.commit("b", 1)
        assert not scheduler.plan().preempted


class Sometimes(FixedPolicy):
    """Everybody drafts in every `period`-th step, 0 for never."""

    def __init__(self, period: int) -> None:
        super().__init__()
        object.__setattr__(self, "period", period)
        object.__setattr__(self, "step", 0)

    @property
    def skips(self) -> bool:
        return True

    def depths(self, view: PlanView) -> NDArray[np.int64]:
        object.__setattr__(self, "step", self.step + 1)
        drafts = self.period > 0 and self.step % self.period == 0
        return np.full(len(view.idle_R), view.expected_RK.shape[1] * drafts)


def watch_reading(drafter: BlockDrafter, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[list[int], Tensor]]]:
    """What the drafter reads from now on, by session: tokens and their aux hidden states, filled as it does."""
    opened: list[DraftSession] = []
    parts: list[list[tuple[list[int], Tensor]]] = []

    def extend(sessions: Sequence[DraftSession], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        assert aux_TLD is not None
        for session, part, own_TLD in zip(sessions, tokens, aux_TLD.split([*map(len, tokens)]), strict=True):
            if not any(session is one for one in opened):
                opened.append(session)
                parts.append([])
            parts[[session is one for one in opened].index(True)].append((list(part), own_TLD.clone()))
        BlockDrafter.extend(drafter, sessions, tokens, aux_TLD)

    monkeypatch.setattr(backoff_module, "_LONGEST", 0)  # what it refuses holds for the round alone
    monkeypatch.setattr(drafter, "extend", extend)
    return parts


def check_reading(
    target: Target, drafter: BlockDrafter, texts: Sequence[list[int]], parts: list[tuple[list[int], Tensor]]
) -> None:
    """A session read one of these texts from its beginning on, with the hidden states of the text alone."""
    own = [token for part, _ in parts for token in part]
    assert own in [text[: len(own)] for text in texts]
    alone = target.forward(torch.tensor([own]), target.new_cache(len(own)), drafter.aux_layers).aux_BTLD
    assert alone is not None
    torch.testing.assert_close(torch.cat([aux_TLD for _, aux_TLD in parts]), alone[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("period", [0, 1, 3])
def test_the_drafter_reads_when_it_drafts(
    target: Target, drafter: BlockDrafter, period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def propose(calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        assert [call.session.length for call in calls] == [call.position - 1 for call in calls]
        return BlockDrafter.propose(drafter, calls, min_confidence)

    read = watch_reading(drafter, monkeypatch)
    monkeypatch.setattr(drafter, "propose", propose)
    engine = Engine(target, drafter, policy=Sometimes(period), config=EngineConfig(4, 24, 4, 40))
    requests = [Request(str(i), prompt, rules=StopRules(12)) for i, prompt in enumerate(prompts(6))]
    tokens = finish(engine, requests)
    for request in requests:
        assert_solo(target, request, tokens[request.id])
    assert bool(read) == (period > 0)
    for parts in read:
        check_reading(target, drafter, [[*one.prompt, *tokens[one.id]] for one in requests], parts)
    if period == 3:
        later = [len(part) for parts in read for part, _ in parts[1:]]
        assert max(later) > 1, "what was skipped is read at once"


def test_what_waits_for_the_drafter_goes_with_a_preempted_request(
    target: Target, drafter: BlockDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody drafts before one of two is preempted; it is read anew, once, when it drafts."""
    read = watch_reading(drafter, monkeypatch)
    engine = Engine(target, drafter, policy=Sometimes(45), config=EngineConfig(2, 64, 4, 16))
    preempted = watch_preemptions(engine)
    requests = [Request(str(i), [5, 7 + i, 9, 11], rules=StopRules(40, stop_ids=())) for i in range(2)]
    tokens = finish(engine, requests)
    assert len(preempted) == 1 and len(read) == 1
    check_reading(target, drafter, [[*one.prompt, *tokens[one.id]] for one in requests], read[0])


def test_a_gate_that_refuses_is_asked_again_later(target: Target, drafter: BlockDrafter) -> None:
    """Behind 1, 3, 7, ... rounds (at most 7 of few requests), and at once where half have gone or a quarter is new."""
    gate, asked = Sometimes(0), list[int]()
    engine = Engine(target, drafter, gate, config=EngineConfig(8, 64, 4, 200))
    lengths = {0: [60] * 2 + [34] * 4, 46: [9], 48: [10]}  # of the responses, by the round in which they begin
    for round in range(60):
        for number, length in enumerate(lengths.get(round, [])):
            engine.submit(Request(f"{round} {number}", [1, 2, 3], rules=StopRules(length, stop_ids=())))
        before = gate.step
        engine.step()
        asked += [round] * (gate.step - before)
    # In round 33 only one token more may come of four, so two are left to draft; in round 47 one of three is new, in
    # round 49 one of four.
    assert asked == [1, 3, 7, 15, 31, 33, 41, 47, 49, 57]


def test_unread_aux_layers_are_bounded(target: Target, drafter: BlockDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting_module, "_MOST_UNREAD", 40)
    monkeypatch.setattr(drafting_module, "_MOST_STEPS", 5)
    engine = Engine(target, drafter, policy=Sometimes(0), config=EngineConfig(1, 16, 16, 64))
    engine.submit(Request("long", prompts(1, longest=1)[0] * 200, rules=StopRules(60, stop_ids=())))
    most = steps = 0
    while not engine.idle:
        engine.step()
        most = max([most, *(live.unread_tokens for live in engine._states.values())])
        steps = max(steps, len(engine.drafting._plain_steps.aux))
    assert 24 < most <= 40 and steps == 5


def test_what_waits_for_the_drafter_holds_no_rows_of_other_requests(target: Target, drafter: BlockDrafter) -> None:
    engine = Engine(target, drafter, policy=Sometimes(0), config=EngineConfig(3, 64, 16, 64))
    for number, prompt in enumerate(prompts(3)):
        engine.submit(Request(str(number), prompt, rules=StopRules(6, stop_ids=())))
    held = []
    while not engine.idle:
        engine.step()
        held += [aux for live in engine._states.values() for _, aux in live.unread if aux is not None]
    assert all(aux.untyped_storage().nbytes() == aux.nbytes for aux in held)
    assert {len(aux) for aux in held} > {1}


@pytest.mark.slow
@torch.inference_mode()
def test_the_real_model_in_company(smollm: Target) -> None:
    """Chunked prefill, ragged verification and the shipped drafter: 12 requests of SmolLM2 as alone."""
    from outrider.checkpoints.checkpoint import load_checkpoint
    from outrider.checkpoints.published import shipped_drafter

    path = shipped_drafter("SmolLM2-135M-Instruct")
    assert path is not None and smollm.tokenizer is not None
    engine = Engine(smollm, load_checkpoint(path).serve(smollm), config=EngineConfig(5, 64, 16, 200))
    texts = ["Count to twelve.", "What is 17 + 25?", "Write a haiku about rain.", "def add(a, b):"] * 3
    requests = [
        Request(str(i), smollm.tokenizer(f"{i}. {text}")["input_ids"], rules=StopRules(24))
        for i, text in enumerate(texts)
    ]
    found = finish(engine, requests)
    for request in requests:
        assert_solo(smollm, request, found[request.id])
