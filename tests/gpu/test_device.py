"""On a real CUDA device (`make test-gpu`): the budgets of the simulated one, and results equal to the CPU's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from outrider.decoding.engine import Engine
from outrider.decoding.scheduler import EngineConfig
from outrider.sampling import SamplingParams, SeededSource, choose_rows
from outrider.target.linear import PackedLinear
from outrider.target.model import Target
from tests.gpu.toys import MOST_LAUNCHES, MOST_SYNCS, SAMPLED, decoding, deep_target, dspark
from tests.toys.engine import finish, prompts, toy_drafter
from tests.toys.targets import toy_target

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def synchronising() -> Iterator[list[str]]:
    """What made the host wait inside, as PyTorch warns of it."""
    found: list[str] = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found += [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)]


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("kind", ["greedy", *SAMPLED])
def test_syncs_of_a_step(requests: int, kind: str) -> None:
    target = deep_target(6)
    engine = Engine(target, dspark(target, layers=2), config=EngineConfig(16, 256))
    engine.ahead = None
    decoding(engine, requests, SAMPLED.get(kind, SamplingParams()))
    with synchronising() as found:
        engine.step()
    assert len(found) <= MOST_SYNCS["greedy" if kind == "greedy" else "sampled"], "\n".join(found)


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("kind", ["greedy", "plain"])
def test_a_step_that_is_launched_ahead_does_not_synchronise(requests: int, kind: str) -> None:
    """But for the event of the step before."""
    target = deep_target(6)
    engine = Engine(target, dspark(target, layers=2), config=EngineConfig(16, 256))
    decoding(engine, requests, SAMPLED.get(kind, SamplingParams()))
    for _ in range(3):
        engine.step()
    with synchronising() as found:
        engine.step()
    assert not found, "\n".join(found)


@pytest.mark.parametrize("drafted", [False, True])
def test_launches_of_a_round_of_36_layers(drafted: bool) -> None:
    target = deep_target(36)
    engine = Engine(target, dspark(target) if drafted else None)
    engine.ahead = None
    decoding(engine, 1, SamplingParams())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.step()
    launches = sum(event.count for event in profile.key_averages() if "LaunchKernel" in event.key)
    assert 0 < launches <= MOST_LAUNCHES["dspark" if drafted else "plain"], launches


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_greedy_text_is_that_of_the_cpu(family: str) -> None:
    from outrider.decoding.request import Request

    found = []
    for where in ("cpu", "cuda"):
        target = toy_target(family)
        target = Target(target.model.to(where), None, target.name)
        drafter = toy_drafter(target) if family != "gemma" else None
        requests = [Request(str(i), prompt) for i, prompt in enumerate(prompts(4))]
        found.append(finish(Engine(target, drafter, config=EngineConfig(4, 64, 4, 64)), requests))
    assert found[0] == found[1]


def test_bfloat16_products_have_float32_sums() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 512), torch.randn(7, 512)
    there = PackedLinear(weight.cuda().bfloat16())(x.cuda())
    exact = x.bfloat16().double() @ weight.bfloat16().double().T
    assert there.dtype == torch.float32
    torch.testing.assert_close(there.cpu().double(), exact, atol=1e-3, rtol=1e-4)


def test_choices_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    probs_NV = torch.randn(50, 1000).softmax(-1)
    expected = [SeededSource(seed).choose(row_V) for seed, row_V in enumerate(probs_NV)]
    uniforms_N = torch.tensor([SeededSource(seed).uniform() for seed in range(50)], dtype=torch.float64)
    index_N, total_N = choose_rows(probs_NV.cuda(), uniforms_N.cuda())
    assert index_N.tolist() == expected and bool((total_N > 0).all())
