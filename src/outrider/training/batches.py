"""The schedule of samples and anchors, and the batches of a training step.

Both are pure functions of (seed, step), so that resuming is exact:

    epoch permutation(seed, epoch) -> samples of a step;  anchors(seed, epoch, sample)
    step -> shares of the ranks -> micro-batches of bounded size;  loss denominator = weights of the whole step

An anchor is a token whose next token was generated: the last prompt token (the first anchor when decoding) and every
response token but the last. A block supervises up to gamma following tokens of the same response.

    random    any of them (DFlash, arXiv 2602.06036): blocks overlap, and each epoch sees others
    blocks    r_1 .. r_gamma | r_gamma+1 .. r_2 gamma | ..   only the tokens before these: the fixed partition of block
              diffusion, every response token in one block

Padded, a batch has one more sequence behind the others, of zeros: the context slots and blocks that fill both numbers
up to one of a few sizes. It supervises nothing, and attention never crosses sequences, so losses and gradients are
those without it. Supervised positions are filled up with the first one, which then weighs nothing.
Shapes: N blocks, K = gamma draft positions, S context slots, M supervised positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
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


class Schedule:
    """The samples and anchors of every step: samples are dealt without replacement, epoch after epoch.

    A step has `sequences_per_step` samples or, where `anchors_per_step` is given, as many as bring that many anchors:
    its cost then follows the anchors, however many a sample has. What is left at an epoch's end is not dealt.
    An anchor stands before every `stride`-th token of a response, from its first one on.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        sequences_per_step: int,
        anchors_per_sequence: int,
        seed: int,
        anchors_per_step: int | None = None,
        stride: int = 1,
    ) -> None:
        self.samples = samples
        self.stride = stride
        self.sequences_per_step = min(sequences_per_step, len(samples))
        self.anchors_per_sequence = anchors_per_sequence
        self.anchors_per_step = anchors_per_step
        self.seed = seed
        # Steps are asked for ahead of their use (features.step_features), so two epochs may be in use at once.
        self._epochs: dict[int, int] = {}  # steps in each epoch seen so far
        self._dealt: tuple[int, list[list[int]]] = (-1, [])  # the latest epoch, dealt

    @classmethod
    def of(cls, config: OptimizerSection, samples: Sequence[Sample], seed: int, gamma: int) -> Schedule:
        """The schedule of a recipe."""
        stride = gamma if config.anchors == "blocks" else 1
        per_step, per_sequence = config.sequences_per_step, config.anchors_per_sequence
        return cls(samples, per_step, per_sequence, seed, config.anchors_per_step, stride)

    def step(self, step: int) -> list[Chosen]:
        """[(sample index, anchor positions ascending)] of a step."""
        epoch, step = self._epoch_of(step)
        return [(i, self.anchors(i, epoch)) for i in self._deal(epoch)[step]]

    def _epoch_of(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and its number in it."""
        epoch = 0
        while True:
            if epoch not in self._epochs:
                self._epochs[epoch] = len(self._deal(epoch))
            if step < self._epochs[epoch]:
                return epoch, step
            step -= self._epochs[epoch]
            epoch += 1

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
                if self._full(len(steps[-1]), anchors):
                    steps.append([])
                    anchors = 0
            steps = steps[:-1] or steps
            self._dealt = (epoch, steps)
        return steps

    def _full(self, sequences: int, anchors: int) -> bool:
        if self.anchors_per_step is not None:
            return anchors >= self.anchors_per_step
        return sequences == self.sequences_per_step

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
    aux_layers, read, following, lengths, anchors, sequence = [], [], [], [], [], []
    previous, labels, supervised, hidden, lse, argmax = [], [], [], [], [], []
    steps_K = torch.arange(gamma)
    for number, ((index, positions), seen) in enumerate(zip(chosen, features, strict=True)):
        sample = samples[index]
        tokens_n = torch.tensor(sample.tokens)
        anchors_N = torch.tensor(positions)
        ahead_NK = (anchors_N[:, None] + 1 + steps_K).clamp(max=len(tokens_n))  # position of x_k
        rows_NK, inside_NK = _supervision(sample, anchors_N, gamma)
        labels.append(tokens_n[ahead_NK.clamp(max=len(tokens_n) - 1)] * inside_NK)
        previous.append(tokens_n[ahead_NK - 1])
        supervised.append(inside_NK)
        hidden.append(seen.hidden_RD[rows_NK])
        lse.append(seen.lse_R[rows_NK])
        argmax.append(seen.argmax_R[rows_NK])
        aux_layers.append(on_device(seen.aux_SLD[: positions[-1]], device))
        read.append(tokens_n[: positions[-1]])
        following.append(tokens_n[1 : positions[-1] + 1])
        lengths.append(positions[-1])
        anchors.append(anchors_N)
        sequence.append(torch.full_like(anchors_N, number))
    blocks = sum(map(len, anchors))
    if padded:
        tile = _TILES[device.type]
        N, S = padded_size(blocks, tile) - blocks, padded_size(sum(lengths) + 1, tile) - sum(lengths)
        parts = (labels, previous, supervised, hidden, lse, argmax, read, following)
        for part, size in zip(parts, [N] * 6 + [S] * 2, strict=True):
            part.append(part[0].new_zeros(size, *part[0].shape[1:]))
        aux_layers.append(aux_layers[0].new_zeros(S, *aux_layers[0].shape[1:]))
        lengths.append(S)
        anchors.append(torch.ones(N, dtype=torch.long))
        sequence.append(torch.full((N,), len(chosen)))

    def there(parts: list[Tensor]) -> Tensor:
        return on_device(torch.cat(parts), device)

    supervised_M = torch.cat(supervised).flatten().nonzero()[:, 0]
    inside = len(supervised_M)
    if padded:
        supervised_M = F.pad(supervised_M, (0, padded_size(inside, _TILES[device.type]) - inside))

    return BlockBatch(
        aux_SLD=torch.cat(aux_layers),
        tokens_S=there(read),
        next_tokens_S=there(following),
        layout=BlockLayout(lengths, there(anchors), there(sequence)),
        previous_NK=there(previous),
        labels_NK=there(labels),
        supervised_NK=there(supervised),
        supervised_M=on_device(supervised_M, device),
        target_hidden_NKD=there(hidden),
        lse_NK=there(lse),
        argmax_NK=there(argmax),
        blocks=blocks,
        positions=inside,
    )


def idle_batch(drafter: DraftModule, padded: bool = False) -> BlockBatch:
    """A batch of empty blocks, for a rank without work that must take part in the others' collectives."""
    config, device = drafter.config, drafter.aux_scale_L.device
    size = _TILES[device.type] if padded else 1
    nothing_N = torch.zeros(size, dtype=torch.long, device=device)
    nothing_NK = nothing_N[:, None].expand(size, config.gamma)
    return BlockBatch(
        aux_SLD=torch.zeros(size, len(config.target_layer_ids), config.hidden_size, dtype=torch.float16, device=device),
        tokens_S=nothing_N,
        next_tokens_S=nothing_N,
        layout=BlockLayout([size], nothing_N + 1, nothing_N),
        previous_NK=nothing_NK,
        labels_NK=nothing_NK,
        supervised_NK=torch.ones_like(nothing_NK, dtype=torch.bool),
        supervised_M=torch.arange(size * config.gamma, device=device),
        target_hidden_NKD=torch.zeros(size, config.gamma, config.hidden_size, dtype=torch.float16, device=device),
        lse_NK=torch.zeros(size, config.gamma, device=device),
        argmax_NK=nothing_NK,
        blocks=size,
        positions=size * config.gamma,
    )


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
