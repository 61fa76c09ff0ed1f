"""The compiled kernels against PyTorch's operators, and to the last bit in any company."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.target import kernels
from outrider.target.attention import Branches
from outrider.target.fused import Operators
from outrider.target.kernels import (
    MOST_ROWS,
    Cache,
    FewRows,
    LayerKernels,
    Norms,
    PackedMatrix,
    attends,
    kernels_available,
    rms_norm,
)
from outrider.target.linear import Float32Rows, PackedLinear

CPU = torch.device("cpu")
SLOTS, BLOCK = 640, 4
TREE = [-1, 0, 0, 1, 1, 2]

needs_compiler = pytest.mark.skipif(
    not kernels_available(torch.float32, CPU), reason="no C compiler with OpenMP here: attention is PyTorch's"
)


def blocks_of(seed: int, positions: int) -> list[int]:
    return torch.randperm(SLOTS // BLOCK, generator=torch.Generator().manual_seed(seed))[
        : positions // BLOCK + 1
    ].tolist()


class Case:
    """Requests of (rows, past) with shuffled blocks of pools of their own, stacked: keys [K, slots, E]."""

    def __init__(self, requests: Sequence[tuple[int, int]], K: int, G: int, E: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.requests, self.K, self.G, self.E = requests, K, G, E
        self.rows = [rows for rows, _ in requests]
        self.starts = [sum(self.rows[:i]) for i in range(len(requests))]
        total = len(requests) * SLOTS
        self.keys, self.values = (torch.randn(K, total, E, generator=generator) for _ in range(2))
        # Between the rows of q lie those of other projections, as in the fused forward.
        self.q = torch.randn(1, sum(self.rows), K * G + 2, E, generator=generator)[:, :, : K * G].transpose(1, 2)
        self.blocks = [
            [block + i * SLOTS // BLOCK for block in blocks_of(i, past + rows)]
            for i, (rows, past) in enumerate(requests)
        ]

    def run(self, window: int | None = None, trees: bool = False) -> Tensor:
        branches = [Branches.of(TREE) if trees else None for _ in self.requests]
        pasts = [past for _, past in self.requests]
        few = FewRows(
            self.starts, self.rows, pasts, blocks=self.blocks, block_size=BLOCK, branches=branches, window=window
        )
        out = torch.full((sum(self.rows), self.K * self.G, self.E), torch.nan)
        few.attend(self.q, self.keys, self.values, scale=None, out_THE=out)
        return out

    def expected(self, window: int | None = None, trees: bool = False) -> Tensor:
        found = []
        for (rows, past), start, blocks in zip(self.requests, self.starts, self.blocks, strict=True):
            tree = Branches.of(TREE if trees else range(-1, rows - 1))
            slots = [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(past + rows)]
            k, v = (x[:, slots].repeat_interleave(self.G, dim=0)[None] for x in (self.keys, self.values))
            mask = tree.visible(past, 0, window)
            out = F.scaled_dot_product_attention(
                self.q[:, :, start : start + rows].double(), k.double(), v.double(), mask
            )
            found.append(out[0].transpose(0, 1).float())
        return torch.cat(found)


@needs_compiler
@pytest.mark.parametrize(("K", "G", "E"), [(3, 3, 64), (2, 4, 128), (1, 1, 8), (2, 2, 80)])
@pytest.mark.parametrize("window", [None, 5, 40])
def test_it_is_pytorchs_attention(K: int, G: int, E: int, window: int | None) -> None:
    case = Case([(1, 0), (3, 17), (MOST_ROWS, 300), (8, 0), (1, 511)], K, G, E)
    torch.testing.assert_close(case.run(window), case.expected(window), atol=2e-6, rtol=2e-5)


@needs_compiler
@pytest.mark.parametrize("window", [None, 3, 40])
def test_trees_see_their_branches(window: int | None) -> None:
    case = Case([(len(TREE), 9), (len(TREE), 0)], 2, 2, 64)
    torch.testing.assert_close(case.run(window, trees=True), case.expected(window, trees=True), atol=2e-6, rtol=2e-5)


@needs_compiler
def test_scores_of_any_size() -> None:
    case = Case([(2, 50)], 1, 2, 64)
    case.q = case.q * 1e4
    out = case.run()
    assert out.isfinite().all()
    torch.testing.assert_close(out, case.expected(), atol=1e-4, rtol=1e-4)


@needs_compiler
def test_a_request_is_the_same_to_the_last_bit_in_any_company_and_on_any_threads(threads: None) -> None:
    together = Case([(3, 100), (5, 200), (1, 7)], 3, 3, 64)
    torch.set_num_threads(3)
    out = together.run()
    torch.set_num_threads(1)
    assert torch.equal(out, together.run())
    alone = Case([(5, 200)], 3, 3, 64)
    alone.q, alone.keys, alone.values = together.q[:, :, 3:8], together.keys, together.values
    alone.blocks = together.blocks[1:2]
    assert torch.equal(alone.run(), out[3:8])


@needs_compiler
def test_a_row_does_not_depend_on_the_rows_behind_it() -> None:
    many = Case([(8, 100)], 3, 3, 64)
    one = Case([(1, 100)], 3, 3, 64)
    one.q, one.keys, one.values, one.blocks = many.q[:, :, :1], many.keys, many.values, many.blocks
    assert torch.equal(many.run()[:1], one.run())


def test_rows_of_others_stay() -> None:
    if not kernels_available(torch.float32, CPU):
        pytest.skip("no C compiler here")
    case = Case([(2, 5), (2, 5)], 1, 1, 8)
    few = FewRows([2], [2], [5], blocks=case.blocks[1:], block_size=BLOCK, branches=[None])
    out = torch.zeros(4, 1, 8)
    few.attend(case.q, case.keys, case.values, scale=None, out_THE=out)
    assert not out[:2].any() and torch.equal(out[2:], case.run()[2:])


# Attention of requests with one row each, in bfloat16


def steps_of(past: list[int], K: int, G: int, E: int) -> tuple[Tensor, Tensor, Tensor, list[list[int]]]:
    """q [1, K G, R, E], keys and values [K, slots, E] of a pool that is NaN elsewhere, and the blocks of requests."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-(length + 1) // BLOCK) for length in past]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    blocks = [[order.pop() for _ in range(count)] for count in counts]
    q = torch.randn(1, len(past), K * G + 2, E, generator=generator).bfloat16()[:, :, : K * G].transpose(1, 2)
    keys, values = (torch.full((K, (sum(counts) + 3) * BLOCK, E), torch.nan).bfloat16() for _ in range(2))
    for pool in (keys, values):
        for length, own in zip(past, blocks, strict=True):
            slots = slots_of(own, length + 1)
            pool[:, slots] = torch.randn(K, length + 1, E, generator=generator).bfloat16()
    return q, keys, values, blocks


