"""Features of the target that a drafter is trained on, computed by packed prefill and cached in bounded memory.

A prefill gives, for tokens t_0 .. t_{n-2} with R generated ones among t_1 .. t_{n-1}:
    aux hidden states    [n - 1, L, D]   divided by aux_scale, float16
    hidden  [R, D]          normed last hidden states at the sample's anchors, float16; row p predicts token p + 1
    lse, argmax [R]         of the full-vocabulary logits of the same rows
`FeatureSource` computes them online and writes nothing to disk; training/feature_store.py reads them from one. When the
memory is full the least recently used sample goes and is fetched again on its next visit: the same numbers, so results
do not depend on the budget. What is missing for a step is prefilled in packed groups.

Shapes: S context slots, R generated tokens, L aux layers, D target hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from outrider.data.responses import Sample
from outrider.sampling import rows_at_once
from outrider.target.model import Target
from outrider.training.machine import release_free_memory
from outrider.utils.measure import on_device, pinned_bytes, to_host

PACK_TOKENS = 2048  # of one packed prefill: matrix products are at full speed, and temporaries stay below 100 MB
_GPU_PACK_TOKENS = 8192
_HEAD_CHUNK, _GPU_HEAD_CHUNK = 128, 512  # rows whose logits are there at a time
_GROWTH = 2**30  # bytes that a process may grow by before it gives free memory back
LARGEST_FLOAT16 = 65504.0


@dataclass(frozen=True)
class Features:
    """Features of one sample, in the host's memory; the module docstring describes the rows."""

    aux_SLD: Tensor
    hidden_RD: Tensor
    lse_R: Tensor
    argmax_R: Tensor

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        tensors = self.aux_SLD, self.hidden_RD, self.lse_R, self.argmax_R
        return sum(pinned_bytes(t.nbytes) if t.is_pinned() else t.nbytes for t in tensors)


class FeatureCache(ABC):
    """Least-recently-used cache of features by sample, up to `budget_bytes`; subclasses compute or read them."""

    background = False  # whether to fetch in another thread

    def __init__(self, samples: Sequence[Sample], budget_bytes: int) -> None:
        self.samples = samples
        self.budget_bytes = budget_bytes
        self._kept: OrderedDict[int, Features] = OrderedDict()
        self._bytes = 0

    @abstractmethod
    def _fetch(self, indices: Sequence[int]) -> list[Features]:
        """Features that are not in memory, in the order of `indices`."""

    def __getitem__(self, index: int) -> Features:
        return self.gather([index])[0]

    def gather(self, now: Sequence[int], soon: Sequence[int] = ()) -> list[Features]:
        """The features of `now`. What is missing is fetched together, with some of `soon` where that is no waste."""
        found = {i: self._kept[i] for i in now if i in self._kept}
        for index in found:
            self._kept.move_to_end(index)
        missing = [i for i in dict.fromkeys(now) if i not in found]
        if missing:
            fetched = missing + self._along(missing, soon)
            for index, features in zip(fetched, self._fetch(fetched), strict=True):
                found[index] = features
                self._remember(index, features)
        return [found[i] for i in now]

    def _along(self, missing: Sequence[int], soon: Sequence[int]) -> list[int]:
        """The samples of `soon` to fetch as well; none by default."""
        return []

    def _remember(self, index: int, features: Features) -> None:
        self._kept[index] = features
        self._bytes += features.nbytes
        while self._bytes > self.budget_bytes and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes

    def close(self) -> None:
        """Empty the cache; subclasses write what is pending."""
        self._kept.clear()
        self._bytes = 0


