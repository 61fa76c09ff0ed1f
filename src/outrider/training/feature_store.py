"""Stores features of the target on disk, in shards whose sizes are known before they are written.

Tensors of a shard:

    aux     [S, L, D]  bf16, or int8 / fp8 (e4m3) with aux_scale [S, L]     value = stored * scale
    hidden  [R, D]     likewise, with hidden_scale [R]                       scale = max |row| / 127 or / 448
    lse     [R]        float32: of the logits of the *stored* hidden rows, so that exp(W h - lse) sums to one
    argmax  [R]        int32: of the exact rows, the token the target itself would take

O(hidden) numbers a token; never logits over the vocabulary (DSpark, arXiv 2607.05147, section 5.1). The samples of a
shard are concatenated along S and R. Shapes: S context slots, R generated tokens, L aux layers, D target hidden.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import math
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from outrider.data.responses import Sample
from outrider.drafters.base import DraftModule
from outrider.target.model import Target
from outrider.training.dataset import known_samples
from outrider.training.features import (
    LARGEST_FLOAT16,
    FeatureCache,
    Features,
    FeatureSource,
    compute_features,
    logit_summary,
    measure_aux_scale,
)
from outrider.training.machine import feature_cache_bytes
from outrider.training.recipe import Recipe
from outrider.training.setup import CALIBRATION_SAMPLES, Run
from outrider.utils.documents import read_json, read_mapping
from outrider.utils.files import check_space, file_sha256, unfinished_writes, write_atomically
from outrider.utils.measure import dtype_name

StoreDtype = Literal["bf16", "int8", "fp8"]
STORED = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST_STORED = {"int8": 127.0, "fp8": 448.0}
# Names in a safetensors header, in the order in which its tensors lie in the file (widest first).
_HEADER_NAMES = {
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
}


def extent(samples: Sequence[Sample]) -> tuple[int, int]:
    """Total context slots S and generated rows R of the samples."""
    return sum(s.length - 1 for s in samples), sum(s.num_supervised for s in samples)


def encode(target: Target, features: Features, dtype: StoreDtype) -> dict[str, Tensor]:
    """Encode float16 features of one sample as the tensors of a shard."""
    stored = _encode_rows("aux", features.aux_SLD, dtype) | _encode_rows("hidden", features.hidden_RD, dtype)
    lse_R, _ = logit_summary(target, _decode_rows("hidden", stored))
    return {**stored, "lse": lse_R, "argmax": features.argmax_R.int()}


def decode(stored: Mapping[str, Tensor]) -> Features:
    """Decode the tensors of one sample into float16 features."""
    aux_SLD, hidden_RD = _decode_rows("aux", stored), _decode_rows("hidden", stored)
    return Features(aux_SLD, hidden_RD, stored["lse"], argmax_R=stored["argmax"].long())


def _encode_rows(name: str, x_XD: Tensor, dtype: StoreDtype) -> dict[str, Tensor]:
    if dtype == "bf16":
        return {name: x_XD.bfloat16()}
    largest_X = x_XD.float().abs().amax(-1)
    scale_X = torch.where(largest_X == 0, 1.0, largest_X / _LARGEST_STORED[dtype])
    scaled_XD = x_XD.float() / scale_X[..., None]
    if dtype == "int8":
        scaled_XD = scaled_XD.round_()
    return {name: scaled_XD.to(STORED[dtype]), f"{name}_scale": scale_X}


def _decode_rows(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    x_XD = stored[name].float()
    if f"{name}_scale" in stored:
        x_XD = x_XD * stored[f"{name}_scale"][..., None]
    return x_XD.clamp_(-LARGEST_FLOAT16, LARGEST_FLOAT16).half()  # bf16 rounds 65504 up to 65536


def shard_bytes(samples: Sequence[Sample], aux_layers: int, hidden: int, dtype: StoreDtype) -> int:
    """Size of the safetensors file: 8 bytes, a JSON header padded to a multiple of 8, and the tensors."""
    slots, rows = extent(samples)
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "aux": (STORED[dtype], (slots, aux_layers, hidden)),
        "hidden": (STORED[dtype], (rows, hidden)),
        "lse": (torch.float32, (rows,)),
        "argmax": (torch.int32, (rows,)),
    }
    if dtype != "bf16":
        tensors |= {"aux_scale": (torch.float32, (slots, aux_layers)), "hidden_scale": (torch.float32, (rows,))}
    header, offset = {}, 0
    for name in sorted(tensors, key=lambda name: (list(_HEADER_NAMES).index(tensors[name][0]), name)):
        kind, shape = tensors[name]
        end = offset + kind.itemsize * math.prod(shape)
        header[name] = {"dtype": _HEADER_NAMES[kind], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"))
    return 8 + -(-len(text) // 8) * 8 + offset


# ----------------------------------------------------------------------------
# The plan of a store: samples, shards and their exact sizes, before anything is written.
#
#     samples, shard_tokens  ->  shard i = samples [a_i, b_i)  ->  exact file sizes
#
# The ranges depend on the samples alone, so processes agree on them without communication: process i of N writes the
# shards i, i + N, ... `plan.json` holds the plan; `manifest.json` adds the SHA-256 of every shard.
# ----------------------------------------------------------------------------


FORMAT_VERSION = 1
# Measured anew by every process, so that it may differ in the last bits from machine to machine.
_SCALE_TOLERANCE = 1e-4
_FINGERPRINT_ELEMENTS = 64


@dataclass(frozen=True)
class ShardPlan:
    """A shard that is to be written: samples [first, end) and the exact size of the file."""

    file: str
    first: int
    end: int
    bytes: int


@dataclass(frozen=True)
class StorePlan:
    """Everything that the contents of a store depend on, and its shards."""

    format: int
    target: str
    target_sha256: str
    target_dtype: str
    samples_sha256: str
    aux_layers: tuple[int, ...]
    aux_scale: tuple[float, ...]
    hidden_size: int
    dtype: StoreDtype
    shards: tuple[ShardPlan, ...]

    @property
    def bytes(self) -> int:
        """Total size of the shards, headers included."""
        return sum(shard.bytes for shard in self.shards)

    @cached_property
    def key(self) -> str:
        """Digest of the plan, which every shard's sidecar repeats."""
        return hashlib.sha256(self.json().encode()).hexdigest()

    def json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def plan_store(
    target: Target,
    samples: Sequence[Sample],
    aux_layers: tuple[int, ...],
    aux_scale_L: Tensor,
    dtype: StoreDtype,
    shard_tokens: int,
) -> StorePlan:
    """Divide samples into shards of about `shard_tokens` tokens (the last sample of a shard may exceed them)."""
    shards: list[ShardPlan] = []
    first = tokens = 0
    for end, sample in enumerate(samples, start=1):
        tokens += sample.length
        if tokens >= shard_tokens or end == len(samples):
            size = shard_bytes(samples[first:end], len(aux_layers), target.hidden_size, dtype=dtype)
            shards.append(ShardPlan(f"shard-{len(shards):05d}.safetensors", first, end, bytes=size))
            first, tokens = end, 0
    return StorePlan(
        format=FORMAT_VERSION,
        target=target.name,
        target_sha256=target_fingerprint(target),
        target_dtype=dtype_name(target.dtype),
        samples_sha256=samples_digest(samples),
        aux_layers=aux_layers,
        aux_scale=tuple(aux_scale_L.tolist()),
        hidden_size=target.hidden_size,
        dtype=dtype,
        shards=tuple(shards),
    )


