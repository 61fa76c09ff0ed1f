"""Ranks: the processes that torchrun started; data-parallel training with DDP or FSDP2; a target sharded over ranks.

    torchrun --nproc-per-node N -m outrider.cli.main train RECIPE      WORLD_SIZE, RANK, LOCAL_RANK from torchrun
    outrider train RECIPE                                              one rank, no process group, no collective

gloo carries collectives on CPUs, NCCL on CUDA devices. With OUTRIDER_PROCESS_GROUP=1 one process has a group of its
own, so that the code of several ranks (NCCL, DDP, FSDP) runs on one GPU.

    ddp    every rank holds the drafter and its moments; gradients are averaged while the backward runs
    fsdp   each rank holds 1/N of both; a draft layer's weights are gathered when it runs (FSDP2 `fully_shard`), or all
           of a drafter's where layers run twice in a forward

Both average gradients over ranks, and a rank's loss is its share of sum_i w_i l_i / sum_i w_i with the denominator of
the whole step. So the loss is multiplied by the number of ranks, and N ranks take the step that one would.
In bfloat16 FSDP gathers draft layers in bfloat16 and reduces their gradients in float32; DDP does both in float32.

Source: FSDP2 as in torchtitan (per-layer sharding; checkpointing, then compiling, then sharding).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from outrider.drafters.base import DraftModule
from outrider.drafters.flex import Compilation, compiled
from outrider.drafters.loss import DraftLoss
from outrider.target.hf import text_decoder
from outrider.target.model import Target, full_tensor
from outrider.training.batches import BlockBatch
from outrider.training.objective import BlockObjective
from outrider.training.recipe import Recipe
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
# A training step over ranks.
# ----------------------------------------------------------------------------


class _Forward(nn.Module):
    """Drafter and objective as one module: the heads' weights are used outside any layer's own forward."""

    def __init__(self, drafter: DraftModule, objective: BlockObjective) -> None:
        super().__init__()
        self.drafter = drafter
        self.objective = objective

    def forward(self, batch: BlockBatch, total_weight: Tensor, progress: float) -> DraftLoss:
        return self.objective(self.drafter, batch, total_weight, progress=progress)


def draft_layers(drafter: DraftModule) -> list[nn.Module]:
    """The layers that are recomputed, compiled and sharded one by one; without any, the drafter is sharded whole."""
    return list(getattr(drafter, "layers", ()))


def check_layers(drafter: DraftModule, recipe: Recipe) -> None:
    """Refuse checkpointing and compiling by layer where there are no layers, and compiling for a CPU."""
    stacked, wished = bool(draft_layers(drafter)), bool(recipe.compile)
    compilable = not wished or usable_device(recipe.device).type == "cuda"
    kind = f"a drafter of kind {drafter.algorithm}"
    none = f"works on draft layers one by one, and {kind} has no stack of them"
    checks = (
        ("optimizer.checkpoint_activations", recipe.optimizer.checkpoint_activations, stacked, none),
        ("compile", wished, stacked, none),
        (
            "compile",
            wished,
            bool(drafter.separable_layers()),
            f"{kind} runs its context through the draft layers: no single graph",
        ),
        ("compile", wished, not drafter.counts_rows(), f"{kind} sorts rows by expert, which is no single graph"),
        ("compile", wished, compilable, "draft layers are compiled for CUDA, and this run has no GPU"),
    )
    for name, wish, possible, reason in checks:
        if wish and not possible:
            raise ValueError(f"{name}=true {reason}: leave {name} out.")


def compiles(drafter: DraftModule, recipe: Recipe, device: torch.device) -> bool:
    """Whether the draft layers are compiled: as the recipe says, else on a GPU where they can be."""
    if recipe.compile is not None:
        return recipe.compile
    graphs = bool(drafter.separable_layers()) and not drafter.counts_rows()
    return device.type == "cuda" and graphs


class ParallelStep:
    """Computes a rank's part of a step. The drafter is changed in place: layers compiled, checkpointed, sharded.

    Attributes:
        padded: whether batches are padded, so that what builds a kernel for every shape sees few: compiled layers,
            FlexAttention, and oneDNN, which multiplies bfloat16 on a CPU.
    """

    def __init__(self, drafter: DraftModule, objective: BlockObjective, recipe: Recipe, ranks: Ranks) -> None:
        self.ranks = ranks
        for tensor in (*drafter.parameters(), *drafter.buffers()) if ranks.grouped else ():
            dist.broadcast(tensor.detach(), src=0)
        compiling = compiles(drafter, recipe, ranks.device)
        device = ranks.device.type
        by_shape = device == "cuda" or (device == "cpu" and objective.products == torch.bfloat16)
        self.padded = compiling or (by_shape and not drafter.counts_rows())
        if compiling:
            _compile_layers(draft_layers(drafter), required=recipe.compile is not None)
        if recipe.optimizer.checkpoint_activations:
            for layer in draft_layers(drafter):
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        self.forward: Callable[..., DraftLoss] = partial(objective, drafter)
        if ranks.grouped and recipe.parallel == "fsdp":
            gathered = torch.bfloat16 if recipe.precision == "bfloat16" else None
            self.forward = _shard(_Forward(drafter, objective), gathered)
        elif ranks.grouped:
            self.forward = DistributedDataParallel(
                _Forward(drafter, objective), broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def backward(
        self, batch: BlockBatch, total_weight: Tensor, last: bool, counts: bool = True, *, progress: float = 1.0
    ) -> DraftLoss:
        """Forward and backward of one micro-batch.

        Args:
            total_weight: the step's summed position weights, over all ranks and micro-batches.
            progress: as in `BlockObjective`.
            last: the gradients of this and the micro-batches before it are then reduced over ranks.
            counts: False for a batch that is there only because other ranks have one more.
        """
        with self._reducing(last):
            output = self.forward(batch, total_weight, progress=progress)
            (output.loss * (self.ranks.world if counts else 0)).backward()
        return output

    @contextmanager
    def _reducing(self, last: bool) -> Iterator[None]:
        if isinstance(self.forward, FSDPModule):
            self.forward.set_requires_gradient_sync(last)
        if isinstance(self.forward, DistributedDataParallel) and not last:
            with self.forward.no_sync():
                yield
        else:
            yield


def _compile_layers(layers: Sequence[Any], required: bool) -> None:
    """Let layers of one class share one compiled forward, as hooks and shards find it.

    Args:
        required: what cannot be compiled is an error; otherwise layers run as they are.
    """
    forwards = {kind: compiled(kind.forward) for kind in {type(layer) for layer in layers}}
    tried = Compilation("draft layers run uncompiled")
    for layer in layers:
        fast = partial(forwards[type(layer)], layer)
        layer.forward = fast if required else partial(tried.call, fast, layer.forward)


def _shard(forward: _Forward, param_dtype: torch.dtype | None) -> nn.Module:
    # Autocast chooses the types of inputs.
    policy = MixedPrecisionPolicy(param_dtype, torch.float32, cast_forward_inputs=False)
    # A layer's weights are freed when its backward has run, and the keys of an earlier forward of it need them still.
    layers = forward.drafter.separable_layers()
    _prefetching([fully_shard(layer, mp_policy=policy) for layer in layers])
    fully_shard(forward)
    return forward


def _prefetching(layers: Sequence[FSDPModule]) -> None:
    """While a layer runs the next one's weights are gathered."""
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])


