"""Training on the simulated device: no device mix in any method's step, few syncs, the losses of the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.target.model import Target
from outrider.training.features import FeatureSource, step_features
from outrider.training.loss import BlockObjective
from outrider.training.recipe import ObjectiveConfig
from outrider.training.setup import Run, fresh, new_drafter
from outrider.training.trainer import Trainer
from tests.gpu.simulated import SimulatedDevice, simulated_device
from tests.gpu.toys import simulate_kernels
from tests.toys.targets import toy_samples, toy_target, with_mask_token
from tests.toys.training import recipe

MOST_SYNCS = 6
SECTIONS: dict[str, dict[str, Any]] = {
    "dspark": {"num_aux_layers": 2, "markov_rank": 6, "block_size": 4},
    "dflash": {"num_aux_layers": 2, "block_size": 4},
    "dflash2": {"num_aux_layers": 2, "block_size": 4, "selector_top_k": 8, "selector_rank": 8},
    "eagle3": {"gamma": 3},
    "peagle": {"gamma": 3},
    "mtp": {"gamma": 3},
    "medusa": {"num_heads": 3},
    "hydra": {"num_heads": 3},
}
EXPERTS = {"num_aux_layers": 2, "markov_rank": 6, "block_size": 4, "n_routed_experts": 6}  # of dspark_v4


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    with simulated_device() as found:
        simulate_kernels(found, monkeypatch)
        yield found


def on(where: str, method: str, out: Path, dtype: torch.dtype = torch.float32) -> Trainer:
    """A trainer of a fresh drafter for a toy target, there."""
    target = toy_target("qwen3", dtype=dtype)
    target = with_mask_token(Target(target.model.to(where), None, target.name))
    optimizer = {"steps": 4, "sequences_per_step": 4, "anchors_per_sequence": 5, "learning_rate": 1e-2}
    chosen = {"algorithm": method, "draft_vocab_size": 60, **SECTIONS.get(method, EXPERTS)}
    plan = recipe(out, drafter=chosen, optimizer=optimizer, eval_every=2, save_every=2, watch={"decode_every": None})
    samples = toy_samples(14)
    torch.manual_seed(0)
    start = fresh(new_drafter(plan, target), plan, target, samples)
    objective = BlockObjective(target, start.draft_ids_Vd, ObjectiveConfig(ce=1.0))
    return Trainer(plan, Run(target, start.drafter, objective, start.draft_ids_Vd, True, samples[2:], samples[:2]))


def steps_of(trainer: Trainer, count: int, before_last: Callable[[], None] = lambda: None) -> list[float]:
    """The losses of the first steps."""
    run = trainer.run
    layers, scale_L = run.drafter.config.target_layer_ids, run.drafter.aux_scale_L
    source = FeatureSource(run.target, run.samples, layers, aux_scale_L=scale_L, budget_bytes=2**30)
    wanted = [[index for part in trainer._share(step) for index, _ in part] for step in range(count)]
    losses = []
    with step_features(source, wanted) as fetched:
        for step in range(count):
            if step == count - 1:
                before_last()
            losses.append(trainer._step(step, fetched).loss)
    return losses


@pytest.mark.parametrize("method", [*SECTIONS, "dspark_v4"])
def test_a_step_mixes_no_devices_and_has_the_losses_of_the_cpu(
    device: SimulatedDevice, method: str, tmp_path: Path
) -> None:
    there = steps_of(on("cuda", method, tmp_path / "there"), 2)
    here = steps_of(on("cpu", method, tmp_path / "here"), 2)
    assert there == pytest.approx(here, rel=1e-4)


@pytest.mark.parametrize(
    ("method", "dtype"), [("dspark", torch.float32), *((method, torch.bfloat16) for method in SECTIONS)]
)
def test_syncs_of_a_step(device: SimulatedDevice, method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    steps_of(on("cuda", method, tmp_path, dtype), 2, before_last=device.counts.reset)
    assert device.counts.syncs <= MOST_SYNCS, device.counts.report()
    calls = device.counts.operations["flex_attention"]
    assert calls == {"dspark": 2, "dflash": 2, "dflash2": 2, "eagle3": 3, "peagle": 1, "mtp": 3}.get(method, 0)


def test_a_step_with_experts_waits_once_more_for_each_layer(device: SimulatedDevice, tmp_path: Path) -> None:
    """For the number of rows of each expert."""
    steps_of(on("cuda", "dspark_v4", tmp_path), 2, before_last=device.counts.reset)
    assert device.counts.syncs <= MOST_SYNCS + 3, device.counts.report()


def test_the_feature_cache_counts_what_pinned_memory_takes(device: SimulatedDevice, tmp_path: Path) -> None:
    """PyTorch gives it in powers of two."""
    run = on("cuda", "dspark", tmp_path).run
    layers, scale_L = run.drafter.config.target_layer_ids, run.drafter.aux_scale_L
    source = FeatureSource(run.target, run.samples, layers, aux_scale_L=scale_L, budget_bytes=2**14)
    sizes = []
    for index in range(len(run.samples)):
        found = source[index]
        tensors = found.aux_SLD, found.hidden_RD, found.lse_R, found.argmax_R
        assert all(tensor.is_pinned() for tensor in tensors)
        sizes.append(sum(2 ** math.ceil(math.log2(tensor.nbytes)) for tensor in tensors))
        assert found.nbytes == sizes[-1] > sum(tensor.nbytes for tensor in tensors)
        assert source._bytes <= 2**14
    assert 1 < len(source._kept) < len(sizes) and source._bytes == sum(sizes[index] for index in source._kept)


def test_a_run_is_evaluated_saved_and_served(device: SimulatedDevice, tmp_path: Path) -> None:
    trainer = on("cuda", "dspark", tmp_path)
    metrics = trainer.train()
    assert metrics["loss"] > 0
    load_checkpoint(tmp_path / "drafter", trainer.run.target.device).serve(trainer.run.target)
