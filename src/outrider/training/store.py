"""A complete feature store on disk: written once by any number of processes, read by every training run after.

    DIR/plan.json       what the store is (training/store_plan.py); written first, by whoever comes first
    DIR/shard-*.safetensors, shard-*.json      shard and sidecar, in any order, by any process
    DIR/manifest.json   the plan with the SHA-256 of every shard; written by whoever finds the set complete

A directory is bit-identical whatever the number of writers and however often they were killed (on one kind of machine
and number of threads: matrix products differ between machines in the last bits).
"""

from __future__ import annotations

import bisect
import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from outrider.data.samples import Sample
from outrider.formats.files import write_atomically
from outrider.target import Target
from outrider.training.features import FeatureCache, Features
from outrider.training.store_plan import StorePlan, agree, read_plan
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


def begin_store(directory: Path, wanted: StorePlan) -> StorePlan:
    """The plan of the store in `directory`: the one found there, else `wanted`, which is written.

    Raises:
        ValueError: the directory holds another run's store.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "plan.json"
    if not path.is_file():
        write_atomically(path, wanted.json(), durable=True, keep_first=True)
    return agree(read_plan(path), wanted, directory)


def missing_bytes(directory: Path, plan: StorePlan) -> int:
    """Bytes still to be written, by file sizes."""
    paths = {directory / shard.file: shard.bytes for shard in plan.shards}
    return sum(size for path, size in paths.items() if not path.is_file() or path.stat().st_size != size)


def free_bytes(directory: Path) -> int:
    """Free on the disk that `directory` is on, or will be."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def check_space(directory: Path, needed: int) -> None:
    """Raises ValueError when the disk does not have `needed` bytes free."""
    free = free_bytes(directory)
    if needed > free:
        raise ValueError(
            f"the store still needs {needed} bytes ({needed / 2**30:.1f} GB) and the disk of {directory} has {free} "
            f"({free / 2**30:.1f} GB) free: nothing was written. Choose another features.directory, "
            "features.dtype=int8, or a window with features.max_gb."
        )


def write_store(
    directory: Path,
    plan: StorePlan,
    target: Target,
    samples: Sequence[Sample],
    numbers: Iterable[int],
    on_progress: Callable[[int], None] = lambda number: None,
) -> list[int]:
    """Write those of the shards `numbers` that are not there and valid; return their numbers.

    Finishes the store when this completes it.
    """
    written = []
    scale_L = torch.tensor(plan.tap_scale, device=target.device)
    for number in numbers:
        shard = plan.shards[number]
        path = directory / shard.file
        if not _valid(path, plan, number):
            encoded = encode_samples(target, samples[shard.first : shard.end], plan.taps, scale_L, plan.dtype)
            write_shard(path, plan.key, range(shard.first, shard.end), encoded)
            assert path.stat().st_size == shard.bytes, (path.stat().st_size, shard.bytes)
            written.append(number)
        on_progress(number)
    with contextlib.suppress(DamagedShard):  # other processes are still at work
        finish_store(directory, plan)
    return written


def _valid(path: Path, plan: StorePlan, number: int) -> bool:
    try:
        check_shard(path, plan.shards[number].bytes, _entry(path.parent, plan, number)["sha256"])
    except DamagedShard:
        return False
    return True


def _entry(directory: Path, plan: StorePlan, number: int) -> dict[str, Any]:
    shard = plan.shards[number]
    return read_sidecar(directory / shard.file, plan.key, range(shard.first, shard.end))


def finish_store(directory: Path, plan: StorePlan) -> list[str]:
    """Write manifest.json from the sidecars and return the SHA-256 of every shard. May be repeated.

    Raises:
        DamagedShard: a shard has no valid sidecar; all of them are named (the first few, when there are many).
    """
    digests, wrong = [], []
    for number in range(len(plan.shards)):
        try:
            digests.append(str(_entry(directory, plan, number)["sha256"]))
        except DamagedShard as error:
            wrong.append(f"{error}{_remedy(number)}")
    if wrong:
        more = f"; and {len(wrong) - 3} more: `outrider features write RECIPE` goes on" if len(wrong) > 3 else ""
        raise DamagedShard(f"the feature store in {directory} is not complete: {'; '.join(wrong[:3])}{more}.")
    text = _manifest(plan, digests)
    path = directory / "manifest.json"
    for name in ("plan.json", "manifest.json"):
        clear_leftovers(directory, f".{name}.*.tmp")
    if not path.is_file() or path.read_text() != text:
        path.unlink(missing_ok=True)
        write_atomically(path, text, durable=True, keep_first=True)
    return digests


