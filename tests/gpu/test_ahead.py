"""Steps launched ahead on the simulated device (decoding/ahead.py): what waits, and that no token changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import outrider.decoding.ahead as ahead_module
from outrider.decoding.ahead import Ahead, _Drafts, _Layout, _lengths
from outrider.decoding.cost import SpsTable
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.policies import (
    BY_COST,
    FixedPolicy,
    Policy,
    SkipDrafting,
    ThresholdPolicy,
    causal_order,
    lengths_of,
)
from outrider.decoding.request import Output, Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import BlockDrafter
from outrider.drafters.dspark import DSpark
from outrider.sampling import SamplingParams, SeededSource
from outrider.target.model import Target
from outrider.target.paged_attention import Reader, Tables, divide, plan
from tests.gpu.simulated import SimulatedDevice, simulated_device
from tests.gpu.toys import SAMPLED, decoding, deep_target, dspark
from tests.toys.engine import finish, prompts, toy_drafter
from tests.toys.targets import randomise, toy_config, toy_target

MOST_LAUNCHED = 6  # of a step: numbers, two graphs, the state of the next, and what is read
PARAMS = {"greedy": SamplingParams(), "sampled": SAMPLED["plain"], "nucleus": SAMPLED["nucleus"]}


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulated_device() as found:
        yield found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, device: SimulatedDevice) -> list[tuple[int, bool]]:
    """Of every step that was launched ahead, when it is read: waits of the host so far, and whether the next one is
    under way.
    """
    found: list[tuple[int, bool]] = []
    read = Ahead._read

    def noted(self: Ahead, flight: Any) -> list[Output]:
        found.append((device.counts.syncs, self._flight is not None))
        return read(self, flight)

    monkeypatch.setattr(Ahead, "_read", noted)
    return found


def there(target: Target) -> Target:
    """The target on the device."""
    return Target(target.model.to("cuda"), None, target.name)


def usual(target: Target, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Plain decoding in usual steps."""
    engine = Engine(target, config=EngineConfig(8, 256, 4, 256))
    engine.ahead = None
    return finish(engine, requests)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("requests", [1, 32])
def test_the_host_waits_for_nothing_before_the_next_launch(
    device: SimulatedDevice, reads: list[tuple[int, bool]], requests: int, kind: str, drafted: bool
) -> None:
    """It waits once a step, for the one before, and launches as much for many requests as for one."""
    target = deep_target(4)
    engine = Engine(target, dspark(target, layers=1) if drafted else None, config=EngineConfig(32, 512))
    decoding(engine, requests, PARAMS[kind])
    for _ in range(2):  # these make the graphs
        engine.step()
    for _ in range(5):
        waits, launches = device.counts.syncs, device.counts.launches
        outputs = engine.step()
        assert reads[-1] == (waits, True), device.counts.report()
        assert device.counts.syncs == waits + 1, device.counts.report()
        assert device.counts.launches - launches <= MOST_LAUNCHED, device.counts.report()
        assert len(outputs) == requests and not any(output.error for output in outputs)
        assert engine.last is not None and engine.last.requests == requests


def run(engine: Engine, kind: str) -> dict[str, list[int]]:
    """Requests of different lengths, with stop tokens and limits, one cancelled and one that comes later."""
    params, starts = PARAMS[kind], prompts(7)
    rules = [StopRules(24, stop_ids=()), StopRules(40, range(4, 14)), StopRules(7, ()), StopRules(1, ())]
    rules += [StopRules(50, ()), StopRules(19, ()), StopRules(12, ())]
    for i in range(6):
        most = 2 if i == 5 else None
        own = replace(params, seed=i if params.temperature else None)
        engine.submit(Request(str(i), starts[i], own, rules=rules[i], most_drafts=most))
    found: dict[str, list[int]] = {}
    while not engine.idle:
        for output in engine.step():
            assert output.error is None
            found.setdefault(output.id, []).extend(output.tokens)
        if len(found.get("4", ())) > 9:
            engine.cancel("4")
        if len(found.get("0", ())) > 8 and "6" not in found and "6" not in engine._states:
            engine.submit(Request("6", starts[6], replace(params, seed=6), rules=rules[6]))
    return found


def changed(**changes: Any) -> Callable[[Target], BlockDrafter]:
    """A toy drafter with another config."""

    def made(target: Target) -> BlockDrafter:
        weights = DSpark(toy_config(**changes))
        randomise(weights)
        return BlockDrafter(DrafterWeights(weights.to("cuda")), target)

    return made


