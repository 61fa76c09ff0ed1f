"""Decoding on the simulated device: launches and syncs of a step of the engine.

A step of one request on a target of 36 layers launches at most 750 kernels, 1,050 with a DSpark drafter of five layers.
The host waits at most 3 times in a greedy step and 5 times in a sampled one, however many requests there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from outrider.decoding.request import StopRules
from outrider.decoding.structured import Grammar
from outrider.engine.batch import Request
from outrider.engine.engine import Engine
from outrider.engine.scheduler import EngineConfig
from outrider.loadtest.load import Traffic
from outrider.loadtest.traces import record
from outrider.sampling import SamplingParams
from outrider.scheduling.policies import ThresholdPolicy
from outrider.target.linear import PackedLinear
from outrider.target.model import Target
from tests.gpu.simulated import SimulatedDevice, simulated_device
from tests.gpu.toys import MOST_LAUNCHES, MOST_SYNCS, SAMPLED, decoding, deep_target, dspark
from tests.toys.engine import finish, prompts, toy_drafter
from tests.toys.targets import toy_target


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulated_device() as found:
        yield found


def step_of(device: SimulatedDevice, engine: Engine, requests: int, params: SamplingParams) -> None:
    """Count a step in which all requests decode."""
    decoding(engine, requests, params)
    device.counts.reset()
    outputs = engine.step()
    assert len(outputs) == requests and not any(output.error for output in outputs)


@pytest.mark.parametrize("drafted", [False, True])
def test_launches_of_a_round_of_36_layers(device: SimulatedDevice, drafted: bool) -> None:
    target = deep_target(36)
    engine = Engine(target, dspark(target) if drafted else None)
    step_of(device, engine, 1, SamplingParams())
    assert device.counts.launches <= MOST_LAUNCHES["dspark" if drafted else "plain"], device.counts.report()


@pytest.mark.parametrize("requests", [1, 3, 32])
@pytest.mark.parametrize("drafted", [False, True])
def test_syncs_of_a_greedy_step(device: SimulatedDevice, requests: int, drafted: bool) -> None:
    target = deep_target(6)
    engine = Engine(target, dspark(target, layers=2) if drafted else None, config=EngineConfig(32, 512))
    step_of(device, engine, requests, SamplingParams())
    assert device.counts.syncs <= MOST_SYNCS["greedy"], device.counts.report()


@pytest.mark.parametrize(("kind", "requests"), [*product(SAMPLED, [1, 5]), ("plain", 32)])
def test_syncs_of_a_sampled_step(device: SimulatedDevice, requests: int, kind: str) -> None:
    target = deep_target(6)
    engine = Engine(target, dspark(target, layers=2), config=EngineConfig(32, 512))
    step_of(device, engine, requests, SAMPLED[kind])
    assert device.counts.syncs <= MOST_SYNCS["sampled"], device.counts.report()


@pytest.mark.parametrize("kind", ["greedy", *SAMPLED])
def test_text_is_that_of_the_cpu(device: SimulatedDevice, kind: str) -> None:
    params, texts = SAMPLED.get(kind, SamplingParams()), []
    for where in ("cpu", "cuda"):
        target = toy_target("qwen3")
        target = Target(target.model.to(where), None, target.name)
        engine = Engine(target, toy_drafter(target), config=EngineConfig(4, 64, 4, 128))
        rules = StopRules(40, stop_ids=())
        requests = [Request(str(i), prompt, replace(params, seed=i), rules) for i, prompt in enumerate(prompts(3))]
        requests[1] = replace(requests[1], trace=True)
        texts.append(finish(engine, requests))
    assert texts[0] == texts[1]


class EvenTokens:
    """A grammar of responses of even tokens, and its state."""

    eos_ids: frozenset[int] = frozenset()

    def __init__(self, target: Target) -> None:
        self.allowed_V = torch.arange(target.vocab_size, device=target.device) % 2 == 0

    def start(self) -> EvenTokens:
        return self

    def allowed(self, drafts: Sequence[int] = ()) -> Tensor | None:
        return self.allowed_V

    def commit(self, token: int) -> None:
        assert token % 2 == 0


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_company_changes_no_text(device: SimulatedDevice, where: str) -> None:
    """A request with a seed says the same beside longer drafts, a constraint, other settings and earlier ends."""
    target = toy_target("qwen3")
    target = Target(target.model.to(where), None, target.name)
    changes: list[dict[str, Any]] = [
        {"most_drafts": 1},
        {"rules": StopRules(7, stop_ids=())},
        {"grammar": cast(Grammar, EvenTokens(target))},
        {"params": replace(SAMPLED["penalties"], seed=5)},
        {"params": SamplingParams()},
    ]
    requests = [
        Request(str(i), prompt, **{"params": SamplingParams(1.0, seed=i), "rules": StopRules(20, stop_ids=())} | own)
        for i, (prompt, own) in enumerate(zip(prompts(len(changes)), changes, strict=True))
    ]
    drafter, policy, config = toy_drafter(target), ThresholdPolicy(0.5), EngineConfig(8, 256, 4, 256)
    together = finish(Engine(target, drafter, policy, config=config), requests)
    for request in requests:
        alone = finish(Engine(target, drafter, policy, config=config), [request])[request.id]
        assert alone == together[request.id], request


def test_traces_of_sampled_text_are_those_of_the_cpu(device: SimulatedDevice) -> None:
    found = []
    for where in ("cpu", "cuda"):
        target = toy_target("qwen3")
        target = Target(target.model.to(where), None, target.name)
        asks = Traffic((1.0,)).asks(prompts(2), seed=0)
        found.append(record(target, toy_drafter(target), asks, StopRules(12, stop_ids=()), {}))
    here, there = found
    assert [r.tokens for r in here.responses] == [r.tokens for r in there.responses]
    assert here.drafted_N.tolist() == there.drafted_N.tolist()
    assert here.accepted_N.tolist() == there.accepted_N.tolist() and here.accepted_N.sum() > 10


def test_a_drafter_of_a_bfloat16_target_is_served_in_bfloat16(device: SimulatedDevice) -> None:
    drafter = dspark(deep_target(6), layers=2)
    matrices = [module for module in drafter.module.modules() if isinstance(module, PackedLinear)]
    assert matrices and all(matrix.weight.dtype == torch.bfloat16 for matrix in [*matrices, drafter.head])
    assert drafter.head(torch.ones(2, 64, device="cuda")).dtype == torch.float32


def test_weights_are_on_the_device_once(device: SimulatedDevice) -> None:
    target = deep_target(6)
    attention = target.model.model.layers[0].self_attn
    fused = {attention.q_proj.weight.data_ptr(), attention.k_proj.weight.data_ptr(), attention.v_proj.weight.data_ptr()}
    storages = {
        attention.q_proj.weight.untyped_storage().data_ptr(),
        attention.v_proj.weight.untyped_storage().data_ptr(),
    }
    assert len(fused) == 3 and len(storages) == 1