def _manifest(plan: StorePlan, digests: Sequence[str]) -> str:
    fields = asdict(plan)
    for shard, digest in zip(fields["shards"], digests, strict=True):
        shard["samples"], shard["sha256"] = shard["end"] - shard["first"], digest
    return json.dumps(fields, indent=1) + "\n"


def _remedy(number: int) -> str:
    return f" (`outrider features write RECIPE --only {number}` makes it)"


def open_store(directory: Path, wanted: StorePlan) -> tuple[StorePlan, list[str]]:
    """The plan and the shards' SHA-256s of a complete store; a store that lacks only its manifest gets one.

    Raises:
        ValueError: there is no store, it is incomplete, another run's, or its manifest is damaged.
    """
    if not (directory / "plan.json").is_file():
        raise ValueError(
            f"{directory} holds no feature store: `outrider features write RECIPE` writes one, features.mode=online "
            "does without."
        )
    plan = agree(read_plan(directory / "plan.json"), wanted, directory)
    path = directory / "manifest.json"
    if not path.is_file():
        return plan, finish_store(directory, plan)
    if read_plan(path) != plan:
        raise ValueError(f"{path} does not fit plan.json beside it: altered or foreign. Delete it; it is made again.")
    try:
        return plan, [str(shard["sha256"]) for shard in json.loads(path.read_text())["shards"]]
    except KeyError as error:
        raise ValueError(f"{path} is altered ({error} is missing). Delete it; it is made again.") from error


def check_store(directory: Path, wanted: StorePlan) -> list[str]:
    """Everything wrong with the shards of a store, file by file; empty when all is well."""
    plan, digests = open_store(directory, wanted)
    wrong = []
    for number, (shard, digest) in enumerate(zip(plan.shards, digests, strict=True)):
        try:
            check_shard(directory / shard.file, shard.bytes, digest)
        except DamagedShard as error:
            wrong.append(f"{error}{_remedy(number)}")
    known = {name for shard in plan.shards for name in (shard.file, sidecar(Path(shard.file)).name)}
    for path in sorted(directory.glob("shard-*")):
        if path.name not in known:
            wrong.append(f"{path} is foreign: not part of this store (delete it)")
    return wrong


class FeatureStore(FeatureCache):
    """Reads a complete store; each shard is checked against its SHA-256 when it is first opened.

    `columns`: which of the store's taps to give, by place; all of them when None.
    """

    background = True

    def __init__(
        self,
        directory: Path,
        wanted: StorePlan,
        samples: Sequence[Sample],
        device: torch.device,
        budget_bytes: int,
        columns: Sequence[int] | None = None,
    ) -> None:
        super().__init__(samples, budget_bytes)
        self.directory, self.device = directory, device
        self.plan, self.digests = open_store(directory, wanted)
        self._columns = None if columns is None or list(columns) == list(range(len(self.plan.taps))) else list(columns)
        self._firsts = [shard.first for shard in self.plan.shards]
        self._readers: dict[int, ShardReader] = {}

    def _fetch(self, indices: Sequence[int]) -> list[Features]:
        return [self._read(index) for index in indices]

    def _read(self, index: int) -> Features:
        number = bisect.bisect_right(self._firsts, index) - 1
        shard = self.plan.shards[number]
        if number not in self._readers:
            path = self.directory / shard.file
            try:
                check_shard(path, shard.bytes, self.digests[number])
            except DamagedShard as error:
                raise DamagedShard(f"{error}{_remedy(number)}") from error
            self._readers[number] = ShardReader(path, self.samples[shard.first : shard.end], self.device)
        features = self._readers[number][index - shard.first]
        if self._columns is None:
            return features
        return replace(features, taps_SLD=features.taps_SLD[:, self._columns])