DRAFTERS: Mapping[str, Callable[[Target], BlockDrafter | None]] = {
    "none": lambda target: None,
    "dspark": toy_drafter,
    "windowed": changed(layer_types=("sliding_attention", "full_attention"), sliding_window=6),
    "without heads": changed(markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False),
}


@pytest.mark.parametrize(
    ("drafts", "kind"),
    [
        ("none", "greedy"),
        ("none", "nucleus"),
        ("dspark", "greedy"),
        ("dspark", "sampled"),
        ("windowed", "nucleus"),
        ("without heads", "sampled"),
    ],
)
def test_tokens_are_those_of_the_usual_step(
    device: SimulatedDevice, reads: list[tuple[int, bool]], drafts: str, kind: str
) -> None:
    target, found = there(toy_target("qwen3")), []
    for launched_ahead in (True, False):
        engine = Engine(target, DRAFTERS[drafts](target), config=EngineConfig(8, 256, 4, 256))
        if not launched_ahead:
            engine.ahead = None
        count = len(reads)
        found.append(run(engine, kind))
        cancelled = found[-1].pop("4")
        assert 10 <= len(cancelled) < 50
        found[-1]["4"] = cancelled[:10]
        assert (len(reads) - count > 5) == launched_ahead
        assert engine.scheduler.allocator.used == 0
    assert found[0] == found[1]
    assert len(found[0]["1"]) < 40, "it met a stop token"


COST = SpsTable([1 / (1 + 0.12 * tokens) for tokens in range(80)])


@pytest.mark.parametrize(
    ("name", "kind", "drafts"),
    [
        ("prefix", "greedy", "dspark"),
        ("look-ahead", "sampled", "dspark"),
        ("skip", "greedy", "without heads"),
        ("skip", "sampled", "dspark"),
    ],
)
def test_a_budget_of_earlier_steps_is_spent_on_the_device(
    device: SimulatedDevice, reads: list[tuple[int, bool]], name: str, kind: str, drafts: str
) -> None:
    """Drafts are verified in part, and greedy text is plain decoding's."""
    target = there(toy_target("qwen3"))
    policy: Policy = BY_COST["look-ahead" if name == "skip" else name](COST)
    policy = SkipDrafting(COST, policy, prior=0.9) if name == "skip" else policy
    engine = Engine(target, DRAFTERS[drafts](target), policy, config=EngineConfig(4, 256, 4, 256))
    asked = [Request(str(i), prompt, PARAMS[kind], StopRules(20, stop_ids=())) for i, prompt in enumerate(prompts(4))]
    found: dict[str, list[int]] = {request.id: [] for request in asked}
    parts = set()
    for request in asked:
        engine.submit(request)
    while not engine.idle:
        for output in engine.step():
            assert output.error is None
            found[output.id] += output.tokens
            parts.add((output.verified, output.proposed))
    assert len(reads) > 5 and len({verified for verified, _ in parts}) > 1
    assert any(verified < proposed for verified, proposed in parts)
    assert kind == "sampled" or found == usual(target, asked)
    assert {len(tokens) for tokens in found.values()} == {20}


def test_drafts_in_order_of_survival() -> None:
    """As many on the device as `causal_order` admits on the host, of any budget."""
    generator = np.random.default_rng(0)
    for R, K in ((1, 5), (4, 3), (7, 6)):
        logits_RK, terms_2RK = generator.normal(size=(R, K)), generator.normal(size=(2, R, K))
        drafted_R, longest_R = generator.integers(0, K + 1, R), generator.integers(1, K + 1, R)
        for budget in range(R * K + 1):
            layout = _Layout(R, K, 0, pages=1, table=0)
            head_FR = np.zeros((ahead_module._FIELDS, R))
            head_FR[3] = longest_R
            scales_2K = np.stack([np.full(K, 0.5), np.full(K, 0.1)])
            numbers = np.concatenate([part.reshape(-1) for part in (head_FR, np.array([budget]), scales_2K, terms_2RK)])
            given = layout.given(torch.from_numpy(np.append(numbers, 0.0)))
            drafts = _Drafts(
                torch.zeros(R, K, dtype=torch.long),
                torch.ones(R, K),
                torch.from_numpy(logits_RK),
                probs_KRVd=None,
                drafted_R=torch.from_numpy(drafted_R),
            )
            estimates_RK = 1 / (1 + np.exp(-(terms_2RK[0] * (0.5 * logits_RK + 0.1) + terms_2RK[1])))
            most_R = np.minimum(drafted_R, longest_R)
            order_N = causal_order(np.cumprod(estimates_RK, axis=1), most_R)
            assert _lengths(given, drafts).tolist() == lengths_of(order_N[:budget], R).tolist()