class FeatureSource(FeatureCache):
    """Features computed by the target when they are needed."""

    def __init__(
        self,
        target: Target,
        samples: Sequence[Sample],
        aux_layers: tuple[int, ...],
        aux_scale_L: Tensor,
        budget_bytes: int,
        dtype: torch.dtype = torch.float16,
    ) -> None:
        super().__init__(samples, budget_bytes)
        self.target, self.aux_layers, self.aux_scale_L, self.dtype = target, aux_layers, aux_scale_L, dtype

    def _fetch(self, indices: Sequence[int]) -> list[Features]:
        samples = [self.samples[i] for i in indices]
        found = list(
            compute_features(self.target, samples, self.aux_layers, aux_scale_L=self.aux_scale_L, dtype=self.dtype)
        )
        # What is remembered lies among the temporaries of prefills: a process grew to seven times of it.
        release_free_memory(_GROWTH)
        return found

    def _along(self, missing: Sequence[int], soon: Sequence[int]) -> list[int]:
        """Fill the last group of tokens, as far as memory holds it beside what is remembered."""
        if not packs(self.target):
            return []
        free_tokens = -sum(self.samples[i].length for i in missing) % pack_tokens(self.target)
        per_token = (len(self.aux_layers) + 1) * self.target.hidden_size * self.dtype.itemsize + 12
        free_bytes = self.budget_bytes - self._bytes
        free_tokens = min(free_tokens, free_bytes // per_token - sum(self.samples[i].length for i in missing))
        along: list[int] = []
        for index in dict.fromkeys(soon):
            if index in self._kept or index in missing:
                continue
            free_tokens -= self.samples[index].length
            if free_tokens < 0:
                break
            along.append(index)
        return along


def packs(target: Target) -> bool:
    """Whether to prefill several samples at once: where that changes no bit, or where speed needs it.

    On a GPU results depend on the batch in the last bits; on a CPU, families without the fused forward go one by one,
    so that a resumed run equals an uninterrupted one to the last bit.
    """
    return target.packs_exactly or target.device.type != "cpu"


def pack_tokens(target: Target) -> int:
    """Of one packed prefill."""
    return _GPU_PACK_TOKENS if target.device.type == "cuda" else PACK_TOKENS


def compute_features(
    target: Target,
    samples: Sequence[Sample],
    aux_layers: tuple[int, ...],
    aux_scale_L: Tensor,
    dtype: torch.dtype = torch.float16,
) -> Iterator[Features]:
    """Features of `samples`, in order, prefilled in groups of up to `pack_tokens` tokens."""
    for group in _groups(samples, pack_tokens(target) if packs(target) else 0):
        yield from _prefill(target, group, aux_layers, aux_scale_L=aux_scale_L, dtype=dtype)


def _groups(samples: Sequence[Sample], limit: int) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    for sample in samples:
        if group and sum(s.length for s in [*group, sample]) > limit:
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


@torch.inference_mode()
def _prefill(
    target: Target, group: Sequence[Sample], aux_layers: tuple[int, ...], aux_scale_L: Tensor, dtype: torch.dtype
) -> list[Features]:
    aux_of, hidden_of = target.prefill_packed([s.tokens[:-1] for s in group], aux_layers)
    tensors: list[Tensor] = []
    for sample, raw_SLD, all_SD in zip(group, aux_of, hidden_of, strict=True):
        hidden_RD = all_SD[on_device(sample.anchors, all_SD.device)].float()
        hidden_RD = hidden_RD.clamp_(-LARGEST_FLOAT16, LARGEST_FLOAT16).to(dtype)
        scaled_SLD = (raw_SLD.float() / aux_scale_L[:, None]).clamp_(-LARGEST_FLOAT16, LARGEST_FLOAT16)
        tensors += scaled_SLD.to(dtype), hidden_RD, *logit_summary(target, hidden_RD)
    parts = iter(to_host(tensors))
    return [Features(*four) for four in zip(parts, parts, parts, parts, strict=True)]


@torch.inference_mode()
def logit_summary(target: Target, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
    """(log-sum-exp, argmax) [R] of the float32 logits of the rows; logits exist for a few rows at a time."""
    lse, argmax = [], []
    for rows in hidden_RD.float().split(_GPU_HEAD_CHUNK if hidden_RD.is_cuda else _HEAD_CHUNK):
        logits = target.logits(rows)
        for few in logits.split(rows_at_once(logits)):
            lse.append(few.logsumexp(-1))
            argmax.append(few.max(-1).indices)  # on a CPU `argmax` takes three times as long
    return torch.cat(lse), torch.cat(argmax)


@torch.inference_mode()
def measure_aux_scale(target: Target, samples: Sequence[Sample], aux_layers: tuple[int, ...]) -> Tensor:
    """RMS of each aux layer [L] over a few samples, leaving out position 0, whose activations are massive outliers."""
    total = torch.zeros(len(aux_layers), dtype=torch.float64, device=target.device)
    count = 0
    for sample in samples:
        tokens = on_device([sample.tokens], target.device)
        output = target.forward(tokens, target.new_cache(tokens.shape[1]), aux_layers, logits=0)
        assert output.aux_BTLD is not None
        squares_TL = output.aux_BTLD[0, 1:].double().square().mean(-1)
        # The median over tokens, so that a second outlier position does not set the scale.
        total += squares_TL.median(0).values
        count += 1
    return (total / count).sqrt().float()


# ----------------------------------------------------------------------------
# The features of coming steps, fetched ahead of their use.
#
#     store    step s trains  |  a thread reads the few steps after it
#     online   step s trains, then step s+1 is prefilled together with what the steps after it lack (one packed group)
#
# A thread only where fetching waits for a disk: prefilling on a CPU would fight the training step for the same cores,
# and on a GPU it is asynchronous by itself. Features do not depend on when they are fetched, so neither do results.
# ----------------------------------------------------------------------------


_AHEAD = 4  # steps


@contextmanager
def step_features(
    source: FeatureCache, steps: Iterable[Sequence[int]], ahead: int = _AHEAD
) -> Iterator[Iterator[list[Features]]]:
    """Yields an iterator over the features of each step's samples, in the order of `steps`.

    While it is open nobody else may use `source`. An exception met while fetching is raised by the `next` that would
    have returned those features.
    """
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="features") if source.background else None
    try:
        yield _fetched(source, iter(steps), ahead, thread=thread)
    finally:
        if thread is not None:
            thread.shutdown(cancel_futures=True)


def _fetched(
    source: FeatureCache, steps: Iterator[Sequence[int]], ahead: int, thread: ThreadPoolExecutor | None
) -> Iterator[list[Features]]:
    def begin(count: int) -> Iterator[tuple[Sequence[int], Future[list[Features]] | None]]:
        return ((now, thread.submit(source.gather, now) if thread else None) for now in islice(steps, count))

    coming = deque(begin(ahead))
    while coming:
        coming.extend(begin(1))
        now, fetched = coming.popleft()
        yield fetched.result() if fetched else source.gather(now, [i for indices, _ in coming for i in indices])
