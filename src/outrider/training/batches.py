"""The schedule of samples and anchors, and the batches of a training step.

Both are pure functions of (seed, step), so that resuming is exact:

    epoch permutation(seed, epoch) -> samples of a step;  anchors(seed, epoch, sample)
    step -> shares of the ranks -> micro-batches of bounded size;  loss denominator = weights of the whole step

An anchor is a token whose next token was generated: the last prompt token (the first anchor when decoding) and every
response token but the last. A block supervises up to gamma following tokens of the same response.

    random    any of them (DFlash, arXiv 2602.06036): blocks overlap, and each epoch sees others
    blocks    r_1 .. r_gamma | r_gamma+1 .. r_2 gamma | ..   only the tokens before these: the fixed partition of block
              diffusion, every response token in one block
    all       every one of them, as EAGLE-3's official training unrolls every position (arXiv 2503.01840)

Padded, a batch has one more sequence behind the others, of zeros: the context slots and blocks that fill both numbers
up to one of a few sizes. It supervises nothing, and attention never crosses sequences, so losses and gradients are
those without it. Supervised positions are filled up with the first one, which then weighs nothing.
Shapes: N blocks, K = gamma draft positions, S context slots, M supervised positions.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.data.responses import Sample
from outrider.drafters.base import DraftModule
from outrider.drafters.layers import BlockLayout
from outrider.target.linear import padded_size
from outrider.training.features import Features
from outrider.training.recipe import OptimizerSection
from outrider.utils.measure import on_device

CPU = torch.device("cpu")
Part = TypeVar("Part")


@dataclass(frozen=True)
class BlockBatch:
    """Inputs of one training forward and the target's view of the supervised positions (`supervised_NK` True)."""

    aux_SLD: Tensor  # scaled, float16
    tokens_S: Tensor  # the token of each context slot
    next_tokens_S: Tensor  # the one after it
    layout: BlockLayout
    previous_NK: Tensor  # x_{k-1} for every draft position; column 0 holds the anchors
    labels_NK: Tensor  # x_k, target vocabulary; 0 where not supervised
    supervised_NK: Tensor
    supervised_M: Tensor  # where it is True, as indices into [N * K]; selecting by the mask would wait for a GPU
    target_hidden_NKD: Tensor
    lse_NK: Tensor
    argmax_NK: Tensor
    blocks: int  # those that are no padding, the first ones
    positions: int  # of `supervised_M`, likewise

    def used_by(self, stream: Any) -> None:
        """Keep the memory of tensors that another stream made until this one is done with them."""
        for value in (*vars(self).values(), self.layout.anchors_N, self.layout.sequence_N):
            if isinstance(value, Tensor):
                value.record_stream(stream)


Chosen = tuple[int, list[int]]  # a sample's index and its anchor positions, ascending


@dataclass
class Schedule:
    """The samples and anchors of every step: samples are dealt without replacement, epoch after epoch.

    A step has `sequences_per_step` samples or, where `anchors_per_step` is given, as many as bring that many anchors:
    its cost then follows the anchors, however many a sample has. What is left at an epoch's end is not dealt.
    An anchor stands before every `stride`-th token of a response, from its first one on.
    """

    samples: Sequence[Sample]
    sequences_per_step: int
    anchors_per_sequence: int
    seed: int
    anchors_per_step: int | None = None
    stride: int = 1
    # Steps are asked for ahead of their use (features.step_features), so two epochs may be in use at once.
    _steps_in: dict[int, int] = field(default_factory=dict, init=False)
    _dealt: tuple[int, list[list[int]]] = field(default=(-1, []), init=False)  # the latest epoch, dealt

    def __post_init__(self) -> None:
        self.sequences_per_step = min(self.sequences_per_step, len(self.samples))

    @classmethod
    def of(cls, config: OptimizerSection, samples: Sequence[Sample], seed: int, gamma: int) -> Schedule:
        """The schedule of a recipe."""
        stride = gamma if config.anchors == "blocks" else 1
        per_step = config.sequences_per_step
        per_sequence = sys.maxsize if config.anchors == "all" else config.anchors_per_sequence
        return cls(samples, per_step, per_sequence, seed, config.anchors_per_step, stride)

    def step(self, step: int) -> list[Chosen]:
        """[(sample index, anchor positions ascending)] of a step."""
        epoch = 0
        while step >= (steps := self._steps_in.get(epoch) or len(self._deal(epoch))):
            self._steps_in[epoch] = steps
            epoch, step = epoch + 1, step - steps
        return [(i, self.anchors(i, epoch)) for i in self._deal(epoch)[step]]

    def steps_of(self, epochs: int) -> int:
        """How many steps the first so many epochs have."""
        return sum(len(self._deal(epoch)) for epoch in range(epochs))

    def anchors_dealt(self, steps: int) -> int:
        """How many anchors the first `steps` steps have: what a training cost, whatever trains on them."""
        found, epoch = 0, 0
        while steps > 0:
            dealt = self._deal(epoch)[:steps]
            found += sum(self._anchors_of(index) for step in dealt for index in step)
            steps, epoch = steps - len(dealt), epoch + 1
        return found

    def _anchors_of(self, index: int) -> int:
        return min(sum(len(starts) for starts in self._starts(index)), self.anchors_per_sequence)

    def _starts(self, index: int) -> Iterator[range]:
        """The first supervised positions of blocks, per response of a sample."""
        return (range(start, end, self.stride) for start, end in self.samples[index].spans)

    def _deal(self, epoch: int) -> list[list[int]]:
        """The samples of every step of an epoch."""
        dealt, steps = self._dealt
        if dealt != epoch:
            order = torch.randperm(len(self.samples), generator=_generator(self.seed, epoch)).tolist()
            steps = [[]]
            anchors = 0
            for index in order:
                steps[-1].append(index)
                anchors += self._anchors_of(index)
                counted, full = (
                    (len(steps[-1]), self.sequences_per_step)
                    if self.anchors_per_step is None
                    else (anchors, self.anchors_per_step)
                )
                if counted >= full:
                    steps.append([])
                    anchors = 0
            steps = steps[:-1] or steps
            self._dealt = (epoch, steps)
        return steps

    def anchors(self, index: int, epoch: int) -> list[int]:
        """Anchor positions in one sample for one epoch."""
        anchors = [position - 1 for starts in self._starts(index) for position in starts]
        order = torch.randperm(len(anchors), generator=_generator(self.seed, epoch, index))
        return sorted(anchors[i] for i in order[: self.anchors_per_sequence].tolist())