def slots_of(blocks: list[int], count: int) -> list[int]:
    return [block * BLOCK + place for block in blocks for place in range(BLOCK)][:count]


def attended(
    q: Tensor, keys: Tensor, values: Tensor, past: list[int], blocks: list[list[int]], window: int | None = None
) -> Tensor:
    rows = list(range(len(past)))
    few = FewRows(
        rows, [1] * len(past), past, blocks=blocks, block_size=BLOCK, branches=[None] * len(past), window=window
    )
    out = q.new_empty(len(past), q.shape[1], q.shape[3])
    few.attend(q, keys, values, scale=None, out_THE=out)
    return out


@needs_compiler
@pytest.mark.parametrize(("K", "G", "E"), [(3, 3, 64), (2, 5, 128), (1, 1, 64), (2, 4, 64), (1, 6, 128)])
@pytest.mark.parametrize("window", [None, 5])
def test_steps_in_bfloat16_are_pytorchs_attention(K: int, G: int, E: int, window: int | None) -> None:
    past = [0, 76, 3, 21, 8]
    q, keys, values, blocks = steps_of(past, K, G, E)
    found = attended(q, keys, values, past, blocks, window)
    assert found.dtype == torch.bfloat16
    for r, length in enumerate(past):
        slots = slots_of(blocks[r], length + 1)[-(window or length + 1) :]
        expected = F.scaled_dot_product_attention(
            q[:, :, r : r + 1].double(), keys[None, :, slots].double(), values[None, :, slots].double(), enable_gqa=True
        )
        # Summed in float32, so what is left is the result's own rounding: half a unit of 8 bits.
        torch.testing.assert_close(found[r].double(), expected[0, :, 0], atol=1e-6, rtol=2**-8)


