"""The simulated device itself: what it counts, what it refuses, and that autograd and optimizers run through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.utils.measure import Clock, on_device
from tests.gpu.simulated import CUDA, DeviceTensor, SimulatedDevice, simulated_device


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulated_device() as found:
        yield found


def test_every_way_of_making_a_tensor_puts_it_on_the_device(device: SimulatedDevice) -> None:
    made = [
        torch.zeros(2, device="cuda"),
        torch.arange(3, device=CUDA),
        torch.tensor([1, 2], device="cuda"),
        torch.ones(2).to("cuda"),
        torch.ones(2).cuda(),
        torch.zeros(2, device="cuda").new_ones(3),
        torch.zeros_like(torch.zeros(2, device="cuda")),
        nn.Linear(2, 2).to("cuda").weight,
    ]
    for tensor in made:
        assert isinstance(tensor, DeviceTensor) and tensor.device == CUDA and tensor.is_cuda
    assert type(made[0].cpu()) is Tensor and made[0].cpu().device.type == "cpu"


@pytest.mark.parametrize(
    ("operation", "launches"),
    [
        (lambda x: x + 1, 1),
        (lambda x: x.add_(1), 1),
        (lambda x: x[:, None, 1:].transpose(0, 1), 0),
        (lambda x: x.T.contiguous(), 1),
        (lambda x: torch.empty_like(x), 0),
        (lambda x: F.linear(x, x), 1),
        (lambda x: F.rms_norm(x, (4,)), 1),
        (lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]), 1),
        (lambda x: F.softmax(x, -1).sum(), 2),
    ],
)
def test_launches(device: SimulatedDevice, operation: Callable[[Tensor], Tensor], launches: int) -> None:
    with torch.inference_mode():
        x = torch.ones(4, 4, device="cuda")
        device.counts.reset()
        operation(x)
    assert (device.counts.launches, device.counts.syncs) == (launches, 0), device.counts.report()


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x[0, 0].item(),
        lambda x: bool(x.any()),
        lambda x: float(x.sum()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", torch.float64),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.bincount(x[0].long()),
        lambda x: x[[0, 1]],
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.copy_(torch.ones(4, 4)),
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: x.new_tensor([1.0]),
        lambda x: torch.ones(2).to(x.device),
        lambda x: torch.ones(2).to(x.device, non_blocking=True),  # from pageable memory it waits all the same
        lambda x: torch.equal(x, x),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_one_sync(device: SimulatedDevice, operation: Callable[[Tensor], object]) -> None:
    x = torch.ones(4, 4, device="cuda")
    device.counts.reset()
    operation(x)
    assert device.counts.syncs == 1, device.counts.report()


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.where(x > 0, x, -x),
        lambda x: x[torch.arange(2, device="cuda")],
        lambda x: x.index_select(0, torch.arange(2, device="cuda")),
        lambda x: x.masked_fill(x > 0, 0.0),
        lambda x: torch.ones(2).pin_memory().to(x.device, non_blocking=True),
        lambda x: on_device([1, 2], CUDA),
        lambda x: x + torch.tensor(2.0),
        lambda x: x.to("cuda"),
    ],
)
def test_no_sync(device: SimulatedDevice, operation: Callable[[Tensor], object]) -> None:
    x = torch.ones(4, 4, device="cuda")
    device.counts.reset()
    operation(x)
    assert device.counts.syncs == 0, device.counts.report()


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + torch.ones(4),
        lambda x: x @ torch.ones(4, 4),
        lambda x: torch.cat([x, torch.ones(4, 4)]),
        lambda x: x.index_select(0, torch.tensor([0])),
        lambda x: torch.ones(4, 4)[x.long()],
        lambda x: F.embedding(torch.tensor([0]), x),
    ],
)
def test_a_mix_of_devices_is_refused(device: SimulatedDevice, operation: Callable[[Tensor], object]) -> None:
    x = torch.ones(4, 4, device="cuda")
    with pytest.raises(RuntimeError, match="found cuda:0 and cpu"):
        operation(x)


def test_gradients_and_the_optimizer_are_those_of_the_cpu(device: SimulatedDevice) -> None:
    def trained(where: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4), nn.Linear(4, 1))
        x = torch.randn(5, 3)
        model, x = model.to(where), x.to(where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return torch.cat([p.detach().cpu().flatten() for p in model.parameters()]).tolist()

    assert trained("cuda") == trained("cpu")


def test_clocks_wait_once_for_all_their_blocks(device: SimulatedDevice) -> None:
    first, second = Clock(CUDA), Clock(CUDA)
    device.counts.reset()
    for _ in range(3):
        with first:
            torch.ones(2, device="cuda")
        with second:
            torch.ones(2, device="cuda")
    assert device.counts.syncs == 0
    seconds = second.take(), first.take()
    assert device.counts.syncs == 1 and min(seconds) > 0
    assert first.take() == 0.0
