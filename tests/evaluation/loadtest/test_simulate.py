"""Traces say what every policy would have committed; the simulator takes the engine's steps and charges the machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.backends.local import default_variants
from outrider.decoding.cost import Ints
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.policies import (
    FixedPolicy,
    LookAhead,
    PlanView,
    Policy,
    PrefixScheduler,
    SkipDrafting,
    ThresholdPolicy,
)
from outrider.decoding.prompt_lookup import Lookup
from outrider.decoding.request import Output, Request, StepRecord, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.dflash import BlockDrafter
from outrider.drafters.draft import Draft
from outrider.drafters.ngram import HybridDrafter, NgramConfig
from outrider.evaluation.loadtest.config import Sla
from outrider.evaluation.loadtest.load import Ask
from outrider.evaluation.loadtest.metrics import Point, summarise_points
from outrider.evaluation.loadtest.simulate import (
    Cluster,
    Machine,
    Scaled,
    SimulatedEngine,
    TableMachine,
    check_comparable,
    compare,
    load_machine,
    serve,
    simulate_sweep,
)
from outrider.evaluation.loadtest.sweep import Sweep
from outrider.evaluation.loadtest.traces import Response, Traces, record
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.toys.command_line import Run, in_process
from tests.toys.policies import Gated
from tests.toys.profiles import SETTING, cells_of, linear, profile_of
from tests.toys.target_directory import save_toy_drafter, save_toy_target

GAMMA, STOP = 4, 0
LINEAR = TableMachine(sps=[1 / (0.1 + 0.01 * b) for b in range(1, 400)], draft_seconds=[0.05], other_seconds=0.002)
POLICIES: list[Policy] = [
    FixedPolicy(),
    FixedPolicy(0),
    FixedPolicy(2),
    ThresholdPolicy(0.55),
    PrefixScheduler(LINEAR),
    LookAhead(LINEAR),
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 97, (3 + 3 * i,), generator=generator).tolist() for i in range(12)]


@pytest.fixture(scope="module")
def recorded(target: Target, drafter: BlockDrafter, prompts: list[list[int]]) -> Traces:
    return record(target, drafter, [Ask(p) for p in prompts], StopRules(30, stop_ids=(STOP,)), {"target": "toy"})


def made(*responses: tuple[int, Sequence[int]], stopped: bool = True, confidence: float = 0.9) -> Traces:
    """Responses of (prompt length, A_n of every position), blocks of GAMMA wherever they fit."""
    found, drafted, accepted = list[Response](), list[int](), list[int]()
    for number, (prompt, counts) in enumerate(responses):
        found.append(Response((number,) * prompt, list(range(len(counts))), stopped, len(drafted)))
        drafted += [GAMMA if stopped else min(GAMMA, len(counts) - n - 1) for n in range(len(counts))]
        accepted += counts
    confidences_NK = np.where(np.arange(GAMMA) < np.array(drafted)[:, None], confidence, 0).astype(np.float32)
    return Traces(found, confidences_NK, np.array(drafted), np.array(accepted), {})


def run(engine: SimulatedEngine | Engine, requests: Sequence[Request]) -> tuple[list[StepRecord], list[list[Output]]]:
    for request in requests:
        engine.submit(request)
    records, outputs = list[StepRecord](), list[list[Output]]()
    while not engine.idle:
        outputs.append(engine.step())
        assert engine.last is not None
        records.append(engine.last)
    return records, outputs


def requests_for(traces: Traces, tokens: int) -> list[Request]:
    rules = StopRules(tokens, stop_ids=(STOP,))
    return [Request(str(i), list(r.prompt), rules=rules) for i, r in enumerate(traces.responses)]


@pytest.mark.parametrize(("length", "tokens"), [(None, 30), (0, 30), (2, 11)])
def test_traces_tell_every_round_of_decoding(
    target: Target, drafter: BlockDrafter, recorded: Traces, length: int | None, tokens: int
) -> None:
    accepted = 0
    for request in requests_for(recorded, tokens):
        real = generate(target, request.prompt, drafter, rules=request.rules, policy=FixedPolicy(length))
        response, place = recorded.find(request.prompt), 0
        assert response.tokens[:tokens] == real.tokens
        for stats in real.rounds:
            row = response.start + place
            drafted = min(int(recorded.drafted_N[row]), tokens - place - 1)
            admitted = drafted if length is None else min(drafted, length)
            committed = min(int(recorded.accepted_N[row]), admitted) + 1
            assert (stats.proposed, len(stats.tokens)) == (drafted, min(committed, len(real.tokens) - place))
            assert recorded.confidences_NK[row, :drafted].tolist() == pytest.approx(list(stats.confidences), abs=1e-6)
            place += len(stats.tokens)
            accepted += stats.accepted
    assert accepted > 10 or length == 0


def test_a_stop_ends_a_trace(recorded: Traces) -> None:
    assert any(r.stopped for r in recorded.responses) and not all(r.stopped for r in recorded.responses)
    for response in recorded.responses:
        assert response.stopped == (response.tokens[-1] == STOP) and len(response.tokens) <= 30


COUNTED = ("requests", "drafting", "tokens", "prefill_tokens", "proposed", "admitted", "accepted", "committed")
QUEUES = ("running", "waiting", "used_blocks")


@pytest.mark.parametrize(("policy", "skip"), [*((policy, False) for policy in POLICIES), (LookAhead(LINEAR), True)])
def test_the_simulator_takes_the_steps_of_the_engine(
    target: Target, drafter: BlockDrafter, recorded: Traces, policy: Policy, skip: bool
) -> None:
    """Chunks of prefill, preemption, gates and policies with memory: every step has the same counts."""
    config = EngineConfig(max_requests=5, token_budget=24, block_size=4, num_blocks=28)
    policy = SkipDrafting(LINEAR, policy) if skip else policy
    requests = requests_for(recorded, 30)
    real, outputs = run(Engine(target, drafter, policy, config), requests)
    simulated, replayed = run(SimulatedEngine(recorded, LINEAR, policy, config), requests)
    assert len(real) == len(simulated)
    for mine, theirs in zip(simulated, real, strict=True):
        assert [getattr(mine, n) for n in COUNTED + QUEUES] == [getattr(theirs, n) for n in COUNTED + QUEUES]
    assert [[(o.id, o.tokens, o.finish) for o in step] for step in replayed] == [
        [(o.id, o.tokens, o.finish) for o in step] for step in outputs
    ]
    assert any(after.waiting > before.waiting for before, after in pairwise(real)), "no preemption"


class NowAndThen(FixedPolicy):
    """The drafter drafts where the text is of odd length."""

    def depths(self, view: PlanView) -> Ints:
        return np.where(view.contexts_R % 2 == 1, view.expected_RK.shape[1], 0)


@pytest.mark.parametrize(
    ("policy", "skip", "slots"),
    [
        (FixedPolicy(), False, None),
        (FixedPolicy(), False, 2),
        (ThresholdPolicy(0.55), False, None),
        (LookAhead(LINEAR), True, None),
    ],
)
def test_copies_are_taken_where_the_engine_takes_them(
    target: Target,
    drafter: BlockDrafter,
    prompts: list[list[int]],
    policy: Policy,
    skip: bool,
    slots: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are found in the recorded text again; only drafts of the drafter itself are recorded."""
    taken, copied = list[list[int]](), Lookup.draft

    def watched(self: Lookup, limit: int, min_confidence: float) -> Draft:
        found = copied(self, limit, min_confidence)
        taken.append(found.tokens)
        return found

    monkeypatch.setattr(Lookup, "draft", watched)
    beside = HybridDrafter(drafter, NgramConfig(6))
    asks = [Ask(prompt * 3, SamplingParams(temperature=0.7, seed=i, coupled=True)) for i, prompt in enumerate(prompts)]
    recorded = record(target, beside, asks[:6], StopRules(30, stop_ids=(STOP,)), {})
    assert recorded.gamma == GAMMA and recorded.slots == 6
    config = EngineConfig(max_requests=4, token_budget=24, block_size=4, num_blocks=60)
    both = SkipDrafting(LINEAR, policy) if skip else Gated(policy, NowAndThen())
    rules = StopRules(30, stop_ids=(STOP,))
    requests = [Request(str(i), list(ask.prompt), ask.params, rules) for i, ask in enumerate(asks[:6])]
    served = beside if slots is None else beside.limited(slots)
    real, _ = run(Engine(target, served, both, config), requests)
    theirs = taken.copy()
    simulated, _ = run(SimulatedEngine(recorded, LINEAR, both, config, slots), requests)
    assert taken == theirs * 2 and (sum(map(len, theirs)) >= 5 or not isinstance(policy, FixedPolicy))
    assert [[getattr(r, n) for n in COUNTED] for r in simulated] == [[getattr(r, n) for n in COUNTED] for r in real]


