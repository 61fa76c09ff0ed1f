"""What a feature store will hold, decided and sized before a byte is written.

    samples, shard_tokens  ->  shard i = samples [a_i, b_i)  ->  exact file sizes

Ranges are a pure function of the samples, so several processes agree on them without talking: process i of N writes the
shards i, i + N, ... `plan.json` is what they agree on; `manifest.json` is the plan with every shard's SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from outrider.data.samples import Sample
from outrider.target import Target
from outrider.target.resolve import dtype_name
from outrider.training.store_codec import StoreDtype, extent, shard_bytes

FORMAT_VERSION = 1
# Measured anew by every process, so that it may differ in the last bits from machine to machine.
_SCALE_TOLERANCE = 1e-4
_FINGERPRINT_ELEMENTS = 64


@dataclass(frozen=True)
class ShardPlan:
    """One file: samples [first, end) and its exact size."""

    file: str
    first: int
    end: int
    bytes: int


@dataclass(frozen=True)
class StorePlan:
    """Everything the numbers in a store depend on, and how they are cut into files."""

    format: int
    target: str
    target_sha256: str
    target_dtype: str
    samples_sha256: str
    taps: tuple[int, ...]
    tap_scale: tuple[float, ...]
    hidden_size: int
    dtype: StoreDtype
    shards: tuple[ShardPlan, ...]

    @property
    def bytes(self) -> int:
        """Size of all shards on disk, headers included."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def key(self) -> str:
        """Identifies the store; every shard's sidecar carries it."""
        return hashlib.sha256(self.json().encode()).hexdigest()

    def json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def plan_store(
    target: Target,
    samples: Sequence[Sample],
    taps: tuple[int, ...],
    tap_scale_L: Tensor,
    dtype: StoreDtype,
    shard_tokens: int,
) -> StorePlan:
    """Cut samples into shards of about `shard_tokens` tokens (the last sample may go beyond)."""
    shards: list[ShardPlan] = []
    first = tokens = 0
    for end, sample in enumerate(samples, start=1):
        tokens += len(sample.tokens)
        if tokens >= shard_tokens or end == len(samples):
            size = shard_bytes(extent(samples[first:end]), len(taps), target.hidden_size, dtype)
            shards.append(ShardPlan(f"shard-{len(shards):05d}.safetensors", first, end, size))
            first, tokens = end, 0
    return StorePlan(
        FORMAT_VERSION,
        target.name,
        target_fingerprint(target),
        dtype_name(target.dtype),
        samples_digest(samples),
        taps,
        tuple(tap_scale_L.tolist()),
        target.hidden_size,
        dtype,
        tuple(shards),
    )


def samples_digest(samples: Sequence[Sample]) -> str:
    """SHA-256 of the samples' tokens and generated ranges, in order."""
    return hashlib.sha256(json.dumps([(s.tokens, s.spans) for s in samples]).encode()).hexdigest()


def target_fingerprint(target: Target) -> str:
    """SHA-256 of the target's config and of a few elements of every parameter: fine-tunes share a config."""
    config = target.config.to_dict()
    for key in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"):
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in target.model.named_parameters():
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // _FINGERPRINT_ELEMENTS)]
        digest.update(name.encode() + some.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def read_plan(path: Path) -> StorePlan:
    """A plan from plan.json or manifest.json.

    Raises:
        ValueError: not readable, or of another format version.
    """
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        if raw["format"] != FORMAT_VERSION:
            raise ValueError(f"format version {raw['format']!r}, this version reads {FORMAT_VERSION}")
        names = set(ShardPlan.__dataclass_fields__)
        shards = tuple(ShardPlan(**{k: v for k, v in shard.items() if k in names}) for shard in raw["shards"])
        plan = StorePlan(**{**raw, "taps": tuple(raw["taps"]), "tap_scale": tuple(raw["tap_scale"]), "shards": shards})
        if plan.dtype not in get_args(StoreDtype):
            raise ValueError(f"unknown dtype {plan.dtype!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged or foreign ({error}). Delete it; `outrider features write RECIPE` makes it again and "
            "keeps every shard that fits."
        ) from error
    return plan


def agree(found: StorePlan, wanted: StorePlan, directory: Path) -> StorePlan:
    """`found`, when it says what `wanted` says (tap scales up to rounding).

    Raises:
        ValueError: naming what differs.
    """
    close = len(found.tap_scale) == len(wanted.tap_scale) and torch.allclose(
        torch.tensor(found.tap_scale), torch.tensor(wanted.tap_scale), rtol=_SCALE_TOLERANCE, atol=0
    )
    wanted = replace(wanted, tap_scale=found.tap_scale) if close else wanted
    # The name is for people: the same weights in another directory are the same target.
    different = [k for k in StorePlan.__dataclass_fields__ if k != "target" and getattr(found, k) != getattr(wanted, k)]
    if different:
        raise ValueError(
            f"the feature store in {directory} was made for another run ({', '.join(different)} differ). Choose "
            "another features.directory, or delete this one."
        )
    return found
