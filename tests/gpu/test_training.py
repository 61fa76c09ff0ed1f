"""Training on the simulated device: no device mix in any method's step, few syncs, the losses of the CPU; batches that
a thread builds ahead on a stream of its own.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider.training.trainer as trainer_module
from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.target.model import Target
from outrider.training.batches import BlockBatch, built_ahead
from outrider.training.features import FeatureSource, step_features
from outrider.training.trainer import Trainer
from tests.gpu.simulated import CUDA, DeviceTensor, SimulatedDevice, simulated_device
from tests.gpu.toys import simulate_kernels
from tests.toys.targets import toy_target
from tests.toys.training import SECTIONS, fresh_trainer

MOST_SYNCS = 6


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    with simulated_device() as found:
        simulate_kernels(found, monkeypatch)
        yield found


def on(where: str, method: str, out: Path, dtype: torch.dtype = torch.float32) -> Trainer:
    """A trainer of a fresh drafter for a toy target, there."""
    target = toy_target("qwen3", dtype=dtype)
    return fresh_trainer(method, out, Target(target.model.to(where), None, target.name))


def steps_of(trainer: Trainer, count: int, before_last: Callable[[], None] = lambda: None) -> list[float]:
    """The losses of the first steps."""
    run = trainer.run
    layers, scale_L = run.drafter.config.target_layer_ids, run.drafter.aux_scale_L
    source = FeatureSource(run.target, run.samples, layers, aux_scale_L=scale_L, budget_bytes=2**30)
    wanted = [[index for part in trainer._share(step) for index, _ in part] for step in range(count)]
    losses = []
    with step_features(source, wanted) as fetched, trainer._batches(range(count), fetched) as batches:
        for step in range(count):
            if step == count - 1:
                before_last()
            losses.append(trainer._step(step, batches).loss)
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


def test_experts_are_balanced_by_the_rows_that_there_are(device: SimulatedDevice, tmp_path: Path) -> None:
    """As on the CPU, where batches are not padded."""
    found = []
    for where in ("cuda", "cpu"):
        trainer = on(where, "dspark_v4", tmp_path / where)
        steps_of(trainer, 3)
        layers: Any = trainer.run.drafter.layers
        found.append([bias for layer in layers for bias in layer.ffn.gate.bias.tolist()])
    assert found[0] == pytest.approx(found[1]) and any(found[0])


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


# ----------------------------------------------------------------------------
# Batches built ahead. The device refuses what a stream uses before it has waited for the stream that writes it.
# ----------------------------------------------------------------------------


def builders() -> list[str]:
    """The threads that build batches now."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]


def tensors_of(batch: BlockBatch) -> list[Tensor]:
    values = [*vars(batch).values(), batch.layout.anchors_N, batch.layout.sequence_N]
    return [value for value in values if isinstance(value, Tensor)]


def test_batches_are_copied_by_a_thread_on_a_stream_of_its_own(device: SimulatedDevice, tmp_path: Path) -> None:
    """From pinned memory without a wait of the host; padded to one size."""
    trainer = on("cuda", "dspark", tmp_path)
    kept = list(FeatureSource(trainer.run.target, trainer.run.samples, (0, 2), torch.ones(2, device=CUDA), 2**30))
    parts = iter([([(i, [9])], [kept[i]]) for i in range(3)])
    seen: list[tuple[str, int, BlockBatch]] = []

    def build(part: Any) -> BlockBatch:
        batch = trainer._built(part)
        device.thread.stream.operations += 1  # of the copying stream, as seen in its thread
        seen.append((threading.current_thread().name, device.counts.operations["aten::_to_copy"], batch))
        return batch

    device.counts.reset()
    with built_ahead(parts, build, CUDA) as batches:
        found = list(batches)
    assert device.counts.syncs == 0, device.counts.report()
    assert [name for name, _, _ in seen] == [seen[0][0]] * 3 and seen[0][0].startswith("batches")
    assert seen[0][1] >= 10, "the copies were made there"
    for batch, (_, _, built) in zip(found, seen, strict=True):
        assert batch is built and len(batch.previous_NK) == len(batch.aux_SLD) == 128
        for tensor in tensors_of(batch):
            assert isinstance(tensor, DeviceTensor) and tensor.written[0] is not device.default_stream
            assert tensor.made is device.default_stream, "its memory waits for the stream that trains"
    assert not builders()


