"""What a step of the engine draws, how long it drafts, and what it remembers for the policies."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from outrider.decoding.acceptance import Acceptance
from outrider.decoding.cost import Ints, SpsTable
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.learned_cost import LearnedCost
from outrider.decoding.policies import FixedPolicy, LookAhead, PlanView, SkipDrafting, StepView
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig, Scheduler
from outrider.decoding.trace import RoundTrace
from outrider.drafters.base import DraftCall
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.toys.engine import finish, prompts, toy_drafter, watch_preemptions
from tests.toys.oracle import Oracle
from tests.toys.policies import Gated
from tests.toys.targets import toy_target


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def test_a_preempted_request_goes_on_with_its_random_numbers(target: Target) -> None:
    """Plain sampling draws one number per token, so tokens are those of the request alone, preempted or not."""
    params = [SamplingParams(1.0, seed=i, repetition_penalty=1.0 + 0.3 * (i % 2)) for i in range(6)]
    requests = [Request(str(i), [5, 7 + i], params[i], StopRules(40, stop_ids=())) for i in range(6)]
    engine = Engine(target, None, config=EngineConfig(max_requests=6, token_budget=64, block_size=4, num_blocks=32))
    preempted = watch_preemptions(engine)
    found = finish(engine, requests)
    assert len(set(preempted)) > 1
    for request in requests:
        assert found[request.id] == generate(target, request.prompt, None, request.params, request.rules).tokens


def test_a_trace_changes_no_token_and_is_only_of_who_asks(target: Target) -> None:
    """Sampled, with penalties, among others, some of which are preempted and read their prompts again."""
    params = [SamplingParams(1.0, seed=i, repetition_penalty=1.0 + 0.3 * (i % 2)) for i in range(6)]
    requests = [Request(str(i), [5, 7 + i], params[i], StopRules(40, stop_ids=())) for i in range(6)]
    config = EngineConfig(max_requests=6, token_budget=64, block_size=4, num_blocks=40)
    untraced = finish(Engine(target, toy_drafter(target), FixedPolicy(2), config=config), requests)
    engine = Engine(target, toy_drafter(target), FixedPolicy(2), config=config)
    preempted = watch_preemptions(engine)
    for request in requests:
        engine.submit(replace(request, trace=int(request.id) % 2 == 0))
    told: dict[str, list[RoundTrace | None]] = {request.id: [] for request in requests}
    while not engine.idle:
        for output in engine.step():
            told[output.id].append(output.trace)
    assert preempted
    for id, rounds in told.items():
        if int(id) % 2:
            assert set(rounds) == {None}
            continue
        traces = [one for one in rounds if one is not None]
        assert [token.token for one in traces for token in one.tokens] == untraced[id]
        assert [one.number for one in traces] == list(range(1, len(rounds) + 1))
        assert {token.origin for one in traces for token in one.tokens} <= {"draft", "correction", "bonus", "plain"}
        assert any(one.source == "drafter" and "verifies 2 drafts" in one.reason for one in traces)


def test_drafts_reach_to_the_last_token_but_one(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft is as long as the response may still be, less the token that the target adds itself."""
    drafter, prompt, most = toy_drafter(target), [5, 9, 11], 9
    limits: dict[int, int | None] = {}
    propose = drafter.propose

    def watched(calls: Sequence[DraftCall], min_confidence: float = 0.0) -> object:
        limits.update((call.position, call.limit) for call in calls)
        return propose(calls, min_confidence)

    monkeypatch.setattr(drafter, "propose", watched)
    request = Request("a", prompt, rules=StopRules(most, stop_ids=()))
    finish(Engine(target, drafter, FixedPolicy(0)), [request])  # one token a step: every position is drafted at
    last = len(prompt) + most
    assert sorted(limits) == list(range(len(prompt) + 1, last - 1)), "a step after its prefill"
    for position, limit in limits.items():
        assert limit == min(drafter.gamma, last - position - 1)