def test_plain_decoding_is_the_engine_without_a_drafter(target: Target, recorded: Traces) -> None:
    config = EngineConfig(max_requests=3, token_budget=16, block_size=4, num_blocks=40)
    real, _ = run(Engine(target, config=config), requests_for(recorded, 12))
    simulated, _ = run(SimulatedEngine(recorded, LINEAR, config=config, slots=0), requests_for(recorded, 12))
    assert [[getattr(r, n) for n in COUNTED] for r in simulated] == [[getattr(r, n) for n in COUNTED] for r in real]


def test_one_request_by_hand() -> None:
    """Prompt 3: a step of 3 rows gives token 0; then blocks at 1 (2 of 4 right), at 4 (all 4) and at 9 (none)."""
    traces = made((3, [0, 2, 0, 0, 4, 0, 0, 0, 0, 0, 0]))
    records, outputs = run(SimulatedEngine(traces, LINEAR), requests_for(traces, 11))
    assert [len(o.tokens) for step in outputs for o in step] == [1, 3, 5, 1, 1]
    assert [r.tokens for r in records] == [3, 5, 5, 2, 1]
    assert [r.accepted for r in records] == [0, 2, 4, 0, 0]
    expected = [0.13 + 0.002, 0.15 + 0.052, 0.15 + 0.052, 0.12 + 0.052, 0.11 + 0.002]
    assert [r.seconds for r in records] == pytest.approx(expected)
    assert [o.finish for step in outputs for o in step] == [None] * 4 + ["stop"]
    assert all(r.draft_seconds + r.verify_seconds + r.other_seconds == pytest.approx(r.seconds) for r in records)