def test_others_may_wait_for_a_place(device: SimulatedDevice, reads: list[tuple[int, bool]]) -> None:
    """Steps of those who run are launched ahead until one of them has ended."""
    target, rules = there(toy_target("qwen3")), [StopRules(count, stop_ids=()) for count in (12, 18, 5, 9, 6)]
    asked = [Request(str(i), prompt, rules=own) for i, (prompt, own) in enumerate(zip(prompts(5), rules, strict=True))]
    found = finish(Engine(target, toy_drafter(target), config=EngineConfig(2, 64, 4, 128)), asked)
    assert len(reads) > 5 and found == usual(target, asked)


@pytest.mark.parametrize("policy", [ThresholdPolicy(0.5), BY_COST["goodput"](COST)], ids=["threshold", "goodput"])
def test_a_policy_that_cannot_say_how_many_is_not_launched_ahead(
    device: SimulatedDevice, reads: list[tuple[int, bool]], policy: Policy
) -> None:
    target = there(toy_target("qwen3"))
    engine = Engine(target, toy_drafter(target), policy, config=EngineConfig(4, 64, 4, 128))
    engine.submit(Request("a", [5] * 9, rules=StopRules(20, stop_ids=())))
    while not engine.idle:
        engine.step()
    assert not reads


def test_usual_steps_beside_who_needs_them(device: SimulatedDevice, reads: list[tuple[int, bool]]) -> None:
    """With a request that asks for a trace, or another temperature, until it has ended."""
    target = there(toy_target("qwen3"))
    asked = Request("a", [5] * 9, rules=StopRules(16, stop_ids=()))
    plain = usual(target, [asked])
    for change in ({"trace": True}, {"logprobs": 2}, {"params": SamplingParams(0.5, seed=1)}):
        drafter = toy_drafter(target) if "trace" in change else None
        engine = Engine(target, drafter, config=EngineConfig(4, 64, 4, 128))
        engine.submit(asked)
        engine.submit(Request("b", [6] * 9, **{"rules": StopRules(5, stop_ids=()), **change}))  # type: ignore[arg-type]
        tokens: list[int] = []
        while not engine.idle:
            count = len(reads)
            outputs = {output.id: output for output in engine.step()}
            tokens += outputs["a"].tokens if "a" in outputs else []
            assert "b" not in outputs or len(reads) == count
        assert reads and tokens == plain["a"]
        reads.clear()


def test_a_history_in_the_prefix_cache_is_what_was_launched_ahead(
    device: SimulatedDevice, reads: list[tuple[int, bool]]
) -> None:
    target, found = there(toy_target("qwen3")), []
    for cached in (True, False):
        engine = Engine(target, toy_drafter(target), config=EngineConfig(1, 64, 4, 128, prefix_cache=cached))
        said, accepted = list(range(5, 20)), []
        for turn in range(2):
            outputs = [*engine.run([Request(str(turn), said, rules=StopRules(16, stop_ids=()))])]
            flat = [output for part in outputs for output in part]
            said = said + [token for output in flat for token in output.tokens] + [7]
            accepted += [output.accepted for output in flat]
            assert (flat[0].cached_tokens > 20) == (cached and turn > 0)
        found.append((said, accepted))
    assert found[0] == found[1] and len(reads) > 10


def test_one_request_after_the_other_uses_the_same_graphs(
    device: SimulatedDevice, reads: list[tuple[int, bool]]
) -> None:
    target = there(toy_target("qwen3"))
    drafter, rules, captures = toy_drafter(target), StopRules(20, stop_ids=()), []
    for prompt in ([5] * 9, [6] * 8):
        count = len(reads)
        generate(target, prompt, drafter, rules=rules)
        assert len(reads) > count
        captures.append(sum(n for (kind, _), n in device.counts.places.items() if kind == "capture"))
    assert captures[0] == captures[1] > 0, "the second makes none"