def micro_batches(
    chosen: Sequence[Chosen], world: int, max_anchors: int | None = None, max_context: int | None = None
) -> list[list[list[Chosen]]]:
    """A step's samples as [rank][micro-batch][sample]: every rank has as many micro-batches, the last ones maybe empty.

    A micro-batch is closed before a sample that would take it beyond `max_anchors` blocks or `max_context` context
    slots; one sample is never split.
    """
    ranks: list[list[list[Chosen]]] = []
    for rank in range(world):
        batches: list[list[Chosen]] = []
        anchors = context = 0
        for index, positions in chosen[rank::world]:
            anchors, context = anchors + len(positions), context + positions[-1]
            over = anchors > (max_anchors or anchors) or context > (max_context or context)
            if over or not batches:
                batches.append([])
                anchors, context = len(positions), positions[-1]
            batches[-1].append((index, positions))
        ranks.append(batches)
    most = max(len(batches) for batches in ranks)
    return [[*batches, *([] for _ in range(most - len(batches)))] for batches in ranks]


def _generator(*key: int) -> torch.Generator:
    seed = 0
    for part in key:
        seed = (seed * 1_000_003 + part + 1) % (2**63)
    return torch.Generator().manual_seed(seed)


def _supervision(sample: Sample, anchors_N: Tensor, gamma: int) -> tuple[Tensor, Tensor]:
    """[N, K] rows of x_k among generated tokens, and whether they are supervised: a block ends with its response."""
    ahead_NK = (anchors_N[:, None] + 1 + torch.arange(gamma)).clamp(max=sample.length)
    rows_n = torch.full((sample.length + 1,), -1)  # a token's row; -1 where it was not generated
    rows_n[sample.supervised_positions] = torch.arange(sample.num_supervised)
    rows_NK = rows_n[ahead_NK]
    return rows_NK.clamp(min=0), (rows_NK >= 0).cumprod(-1).bool()


def total_weight(chosen: Sequence[Chosen], samples: Sequence[Sample], weights_K: Tensor) -> Tensor:
    """The summed position weights of a whole step: the denominator of its loss, the same however it is divided."""
    counts_K = torch.zeros(len(weights_K), dtype=torch.long)
    for index, positions in chosen:
        counts_K += _supervision(samples[index], torch.tensor(positions), len(weights_K))[1].sum(0)
    return (on_device(counts_K, weights_K.device) * weights_K).sum()


_TILES = {"cpu": 16, "cuda": 128}  # rows of a tile, of matrix products and of FlexAttention's kernels