def test_two_requests_by_hand() -> None:
    """They share steps; the longer one goes on alone. Fixed length 1."""
    traces = made((2, [0, 1, 0, 0]), (4, [0, 1, 0, 0, 1, 0, 0]))
    records, outputs = run(SimulatedEngine(traces, LINEAR, FixedPolicy(1)), requests_for(traces, 7))
    assert [[(o.id, len(o.tokens)) for o in step] for step in outputs] == [
        [("0", 1), ("1", 1)],
        [("0", 2), ("1", 2)],
        [("0", 1), ("1", 1)],
        [("1", 2)],
        [("1", 1)],
    ]
    assert [(r.tokens, r.drafting) for r in records] == [(6, 0), (4, 2), (4, 2), (2, 1), (1, 0)]


def test_preemption_by_hand() -> None:
    """6 blocks of 2 for two requests that need 4 each in the end: the younger starts again once the elder is done."""
    traces = made((3, [0] * 5), (3, [0] * 5))
    config = EngineConfig(max_requests=2, token_budget=8, block_size=2, num_blocks=6)
    simulated = SimulatedEngine(traces, LINEAR, FixedPolicy(0), config=config, slots=0)
    records, outputs = run(simulated, requests_for(traces, 5))
    assert [[o.id for o in step] for step in outputs] == [["0", "1"]] * 4 + [["0"], ["1"]]
    assert [r.waiting for r in records] == [0, 0, 0, 0, 1, 0]
    assert records[-1].prefill_tokens == 6 and records[-1].used_blocks == 0


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_nothing_is_lost_whatever_the_load(seed: int) -> None:
    chooser = np.random.default_rng(seed)
    shapes = []
    for _ in range(12):
        length = int(chooser.integers(1, 30))
        left = np.arange(length)[::-1]
        shapes.append((int(chooser.integers(1, 20)), np.minimum(chooser.integers(0, 5, length), left).tolist()))
    traces = made(*shapes)
    config = EngineConfig(max_requests=4, token_budget=16, block_size=4, num_blocks=16)
    replicas = [SimulatedEngine(traces, LINEAR, LookAhead(LINEAR), config=config) for _ in range(2)]
    cluster = Cluster(replicas)
    for request in requests_for(traces, 30):
        cluster.submit(request)
    found: dict[str, list[int]] = {}
    before = cluster.now()
    while not cluster.idle:
        for output in cluster.step():
            found.setdefault(output.id, []).extend(output.tokens)
        assert cluster.now() >= before
        before = cluster.now()
    assert found == {str(i): r.tokens for i, r in enumerate(traces.responses)}
    assert all(replica.scheduler.allocator.used == 0 for replica in replicas)


