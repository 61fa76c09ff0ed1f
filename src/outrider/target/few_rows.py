"""Attention of requests with few rows each (a token, or a token and its drafts): one compiled call for all of them.

PyTorch's fused attention on a CPU is made for many rows, and is one call per request here. `few_rows.c` reads the keys
and values of all requests once. The machine's C compiler makes a library of it when it is first needed, for this
processor, and the library is kept in the user's cache directory. Where there is no compiler, on other systems than
Linux and for other types than float32, attention stays PyTorch's: slower, and equal up to rounding.

Shapes: R requests, T rows of all, K kv heads, G queries per kv head, H = K * G, E head dim, S slots.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.target.attention import Branches
from outrider.utils.files import cache_dir, write_atomically

MOST_ROWS = 16  # of a request; of more, matrix products are faster
_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
_NATIVE = {"x86_64": ("-march=native", "-mprefer-vector-width=512"), "aarch64": ("-mcpu=native",)}
_SECONDS = 60  # for a compiler that hangs


class _Requests(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("requests", "block_size", "widest")),
        *((name, ctypes.c_void_p) for name in ("first_row", "rows", "past", "first_block", "first_seen", "low")),
        ("blocks", ctypes.c_void_p),
        ("sees", ctypes.c_void_p),
    ]


class _Shapes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kv_heads", "groups", "head_dim", "head_stride")),
        *((name, ctypes.c_int64) for name in ("query_row", "query_head")),
        ("scale", ctypes.c_float),
    ]


@cache
def _compiled() -> Any | None:
    """The function `attend` of few_rows.c; None where it cannot be made."""
    compiler = shutil.which("cc")
    if not sys.platform.startswith("linux") or compiler is None:
        return None
    flags = (*_FLAGS, *_NATIVE.get(platform.machine(), ()))
    try:
        # One directory may be the cache of several machines, and code for one processor ends on another.
        key = sha256(repr((_SOURCE.read_bytes(), flags, _processor(), compiler)).encode()).hexdigest()[:16]
        path = cache_dir() / "compiled" / f"few_rows-{key}.so"
        if not path.is_file():
            with tempfile.TemporaryDirectory() as directory:
                made = Path(directory) / path.name
                command = [compiler, *flags, str(_SOURCE), "-o", str(made), "-lm"]
                subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, made.read_bytes())
        attend = ctypes.CDLL(str(path)).attend
    except (OSError, subprocess.SubprocessError):  # no OpenMP, an old compiler, a cache that cannot be written
        return None
    pointers = (ctypes.c_void_p,) * 4
    attend.argtypes = (ctypes.POINTER(_Requests), ctypes.POINTER(_Shapes), *pointers, ctypes.c_int)
    attend.restype = ctypes.c_int
    return attend


def _processor() -> list[str]:
    """What /proc/cpuinfo says of the first core's model and instructions."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    return [line for line in lines if line.split("\t")[0] in ("model", "model name", "flags", "Features", "CPU part")]


def few_rows_available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether keys of this type on this device can be attended to by the compiled function."""
    return device.type == "cpu" and dtype == torch.float32 and _compiled() is not None


class FewRows:
    """The rows of some requests, at most `MOST_ROWS` each, and what each row sees.

    Args:
        first_row: where each request's rows begin among all rows.
        past: cached tokens of each request, which its rows follow.
        blocks: of each request, in order of positions (`PagedKV`).
        branches: of each request; None where every row sees those before it and itself.
        window: the last so many positions are visible, the row's own included; None is all.
    """

    def __init__(
        self,
        first_row: Sequence[int],
        rows: Sequence[int],
        past: Sequence[int],
        *,
        blocks: Sequence[Sequence[int]],
        block_size: int,
        branches: Sequence[Branches | None],
        window: int | None = None,
    ) -> None:
        assert max(rows) <= MOST_ROWS
        sees: list[bytes] = []
        low = np.zeros(max(start + count for start, count in zip(first_row, rows, strict=True)), dtype=np.int64)
        for start, count, length, tree in zip(first_row, rows, past, branches, strict=True):
            sees.append(_sees(count, window) if tree is None else _tree_sees(tree, window))
            if window is not None:
                depths = np.arange(count) if tree is None else tree.depths_T.numpy()
                low[start : start + count] = np.clip(length + depths + 1 - window, 0, length)
        self._arrays: dict[str, np.ndarray[Any, Any]] = {
            "first_row": np.array(first_row, dtype=np.int64),
            "rows": np.array(rows, dtype=np.int64),
            "past": np.array(past, dtype=np.int64),
            "first_block": _starts([len(own) for own in blocks]),
            "first_seen": _starts([len(own) for own in sees]),
            "low": low,
            "blocks": np.array([block for own in blocks for block in own], dtype=np.int64),
            "sees": np.frombuffer(b"".join(sees), dtype=np.uint8),
        }
        addresses = {name: array.ctypes.data for name, array in self._arrays.items()}
        self._requests = _Requests(requests=len(rows), block_size=block_size, widest=max(rows), **addresses)

    def attend(self, q: Tensor, keys_KSE: Tensor, values_KSE: Tensor, *, scale: float | None, out_THE: Tensor) -> None:
        """Attention of these rows of q [1, H, T, E] into the same rows of `out_THE`; the other rows stay.

        Raises:
            MemoryError: there is none for the scores.
        """
        _, H, _, E = q.shape
        K = keys_KSE.shape[0]
        q = q if q.stride(3) == 1 else q.contiguous()
        strides = keys_KSE.stride()
        assert strides == values_KSE.stride() and strides[1:] == (E, 1) and out_THE.is_contiguous()
        attend = _compiled()
        assert attend is not None and keys_KSE.dtype == values_KSE.dtype == q.dtype == out_THE.dtype == torch.float32
        scale = E**-0.5 if scale is None else scale
        shapes = _Shapes(
            kv_heads=K,
            groups=H // K,
            head_dim=E,
            head_stride=strides[0],
            query_row=q.stride(2),
            query_head=q.stride(1),
            scale=scale,
        )
        tensors = (q.data_ptr(), keys_KSE.data_ptr(), values_KSE.data_ptr(), out_THE.data_ptr())
        if attend(self._requests, shapes, *tensors, torch.get_num_threads()):
            raise MemoryError("no memory for the scores of attention")


@cache
def _sees(rows: int, window: int | None) -> bytes:
    """Which rows of a chain each one sees, [rows, rows]."""
    distance = np.arange(rows)[:, None] - np.arange(rows)
    return ((distance >= 0) & (distance < (rows if window is None else window))).tobytes()


def _tree_sees(branches: Branches, window: int | None) -> bytes:
    return branches.visible(past=0, window=window).numpy().tobytes()


def _starts(lengths: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64))).astype(np.int64)
