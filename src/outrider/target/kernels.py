"""Compile and call the CPU kernels.

    float32     products of packed matrices, layers around their attention, whole layers
    bfloat16    RMS norms
    both        attention of requests with few rows each (a token and its drafts, or a tree), in one call for all

A decoding step reads all weights once for a few rows. oneDNN's products are then slower than the memory, and for a
small target PyTorch's operators take a third of a step between the products. The machine's C compiler builds a library
from `kernels.c` at first use, for this processor, and the user's cache directory keeps it. Without a compiler, on
systems other than Linux, and in other types, oneDNN computes products and PyTorch the rest: slower, and equal up to
rounding.

Shapes: R requests, T rows of all, K kv heads, G queries per kv head, H = K * G, E head dim, S slots, D hidden, I inner.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.target.paged_attention import MOST_SEEN, Reader, tables
from outrider.utils.files import cache_dir, write_atomically

MOST_ROWS = 16  # of a request in attention, without a tree: see `few`
_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
_NATIVE = {"x86_64": ("-march=native", "-mprefer-vector-width=512"), "aarch64": ("-mcpu=native",)}
_NORM_MULTIPLE = 32  # a row of a bfloat16 norm has a multiple of these elements, two vectors
_SECONDS = 300  # time limit of the compiler; some 20 on a quiet machine


class _Requests(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("requests", "page_size")),
        *((name, ctypes.c_void_p) for name in ("request", "row", "pages")),
    ]


class _Shapes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kv_heads", "groups", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("key_head", "key_slot", "value_head", "value_slot")),
        *((name, ctypes.c_int64) for name in ("query_row", "query_head", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("sinks", ctypes.c_void_p),
    ]


class _Matrix(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
        *((name, ctypes.c_int64) for name in ("inputs", "out", "halved")),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_int64) for name in ("hidden", "inner", "heads", "kv_heads", "head_dim")),
        ("eps", ctypes.c_float),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values", "slots")),
        ("head_stride", ctypes.c_int64),
    ]


# Arguments of the functions of kernels.c.
_POINTER, _COUNT, _THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "panel_width": (_COUNT, ()),
    "product": (None, (ctypes.POINTER(_Matrix), _POINTER, _POINTER, _COUNT, _THREADS)),
    "before_attention": (None, (ctypes.POINTER(_Layer), *(_POINTER,) * 5, _COUNT, _THREADS)),
    "after_attention": (None, (ctypes.POINTER(_Layer), *(_POINTER,) * 3, _COUNT, _THREADS)),
    "attend": (
        ctypes.c_int,
        (ctypes.POINTER(_Requests), ctypes.POINTER(_Shapes), *(_POINTER,) * 4, ctypes.c_int, _THREADS),
    ),
    "normalise_bfloat16": (None, (*(_POINTER,) * 3, _COUNT, _COUNT, ctypes.c_float, _THREADS)),
    "whole_layer": (
        ctypes.c_int,
        (
            *(ctypes.POINTER(struct) for struct in (_Layer, _Requests, _Cache)),
            ctypes.c_float,
            *(_POINTER,) * 4,
            _COUNT,
            _THREADS,
        ),
    ),
}


@cache
def _compiled() -> Any | None:
    """Build and load the library of kernels.c; None if that fails."""
    compiler = shutil.which("cc")
    if not sys.platform.startswith("linux") or compiler is None:
        return None
    flags = (*_FLAGS, *_NATIVE.get(platform.machine(), ()))
    try:
        # Several machines may share the cache, and code for one processor crashes on another.
        key = sha256(repr((_SOURCE.read_bytes(), flags, _processor(), compiler)).encode()).hexdigest()[:16]
        path = cache_dir() / "compiled" / f"kernels-{key}.so"
        if not path.is_file():
            with tempfile.TemporaryDirectory() as directory:
                made = Path(directory) / path.name
                command = [compiler, *flags, str(_SOURCE), "-o", str(made), "-lm"]
                subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, made.read_bytes())
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (
        AttributeError,
        OSError,
        subprocess.SubprocessError,
    ):  # no OpenMP, an old compiler, a read-only cache
        return None
    return library


def _processor() -> list[str]:
    """Read model and instruction sets of the first core from /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    return [line for line in lines if line.split("\t")[0] in ("model", "model name", "flags", "Features", "CPU part")]