@needs_compiler
def test_a_step_in_bfloat16_is_the_same_to_the_last_bit_in_any_company(threads: None) -> None:
    past = [49, 3, 17, 30]
    q, keys, values, blocks = steps_of(past, 3, 3, 64)
    torch.set_num_threads(3)
    together = attended(q, keys, values, past, blocks)
    torch.set_num_threads(1)
    for r, length in enumerate(past):
        assert torch.equal(attended(q[:, :, r : r + 1], keys, values, [length], [blocks[r]])[0], together[r])


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 32), (5, 576), (3, 4096)])
def test_norms_in_bfloat16_are_pytorchs_with_one_rounding(shape: tuple[int, int], threads: None) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*s, generator=generator).bfloat16() for s in (shape, shape[1:]))
    found = rms_norm(x, weight, 1e-5)
    expected = F.rms_norm(x.double(), shape[1:], weight.double(), 1e-5)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=2**-8)
    torch.set_num_threads(1)
    assert torch.equal(rms_norm(x[:1], weight, 1e-5), found[:1])


# Products and layers


@needs_compiler
@pytest.mark.parametrize(("inputs", "out"), [(1, 1), (3, 5), (130, 24), (257, 49), (576, 200)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_any_shape(inputs: int, out: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(out, inputs, generator=generator), torch.randn(130, inputs, generator=generator)
    added = torch.randn(out, generator=generator) if bias else None
    matrix = PackedMatrix(weight, added)
    expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
    whole = matrix.product(x)
    torch.testing.assert_close(whole.double(), expected, atol=1e-5 * inputs**0.5, rtol=0)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 64, 65, 128):
        assert torch.equal(matrix.product(x[:rows]), whole[:rows]), rows
        assert torch.equal(matrix.product(x[-rows:]), whole[-rows:]), rows


@needs_compiler
@pytest.mark.parametrize(("inputs", "out"), [(1, 1), (130, 24), (257, 49), (576, 200)])
def test_weights_that_are_bfloat16_are_kept_so_and_give_the_same_bits(inputs: int, out: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, inputs, generator=generator).bfloat16().float()
    x = torch.randn(130, inputs, generator=generator)
    third = torch.full((1, inputs), 1 / 3)  # is none, so the whole matrix is float32
    halved, whole = PackedMatrix(weight), PackedMatrix(torch.cat([weight, third]))
    assert (halved.panels.dtype, whole.panels.dtype) == (torch.bfloat16, torch.float32)
    for rows in (1, 2, 8, 9, 17, 33, 64, 65, 130):
        assert torch.equal(halved.product(x[:rows]), whole.product(x[:rows])[:, :out]), rows


def test_float32_rows_of_a_bfloat16_matrix_have_float32_products() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((200, 96), (7, 96)))
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    product = Float32Rows(weight)
    found = product(x.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-5)
    assert torch.equal(product(x[2:3].float())[0], found[2])
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]
    exact = torch.randn(7, 96, generator=generator)
    half = Float32Rows(weight.half())  # no processor multiplies it so
    torch.testing.assert_close(half(exact).double(), exact.double() @ weight.double().T, atol=1e-4, rtol=1e-5)


@needs_compiler
def test_products_are_the_same_to_the_last_bit_on_any_threads(threads: None) -> None:
    matrix, x = PackedMatrix(torch.randn(500, 300)), torch.randn(9, 300)
    torch.set_num_threads(3)
    found = matrix.product(x)
    torch.set_num_threads(1)
    assert torch.equal(found, matrix.product(x))


def compiled(linears: Sequence[PackedLinear], norms: Norms, heads: tuple[int, int]) -> LayerKernels:
    return LayerKernels(*(one.matrix for one in linears if one.matrix is not None), norms=norms, heads=heads)