def test_replicas_by_hand() -> None:
    """Prompts of 2, 10 and 2 tokens, two tokens each; the third request comes when the first step has ended."""
    traces = made((2, [0, 0]), (10, [0, 0]), (2, [0, 0]))
    plain = [SimulatedEngine(traces, LINEAR, slots=0) for _ in range(2)]
    cluster = Cluster(plain, "round-robin")
    first, second, third = requests_for(traces, 2)
    cluster.submit(first)
    cluster.submit(second)
    events = [([o.id for o in cluster.step()], cluster.now())]
    cluster.submit(third)
    while not cluster.idle:
        events.append(([o.id for o in cluster.step()], cluster.now()))
    # A step takes 0.102 + 0.01 a row. Replica 0: 2 rows, 3 (an anchor, the third prompt), 1. Replica 1: 10, 1.
    times = [0.122, 0.202, 0.122 + 0.132, 0.202 + 0.112, 0.254 + 0.112]
    assert [ids for ids, _ in events] == [["0"], ["1"], ["0", "2"], ["1"], ["2"]]
    assert [now for _, now in events] == pytest.approx(times)


def test_the_least_loaded_replica_gets_the_request() -> None:
    traces = made((2, [0] * 9), (2, [0, 0]), (2, [0] * 9))
    engines = [SimulatedEngine(traces, LINEAR, slots=0) for _ in range(2)]
    cluster = Cluster(engines)
    first, second, third = requests_for(traces, 9)
    cluster.submit(first)
    cluster.submit(second)
    while not engines[1].idle:
        cluster.step()
    cluster.submit(third)
    assert [engine.load for engine in engines] == [1, 1]
    assert cluster.cancel("2") and not cluster.cancel("2") and engines[1].idle


def test_the_same_load_gives_the_same_seconds() -> None:
    traces = made(*((3 + i, [min(i % 5, 8 - n) for n in range(9)]) for i in range(9)))

    def seconds() -> list[float]:
        engine = SimulatedEngine(traces, LINEAR, SkipDrafting(LINEAR, PrefixScheduler(LINEAR)))
        return [r.seconds for r in run(engine, requests_for(traces, 9))[0]]

    assert seconds() == seconds()


def test_requests_that_no_trace_answers_are_refused(recorded: Traces) -> None:
    engine = SimulatedEngine(recorded, LINEAR)
    cut = next(r for r in recorded.responses if not r.stopped)
    with pytest.raises(ValueError, match="no trace of a prompt of 2 tokens"):
        engine.submit(Request("a", [5, 6]))
    with pytest.raises(ValueError, match="asks for 31 tokens, its trace has 30"):
        engine.submit(Request("a", cut.prompt, rules=StopRules(31)))
    with pytest.raises(ValueError, match=r"asks for .*temperature=0\.5.*its trace has .*temperature=0\.0"):
        engine.submit(Request("a", cut.prompt, SamplingParams(temperature=0.5), StopRules(3)))
    assert engine.idle
    engine.submit(Request("a", cut.prompt, rules=StopRules(3)))
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.submit(Request("a", cut.prompt, rules=StopRules(3)))
    assert engine.cancel("a") and not engine.cancel("a") and engine.idle


