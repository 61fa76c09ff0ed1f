"""A rolling window of features on disk: never more than `max_bytes` of shards, refreshed by the target.

    wanted -> memory? -> pending? -> a shard on disk? -> the target computes it -> pending --full--> new shard,
                                                                              least recently needed shards make room

A shard holds samples in the order in which training first needed them, so a miss costs one prefill and never that of
its neighbours. What a sample decodes to depends on the sample alone, so any budget gives the numbers of a complete
store. The window is a cache: what is damaged is reported, dropped and computed again. One process owns a window.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.data.samples import Sample
from outrider.target import Target
from outrider.training.features import FeatureCache, Features
from outrider.training.store import begin_store
from outrider.training.store_codec import decode, extent, shard_bytes
from outrider.training.store_plan import StorePlan
from outrider.training.store_shards import (
    DamagedShard,
    ShardReader,
    check_shard,
    clear_leftovers,
    encode_samples,
    read_sidecar,
    sidecar,
    write_shard,
)

_FEWEST_SHARDS = 8  # a budget is cut into at least so many, or one shard would displace everything


@dataclass
class _Shard:
    path: Path
    indices: list[int]
    bytes: int
    sha256: str
    reader: ShardReader | None = None  # opened, and checked, at the first need


class FeatureWindow(FeatureCache):
    """Features from a bounded directory, computed where they are not there."""

    def __init__(
        self,
        directory: Path,
        wanted: StorePlan,
        target: Target,
        samples: Sequence[Sample],
        budget_bytes: int,
        max_bytes: int,
        shard_tokens: int,
    ) -> None:
        super().__init__(samples, budget_bytes)
        self.directory, self.target, self.max_bytes, self.shard_tokens = directory, target, max_bytes, shard_tokens
        self.plan = begin_store(directory, replace(wanted, shards=()))
        self.computed = 0
        self._pending: dict[int, Mapping[str, Tensor]] = {}
        self._where: dict[int, _Shard] = {}
        self._shards: OrderedDict[str, _Shard] = OrderedDict()  # least recently needed first
        self._next = 0
        self._scan()

    @property
    def bytes(self) -> int:
        """Of all shards on disk."""
        return sum(shard.bytes for shard in self._shards.values())

    def close(self) -> None:
        self._flush()
        super().close()

    def warm(self) -> None:
        """Fill the window with the first samples that fit."""
        for index in range(len(self.samples)):
            if self.bytes + self._size([*self._pending, index]) > self.max_bytes:
                break
            self.gather([index])
        self.close()

    def _scan(self) -> None:
        """Take over the shards of an earlier process."""
        clear_leftovers(self.directory, ".*.tmp")
        for path in sorted(self.directory.glob("window-*.safetensors")):
            self._next = max(self._next, int(path.stem.rpartition("-")[2]) + 1)
            try:
                entry = read_sidecar(path, self.plan.key)
            except DamagedShard as error:
                self._remove(path, error)
                continue
            shard = _Shard(path, entry["samples"], entry["bytes"], entry["sha256"])
            self._shards[path.name] = shard
            self._where |= dict.fromkeys(shard.indices, shard)
        self._make_room(0)  # the budget may be smaller than last time

    def _fetch(self, indices: Sequence[int]) -> list[Features]:
        found = {index: self._recall(index) for index in indices}
        missing = [index for index, features in found.items() if features is None]
        scale_L = torch.tensor(self.plan.tap_scale, device=self.target.device)
        samples = [self.samples[i] for i in missing]
        encoded = encode_samples(self.target, samples, self.plan.taps, scale_L, self.plan.dtype)
        self.computed += len(missing)
        for index, stored in zip(missing, encoded, strict=True):
            self._pending[index] = stored
            found[index] = decode(stored)
            if sum(len(self.samples[i].tokens) for i in self._pending) >= self.shard_tokens or (
                self._size(list(self._pending)) > self.max_bytes // _FEWEST_SHARDS
            ):
                self._flush()
        return [features for features in found.values() if features is not None]

    def _recall(self, index: int) -> Features | None:
        if index in self._pending:
            return decode(self._pending[index])
        shard = self._where.get(index)
        if shard is None:
            return None
        try:
            if shard.reader is None:
                check_shard(shard.path, shard.bytes, shard.sha256)
                samples = [self.samples[i] for i in shard.indices]
                shard.reader = ShardReader(shard.path, samples, self.target.device)
        except DamagedShard as error:
            self._drop(shard)
            self._remove(shard.path, error)
            return None
        self._shards.move_to_end(shard.path.name)
        return shard.reader[shard.indices.index(index)]

    def _size(self, indices: Sequence[int]) -> int:
        size = extent([self.samples[i] for i in indices])
        return shard_bytes(size, len(self.plan.taps), self.plan.hidden_size, self.plan.dtype)

    def _flush(self) -> None:
        """Write what is pending as one shard; nothing is written where it alone would exceed the budget."""
        indices, size = list(self._pending), self._size(list(self._pending))
        if indices and size <= self.max_bytes:
            self._make_room(size)
            path = self.directory / f"window-{self._next:06d}.safetensors"
            self._next += 1
            digest = write_shard(path, self.plan.key, indices, list(self._pending.values()))
            shard = _Shard(path, indices, size, digest)
            self._shards[path.name] = shard
            self._where |= dict.fromkeys(indices, shard)
        self._pending.clear()

    def _make_room(self, size: int) -> None:
        while self._shards and self.bytes + size > self.max_bytes:
            shard = next(iter(self._shards.values()))
            self._drop(shard)
            self._remove(shard.path)

    def _drop(self, shard: _Shard) -> None:
        del self._shards[shard.path.name]
        for index in shard.indices:
            if self._where.get(index) is shard:
                del self._where[index]

    @staticmethod
    def _remove(path: Path, why: DamagedShard | None = None) -> None:
        if why is not None:
            warnings.warn(f"{why}: dropped from the window and computed again when needed", stacklevel=2)
        sidecar(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