def whole_drafter(drafter: DraftModule) -> DraftModule:
    """The drafter with full tensors: itself, or a copy gathered from all ranks (a collective)."""
    if not any(isinstance(parameter, DTensor) for parameter in drafter.parameters()):
        return drafter
    state = {name: full_tensor(tensor) for name, tensor in drafter.state_dict().items()}
    with torch.device("meta"):  # without drawing a billion first weights
        copy = type(drafter)(drafter.config)
    copy.load_state_dict(state, assign=True)
    copy.aux_scale_L = drafter.aux_scale_L.clone()
    return copy.requires_grad_(False)


# ----------------------------------------------------------------------------
# A target too large for one device: each rank holds 1/N of every decoder layer (FSDP2 `fully_shard`, inference only).
#
#     layer by layer:  gather the next one's weights -> forward of this rank's own tokens -> drop its own again
#
# Collectives carry weights and nothing else: hidden states, aux hidden states and logits stay on the rank that computed
# them, because each rank runs the whole depth on its own sequences. Embedding and head stay whole on every rank, for
# the objective reads them. Gathering makes a forward of one rank a forward of all, so ranks agree before each one
# (`LockStep`).
# ----------------------------------------------------------------------------


def shard_layers(model: Any, ranks: Ranks) -> None:
    """Spread the decoder layers of a Hugging Face causal LM over all ranks, each shard on its rank's device."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    decoder = text_decoder(model)
    layers = list(decoder.layers)
    _prefetching([fully_shard(layer, mesh=mesh, reshard_after_forward=True) for layer in layers])
    # The decoder is the root, without weights of its own: layers without one would each wait for themselves.
    spread = {parameter for layer in layers for parameter in layer.parameters()}
    fully_shard(decoder, mesh=mesh, ignored_params=set(decoder.parameters()) - spread)


class LockStep:
    """Ranks with fewer sequences run one-token forwards until the others are done.

        before a forward of its own   a rank adds 1 to the sum over ranks
        leaving the `with` block      it adds 0, and runs along while the sum is not 0

    Code that every rank runs alike (evaluation, aux layer scales) needs no block: its forwards pair up by themselves.
    """

    def __init__(self, target: Target, ranks: Ranks) -> None:
        self.target, self.ranks = target, ranks
        self.active = target.sharded and ranks.grouped
        self._announcing = False
        if self.active:
            target.decoder.register_forward_pre_hook(self._announce)

    def _announce(self, _module: Any, _args: Any) -> None:
        if self._announcing:
            self._working(True)

    def _working(self, this_rank: bool) -> bool:
        return bool(self.ranks.sum(torch.tensor(float(this_rank), device=self.ranks.device)) > 0)

    def __enter__(self) -> None:
        self._announcing = self.active

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._announcing = False
        token_11 = torch.zeros(1, 1, dtype=torch.long, device=self.target.device)
        while self.active and kind is None and self._working(False):
            self.target.forward(token_11, self.target.new_cache(1), logits=0)