def build_batch(
    chosen: Sequence[Chosen],
    samples: Sequence[Sample],
    features: Sequence[Features],
    gamma: int,
    device: torch.device = CPU,
    padded: bool = False,
) -> BlockBatch:
    """The batch of one forward, on `device`; context slots beyond a sample's last anchor are left out."""
    parts: list[dict[str, Tensor]] = []
    for number, ((index, positions), seen) in enumerate(zip(chosen, features, strict=True)):
        tokens_n, anchors_N, context = torch.tensor(samples[index].tokens), torch.tensor(positions), positions[-1]
        ahead_NK = (anchors_N[:, None] + 1 + torch.arange(gamma)).clamp(max=len(tokens_n))  # position of x_k
        rows_NK, inside_NK = _supervision(samples[index], anchors_N, gamma)
        parts.append(
            {
                "aux_SLD": on_device(seen.aux_SLD[:context], device),
                "tokens_S": tokens_n[:context],
                "next_tokens_S": tokens_n[1 : context + 1],
                "previous_NK": tokens_n[ahead_NK - 1],
                "labels_NK": tokens_n[ahead_NK.clamp(max=len(tokens_n) - 1)] * inside_NK,
                "supervised_NK": inside_NK,
                "target_hidden_NKD": seen.hidden_RD[rows_NK],
                "lse_NK": seen.lse_R[rows_NK],
                "argmax_NK": seen.argmax_R[rows_NK],
                "anchors_N": anchors_N,
                "sequence_N": torch.full_like(anchors_N, number),
            }
        )
    lengths, blocks = [len(part["tokens_S"]) for part in parts], sum(len(part["anchors_N"]) for part in parts)
    supervised_M = torch.cat([part["supervised_NK"] for part in parts]).flatten().nonzero()[:, 0]
    inside = len(supervised_M)
    if padded:
        tile = _TILES[device.type]
        N, S = padded_size(blocks, tile) - blocks, padded_size(sum(lengths) + 1, tile) - sum(lengths)
        padding = {k: x.new_zeros(S if "_S" in k else N, *x.shape[1:]) for k, x in parts[0].items()}
        parts.append(
            padding | {"anchors_N": padding["anchors_N"] + 1, "sequence_N": padding["sequence_N"] + len(chosen)}
        )
        lengths.append(S)
        supervised_M = F.pad(supervised_M, (0, padded_size(inside, tile) - inside))
    aux_SLD = torch.cat([part.pop("aux_SLD") for part in parts])
    whole = {name: on_device(torch.cat([part[name] for part in parts]), device) for name in parts[0]}
    return BlockBatch(
        aux_SLD=aux_SLD,
        layout=BlockLayout(lengths, whole.pop("anchors_N"), whole.pop("sequence_N")),
        supervised_M=on_device(supervised_M, device),
        blocks=blocks,
        positions=inside,
        **whole,
    )


def idle_batch(drafter: DraftModule, padded: bool = False) -> BlockBatch:
    """A batch of zeros, for a rank without work that must take part in the others' collectives."""
    config, gamma = drafter.config, drafter.config.gamma
    zeros = partial(torch.zeros, dtype=torch.float16)
    features = Features(
        zeros(gamma + 1, len(config.target_layer_ids), config.hidden_size),
        hidden_RD=zeros(gamma, config.hidden_size),
        lse_R=torch.zeros(gamma),
        argmax_R=torch.zeros(gamma, dtype=torch.long),
    )
    sample, device = Sample("", [0] * (gamma + 2), ((2, gamma + 2),)), drafter.aux_scale_L.device
    return build_batch([(0, [1])], [sample], [features], gamma=gamma, device=device, padded=padded)


# ----------------------------------------------------------------------------
# The batches of coming forwards on a GPU, built ahead of their use.
#
#     caller    batch i trains  |  features of i+1 are there (features.step_features)  |  waits for the event of i+1
#     thread                    |  rows are gathered on the host, copied on a stream of its own, event of i+1
#
# One batch ahead: memory holds two. The parts are asked for by the caller, in order, so what they draw and prefill does
# not depend on the thread. On a CPU the thread would only take cores from the training step.
# ----------------------------------------------------------------------------


@contextmanager
def built_ahead(
    parts: Iterator[Part], build: Callable[[Part], BlockBatch], device: torch.device
) -> Iterator[Iterator[BlockBatch]]:
    """Yields an iterator over the batches of `parts`, in order.

    An exception met while building is raised by the `next` that would have returned that batch.
    """
    if device.type != "cuda":
        yield map(build, parts)
        return
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
    try:
        yield _built_by(thread, parts, build, device=device)
    finally:
        thread.shutdown(cancel_futures=True)


def _built_by(
    thread: ThreadPoolExecutor, parts: Iterator[Part], build: Callable[[Part], BlockBatch], device: torch.device
) -> Iterator[BlockBatch]:
    copying = torch.cuda.Stream(device)

    def built(part: Part) -> tuple[BlockBatch, torch.cuda.Event]:
        with torch.cuda.stream(copying):
            batch, event = build(part), torch.cuda.Event()
            event.record(copying)
        return batch, event

    def begin() -> Iterator[Future[tuple[BlockBatch, torch.cuda.Event]]]:
        return (thread.submit(built, part) for part in islice(parts, 1))

    coming = deque(begin())
    while coming:
        batch, event = coming.popleft().result()
        coming.extend(begin())
        stream = torch.cuda.current_stream(device)
        stream.wait_event(event)
        batch.used_by(stream)
        yield batch
