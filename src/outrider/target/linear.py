"""Pack the weights of linear layers once for the CPU's matrix kernels (inference only).

`F.linear` reads a row-major weight and is slow for the 2-32 rows of verification. With a compiler, float32 weights are
packed for our kernels (target/kernels.py); otherwise, and in bfloat16, for oneDNN. Both run any number of rows from one
copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.target.kernels import PackedMatrix, kernels_available

_PACK_ROWS = 16  # layout hint; every number of rows runs from the same copy
_MIN_ROWS = 4  # fewer rows would take a slower kernel

_enabled = True
# One oneDNN matrix of every shape, for `warm_up`: its kernels depend on shapes, not on weights.
_packed: WeakValueDictionary[tuple[int, int, torch.dtype, bool], PackedLinear] = WeakValueDictionary()


@contextmanager
def packing_disabled() -> Iterator[None]:
    """Build layers without packing inside the block; they use `F.linear`, for comparisons."""
    global _enabled
    _enabled = False
    try:
        yield
    finally:
        _enabled = True


def _packs_bfloat16() -> bool:
    """Return whether oneDNN has packed bfloat16 kernels for this CPU (AVX-512 BF16 or AMX).

    Environment variables can disable instruction sets in oneDNN, which then refuses to pack.
    """
    products = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(products and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _onednn_packs(weight: Tensor) -> bool:
    """Return whether oneDNN can pack this weight: on a CPU, in a type and a build that support it."""
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _packs_bfloat16()))
    )


class PackedLinear(nn.Module):
    """Computes y = x W^T + b from a packed copy of W [out, in], or with `F.linear` if packing is not available.

    It has no parameters to train, move or save. Rebuild it when W changes.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.widths = [self.out_features]
        self.bias = None if bias is None else bias.detach()
        self.matrix: PackedMatrix | None = None  # for our kernels
        self.weight = weight.detach()
        ours = _enabled and kernels_available(weight.dtype, weight.device)
        self.packed = ours or (_enabled and _onednn_packs(weight))
        if ours:
            self.matrix = PackedMatrix(self.weight, self.bias)
            self.weight = self.matrix.panels
        elif self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), _PACK_ROWS)
            _packed[self.out_features, self.in_features, weight.dtype, bias is None] = self

    @classmethod
    def fused(cls, *linears: nn.Linear, dtype: torch.dtype | None = None) -> PackedLinear:
        """Fuse linears that read the same input into one matrix; outputs are concatenated with `widths`.

        If it is not packed, the linears' weights become views of it, so that a GPU holds them once.

        Args:
            dtype: type of the matrix; None: that of the linears.
        """
        weight = linears[0].weight.detach() if len(linears) == 1 else torch.cat([x.weight.detach() for x in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        assert len(biases) in (0, len(linears))
        packed = cls(weight.to(dtype or weight.dtype), torch.cat([b.detach() for b in biases]) if biases else None)
        packed.widths = [linear.out_features for linear in linears]
        if not packed.packed and len(linears) > 1 and packed.weight.dtype == weight.dtype:
            for linear, part in zip(linears, packed.weight.split(packed.widths), strict=True):
                linear.weight = nn.Parameter(part, requires_grad=False)
        return packed

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [..., in]; return [..., out] in the type of x."""
        if not self.packed:
            return F.linear(x, self.weight, self.bias) if x.dtype == self.weight.dtype else self._float32(x)
        if x.dim() != 2:
            return self.forward(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
        if self.matrix is not None:
            return self.matrix.product(x)
        rows = x.shape[0]
        if rows < _MIN_ROWS:
            x = F.pad(x, (0, 0, 0, _MIN_ROWS - rows))
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")[:rows]

    def _float32(self, x: Tensor) -> Tensor:
        """Multiply float32 rows by bfloat16 weights on a GPU: bfloat16 operands, float32 sums and result."""
        out = torch.mm(x.reshape(-1, self.in_features).to(self.weight.dtype), self.weight.T, out_dtype=torch.float32)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], self.out_features)

    __call__ = forward  # skips the module's hooks, which cost a hundredth of a decoding step


class Float32Rows:
    """Computes y = x W^T of float32 rows on a CPU for W [out, in] of a shorter type, with float32 sums and result.

    With a bfloat16 W, a processor with bfloat16 products uses them, as a GPU does, several times as fast as float32.
    This is exact for rows that were bfloat16 before, such as a bfloat16 model's hidden states.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.float()
        self.packed = None if weight.dtype == torch.bfloat16 and _packs_bfloat16() else PackedLinear(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to [rows, in]; each row's result has the same bits whatever the others are."""
        if self.packed is not None:
            return self.packed(x)
        rows = len(x)
        if rows < _MIN_ROWS:  # a single row may take a kernel that sums in another order
            x = F.pad(x, (0, 0, 0, _MIN_ROWS - rows))
        matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        before = matmul.fp32_precision
        matmul.fp32_precision = "bf16"
        try:
            return F.linear(x, self.weight)[:rows]
        finally:
            matmul.fp32_precision = before


class Packable(nn.Module):
    """A module whose linears `pack` replaces by packed ones for serving, with the same forward.

    `groups` names the linears. Linears of a group read the same input and become one matrix; the forward calls
    `outputs` for them. Other linears are kept. A linear may be in several groups, also of enclosing modules, because
    each matrix holds a copy.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    matrices: Mapping[tuple[str, ...], PackedLinear] = {}

    def outputs(self, x: Tensor, *names: str) -> Sequence[Tensor]:
        """Return the outputs of these linears for the same input."""
        matrix = self.matrices.get(names)
        if matrix is None:
            return [self.get_submodule(name)(x) for name in names]
        return matrix(x).split(matrix.widths, dim=-1)

    def after_packing(self) -> None:
        """Adapt the module after its linears and those of its submodules are packed."""


def pack(module: nn.Module, dtype: torch.dtype) -> None:
    """Pack the linears of every `Packable` in `module` for serving, in place, and drop their parameters.

    Args:
        dtype: type of the matrices. Rows stay float32; on a GPU the matrices may be bfloat16.
    """
    parts = [part for part in module.modules() if isinstance(part, Packable)]
    for part in parts:
        part.matrices = {
            names: PackedLinear.fused(*(cast(nn.Linear, part.get_submodule(name)) for name in names), dtype=dtype)
            for names in part.groups
        }
    for part in parts:
        for names, matrix in part.matrices.items():
            for name in names:
                parent, _, attribute = name.rpartition(".")
                setattr(part.get_submodule(parent), attribute, matrix if len(names) == 1 else None)
    for part in parts:
        part.after_packing()


def padded_size(count: int, least: int = 16) -> int:
    """Round `count` up to one of few sizes, eight per octave, so that kernels are built for few sizes.

    Args:
        least: the smallest size and divisor of all sizes: the rows of a tile.
    """
    step = max(least, (1 << (count - 1).bit_length()) // 16)
    return -(-count // step) * step


@torch.inference_mode()
def warm_up(most_rows: int) -> None:
    """Build oneDNN's kernels for every packed matrix and every number of rows up to `most_rows`.

    Otherwise each is built at its first use, which takes several times as long, and batches sized by confidences keep
    meeting new sizes.
    """
    for linear in list(_packed.values()):
        x_ND = torch.zeros(most_rows, linear.in_features, dtype=linear.weight.dtype)
        for rows in range(_MIN_ROWS, most_rows + 1):
            linear(x_ND[:rows])
