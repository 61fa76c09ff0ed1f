"""One shard: a safetensors file and its sidecar, each written whole or not at all.

    .shard-00003.safetensors.tmp  --fsync, rename-->  shard-00003.safetensors, then shard-00003.json {key, sha256, ...}

The sidecar comes last: a shard counts once it is there. A process killed at any time leaves at most a temporary file,
and the next one goes on with the shards that have no valid sidecar.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from outrider.data.samples import Sample
from outrider.formats.files import write_atomically
from outrider.target import Target
from outrider.target.resolve import file_sha256
from outrider.training.features import Features, compute_features
from outrider.training.store_codec import Extent, StoreDtype, decode, encode, extent


class DamagedShard(ValueError):
    """A shard that cannot be used; the message names the file and what is wrong with it."""


def clear_leftovers(directory: Path, pattern: str) -> None:
    """Remove temporary files of processes that were killed inside `write_atomically`."""
    for path in directory.glob(pattern):
        path.unlink(missing_ok=True)


def sidecar(path: Path) -> Path:
    return path.with_suffix(".json")


def encode_samples(
    target: Target, samples: Sequence[Sample], taps: tuple[int, ...], tap_scale_L: Tensor, dtype: StoreDtype
) -> list[dict[str, Tensor]]:
    """Stored tensors of each sample, computed by the target."""
    return [encode(target, features, dtype) for features in compute_features(target, samples, taps, tap_scale_L)]


def write_shard(path: Path, key: str, indices: Sequence[int], encoded: Sequence[Mapping[str, Tensor]]) -> str:
    """Write samples into one shard with its sidecar, and return its SHA-256."""
    tensors = {name: torch.cat([e[name] for e in encoded]).cpu().contiguous() for name in encoded[0]}
    # Not `save_file`: it writes to a temporary file of its own naming, which a killed process would leave for ever.
    data = save(tensors)
    sidecar(path).unlink(missing_ok=True)  # while the file changes there is no shard
    # Not unique: what a killed process left is as large as a shard, and whoever makes this one again writes over it.
    write_atomically(path, data, durable=True, unique=False)
    entry = {"key": key, "samples": list(indices), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    write_atomically(sidecar(path), json.dumps(entry) + "\n", durable=True, unique=False)
    return str(entry["sha256"])


def read_sidecar(path: Path, key: str, samples: Sequence[int] | None = None) -> dict[str, Any]:
    """The sidecar of the shard at `path`, which holds `samples` (None: whichever it says).

    Raises:
        DamagedShard: missing, unreadable, or of another store.
    """
    try:
        entry: dict[str, Any] = json.loads(sidecar(path).read_text())
        foreign = entry["key"] != key
        entry["sha256"], entry["bytes"], entry["samples"]
    except FileNotFoundError as error:
        raise DamagedShard(f"{path} has not been written (no {sidecar(path).name})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedShard(f"{sidecar(path)} is altered: not a shard's sidecar") from error
    if foreign:
        raise DamagedShard(f"{path} is foreign: {sidecar(path).name} belongs to another store")
    if samples is not None and entry["samples"] != list(samples):
        raise DamagedShard(f"{path} is foreign: {sidecar(path).name} belongs to another shard")
    return entry


def check_shard(path: Path, expected_bytes: int, expected_sha256: str) -> None:
    """Raises DamagedShard when the file is missing, truncated or altered."""
    if not path.is_file():
        raise DamagedShard(f"{path} is missing")
    found = path.stat().st_size
    if found != expected_bytes:
        raise DamagedShard(
            f"{path} is {'truncated' if found < expected_bytes else 'altered'}: {found} bytes instead of "
            f"{expected_bytes}"
        )
    if file_sha256(path) != expected_sha256:
        raise DamagedShard(f"{path} is altered, or foreign: its SHA-256 is not the recorded one")


class ShardReader:
    """Features of single samples out of one memory-mapped shard."""

    def __init__(self, path: Path, samples: Sequence[Sample], device: torch.device) -> None:
        self.file = safe_open(path, "pt")
        self.device = device
        self.ends = [Extent(0, 0)]
        for sample in samples:
            size, last = extent([sample]), self.ends[-1]
            self.ends.append(Extent(last.slots + size.slots, last.rows + size.rows))

    def __getitem__(self, place: int) -> Features:
        """Features of the shard's sample number `place`."""
        start, end = self.ends[place], self.ends[place + 1]
        stored = {}
        for name in self.file.keys():  # noqa: SIM118  (not a dict)
            rows = slice(start.slots, end.slots) if name.startswith("taps") else slice(start.rows, end.rows)
            stored[name] = self.file.get_slice(name)[rows].to(self.device)
        return decode(stored)
