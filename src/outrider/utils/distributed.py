"""The ranks of a distributed run: the processes that `torchrun` started, or one process alone.

    torchrun --nproc-per-node N -m outrider.cli.main train RECIPE      WORLD_SIZE, RANK, LOCAL_RANK from torchrun
    outrider train RECIPE                                              one rank, no process group, no collective

gloo carries collectives on CPUs, NCCL on CUDA devices. With OUTRIDER_PROCESS_GROUP=1 one process has a group of its
own, so that the code of several ranks (NCCL, DDP, FSDP) runs on one GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from outrider.utils.measure import usable_device

_Found = TypeVar("_Found")
# Ranks wait for the main one while it regenerates responses; a collective that is merely late must not end the run.
_TIMEOUT = timedelta(hours=12)


@dataclass(frozen=True)
class Ranks:
    """`rank` of `world` processes, computing on `device`. Every method is a collective.

    `grouped`: whether there is a process group, which one process alone has where it was asked for.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    grouped: bool = False

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.grouped:
            dist.all_reduce(values)
        return values

    def from_main(self, make: Callable[[], _Found]) -> _Found:
        """What `make` returns on the main rank, on every rank; the others wait. It must be picklable.

        Raises:
            ValueError, OSError: what `make` raised, on every rank: none should end by losing its peer.
        """
        if not self.grouped:
            return make()
        outcome: list[Any] = [None, None]
        if self.main:
            try:
                outcome[0] = make()
            except (ValueError, OSError) as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, device=self.device)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def gather(self, mine: _Found) -> list[_Found]:
        """All-gather of picklable objects, in the order of ranks."""
        if not self.grouped:
            return [mine]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine)
        return found

    def copy_from_main(self, tensors: list[Tensor]) -> None:
        """Broadcast tensors from the main rank, in place."""
        if self.grouped:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def wait(self) -> None:
        """Barrier: the host waits, too, which under NCCL it would not do for the sum alone."""
        self.sum(torch.zeros((), device=self.device)).item()


ALONE = Ranks()


@contextmanager
def join(device: str) -> Iterator[Ranks]:
    """Join the processes that torchrun started, or be the only one. `device` "cuda" becomes this rank's own.

    Raises:
        ValueError: several ranks are given one numbered CUDA device, or CUDA is not there.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    chosen = usable_device(device)
    if chosen.type == "cuda":
        if world > 1 and chosen.index is not None:
            raise ValueError(f"device {device!r} names one GPU for {world} ranks; use device=cuda.")
        index = int(os.environ.get("LOCAL_RANK", 0)) if chosen.index is None else chosen.index
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    alone = world == 1
    if alone and os.environ.get("OUTRIDER_PROCESS_GROUP") != "1":
        yield Ranks(device=chosen)
        return
    dist.init_process_group(
        "nccl" if chosen.type == "cuda" else "gloo",
        timeout=_TIMEOUT,
        device_id=chosen if chosen.type == "cuda" else None,
        store=dist.HashStore() if alone else None,
        rank=0 if alone else -1,
        world_size=1 if alone else -1,
    )
    try:
        yield Ranks(rank, world, chosen, grouped=True)
    finally:
        dist.destroy_process_group()


# ----------------------------------------------------------------------------
# Weights of a target whose layers may be spread over ranks (training/parallel.py spreads them).
# ----------------------------------------------------------------------------


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of one that may be sharded over ranks (then a collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