def test_a_stream_waits_before_it_reads_what_another_wrote(device: SimulatedDevice) -> None:
    other, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(other):
        early = torch.ones(3, device="cuda") + 1
        event.record()
        late = early * 2
    with pytest.raises(RuntimeError, match="may not have written yet"):
        early.sum()
    torch.cuda.current_stream().wait_event(event)
    with pytest.raises(RuntimeError, match="another one's to reuse"):
        early.sum()
    for tensor in (early, late):
        tensor.record_stream(torch.cuda.current_stream())
    assert early.sum().item() == 6
    with pytest.raises(RuntimeError, match="may not have written yet"):
        late.sum()


@pytest.mark.slow
def test_a_run_with_batches_built_ahead_is_exact_and_resumes(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch ahead, over the ends of steps; micro-batches come in their order."""
    parts: list[list[int]] = []
    build = Trainer._built

    def noted(trainer: Trainer, part: Any) -> BlockBatch:
        parts.append([index for index, _ in part[0]])
        return build(trainer, part)

    monkeypatch.setattr(Trainer, "_built", noted)
    optimizer = {"steps": 4, "sequences_per_step": 4, "anchors_per_sequence": 5, "max_anchors_per_forward": 10}

    def ends(name: str, steps: int | None = None) -> list[Tensor]:
        parts.clear()
        target = toy_target("qwen3")
        target = Target(target.model.to("cuda"), None, target.name)
        trainer = fresh_trainer("dspark", tmp_path / name, target, optimizer=optimizer)
        trainer.train(stop_after=steps)
        return [tensor.cpu() for tensor in trainer.run.drafter.state_dict().values()]

    whole, order = ends("whole"), list(parts)
    assert len(order) == 8 and not builders()
    ends("parts", 3)
    assert parts == order[:6]
    resumed = ends("parts")
    assert parts == order[6:]
    monkeypatch.setattr(
        trainer_module, "built_ahead", lambda parts, build, _: built_ahead(parts, build, torch.device("cpu"))
    )
    here = ends("here")
    assert parts == order
    for x, y, z in zip(whole, resumed, here, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)


def test_an_exception_in_the_thread_is_raised_where_its_batch_is_due(device: SimulatedDevice) -> None:
    def unreadable(part: int) -> Any:
        if part == 2:
            raise ValueError("shard 2 is damaged")
        return torch_batch

    torch_batch = type("Batch", (), {"used_by": lambda self, stream: None})()
    asked: list[int] = []
    parts = (asked.append(number) or number for number in range(9))
    got = 0
    with pytest.raises(ValueError, match="shard 2") as caught, built_ahead(parts, unreadable, CUDA) as batches:
        for _ in batches:
            got += 1
    assert got == 2 and asked == [0, 1, 2, 3][: len(asked)] and len(asked) <= 4
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "unreadable" in frames and not builders()


def test_ctrl_c_ends_the_thread(device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = on("cuda", "dspark", tmp_path)
    alive: list[list[str]] = []

    def interrupted(*_: Any, **__: Any) -> Any:
        alive.append(builders())
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.parallel, "backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(alive) == 1 and len(alive[0]) == 1 and not builders()


def test_a_cpu_builds_batches_when_they_are_due(device: SimulatedDevice, tmp_path: Path) -> None:
    trainer = on("cpu", "dspark", tmp_path)
    names: list[list[str]] = []
    backward = trainer.parallel.backward
    trainer.parallel.backward = lambda *args, **options: (names.append(builders()), backward(*args, **options))[1]  # type: ignore[method-assign]
    steps_of(trainer, 2)
    assert names == [[], []]