def test_traces_come_back_from_disk(recorded: Traces, tmp_path: Path) -> None:
    recorded.save(tmp_path / "traces.npz")
    found = Traces.load(tmp_path / "traces.npz")
    assert [asdict(r) for r in found.responses] == [asdict(r) for r in recorded.responses]
    for name in ("confidences_NK", "drafted_N", "accepted_N"):
        np.testing.assert_array_equal(getattr(found, name), getattr(recorded, name))
    assert found.about == recorded.about and found.gamma == GAMMA
    assert [path.name for path in tmp_path.iterdir()] == ["traces.npz"]


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no traces at .*record them"):
        Traces.load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:100])
    for name in ("text.npz", "other.npz", "cut.npz"):
        with pytest.raises(ValueError, match="holds no traces"):
            Traces.load(tmp_path / name)


def test_machines_scale_and_extrapolate(tmp_path: Path) -> None:
    table = {"sps": [10, 5], "draft_seconds": [0.02, 0.03], "other_seconds": 0.001}
    (tmp_path / "table.json").write_text(json.dumps(table))
    machine: Machine = load_machine(tmp_path / "table.json", {})
    assert [machine.draft_seconds(n) for n in range(5)] == pytest.approx([0, 0.02, 0.03, 0.04, 0.05])
    tokens = np.array([1, 2, 9])
    assert machine.seconds(tokens, 3, 100).tolist() == pytest.approx([0.101, 0.201, 0.201])
    scaled = load_machine(tmp_path / "table.json", {}, draft=2, verify=0.5)
    assert isinstance(scaled, Scaled)
    assert scaled.seconds(tokens, 3, 100).tolist() == pytest.approx([0.051, 0.101, 0.101])
    assert scaled.draft_seconds(2) == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ('{"sps": []}', "sps"),
        ('{"sps": [1, 0]}', r"json: sps: SPS values .* must be positive numbers, one per token count from 1\.$"),
        ('{"sps": [1], "drafts": 2}', "drafts"),
        ('{"rates": [1]}', "not a profile"),
        ('{"sps": [1], "draft_seconds": [-1]}', "draft_seconds.0: Input should be greater than or equal to 0"),
    ],
)
def test_files_that_are_no_machine_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "machine.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_machine(tmp_path / "machine.json", {})
    with pytest.raises(ValueError, match="no profile at"):
        load_machine(tmp_path / "absent.json", {})


def steady(count: int = 12) -> Traces:
    """Responses alike in length, half of whose drafts are right."""
    traces = made(*((6, [2 if n % 2 else 1 for n in range(17)] + [0] * 3) for _ in range(count)), stopped=False)
    traces.about |= {"threshold": 0.5}
    return traces


def sweep_of(*variants: str, levels: tuple[float, ...], arrivals: Literal["closed", "poisson"] = "closed") -> Sweep:
    return Sweep(arrivals, levels, variants, 1, 24, None, 20, Sla())


def simulated(
    traces: Traces, sweep: Sweep, replicas: int = 1, machine: Machine = LINEAR
) -> dict[tuple[str, float], Point]:
    def serving(name: str, level: float) -> Cluster:
        return serve(name, traces, machine, EngineConfig(), 0.5, replicas)

    points = simulate_sweep(sweep, serving, [Ask(r.prompt) for r in traces.responses])
    return {(point.variant, point.level): point for point in points}


def test_one_user_gets_what_the_steps_cost() -> None:
    """Plain decoding of 20 tokens: one step of 6 rows, 19 of one, whoever comes next."""
    points = simulated(steady(), sweep_of("none", levels=(1, 2)))
    response = 0.102 + 0.06 + 19 * 0.112
    metrics = points["none", 1].metrics
    assert metrics.tokens_per_second == pytest.approx(20 / response)
    assert (metrics.ttft_p50, metrics.ttft_p95) == pytest.approx((0.162, 0.162))
    assert metrics.user_p50 == pytest.approx(1 / 0.112) and metrics.budget == metrics.tau == 1
    assert points["none", 2].metrics.tokens_per_second > 1.5 * metrics.tokens_per_second


