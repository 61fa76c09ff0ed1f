"""How features lie in a shard, and how many bytes that takes.

    taps    [S, L, D]  bf16, or int8 / fp8 (e4m3) with taps_scale [S, L]     value = stored * scale
    hidden  [R, D]     likewise, with hidden_scale [R]                       scale = max |row| / 127 or / 448
    lse     [R]        float32: of the logits of the *stored* hidden rows, so that exp(W h - lse) sums to one
    argmax  [R]        int32: of the exact rows, the token the target itself would take

O(d) numbers a token; never logits over the vocabulary (DSpark, arXiv 2607.05147, section 5.1). The samples of a shard
are concatenated along S and R. Shapes: S context slots, R generated tokens, L taps, D target hidden.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outrider.data.samples import Sample
from outrider.target import Target
from outrider.training.features import LARGEST_FLOAT16, Features, logit_summary

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


@dataclass(frozen=True)
class Extent:
    """Rows of one sample, or of all samples of a shard."""

    slots: int
    rows: int


def extent(samples: Sequence[Sample]) -> Extent:
    return Extent(sum(len(s.tokens) - 1 for s in samples), sum(s.num_supervised for s in samples))


def encode(target: Target, features: Features, dtype: StoreDtype) -> dict[str, Tensor]:
    """The stored tensors of one sample, from float16 features."""
    stored = _encode_rows("taps", features.taps_SLD, dtype) | _encode_rows("hidden", features.hidden_RD, dtype)
    lse_R, _ = logit_summary(target, _decode_rows("hidden", stored))
    return {**stored, "lse": lse_R, "argmax": features.argmax_R.int()}


def decode(stored: Mapping[str, Tensor]) -> Features:
    """Features as the trainer wants them, in float16."""
    taps_SLD, hidden_RD = _decode_rows("taps", stored), _decode_rows("hidden", stored)
    return Features(taps_SLD, hidden_RD, stored["lse"], stored["argmax"].long())


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


def shapes(size: Extent, taps: int, hidden: int, dtype: StoreDtype) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Every tensor of a shard: its type and shape."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "taps": (STORED[dtype], (size.slots, taps, hidden)),
        "hidden": (STORED[dtype], (size.rows, hidden)),
        "lse": (torch.float32, (size.rows,)),
        "argmax": (torch.int32, (size.rows,)),
    }
    if dtype != "bf16":
        tensors["taps_scale"] = (torch.float32, (size.slots, taps))
        tensors["hidden_scale"] = (torch.float32, (size.rows,))
    return tensors


def shard_bytes(size: Extent, taps: int, hidden: int, dtype: StoreDtype) -> int:
    """Bytes of the safetensors file: 8, a JSON header padded to a multiple of 8, and the tensors."""
    tensors = shapes(size, taps, hidden, dtype)
    order = sorted(tensors, key=lambda name: (list(_HEADER_NAMES).index(tensors[name][0]), name))
    header, offset = {}, 0
    for name in order:
        kind, shape = tensors[name]
        end = offset + kind.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": _HEADER_NAMES[kind], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"))
    return 8 + -(-len(text) // 8) * 8 + offset