def test_the_history_is_what_the_policy_was_shown(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts in full, also those that were rejected or never verified, and of each step only once it is over, with what
    became of them.
    """
    shown: list[StepView] = []
    recorded: list[StepView] = []
    outcomes: list[tuple[int, int]] = []
    record, skip = Acceptance.observe, Acceptance.skip

    class Watching(FixedPolicy):
        def lengths(self, view: StepView) -> Ints:
            assert len(recorded) == len(shown), "a step is remembered after it, not before its policy is asked"
            shown.append(view)
            return super().lengths(view)

    def watched(
        self: Acceptance, ids: Sequence[Hashable], view: StepView, *, verified_R: Ints, accepted_R: Ints
    ) -> None:
        recorded.append(view)
        outcomes.append((int(verified_R.sum()), int(accepted_R.sum())))
        record(self, ids, view, verified_R=verified_R, accepted_R=accepted_R)

    def skipped(self: Acceptance, ids: Sequence[Hashable]) -> None:
        outcomes.append((0, 0))
        skip(self, ids)

    monkeypatch.setattr(Acceptance, "observe", watched)
    monkeypatch.setattr(Acceptance, "skip", skipped)
    requests = [Request(str(i), p, rules=StopRules(12, stop_ids=())) for i, p in enumerate(prompts(4))]
    engine = Engine(target, toy_drafter(target), Watching(1))
    for request in requests:
        engine.submit(request)
    true: list[tuple[int, int]] = []
    while not engine.idle:
        engine.step()
        assert engine.last is not None
        true += [(engine.last.admitted, engine.last.accepted)] * (engine.last.requests > 0)
    assert outcomes == true
    assert len(shown) > 5 and recorded == shown
    assert any(view.drafted_R.max(initial=0) > 1 for view in recorded), "drafts beyond the one that was verified"


def test_costs_are_learned_from_what_steps_were(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every step without prompts its seconds, requests, mean context and drafts."""
    told: list[tuple[float, int, float, dict[str, int]]] = []

    def took(self: LearnedCost, seconds: float, requests: int, context: float, **counts: int) -> None:
        told.append((seconds, requests, context, counts))

    monkeypatch.setattr(LearnedCost, "observe", took)
    cost = LearnedCost(SpsTable([1.0]))
    engine = Engine(target, toy_drafter(target), SkipDrafting(cost, LookAhead(cost)))
    for number, prompt in enumerate(prompts(3)):
        engine.submit(Request(str(number), prompt, rules=StopRules(9 + 4 * number, stop_ids=())))
    steps = []
    while not engine.idle:
        before = [len(state.tokens) for state in engine._states.values()]
        engine.step()
        last = engine.last
        assert last is not None
        if not last.prefill_tokens:
            steps.append((last.seconds, last.requests, np.mean(before), last.admitted, last.drafting))
    assert [(*first, counts["verified"], counts["drafting"]) for *first, counts in told] == steps
    assert any(drafting for *_, drafting in steps) and len({requests for _, requests, *_ in steps}) > 1
    assert {counts["depth"] for *_, counts in told if counts["drafting"]} >= {4}, "the longest draft"


def test_a_step_goes_without_drafts_to_compare_with(target: Target) -> None:
    cost = LearnedCost(SpsTable([1.0]))
    engine = Engine(target, toy_drafter(target), SkipDrafting(cost, LookAhead(cost)))
    for number, prompt in enumerate(prompts(2)):
        engine.submit(Request(str(number), prompt, rules=StopRules(60, stop_ids=()), trace=True))
    drafted, reasons = list[bool](), list[str]()
    while len(drafted) < 6:
        outputs = engine.step()
        last = engine.last
        assert last is not None
        if not last.prefill_tokens:
            drafted.append(bool(last.admitted))
            reasons = [output.trace.reason for output in outputs if output.trace is not None]
    assert drafted == [True, False] * 3
    assert reasons == ["the round went without drafts, to learn what they cost"] * 2


def test_policies_and_gates_are_told_of_the_rest_of_the_step(target: Target) -> None:
    """Rows of prefill, and requests that cannot draft yet, take the step's time too."""
    shown: list[StepView] = []
    asked: list[PlanView] = []
    rest: list[tuple[int, int]] = []
    committed: list[int] = []

    class Shown(FixedPolicy):
        def lengths(self, view: StepView) -> Ints:
            shown.append(view)
            return super().lengths(view)

    class Asked(FixedPolicy):
        def depths(self, view: PlanView) -> Ints:
            asked.append(view)
            return super().depths(view)

    config = EngineConfig(max_requests=6, token_budget=24, block_size=4, num_blocks=200)
    engine = Engine(target, toy_drafter(target), Gated(Shown(1), Asked()), config=config)

    def compare() -> None:
        assert engine.last is not None
        for view in shown:
            assert view.other_tokens == engine.last.prefill_tokens
        for gate_view in asked:
            assert gate_view.other_tokens == engine.last.prefill_tokens
            assert len(gate_view.idle_R) + gate_view.other_requests == engine.last.requests
            rest.append((gate_view.other_tokens, gate_view.other_requests))
        committed.append(engine.last.committed)
        shown.clear()
        asked.clear()

    requests = [Request(str(i), p, rules=StopRules(12, stop_ids=())) for i, p in enumerate(prompts(8))]
    found = finish(engine, requests, compare)
    assert sum(committed) == sum(map(len, found.values()))
    assert max(tokens for tokens, _ in rest) > 0 and max(others for _, others in rest) > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_drafts_are_no_deeper_than_the_gate_says(target: Target, depth: int) -> None:
    class Shallow(FixedPolicy):
        def depths(self, view: PlanView) -> Ints:
            return np.minimum(super().depths(view), depth)

    engine, drafted = Engine(target, toy_drafter(target), Shallow()), 0

    def count() -> None:
        nonlocal drafted
        assert engine.last is not None and engine.last.proposed == engine.last.drafting * depth
        drafted += engine.last.drafting

    finish(engine, [Request(str(i), p, rules=StopRules(12, stop_ids=())) for i, p in enumerate(prompts(3))], count)
    assert (drafted > 0) == (depth > 0)


def test_what_a_request_held_is_given_back(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every drafter session is ended once, those of preempted requests too, and the history forgets the request."""
    drafter = toy_drafter(target)
    opened: list[object] = []
    ended: list[object] = []
    new_session = drafter.new_session

    def watched(capacity: int) -> object:
        opened.append(new_session(capacity))
        return opened[-1]

    monkeypatch.setattr(drafter, "new_session", watched)
    monkeypatch.setattr(drafter, "end", ended.append)
    engine = Engine(target, drafter, config=EngineConfig(max_requests=6, token_budget=64, block_size=4, num_blocks=32))
    preempted = watch_preemptions(engine)
    finish(engine, [Request(str(i), [5, 7 + i], rules=StopRules(40, stop_ids=())) for i in range(6)])
    assert preempted and len(opened) == 6 + len(preempted)
    assert sorted(map(id, ended)) == sorted(map(id, opened))
    assert not engine.drafting.acceptance._slots and not engine.scheduler.running and not engine.scheduler.waiting


def test_a_preempted_request_is_read_anew(target: Target) -> None:
    """Its drafter reads every token once, with none of what waited when it was preempted: the oracle compares them."""
    prompt, rules = [5, 9, 11], StopRules(40, stop_ids=())
    text = generate(target, prompt, rules=rules).tokens
    tight = EngineConfig(max_requests=6, token_budget=64, block_size=4, num_blocks=32)
    engine = Engine(target, Oracle(target, [*prompt, *text], spoil=0.3), config=tight)
    preempted = watch_preemptions(engine)
    assert set(map(tuple, finish(engine, [Request(str(i), prompt, rules=rules) for i in range(6)]).values())) == {
        tuple(text)
    }
    assert len(set(preempted)) > 1


def test_a_greedy_penalty_reads_warped_rows(target: Target) -> None:
    """Greedy picks of a batch are the argmax of raw logits only for requests without a repetition penalty."""
    drafter = toy_drafter(target)
    rules = StopRules(30, stop_ids=())
    requests = [Request(str(i), [5, 7 + i], SamplingParams(repetition_penalty=1.0 + 0.5 * i), rules) for i in range(4)]
    found = finish(Engine(target, drafter), requests)
    for request in requests:
        assert found[request.id] == generate(target, request.prompt, None, request.params, rules).tokens
    assert len({tuple(tokens) for tokens in found.values()}) > 1


def test_a_quarter_of_the_rows_is_kept_for_waiting_prompts() -> None:
    """Drafts of the requests that decode take three quarters of the token budget while another request waits."""
    config = EngineConfig(max_requests=3, token_budget=16, block_size=4, num_blocks=64)
    scheduler = Scheduler(config, draft_slots=15)
    for id in "ab":
        scheduler.add(id, 2, 40)
    for work in scheduler.plan().work:
        scheduler.advance(work.id, work.prefill)
        scheduler.commit(work.id, 1)
    alone = scheduler.plan()
    assert sum(1 + work.limit for work in alone.work) == 16
    scheduler.add("c", 30, 8)
    shared = scheduler.plan()
    assert [work.limit for work in shared.work[:2]] == [5, 5], "12 rows for two anchors and their drafts"
    assert (shared.work[2].id, shared.work[2].prefill) == ("c", 4), "and 4 for the prompt"


def test_prompts_have_few_rows_beside_requests_that_decode_and_all_without() -> None:
    scheduler = Scheduler(EngineConfig(max_requests=3, token_budget=64, num_blocks=64, prompt_rows=10), draft_slots=5)
    scheduler.add("a", 50, 8)
    assert [(work.prefill, work.decodes) for work in scheduler.plan().work] == [(49, True)]
    scheduler.commit("a", 1)
    scheduler.add("b", 15, 8)
    scheduler.add("c", 4, 8)
    rows = []
    for _ in range(2):
        first, *others = scheduler.plan().work
        assert (first.id, first.limit) == ("a", 5)
        rows.append([(work.id, work.prefill, work.decodes) for work in others])
        for work in others:
            (scheduler.commit if work.decodes else scheduler.advance)(work.id, 1 if work.decodes else work.prefill)
    assert rows == [[("b", 10, False)], [("b", 4, True), ("c", 3, True)]]


@pytest.mark.parametrize("seed", range(6))
def test_the_books_of_the_scheduler_balance(seed: int) -> None:
    """In any course of requests: rows within budget and blocks, no block twice or lost, in order of arrival."""
    draw = random.Random(seed)
    config = EngineConfig(max_requests=4, token_budget=12, block_size=4, num_blocks=12)
    scheduler = Scheduler(config, draft_slots=5, trees=seed % 2 == 1)
    arrived: list[str] = []
    preempted = 0
    for step in range(500):
        if draw.random() < 0.3:
            arrived.append(str(step))
            scheduler.add(arrived[-1], draw.randint(1, 24), draw.randint(1, 24))
        if arrived and draw.random() < 0.03:
            scheduler.remove(arrived.pop(draw.randrange(len(arrived))))
        if draw.random() < 0.05:  # the limits of a running scheduler may change
            scheduler.config = replace(config, max_requests=draw.randint(1, 4))
        plan, running = scheduler.plan(), scheduler.running
        assert not plan.admitted or len(running) <= scheduler.config.max_requests
        preempted += len(plan.preempted)
        assert [*running, *(id for id, _ in scheduler.waiting)] == arrived
        held = [block for progress in running.values() for block in progress.blocks]
        assert len(set(held)) == len(held) == scheduler.allocator.used
        assert sum(work.prefill + work.decodes + work.limit for work in plan.work) <= config.token_budget
        for work in plan.work:
            progress = running[work.id]
            ready = progress.cached + work.prefill
            assert ready + work.decodes + work.limit <= config.block_size * len(progress.blocks)
            assert ready == progress.length - 1 if work.decodes else ready < progress.length
            left = progress.capacity - progress.length
            assert scheduler.trees or work.limit < left
            if not work.decodes:
                scheduler.advance(work.id, work.prefill)
                continue
            scheduler.commit(work.id, draw.randint(1, min(1 + work.limit, left)))
            if progress.length == progress.capacity:
                scheduler.remove(work.id)
                arrived.remove(work.id)
    assert preempted > 3


def test_the_youngest_request_gives_way() -> None:
    """When KV blocks run out, the request that arrived last is preempted; the others go on."""
    scheduler = Scheduler(EngineConfig(max_requests=3, token_budget=16, block_size=4, num_blocks=4), draft_slots=0)
    for id in "abc":
        scheduler.add(id, 4, 8)
    assert [work.id for work in scheduler.plan().work] == ["a", "b", "c"]
    for id in "abc":
        scheduler.advance(id, 3)
        scheduler.commit(id, 1)
    step = scheduler.plan()
    assert step.preempted == ["c"] and [work.id for work in step.work] == ["a", "b"]