def test_replicas_multiply_throughput_and_share_poisson_arrivals() -> None:
    traces = steady()
    alone, four = (
        simulated(traces, sweep_of("fixed-2", levels=(8,))),
        simulated(traces, sweep_of("fixed-2", levels=(32,)), 4),
    )
    one, many = alone["fixed-2", 8].metrics, four["fixed-2", 32].metrics
    assert many.tokens_per_second == pytest.approx(4 * one.tokens_per_second, rel=0.05)
    assert many.tau == pytest.approx(one.tau, rel=0.02)
    light = sweep_of("fixed-2", levels=(0.5,), arrivals="poisson")
    waiting = [simulated(traces, light, replicas)["fixed-2", 0.5].metrics.ttft_p95 for replicas in (1, 4)]
    assert waiting[1] < waiting[0]


def test_every_variant_can_be_simulated_and_better_machines_are_faster() -> None:
    names = default_variants(GAMMA, 0.5, confident=True)
    slow = simulated(steady(), sweep_of(*names, levels=(4,)))
    fast = simulated(steady(), sweep_of(*names, levels=(4,)), machine=Scaled(LINEAR, verify=0.5))
    assert {"none", "fixed-1", "threshold", "async", "look-ahead+skip"} <= {name for name, _ in slow}
    for key, point in slow.items():
        assert fast[key].metrics.tokens_per_second > 1.2 * point.metrics.tokens_per_second
        assert point.same == point.metrics.requests == 24


def test_errors_are_in_per_cent_of_the_measured() -> None:
    points = summarise_points(list(simulated(steady(), sweep_of("none", "fixed-2", levels=(1, 4))).values()))
    real = [p.model_copy(deep=True) for p in points if p.variant == "none"]
    for point in real:
        point.quartiles["tokens_per_second"] = (0.0, point.throughput / (1.25 if point.level == 4 else 1), 0.0)
    assert [(c.variant, c.level, round(c.error, 6)) for c in compare(points, real)] == [("none", 1, 0), ("none", 4, 25)]
    assert [c.ratio_error for c in compare(points, real)] == [pytest.approx(0)] * 2
    faster = [p.model_copy(deep=True) for p in points]
    for point in faster:  # a machine twice as fast, on which drafts were worth a tenth more
        rate = point.throughput * (2 if point.variant == "none" else 2.2)
        point.quartiles["tokens_per_second"] = (0.0, rate, 0.0)
    errors = {c.variant: (c.error, c.ratio_error) for c in compare(points, faster)}
    assert errors["none"] == (pytest.approx(-50), pytest.approx(0))
    assert errors["fixed-2"] == (pytest.approx(100 / 2.2 - 100), pytest.approx(100 / 1.1 - 100))
    assert {c.ratio_error for c in compare(points, [p for p in faster if p.variant != "none"])} == {None}
    with pytest.raises(ValueError, match="no measured point has the variant and level"):
        compare(points[:1], real[1:])


