"""The engine on the simulated device mixes no devices, greedy and sampled, and gives the CPU's text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from outrider.decoding.request import StopRules
from outrider.engine.batch import Request
from outrider.engine.engine import Engine
from outrider.engine.scheduler import EngineConfig
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.gpu.simulated import SimulatedDevice, simulated_device
from tests.toys.engine import finish, prompts, toy_drafter
from tests.toys.targets import toy_target

KINDS = {
    "greedy": SamplingParams(),
    "plain": SamplingParams(temperature=1.0),
    "nucleus": SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01, top_k=40),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.1),
    "coupled": SamplingParams(temperature=1.0, coupled=True),
}


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulated_device() as found:
        yield found


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_the_cpu(device: SimulatedDevice, kind: str) -> None:
    texts = []
    for where in ("cpu", "cuda"):
        target = toy_target("qwen3")
        target = Target(target.model.to(where), None, target.name)
        engine = Engine(target, toy_drafter(target), config=EngineConfig(4, 64, 4, 128))
        rules = StopRules(8, stop_ids=())
        requests = [Request(str(i), prompt, replace(KINDS[kind], seed=i), rules) for i, prompt in enumerate(prompts(3))]
        texts.append(finish(engine, requests))
    assert texts[0] == texts[1] and device.counts.launches