def samples_digest(samples: Iterable[Sample]) -> str:
    """SHA-256 of the JSON list of the samples' tokens and generated ranges, computed piece by piece."""
    digest, before = hashlib.sha256(b"["), ""
    for sample in samples:
        digest.update((before + json.dumps([sample.tokens, sample.spans])).encode())
        before = ", "
    digest.update(b"]")
    return digest.hexdigest()


def target_fingerprint(target: Target) -> str:
    """SHA-256 of the target's config and of some elements of every parameter, as fine-tunes share a config."""
    config = target.config.to_dict()
    for key in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"):
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in target.model.named_parameters():
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // _FINGERPRINT_ELEMENTS)]
        digest.update(name.encode() + some.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def read_plan(directory: Path, wanted: StorePlan) -> StorePlan:
    """Read the plan on disk, which must equal `wanted` up to the target's name and the rounding of its aux scales.

    Raises:
        ValueError: not readable, of another format version, or another run's; what differs is named.
    """
    path = directory / "plan.json"
    try:
        found: dict[str, Any] = read_mapping(path)
        if found["format"] != FORMAT_VERSION:
            raise ValueError(f"format version {found['format']!r}, this version reads {FORMAT_VERSION}")
        # The name is for people: the same weights in another directory are the same target.
        wanted, scale = replace(wanted, target=str(found["target"])), tuple(map(float, found["aux_scale"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged or foreign ({error}). Delete it; `outrider features write RECIPE` makes it again and "
            "keeps every shard that fits."
        ) from error
    if len(scale) == len(wanted.aux_scale) and torch.allclose(
        torch.tensor(scale), torch.tensor(wanted.aux_scale), rtol=_SCALE_TOLERANCE, atol=0
    ):
        wanted = replace(wanted, aux_scale=scale)
    fields = json.loads(wanted.json())
    different = [name for name in {**fields, **found} if fields.get(name) != found.get(name)]
    if different:
        raise ValueError(
            f"the feature store in {directory} was made for another run ({', '.join(different)} differ). Choose "
            "another features.directory, or delete this one."
        )
    return wanted


# ----------------------------------------------------------------------------
# A shard: a safetensors file and its sidecar, each written atomically.
#
#     a temporary file  --fsync, rename-->  shard-00003.safetensors, then shard-00003.json {key, sha256, ..}
#
# The sidecar is written last, and a shard without a valid sidecar is written again. A killed process leaves at most a
# temporary file.
# ----------------------------------------------------------------------------


class DamagedShard(ValueError):
    """A shard cannot be used; the message names the file and the fault."""


@dataclass(eq=False)
class Shard:
    """A shard on disk, of the samples `indices`; `remedy` ends the messages of its errors."""

    path: Path
    indices: Sequence[int]
    bytes: int
    sha256: str
    remedy: str = ""
    _file: Any = None  # memory-mapped
    _ends: list[tuple[int, int]] = field(default_factory=list)  # slots and rows before each sample, and in all

    def check(self) -> None:
        """Raise DamagedShard if the file is missing, truncated or altered."""
        if not self.path.is_file():
            raise DamagedShard(f"{self.path} is missing{self.remedy}")
        found = self.path.stat().st_size
        if found != self.bytes:
            how = "truncated" if found < self.bytes else "altered"
            raise DamagedShard(f"{self.path} is {how}: {found} bytes instead of {self.bytes}{self.remedy}")
        if file_sha256(self.path) != self.sha256:
            raise DamagedShard(f"{self.path} is altered, or foreign: its SHA-256 is not the recorded one{self.remedy}")

    def read(self, index: int, samples: Sequence[Sample]) -> Features:
        """Features of `samples[index]`; the file is checked when it is first read (raises DamagedShard)."""
        if self._file is None:
            self.check()
            self._file = safe_open(self.path, "pt")
            sizes = [extent([samples[i]]) for i in self.indices]
            self._ends = list(accumulate(sizes, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0)))
        place = self.indices.index(index)
        slots, rows = map(slice, self._ends[place], self._ends[place + 1])
        stored = {}
        for name in self._file.keys():  # noqa: SIM118  (not a dict)
            part = slots if name.startswith("aux") else rows
            stored[name] = self._file.get_slice(name)[part]
        return decode(stored)


def sidecar(path: Path) -> Path:
    return path.with_suffix(".json")


def encode_samples(target: Target, samples: Sequence[Sample], plan: StorePlan) -> list[dict[str, Tensor]]:
    """Compute the stored tensors of each sample with the target."""
    scale_L = torch.tensor(plan.aux_scale, device=target.device)
    return [
        encode(target, found, plan.dtype)
        for found in compute_features(target, samples, plan.aux_layers, aux_scale_L=scale_L)
    ]


def write_shard(path: Path, key: str, indices: Sequence[int], encoded: Sequence[Mapping[str, Tensor]]) -> Shard:
    """Write encoded samples into one shard with its sidecar."""
    tensors = {name: torch.cat([e[name] for e in encoded]).cpu().contiguous() for name in encoded[0]}
    # `save_file` writes a temporary file of its own naming, which nobody removes after a kill.
    data = save(tensors)
    shard = Shard(path, indices, len(data), sha256=hashlib.sha256(data).hexdigest())
    sidecar(path).unlink(missing_ok=True)  # while the file changes there is no shard
    # A temporary file that a killed process left is as large as a shard: the next writer removes it.
    write_atomically(path, data, durable=True, sole_writer=True)
    entry = {"key": key, "samples": list(indices), "bytes": shard.bytes, "sha256": shard.sha256}
    write_atomically(sidecar(path), json.dumps(entry) + "\n", durable=True, sole_writer=True)
    return shard


def find_shard(path: Path, key: str, indices: Sequence[int] | None = None, remedy: str = "") -> Shard:
    """Open the shard at `path` by its sidecar, without checking the file.

    Args:
        indices: samples that it must hold; None: any.

    Raises:
        DamagedShard: the sidecar is missing, unreadable, or of another store.
    """
    try:
        entry: dict[str, Any] = read_mapping(sidecar(path))
        shard = Shard(path, entry["samples"], entry["bytes"], sha256=entry["sha256"], remedy=remedy)
        foreign = entry["key"] != key
    except FileNotFoundError as error:
        raise DamagedShard(f"{path} has not been written (no {sidecar(path).name}){remedy}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedShard(f"{sidecar(path)} is altered: not a shard's sidecar{remedy}") from error
    if foreign or (indices is not None and shard.indices != list(indices)):
        other = "store" if foreign else "shard"
        raise DamagedShard(f"{path} is foreign: {sidecar(path).name} belongs to another {other}{remedy}")
    return shard


# ----------------------------------------------------------------------------
# A complete store on disk: written once by any number of processes, then read by training runs.
#
#     DIR/plan.json       the plan; written by the first process
#     DIR/shard-*.safetensors, shard-*.json      shard and sidecar, in any order, by any process
#     DIR/manifest.json   the plan with the SHA-256 of every shard; written by the process that completes the store
#
# The files do not depend on the number of writers or on kills, up to the rounding of matrix products between machines.
# ----------------------------------------------------------------------------


def begin_store(directory: Path, wanted: StorePlan) -> StorePlan:
    """Read the plan of the store in `directory`, or write `wanted` if there is none.

    Raises:
        ValueError: the directory holds another run's store.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "plan.json"
    if not path.is_file():
        write_atomically(path, wanted.json(), durable=True, keep_first=True)
    return read_plan(directory, wanted)


def missing_bytes(directory: Path, plan: StorePlan) -> int:
    """Bytes that are still to be written, by file sizes."""
    paths = {directory / shard.file: shard.bytes for shard in plan.shards}
    return sum(size for path, size in paths.items() if not path.is_file() or path.stat().st_size != size)


def check_store_space(directory: Path, needed: int) -> None:
    """Raise ValueError if the disk does not have `needed` bytes free."""
    remedy = "Choose another features.directory, features.dtype=int8, or a window with features.max_gb."
    check_space(directory, needed, "the store still", remedy=remedy)


def check_store_fits(recipe: Recipe, drafter: DraftModule) -> None:
    """Refuse a store that does not fit on the disk, by the responses that exist, before a model is loaded.

    Args:
        drafter: with or without its weights.
    """
    section, directory = recipe.features, store_directory(recipe)
    if section.mode != "store":
        return
    layers = len(section.aux_layers or drafter.config.target_layer_ids)
    needed = shard_bytes(known_samples(recipe), layers, drafter.config.hidden_size, dtype=section.dtype)
    if section.max_gb is not None:
        needed = min(needed, int(section.max_gb * 2**30))
    written = sum(path.stat().st_size for path in directory.rglob("*.safetensors"))
    check_store_space(directory, needed - written)


def write_store(
    directory: Path,
    plan: StorePlan,
    target: Target,
    samples: Sequence[Sample],
    numbers: Iterable[int],
    on_progress: Callable[[int], None] = lambda number: None,
) -> list[int]:
    """Write the missing and damaged shards among `numbers`, and the manifest once the store is complete.

    Returns the numbers of the shards that were written.
    """
    written = []
    for number in numbers:
        planned = plan.shards[number]
        try:
            _written_shard(directory, plan, number).check()
        except DamagedShard:
            encoded = encode_samples(target, samples[planned.first : planned.end], plan)
            shard = write_shard(directory / planned.file, plan.key, range(planned.first, planned.end), encoded=encoded)
            assert shard.bytes == planned.bytes, (shard.bytes, planned.bytes)
            written.append(number)
        on_progress(number)
    with contextlib.suppress(DamagedShard):  # other processes are still at work
        _complete_shards(directory, plan)
    return written


def _remedy(number: int) -> str:
    return f" (`outrider features write RECIPE --only {number}` makes it)"


def _written_shard(directory: Path, plan: StorePlan, number: int) -> Shard:
    planned = plan.shards[number]
    return find_shard(directory / planned.file, plan.key, range(planned.first, planned.end), remedy=_remedy(number))


def _complete_shards(directory: Path, plan: StorePlan) -> list[Shard]:
    """Open all shards of a complete store, and write manifest.json from their sidecars if it is missing or differs.

    Raises:
        DamagedShard: a shard has no valid sidecar; all of them are named (the first few, when there are many).
    """
    shards, wrong = [], []
    for number in range(len(plan.shards)):
        try:
            shards.append(_written_shard(directory, plan, number))
        except DamagedShard as error:
            wrong.append(str(error))
    if wrong:
        more = f"; and {len(wrong) - 3} more: `outrider features write RECIPE` goes on" if len(wrong) > 3 else ""
        raise DamagedShard(f"the feature store in {directory} is not complete: {'; '.join(wrong[:3])}{more}.")
    text = json.dumps(_manifest(plan, [shard.sha256 for shard in shards]), indent=1) + "\n"
    path = directory / "manifest.json"
    for leftover in unfinished_writes(directory, "plan.json", path.name):
        leftover.unlink(missing_ok=True)  # of processes that were killed inside `write_atomically`
    if not path.is_file() or path.read_text() != text:
        path.unlink(missing_ok=True)
        write_atomically(path, text, durable=True, keep_first=True)
    return shards


def _manifest(plan: StorePlan, digests: Sequence[str]) -> dict[str, Any]:
    fields = asdict(plan)
    for shard, digest in zip(fields["shards"], digests, strict=True):
        shard["samples"], shard["sha256"] = shard["end"] - shard["first"], digest
    return fields


def open_store(directory: Path, wanted: StorePlan) -> tuple[StorePlan, list[Shard]]:
    """Open a complete store: its plan and shards. A missing manifest is written.

    Raises:
        ValueError: there is no store, it is incomplete, another run's, or its manifest is damaged.
    """
    if not (directory / "plan.json").is_file():
        raise ValueError(
            f"{directory} holds no feature store: `outrider features write RECIPE` writes one, features.mode=online "
            "does without."
        )
    plan = read_plan(directory, wanted)
    path = directory / "manifest.json"
    if not path.is_file():
        return plan, _complete_shards(directory, plan)
    try:
        found = read_json(path)
        digests = [str(shard["sha256"]) for shard in found["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}). Delete it; it is made again.") from error
    if len(digests) != len(plan.shards) or found != json.loads(json.dumps(_manifest(plan, digests))):
        raise ValueError(f"{path} does not fit plan.json beside it: altered or foreign. Delete it; it is made again.")
    shards = [
        Shard(directory / s.file, range(s.first, s.end), s.bytes, sha256=digest, remedy=_remedy(number))
        for number, (s, digest) in enumerate(zip(plan.shards, digests, strict=True))
    ]
    return plan, shards


def check_store(directory: Path, wanted: StorePlan) -> list[str]:
    """List the faults of a store's files."""
    _, shards = open_store(directory, wanted)
    wrong = []
    for shard in shards:
        try:
            shard.check()
        except DamagedShard as error:
            wrong.append(str(error))
    known = {name for shard in shards for name in (shard.path, sidecar(shard.path))}
    foreign = [path for path in sorted(directory.glob("shard-*")) if path not in known]
    return wrong + [f"{path} is foreign: not part of this store (delete it)" for path in foreign]


class FeatureStore(FeatureCache):
    """Reads a complete store, and checks the SHA-256 of each shard when it is first opened.

    Args:
        columns: places of the aux layers to return, among the store's; None: all.
    """

    background = True

    def __init__(
        self,
        directory: Path,
        wanted: StorePlan,
        samples: Sequence[Sample],
        budget_bytes: int,
        columns: Sequence[int] | None = None,
    ) -> None:
        super().__init__(samples, budget_bytes)
        self.plan, self._shards = open_store(directory, wanted)
        everything = list(range(len(self.plan.aux_layers)))
        self._columns = None if columns is None or list(columns) == everything else list(columns)
        self._firsts = [shard.first for shard in self.plan.shards]

    def _fetch(self, indices: Sequence[int]) -> list[Features]:
        shards = (self._shards[bisect.bisect_right(self._firsts, index) - 1] for index in indices)
        read = [shard.read(index, self.samples) for index, shard in zip(indices, shards, strict=True)]
        if self._columns is None:
            return read
        return [replace(features, aux_SLD=features.aux_SLD[:, self._columns]) for features in read]


# ----------------------------------------------------------------------------
# A rolling window of features on disk: at most `max_bytes` of shards, the least recently used are replaced.
#
#     wanted -> memory? -> pending? -> a shard on disk? -> the target computes it -> pending --full--> new shard,
#                                                                               least recently needed shards make room
#
# A shard holds samples in the order in which training first needed them, so a miss costs one prefill. Features depend
# on their sample alone, so any budget gives the same numbers as a complete store. Damaged shards are reported, dropped
# and computed again. One process owns a window.
# ----------------------------------------------------------------------------


_FEWEST_SHARDS = 8  # in a budget; a single shard would displace all others


class FeatureWindow(FeatureCache):
    """Reads features from a directory of bounded size, and computes those that it lacks."""

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
        self._where: dict[int, Shard] = {}
        self._shards: OrderedDict[Path, Shard] = OrderedDict()  # least recently needed first
        self._next = 0
        self._scan()

    @property
    def bytes(self) -> int:
        """Size of all shards on disk."""
        return sum(shard.bytes for shard in self._shards.values())

    def close(self) -> None:
        self._flush()
        super().close()

    def warm(self) -> None:
        """Fill the window with the first samples, as many as fit."""
        for index in range(len(self.samples)):
            if self.bytes + self._size([*self._pending, index]) > self.max_bytes:
                break
            self.gather([index])
        self.close()

    def _scan(self) -> None:
        """Take over the shards of an earlier process."""
        for leftover in unfinished_writes(self.directory):  # of a killed process
            leftover.unlink(missing_ok=True)
        for path in sorted(self.directory.glob("window-*.safetensors")):
            self._next = max(self._next, int(path.stem.rpartition("-")[2]) + 1)
            try:
                self._add(find_shard(path, self.plan.key))
            except DamagedShard as error:
                self._drop(path, error)
        self._make_room(0)  # the budget may be smaller than last time

    def _fetch(self, indices: Sequence[int]) -> list[Features]:
        found = {index: self._recall(index) for index in indices}
        missing = [index for index, features in found.items() if features is None]
        encoded = encode_samples(self.target, [self.samples[i] for i in missing], self.plan)
        self.computed += len(missing)
        for index, stored in zip(missing, encoded, strict=True):
            self._pending[index] = stored
            found[index] = decode(stored)
            if sum(self.samples[i].length for i in self._pending) >= self.shard_tokens or (
                self._size(self._pending) > self.max_bytes // _FEWEST_SHARDS
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
            features = shard.read(index, self.samples)
        except DamagedShard as error:
            self._drop(shard.path, error)
            return None
        self._shards.move_to_end(shard.path)
        return features

    def _size(self, indices: Iterable[int]) -> int:
        samples = [self.samples[i] for i in indices]
        return shard_bytes(samples, len(self.plan.aux_layers), self.plan.hidden_size, dtype=self.plan.dtype)

    def _flush(self) -> None:
        """Write the pending samples as one shard, unless it alone exceeds the budget."""
        indices, size = list(self._pending), self._size(self._pending)
        if indices and size <= self.max_bytes:
            self._make_room(size)
            path = self.directory / f"window-{self._next:06d}.safetensors"
            self._next += 1
            self._add(write_shard(path, self.plan.key, indices, encoded=list(self._pending.values())))
        self._pending.clear()

    def _make_room(self, size: int) -> None:
        while self._shards and self.bytes + size > self.max_bytes:
            self._drop(next(iter(self._shards)))

    def _add(self, shard: Shard) -> None:
        self._shards[shard.path] = shard
        self._where |= dict.fromkeys(shard.indices, shard)

    def _drop(self, path: Path, why: DamagedShard | None = None) -> None:
        if why is not None:
            warnings.warn(f"{why}: dropped from the window and computed again when needed", stacklevel=2)
        shard = self._shards.pop(path, None)
        for index in shard.indices if shard is not None else ():
            if self._where.get(index) is shard:
                del self._where[index]
        sidecar(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


# ----------------------------------------------------------------------------
# The source of a run's features, by the recipe's `features` section.
#
# online             the target computes them, memory keeps what fits            FeatureSource
# store              a complete directory, written by `outrider features write`  FeatureStore
#                    `aux_layers` set: one directory for drafters that read different layers
# store, max_gb set  a directory of bounded size that training fills itself      FeatureWindow, one a process
# ----------------------------------------------------------------------------


def store_directory(recipe: Recipe) -> Path:
    """The directory of the recipe's feature store, which may not exist yet."""
    return Path(recipe.features.directory or Path(recipe.out) / "features")


def recipe_plan(recipe: Recipe, run: Run) -> StorePlan:
    """Plan the recipe's store: its contents and exact size.

    Raises:
        ValueError: `features.aux_layers` lacks a layer that the drafter reads, or names one that is none.
    """
    section, target, samples = recipe.features, run.target, run.samples
    aux_layers, aux_scale_L = run.drafter.config.target_layer_ids, run.drafter.aux_scale_L
    if section.aux_layers is not None:
        wide = target.check_aux_layers(section.aux_layers, final=True)
        missing = sorted(set(aux_layers) - set(wide))
        if missing:
            raise ValueError(f"features.aux_layers {section.aux_layers} lacks {missing}, which the drafter reads.")
        wide_L = measure_aux_scale(target, samples[:CALIBRATION_SAMPLES], wide).clone()
        # The drafter divides by its own scales.
        wide_L[[wide.index(aux_layer) for aux_layer in aux_layers]] = aux_scale_L
        aux_layers, aux_scale_L = wide, wide_L
    return plan_store(
        target, samples, aux_layers, aux_scale_L=aux_scale_L, dtype=section.dtype, shard_tokens=section.shard_tokens
    )


def open_features(recipe: Recipe, run: Run, rank: int = 0, world_size: int = 1) -> FeatureCache:
    """Open the features of the training samples, as the recipe says. Call `close` when training ends.

    Args:
        rank, world_size: of this process; a window's budget is shared evenly, a complete store is read by all.

    Raises:
        ValueError: the store is not there, incomplete, or another run's.
    """
    memory, section, directory = feature_cache_bytes(recipe.feature_cache_gb), recipe.features, store_directory(recipe)
    aux_layers = run.drafter.config.target_layer_ids
    if section.mode == "online":
        scale_L = run.drafter.aux_scale_L
        return FeatureSource(run.target, run.samples, aux_layers, aux_scale_L=scale_L, budget_bytes=memory)
    plan = recipe_plan(recipe, run)
    if section.max_gb is None:
        columns = [plan.aux_layers.index(aux_layer) for aux_layer in aux_layers]
        return FeatureStore(directory, plan, run.samples, budget_bytes=memory, columns=columns)
    if rank == 0:  # windows of another number of processes would stand beside the budget
        for stale in directory.glob("window-*-of-*"):
            if not stale.name.endswith(f"-of-{world_size}"):
                shutil.rmtree(stale, ignore_errors=True)
    return FeatureWindow(
        directory / f"window-{rank}-of-{world_size}",
        plan,
        run.target,
        samples=run.samples,
        budget_bytes=memory,
        max_bytes=int(section.max_gb * 2**30) // world_size,
        shard_tokens=section.shard_tokens,
    )