def test_probabilities_that_are_no_numbers_end_requests(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, logits = there(toy_target("qwen3")), Target.logits
    engine = Engine(target, toy_drafter(target), config=EngineConfig(4, 64, 4, 128))
    for id in "ab":
        engine.submit(Request(id, [5] * 9, SamplingParams(1.0, seed=1), StopRules(40, stop_ids=())))
    engine.step()
    monkeypatch.setattr(Target, "logits", lambda self, x: logits(self, x) * torch.nan)
    outputs = engine.step()
    assert {output.id: output.finish for output in outputs} == {"a": "error", "b": "error"} and engine.idle
    assert all("not finite" in str(output.error) for output in outputs)


def test_what_cannot_be_captured_is_launched_as_usual(
    device: SimulatedDevice, reads: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = there(toy_target("qwen3"))
    request = Request("a", [5] * 9, rules=StopRules(20, stop_ids=()))
    plain = usual(target, [request])["a"]

    def waits(self: BlockDrafter, aux_TLD: Tensor, *others: Any, **more: Any) -> None:
        assert aux_TLD.sum().item() < 1e9
        extend_at(self, aux_TLD, *others, **more)

    extend_at = BlockDrafter.extend_at
    monkeypatch.setattr(BlockDrafter, "extend_at", waits)
    engine = Engine(target, toy_drafter(target), config=EngineConfig(4, 64, 4, 128))
    with pytest.warns(UserWarning, match="launched ahead run without CUDA graphs"):
        outputs = [output for part in engine.run([request]) for output in part]
    assert [token for output in outputs for token in output.tokens] == plain and len(reads) == 1


def test_few_blocks(device: SimulatedDevice, reads: list[tuple[int, bool]]) -> None:
    """Requests that together need more blocks than there are: some are preempted, and all say the same."""
    target, rules = there(toy_target("qwen3")), StopRules(24, stop_ids=())
    asked = [Request(str(i), prompt, rules=rules) for i, prompt in enumerate(prompts(4, longest=12))]
    engine = Engine(target, toy_drafter(target), FixedPolicy(), config=EngineConfig(4, 64, 4, num_blocks=19))
    found: dict[str, list[int]] = {request.id: [] for request in asked}
    preempted = 0
    for outputs in engine.run(asked):
        for output in outputs:
            found[output.id] += output.tokens
        preempted += 0 if engine.last is None else engine.last.preempted
    assert reads and preempted and found == usual(target, asked)


def places(readers: Sequence[Reader]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    pages = [len(reader.pages) for reader in readers]
    columns = [
        [len(reader.positions) for reader in readers],
        [reader.past for reader in readers],
        np.cumsum([0, *pages])[:-1],
        [reader.slots for reader in readers],
        np.concatenate([reader.pages for reader in readers]),
    ]
    counts_R, past_R, first_R, slots_R, pages_P = (torch.tensor(np.array(column)) for column in columns)
    return counts_R, past_R, first_R, slots_R, pages_P


@torch.inference_mode()
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("slots", [0, 40])
def test_the_device_divides_attention_as_the_host_does(device: SimulatedDevice, slots: int, window: int | None) -> None:
    """Without a wait, whatever comes behind as padding; of contexts whose chunks are doubled, too."""
    generator = np.random.default_rng(0)
    for past in ([0], [3, 300, 5000], [100_000, 90_000, 80_000, 1, 2]):
        readers, first = [], 0
        for own in past:
            rows = int(generator.integers(1, 9))
            count = -(-(min(own + rows, slots) if slots else own + rows) // 16)
            readers.append(Reader(own, range(own, own + rows), range(first, first + count), slots=slots))
            first += count
        host = plan(readers, 2, 16, window=window)
        counts_R, past_R, first_R, slots_R, pages_P = (x.to("cuda") for x in places(readers))
        padded = [torch.nn.functional.pad(x, (0, 2)) for x in (counts_R, past_R, first_R, slots_R)]
        tables = Tables(padded[2], pages_P, 16, slots_R=padded[3])
        T, waits = host.sizes.rows, device.counts.syncs
        found = divide(padded[0], padded[1], tables, groups=2, rows=T + 5, items=T + 64, window=window, spare_slot=-7)
        assert device.counts.syncs == waits
        rows_T3, requests_R6, items_W4 = (x.cpu() for x in (found.rows_T3, found.requests_R6, found.items_W4))
        parts = torch.from_numpy(host.numbers).split(host.sizes.lengths)
        for part, padded_part in zip(parts, (rows_T3, requests_R6, items_W4), strict=False):
            numbers = padded_part.reshape(-1)
            assert numbers[: len(part)].equal(part) and (numbers[len(part) :] == -1).all()
        assert found.slots_T.tolist() == [*host.slots_T.tolist(), *[-7] * 5]
        assert found.padding_T.tolist() == [False] * T + [True] * 5


def test_numbers_that_a_source_gives_ahead_are_its_next_ones() -> None:
    source, other = SeededSource(7), SeededSource(7)
    first = [other.uniform() for _ in range(50)]
    assert source.ahead(50) == first and source.ahead(9) == first[:9]
    source.skip(3)
    assert [source.uniform() for _ in range(4)] == first[3:7] and source.ahead(43) == first[7:]