def kernels_available(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether there are compiled kernels for this type on this device."""
    return device.type == "cpu" and dtype == torch.float32 and _compiled() is not None


def attends(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `FewRows.attend` supports this type on this device."""
    return dtype in (torch.float32, torch.bfloat16) and device.type == "cpu" and _compiled() is not None


def few(rows: int, tree: bool) -> bool:
    """Return whether so many new rows of a request belong into `FewRows`: a token and its drafts, as a chain or a tree.

    The more rows read a key, the more of the time is products: PyTorch's blocked ones are as fast for 32 rows and take
    0.8 of the time for 64. So prompts attend one by one. Trees do not: their rows have the bits of plain decoding here.
    """
    return rows <= (MOST_SEEN if tree else MOST_ROWS)


class PackedMatrix:
    """A copy of W [out, in] float32 in the layout of the kernels, with a bias [out] or none.

    If every weight is exactly a bfloat16, as in checkpoints of that type, the copy is bfloat16. The cost of a step of
    few rows is reading the weights, which is then halved; products are the same to the last bit.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        width = _library().panel_width()
        panels = -(-self.out_features // width)
        halved = bool((weight.bfloat16() == weight).all())
        padded = torch.zeros(panels * width, self.in_features, dtype=torch.bfloat16 if halved else torch.float32)
        padded[: self.out_features] = weight
        panels_PWD = padded.view(panels, width, self.in_features)
        if halved:  # output n and n + width / 2 of a panel are one word
            panels_PWD = panels_PWD.unflatten(1, (2, width // 2)).transpose(1, 2).flatten(1, 2)
        self.panels = panels_PWD.transpose(1, 2).contiguous()
        self.bias = None if bias is None else bias.float().contiguous()
        self.struct = _Matrix(
            weights=self.panels.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            inputs=self.in_features,
            out=self.out_features,
            halved=halved,
        )

    def product(self, x_TD: Tensor) -> Tensor:
        """Compute x W^T + b, [T, in] -> [T, out]."""
        assert x_TD.dtype == torch.float32
        x_TD = x_TD.contiguous()
        y_TD = x_TD.new_empty(len(x_TD), self.out_features)
        _library().product(self.struct, x_TD.data_ptr(), y_TD.data_ptr(), len(x_TD), torch.get_num_threads())
        return y_TD


@dataclass(frozen=True)
class Norms:
    """The weights of a layer's RMS norms: before attention and MLP [D]; of queries and keys [E], or None."""

    input: Tensor
    post: Tensor
    q: Tensor | None
    k: Tensor | None
    eps: float


class LayerKernels:
    """A Llama or Qwen3 layer, computed around its attention or as a whole.

    Args:
        qkv, o, gate_up, down: matrices of the layer; q, k, v and gate, up are fused.
        heads: (H, K).
    """

    def __init__(
        self,
        qkv: PackedMatrix,
        o: PackedMatrix,
        gate_up: PackedMatrix,
        down: PackedMatrix,
        *,
        norms: Norms,
        heads: tuple[int, int],
    ) -> None:
        self.out_features, self.inner, self.heads = qkv.out_features, down.in_features, heads
        self._scratch = 2 * qkv.in_features + 3 * self.inner + qkv.out_features + o.in_features  # floats of a row
        weights = [None if x is None else x.contiguous() for x in (norms.input, norms.post, norms.q, norms.k)]
        self._kept = (qkv, o, gate_up, down, weights)  # the struct holds addresses only
        input_norm, post_norm, q_norm, k_norm = (None if x is None else x.data_ptr() for x in weights)
        self._struct = _Layer(
            qkv=qkv.struct,
            o=o.struct,
            gate_up=gate_up.struct,
            down=down.struct,
            input_norm=input_norm,
            post_norm=post_norm,
            q_norm=q_norm,
            k_norm=k_norm,
            hidden=qkv.in_features,
            inner=self.inner,
            heads=heads[0],
            kv_heads=heads[1],
            head_dim=o.in_features // heads[0],
            eps=norms.eps,
        )

    def before_attention(self, hidden_TD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return normed and rotated queries and keys of these rows, [T, H + K, E], and their values [T, K, E]."""
        (T, E), (H, K) = cos_TE.shape, self.heads
        normed, qkv = torch.empty_like(hidden_TD), hidden_TD.new_empty(T, self.out_features)
        read = (hidden_TD.data_ptr(), cos_TE.data_ptr(), sin_TE.data_ptr())
        _library().before_attention(self._struct, *read, normed.data_ptr(), qkv.data_ptr(), T, torch.get_num_threads())
        queries_keys, values = qkv.view(T, -1, E).split((H + K, K), dim=1)
        return queries_keys, values

    def after_attention(self, attention_TD: Tensor, hidden_TD: Tensor) -> None:
        """Add the output projection of attention [T, H E] and the MLP to `hidden_TD`, in place."""
        T, D = hidden_TD.shape
        scratch = hidden_TD.new_empty(T * (D + 3 * self.inner))
        pointers = (attention_TD.data_ptr(), hidden_TD.data_ptr(), scratch.data_ptr())
        _library().after_attention(self._struct, *pointers, T, torch.get_num_threads())

    def around(self, attend: Callable[..., Tensor], x_XD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """The layer around `attend`, which takes queries, keys and values [X, heads, E]: [X, D] -> [X, D].

        `rope`: cos and signed sin, broadcast over heads.
        """
        rows, E, (H, K) = x_XD.shape[:-1], self._struct.head_dim, self.heads
        hidden_TD = x_XD.flatten(0, -2).clone()  # the kernels add to it
        cos_TE, sin_TE = (table.expand(*rows, 1, E).reshape(-1, E) for table in rope)
        queries_keys, values = (x.unflatten(0, rows) for x in self.before_attention(hidden_TD, cos_TE, sin_TE))
        attended = attend(*queries_keys.split((H, K), dim=-2), values)
        self.after_attention(attended.reshape(-1, H * E), hidden_TD)
        return hidden_TD.view(x_XD.shape)

    def forward(self, hidden_TD: Tensor, cos_TE: Tensor, sin_TE: Tensor, rows: FewRows, cache: Cache) -> None:
        """Compute the whole layer in place, if `rows` covers every row; write their keys and values into `cache`.

        Raises:
            MemoryError: the scores of attention do not fit into memory.
        """
        T, threads = len(hidden_TD), torch.get_num_threads()
        scratch = hidden_TD.new_empty(T * self._scratch)
        tensors = (hidden_TD.data_ptr(), cos_TE.data_ptr(), sin_TE.data_ptr(), scratch.data_ptr())
        scale = self._struct.head_dim**-0.5
        if _library().whole_layer(self._struct, rows.requests, cache.struct, scale, *tensors, T, threads):
            raise MemoryError("no memory for the scores of attention")


def _library() -> Any:
    """Return the library, which must be available."""
    library = _compiled()
    assert library is not None
    return library


class Cache:
    """The keys and values of a layer, [K, S, E] each, and the slots [T] int64 of the rows of a step."""

    def __init__(self, keys_KSE: Tensor, values_KSE: Tensor, slots_T: Tensor) -> None:
        strides, E = keys_KSE.stride(), keys_KSE.shape[2]
        assert strides == values_KSE.stride() and strides[1:] == (E, 1)
        assert keys_KSE.dtype == values_KSE.dtype == torch.float32 and slots_T.dtype == torch.int64
        self._kept = keys_KSE, values_KSE, slots_T  # the struct holds addresses only
        keys, values, slots = (tensor.data_ptr() for tensor in self._kept)
        self.struct = _Cache(keys=keys, values=values, slots=slots, head_stride=strides[0])


class FewRows:
    """The new rows of requests with few rows each (`few`), one request after another, and what they see."""

    def __init__(self, readers: Sequence[Reader], page_size: int) -> None:
        self._tables = tables(readers)  # the struct holds addresses only
        rows_T2, requests_R4, pages_P = self._tables
        assert requests_R4[:, 1].max() <= MOST_SEEN
        addresses = (table.ctypes.data for table in (requests_R4, rows_T2, pages_P))
        self.requests = _Requests(len(readers), page_size, *addresses)

    def attend(
        self,
        q: Tensor,
        keys_KSE: Tensor,
        values_KSV: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attend with q [1, H, T, E] to the pages of the rows' requests: [T, H, V], V the dim of values.

        Products and sums are in float32, whatever the type of the arguments.

        Args:
            scale: factor of the scores; None: 1 / sqrt(E).
            window: number of visible positions, including the row's; None: all.
            softcap: scores become softcap * tanh(score / softcap).
            sinks_H: an additional score per head that takes probability without a value.

        Raises:
            MemoryError: the scores do not fit into memory.
        """
        _, H, T, E = q.shape
        K, V = keys_KSE.shape[0], values_KSV.shape[2]
        q = q if q.stride(3) == 1 else q.contiguous()
        half = q.dtype == torch.bfloat16
        assert len(self._tables.rows_T2) == T and keys_KSE.shape[2] == E
        assert keys_KSE.dtype == values_KSV.dtype == q.dtype and not (half and (E % 2 or V % 2))
        assert keys_KSE.stride(2) == values_KSV.stride(2) == 1
        sinks = None if sinks_H is None else sinks_H.float().contiguous()
        shapes = _Shapes(
            kv_heads=K,
            groups=H // K,
            key_dim=E,
            value_dim=V,
            key_head=keys_KSE.stride(0),
            key_slot=keys_KSE.stride(1),
            value_head=values_KSV.stride(0),
            value_slot=values_KSV.stride(1),
            query_row=q.stride(2),
            query_head=q.stride(1),
            window=window or 0,
            scale=E**-0.5 if scale is None else scale,
            softcap=softcap or 0.0,
            sinks=None if sinks is None else sinks.data_ptr(),
        )
        out_THV = q.new_empty(T, H, V)
        pointers = (tensor.data_ptr() for tensor in (q, keys_KSE, values_KSV, out_THV))
        if _library().attend(self.requests, shapes, *pointers, half, torch.get_num_threads()):
            raise MemoryError("no memory for the scores of attention")
        return out_THV


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute the RMS norm of rows, in bfloat16 on a CPU by a kernel that replaces several operators."""
    T, D = x_TD.shape
    ours = x_TD.dtype == weight_D.dtype == torch.bfloat16 and x_TD.device.type == "cpu" and D % _NORM_MULTIPLE == 0
    if not ours or _compiled() is None:
        return F.rms_norm(x_TD, (D,), weight_D, eps)
    x_TD, out_TD = x_TD.contiguous(), torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    pointers = (x_TD.data_ptr(), weight_D.data_ptr(), out_TD.data_ptr())
    _library().normalise_bfloat16(*pointers, T, D, eps, torch.get_num_threads())
    return out_TD


class WholeStep(NamedTuple):
    """A step of requests with few rows each, so that `LayerKernels.forward` can compute whole layers.

    `cache`: returns the cache of a layer by index.
    """

    rows: FewRows
    cache: Callable[[int], Cache]