@needs_compiler
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows", [1, 6, 70])
def test_layers_are_those_of_pytorchs_operators(normed: bool, rows: int) -> None:
    H, K, E, D, inner = 6, 2, 8, 40, 300
    generator = torch.Generator().manual_seed(rows)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def linear(inputs: int, out: int) -> nn.Linear:
        made = nn.Linear(inputs, out)
        made.weight.data, made.bias.data = drawn(out, inputs) / inputs**0.5, drawn(out)
        return made

    shapes = ((D, (H + 2 * K) * E), (H * E, D), (D, 2 * inner), (inner, D))
    linears = [PackedLinear.fused(linear(*shape)) for shape in shapes]
    norms = Norms(drawn(D), drawn(D), drawn(E) if normed else None, drawn(E) if normed else None, eps=1e-5)
    own = compiled(linears, norms, heads=(H, K))
    theirs = Operators(*linears, norms=norms, heads=(H, K))
    hidden, cos, sin, attended = drawn(rows, D), drawn(rows, E), drawn(rows, E), drawn(rows, H * E)
    expected = theirs.before_attention(hidden, cos, sin)
    torch.testing.assert_close(own.before_attention(hidden, cos, sin), expected, atol=1e-5, rtol=1e-5)
    other = hidden.clone()
    own.after_attention(attended, hidden)
    theirs.after_attention(attended, other)
    torch.testing.assert_close(hidden, other, atol=2e-5, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("requests", [[(1, 0)], [(1, 7), (4, 130), (16, 3)]])
def test_whole_layers_are_their_parts_to_the_last_bit(
    requests: list[tuple[int, int]], normed: bool, threads: None
) -> None:
    D, inner = 40, 300
    case = Case(requests, K=2, G=3, E=8)
    H, K, E, T = 6, case.K, case.E, sum(case.rows)

    def linear(inputs: int, out: int) -> PackedLinear:
        return PackedLinear.fused(nn.Linear(inputs, out))

    generator = torch.Generator().manual_seed(T)
    hidden, cos, sin = (torch.randn(T, width, generator=generator) for width in (D, E, E))
    q_norm, k_norm = (torch.rand(E, generator=generator) if normed else None for _ in range(2))
    norms = Norms(torch.rand(D), torch.rand(D), q_norm, k_norm, eps=1e-5)
    layer = compiled([linear(D, (H + 2 * K) * E), linear(H * E, D), linear(D, 2 * inner), linear(inner, D)],
                     norms, heads=(H, K))  # fmt: skip
    slots = torch.tensor([
        blocks[p // BLOCK] * BLOCK + p % BLOCK
        for (rows, past), blocks in zip(requests, case.blocks, strict=True) for p in range(past, past + rows)
    ])  # fmt: skip
    pasts = [past for _, past in requests]
    few = FewRows(
        case.starts, case.rows, pasts, blocks=case.blocks, block_size=BLOCK, branches=[None for _ in requests]
    )
    keys, values, expected = case.keys.clone(), case.values.clone(), hidden.clone()
    queries_keys, v = layer.before_attention(expected, cos, sin)
    q, k = queries_keys.split((H, K), dim=1)
    keys[:, slots], values[:, slots] = k.transpose(0, 1), v.transpose(0, 1)
    attended = torch.empty(T, H, E)
    few.attend(q.transpose(0, 1)[None], keys, values, scale=None, out_THE=attended)
    layer.after_attention(attended.view(T, -1), expected)
    torch.set_num_threads(3)
    layer.forward(hidden, cos, sin, rows=few, cache=Cache(case.keys, case.values, slots))
    assert torch.equal(hidden, expected)
    assert torch.equal(case.keys, keys) and torch.equal(case.values, values)


@needs_compiler
def test_activations_of_any_size() -> None:
    """silu(g) of gates that float32 barely holds, where exp(-g) overflows."""
    D = 8
    gates = torch.tensor([-3e38, -200.0, -88.0, -1.0, 0.0, 1.0, 200.0, 1e30])
    one, none = torch.eye(D), torch.zeros(D, D)
    packed = [PackedMatrix(weight, bias) for weight, bias in (
        (torch.zeros(3 * D, D), None), (none, None),
        (torch.zeros(2 * D, D), torch.cat((gates, torch.ones(D)))), (one, None),
    )]  # fmt: skip
    own = LayerKernels(*packed, norms=Norms(torch.ones(D), torch.ones(D), None, None, 1e-5), heads=(1, 1))
    hidden = torch.zeros(1, D)
    own.after_attention(torch.zeros(1, D), hidden)
    torch.testing.assert_close(hidden[0], F.silu(gates))


def test_only_for_their_types_on_a_cpu() -> None:
    assert not kernels_available(torch.float64, CPU)
    assert not kernels_available(torch.float32, torch.device("cuda"))
    assert not attends(torch.bfloat16, torch.device("cuda"), head_dim=64)
    assert not attends(torch.bfloat16, CPU, head_dim=80)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """`_compiled` without what it remembers, with an empty cache directory."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    yield kernels._compiled.__wrapped__


@pytest.mark.parametrize("compiler", [None, "false", "/no/such/compiler"])
def test_without_a_working_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch, fresh: Any, compiler: str) -> None:
    found = shutil.which(compiler or "") or compiler
    monkeypatch.setattr(kernels.shutil, "which", lambda name: found)
    assert fresh() is None


@needs_compiler
def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch, fresh: Any, tmp_path: Path) -> None:
    assert fresh() is not None
    (made,) = (tmp_path / "compiled").iterdir()
    monkeypatch.setattr(kernels.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert fresh() is not None
    elsewhere = tmp_path / "damaged" / "compiled" / made.name
    elsewhere.parent.mkdir(parents=True)
    elsewhere.write_bytes(b"no library")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "damaged"))
    assert fresh() is None


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
