"""Traces say what every policy would have committed; the simulator takes the engine's steps and charges the machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import randomise, toy_config, toy_target
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.benchmark.cluster import Cluster
from outrider.benchmark.machines import Machine, Scaled, Table, TableMachine, load_machine
from outrider.benchmark.simulate import SimulatedEngine
from outrider.benchmark.traces import Response, Traces, record
from outrider.decoding import StopRules, generate
from outrider.drafters import DSpark, DSparkConfig
from outrider.drafters.packed import PackedDrafter
from outrider.engine import Engine, EngineConfig, Output, Request, StepRecord
from outrider.sampling import SamplingParams
from outrider.scheduling import FixedPolicy, LookAhead, Policy, PrefixScheduler, SkipDrafting, ThresholdPolicy
from outrider.target import Target

GAMMA, STOP = 4, 0
LINEAR = TableMachine(
    Table(sps=[1 / (0.1 + 0.01 * b) for b in range(1, 400)], draft_seconds=[0.05], other_seconds=0.002)
)
POLICIES: list[Policy] = [
    FixedPolicy(),
    FixedPolicy(0),
    FixedPolicy(2),
    ThresholdPolicy(0.55),
    PrefixScheduler(LINEAR),
    LookAhead(LINEAR),
]


@pytest.fixture(scope="module")
def target() -> Target:
    """A toy with few likely tokens: a random drafter is right now and then."""
    found = toy_target()
    found.model.lm_head.weight.data[8:] *= 0.05
    return Target(found.model, None, "toy")


@pytest.fixture(scope="module")
def drafter(target: Target) -> PackedDrafter:
    config = toy_config()
    assert isinstance(config, DSparkConfig)
    module = DSpark(config)
    randomise(module, seed=6)
    return PackedDrafter(module.eval(), target)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 97, (3 + 3 * i,), generator=generator).tolist() for i in range(12)]


@pytest.fixture(scope="module")
def recorded(target: Target, drafter: PackedDrafter, prompts: list[list[int]]) -> Traces:
    return record(target, drafter, prompts, StopRules(30, stop_ids=(STOP,)), {"target": "toy"})


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
    target: Target, drafter: PackedDrafter, recorded: Traces, length: int | None, tokens: int
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
            assert (stats.proposed, stats.committed) == (drafted, min(committed, len(real.tokens) - place))
            assert recorded.confidences_NK[row, :drafted].tolist() == pytest.approx(list(stats.confidences), abs=1e-6)
            place += stats.committed
            accepted += stats.accepted
    assert accepted > 10 or length == 0


def test_a_stop_ends_a_trace(recorded: Traces) -> None:
    assert any(r.stopped for r in recorded.responses) and not all(r.stopped for r in recorded.responses)
    for response in recorded.responses:
        assert response.stopped == (response.tokens[-1] == STOP) and len(response.tokens) <= 30


COUNTED = ("requests", "drafting", "tokens", "prefill_tokens", "proposed", "admitted", "committed")
QUEUES = ("running", "waiting", "used_blocks")


@pytest.mark.parametrize(("policy", "skip"), [*((policy, False) for policy in POLICIES), (LookAhead(LINEAR), True)])
def test_the_simulator_takes_the_steps_of_the_engine(
    target: Target, drafter: PackedDrafter, recorded: Traces, policy: Policy, skip: bool
) -> None:
    """Chunks of prefill, preemption, gates and policies with memory: every step has the same counts."""
    config = EngineConfig(max_requests=5, token_budget=24, block_size=4, num_blocks=28)
    gate = SkipDrafting(LINEAR) if skip else None
    requests = requests_for(recorded, 30)
    real, outputs = run(Engine(target, drafter, policy, gate, config), requests)
    simulated, replayed = run(SimulatedEngine(recorded, LINEAR, policy, gate, config), requests)
    assert len(real) == len(simulated)
    for mine, theirs in zip(simulated, real, strict=True):
        assert [getattr(mine, n) for n in COUNTED + QUEUES] == [getattr(theirs, n) for n in COUNTED + QUEUES]
    assert [[(o.id, o.tokens, o.finish) for o in step] for step in replayed] == [
        [(o.id, o.tokens, o.finish) for o in step] for step in outputs
    ]
    assert any(after.waiting > before.waiting for before, after in pairwise(real)), "no preemption"


def test_plain_decoding_is_the_engine_without_a_drafter(target: Target, recorded: Traces) -> None:
    config = EngineConfig(max_requests=3, token_budget=16, block_size=4, num_blocks=40)
    real, _ = run(Engine(target, config=config), requests_for(recorded, 12))
    simulated, _ = run(SimulatedEngine(recorded, LINEAR, config=config, gamma=0), requests_for(recorded, 12))
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
    simulated = SimulatedEngine(traces, LINEAR, FixedPolicy(0), config=config, gamma=0)
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
    plain = [SimulatedEngine(traces, LINEAR, gamma=0) for _ in range(2)]
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
    engines = [SimulatedEngine(traces, LINEAR, gamma=0) for _ in range(2)]
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
        engine = SimulatedEngine(traces, LINEAR, PrefixScheduler(LINEAR), SkipDrafting(LINEAR))
        return [r.seconds for r in run(engine, requests_for(traces, 9))[0]]

    assert seconds() == seconds()


def test_requests_that_no_trace_answers_are_refused(recorded: Traces) -> None:
    engine = SimulatedEngine(recorded, LINEAR)
    cut = next(r for r in recorded.responses if not r.stopped)
    with pytest.raises(ValueError, match="no trace of a prompt of 2 tokens"):
        engine.submit(Request("a", [5, 6]))
    with pytest.raises(ValueError, match="asks for 31 tokens, its trace has 30"):
        engine.submit(Request("a", cut.prompt, rules=StopRules(31)))
    with pytest.raises(ValueError, match="traces are of greedy decoding"):
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
    assert machine.seconds(tokens, 3, 2, 100).tolist() == pytest.approx([0.131, 0.231, 0.231])
    scaled = load_machine(tmp_path / "table.json", {}, draft=2, verify=0.5)
    assert isinstance(scaled, Scaled)
    assert scaled.seconds(tokens, 3, 2, 100).tolist() == pytest.approx([0.111, 0.161, 0.161])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ('{"sps": []}', "sps"),
        ('{"sps": [1, 0]}', "must be positive"),
        ('{"sps": [1], "drafts": 2}', "drafts"),
        ('{"rates": [1]}', "not a profile"),
    ],
)
def test_files_that_are_no_machine_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "machine.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_machine(tmp_path / "machine.json", {})
    with pytest.raises(ValueError, match="no profile at"):
        load_machine(tmp_path / "absent.json", {})