@pytest.fixture
def outrider(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`outrider ARGS` in this process: (exit status, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "200")

    return in_process(monkeypatch, capfd)


def test_the_verb_records_simulates_and_validates(outrider: Run, tmp_path: Path) -> None:
    vocab = save_toy_target(tmp_path / "target", layers=5)
    save_toy_drafter(tmp_path / "drafter", vocab)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"turns": [f"say {i}"]}) + "\n" for i in range(5)))
    (tmp_path / "table.json").write_text(json.dumps({"sps": [10, 9, 8, 7], "draft_seconds": [0.01]}))
    traces, models = tmp_path / "traces.npz", ("--target", tmp_path / "target", "--drafter", tmp_path / "drafter")
    asked = ("--tasks", tmp_path / "p.jsonl", "--max-new-tokens", 8)
    status, stdout, stderr = outrider("simulate", "--record", traces, *models, *asked)
    assert status == 0 and "5 responses" in stdout, stderr
    given = ("simulate", "--traces", traces, "--profile", tmp_path / "table.json", "--max-new-tokens", 8)
    chosen = ("--variants", "none,fixed-2,look-ahead+skip", "--concurrency", "1,3", "--requests", 6)
    status, stdout, stderr = outrider(*given, *chosen, "--out", tmp_path / "first")
    assert status == 0 and "look-ahead+skip" in stdout, stderr
    assert {path.name for path in (tmp_path / "first").iterdir()} == {
        "frontier.json",
        "frontier.png",
        "load.png",
        "gains.png",
    }
    shared = ("--replicas", 2, "--concurrency", 4, "--variants", "none", "--requests", 6)
    status, stdout, stderr = outrider(*given, *shared, "--out", tmp_path / "replicas")
    assert status == 0, stderr
    assert json.loads((tmp_path / "replicas" / "frontier.json").read_text())["settings"]["replicas"] == 2
    validate = ("--validate", tmp_path / "first" / "frontier.json", "--scale-verify", 2)
    status, stdout, stderr = outrider(*given, *chosen, "--out", tmp_path / "second", *validate)
    assert status == 0 and "worst: " in stdout, stderr + stdout
    found = json.loads((tmp_path / "second" / "validation.json").read_text())
    assert len(found["points"]) == 6 and all(-60 < point["error"] < 0 for point in found["points"])
    assert found["points"][0]["variant"] == "none" and found["points"][0]["error"] == pytest.approx(-50.0)

    status, _, stderr = outrider(*given, *chosen[:-1], 7, "--out", tmp_path / "x", *validate)
    assert status == 2 and "requests is 6, here it is 7" in stderr and not (tmp_path / "x").exists(), stderr
    for arguments, message in (
        (("simulate",), "give --traces, --profile and --out"),
        (("simulate", "--record", traces), "--record needs --tasks"),
        ((*given, "--out", tmp_path / "x", "--variants", "threshold"), "the drafter recommends none"),
        ((*given, "--out", tmp_path / "x", "--routing", "best"), "--routing"),
        ((*given, "--out", tmp_path / "x", "--concurrency", "many"), "--concurrency 'many'"),
        ((*given[:-1], 9, "--out", tmp_path / "x"), "its trace has 8"),
        ((*given, "--out", tmp_path / "x", "--validate", tmp_path / "table.json"), "is no frontier.json"),
        ((*given, "--out", tmp_path / "x", "--validate", tmp_path / "none.json"), "no measured points"),
        ((*given, "--out", tmp_path / "x", "--variants", ","), "--variants ',' names nothing"),
    ):
        status, _, stderr = outrider(*arguments)
        assert status == 2 and message in stderr and "Traceback" not in stderr, stderr
    assert not (tmp_path / "x").exists()


def test_only_what_was_measured_under_the_same_load_is_compared() -> None:
    measured: dict[str, object] = sweep_of("none", levels=(1, 2)).settings() | {"token_budget": 512, "target": "t"}
    check_comparable(sweep_of("fixed-1", levels=(4,)).settings() | {"token_budget": 512, "replicas": 1}, measured)
    changes = {"max_new_tokens": 9, "requests": None, "seed": 3, "token_budget": 64, "arrivals": "poisson"}
    for name, value in changes.items():
        with pytest.raises(ValueError, match=rf"another load: {name} is {value}, here it is {measured[name]}\. "):
            check_comparable(measured, measured | {name: value})
    with pytest.raises(ValueError) as every:
        check_comparable(measured, {})
    assert all(f"{name} is None" in str(every.value) for name in changes)


def test_a_profile_of_something_else_is_refused(tmp_path: Path) -> None:
    profile = profile_of(cells_of(linear))
    profile.save(tmp_path / "profile.json")
    same = {"target": SETTING.target, "drafter": SETTING.drafter}
    machine = load_machine(tmp_path / "profile.json", same)
    assert machine.seconds(np.array([9]), 2, 100) == profile.seconds(np.array([9]), 2, 100)
    assert machine.plain().draft_seconds(3) == 0 < machine.draft_seconds(3), "plain decoding has no drafter"
    for name in same:
        with pytest.raises(ValueError, match=f"{name} is .*, the traces are of another"):
            load_machine(tmp_path / "profile.json", same | {name: "another"})
