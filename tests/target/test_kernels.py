"""The compiled kernels against PyTorch's operators and dense attention, and to the last bit in any company."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.target import kernels
from outrider.target.attention import Branches, Latents
from outrider.target.fused import Operators
from outrider.target.kernels import (
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
from outrider.target.paged_attention import MOST_SEEN, Reader, bits_of
from tests.toys.paged_reference import CASES, PAGE, Case, dense, readers_of

CPU = torch.device("cpu")
TREE = [-1, 0, 0, 1, 1, 2]
# A row of a target: what a block drafter's rows see is another rule.
FEW = [
    replace(case, requests=tuple(request for request in case.requests if request[1] <= MOST_SEEN))
    for case in CASES
    if not case.slots
]
(EVERYTHING,) = (case for case in FEW if case.name == "all of it")
TYPES = (torch.float32, torch.bfloat16)

needs_compiler = pytest.mark.skipif(
    not kernels_available(torch.float32, CPU), reason="no C compiler with OpenMP here: attention is PyTorch's"
)


def slots_of(reader: Reader) -> list[int]:
    return [reader.pages[p // PAGE] * PAGE + p % PAGE for p in range(reader.end)]


def pool_of(readers: Sequence[Reader], heads: int, dim: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A pool [heads, slots, dim] that is NaN where no position of a reader is."""
    generator, pages = torch.Generator().manual_seed(seed), 1 + max(max(reader.pages) for reader in readers)
    pool = torch.full((heads, pages * PAGE, dim), torch.nan)
    for reader in readers:
        pool[:, slots_of(reader)] = torch.randn(heads, reader.end, dim, generator=generator)
    return pool.to(dtype)


def queries_of(rows: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Queries [1, heads, rows, dim], between whose rows lie those of other projections, as in the fused forward."""
    wide = torch.randn(1, rows, heads + 2, dim, generator=torch.Generator().manual_seed(rows))
    return wide.to(dtype)[:, :, :heads].transpose(1, 2)


class Step:
    """A case with its readers, queries, keys and values."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32) -> None:
        self.readers, _ = readers_of(case, np.random.default_rng(len(case.name)))
        K, G, E = case.heads
        self.counts = [len(reader.positions) for reader in self.readers]
        self.q = queries_of(sum(self.counts), K * G, E, dtype)
        self.keys, self.values = (pool_of(self.readers, K, E, seed, dtype) for seed in (1, 2))
        sinks_H = torch.randn(K * G, generator=torch.Generator().manual_seed(3)) if case.sinks else None
        self.options: dict[str, Any] = {
            "window": case.window,
            "softcap": case.softcap,
            "scale": case.scale,
            "sinks_H": sinks_H,
        }

    def run(self) -> Tensor:
        return FewRows(self.readers, PAGE).attend(self.q, self.keys, self.values, **self.options)

    def alone(self, index: int) -> Tensor:
        """The rows of one request, computed without the others."""
        q = self.q.split(self.counts, dim=2)[index]
        return FewRows([self.readers[index]], PAGE).attend(q, self.keys, self.values, **self.options)

    def expected(self) -> Tensor:
        q_THE, keys, values = (x.double() for x in (self.q[0].transpose(0, 1), self.keys, self.values))
        return dense(q_THE, keys, values, readers=self.readers, page_size=PAGE, **self.options)


def check(found: Tensor, expected: Tensor) -> None:
    """Sums are in float32: what is left in bfloat16 is the result's own rounding, half a unit of 8 bits."""
    exact = found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=4e-6, rtol=2e-5 if exact else 2**-8)


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_it_is_dense_attention(case: Case, dtype: torch.dtype) -> None:
    step = Step(case, dtype)
    found = step.run()
    assert found.dtype == dtype
    check(found, step.expected())


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("heads", [(3, 3, 64), (2, 4, 128), (1, 1, 8), (2, 2, 80), (1, 20, 64), (1, 5, 256)])
def test_heads_of_any_size_and_number(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    step = Step(replace(EVERYTHING, heads=heads), dtype)
    check(step.run(), step.expected())


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES)
def test_heads_read_latents_as_they_are(dtype: torch.dtype) -> None:
    """Keys and values of different dims in one pool, against those that the latents are expanded to."""
    H, N, P, C, V = 20, 16, 8, 24, 12
    readers, _ = readers_of(EVERYTHING, np.random.default_rng(0))
    generator = torch.Generator().manual_seed(0)
    pool = pool_of(readers, 1, C + P, seed=1, dtype=dtype)
    keys_HNC, values_HVC = (torch.randn(H, dim, C, generator=generator).to(dtype) / C**0.5 for dim in (N, V))
    q = queries_of(sum(len(reader.positions) for reader in readers), H, N + P, dtype)

    def expanded(latents_1SC: Tensor, rotated_1SP: Tensor) -> tuple[Tensor, Tensor]:
        keys = torch.cat([latents_1SC @ keys_HNC.double().transpose(1, 2), rotated_1SP.expand(H, -1, -1)], dim=2)
        return keys, latents_1SC @ values_HVC.double().transpose(1, 2)

    latents = Latents(keys_HNC, values_HVC, expand=expanded)
    sums_THC = FewRows(readers, PAGE).attend(latents.queries(q), pool, pool[..., :C], scale=0.2)
    keys, values = expanded(*pool.double().split((C, P), dim=2))
    expected = dense(q[0].transpose(0, 1).double(), keys, values, readers=readers, page_size=PAGE, scale=0.2)
    found = latents.outputs(sums_THC)
    assert found.dtype == dtype and found.shape == expected.shape
    # In bfloat16 the products before and behind the kernel are rounded, too.
    torch.testing.assert_close(found.double(), expected, atol=1e-5 if dtype == torch.float32 else 4e-2, rtol=1e-5)


@needs_compiler
def test_scores_of_any_size() -> None:
    step = Step(Case("large", ((50, 2),)))
    step.q = step.q * 1e4
    out = step.run()
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), step.expected(), atol=1e-4, rtol=1e-4)


@needs_compiler
def test_a_soft_cap_of_any_score() -> None:
    """Scores of 1e-6 to 1e6 of a cap of 1: the curve is a line below and a constant above."""
    step = Step(Case("capped", ((60, 3),), softcap=1.0))
    step.keys = step.keys * 10.0 ** torch.linspace(-6, 6, step.keys.shape[1])[:, None]
    check(step.run(), step.expected())


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", [EVERYTHING, *FEW[:3]], ids=lambda case: case.name)
def test_a_request_is_the_same_to_the_last_bit_in_any_company_and_on_any_threads(
    case: Case, dtype: torch.dtype, threads: None
) -> None:
    step = Step(case, dtype)
    torch.set_num_threads(3)
    together = step.run()
    torch.set_num_threads(1)
    assert torch.equal(together, step.run())
    for index, rows in enumerate(together.split(step.counts)):
        assert torch.equal(step.alone(index), rows)


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [None, 3, 21])
def test_a_row_is_the_same_to_the_last_bit_with_drafts_and_without(window: int | None, dtype: torch.dtype) -> None:
    """At its position alone, behind earlier rows and before later ones."""
    pages = np.random.default_rng(0).permutation(40).tolist()
    whole = Reader(0, range(160), pages)
    keys, values = (pool_of([whole], 2, 64, seed, dtype) for seed in (1, 2))
    q, sinks_H = queries_of(17, 6, 64, dtype), torch.randn(6, generator=torch.Generator().manual_seed(0))
    for position in (15, 16, 77, 140):
        found = []
        for past, rows in ((position, 1), (position, 9), (position - 15, 16), (position - 4, 8)):
            own = q[:, :, :rows].clone()
            own[:, :, position - past] = q[:, :, 16]
            few = FewRows([Reader(past, range(past, past + rows), pages)], PAGE)
            out = few.attend(own, keys, values, window=window, softcap=5.0, sinks_H=sinks_H)
            found.append(out[position - past].tolist())
        assert found == [found[0]] * 4, position


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [None, 2, 7])
def test_a_row_of_a_tree_is_the_same_to_the_last_bit_as_on_its_path_alone(
    window: int | None, dtype: torch.dtype
) -> None:
    branches, past, generator = Branches.of(TREE), 9, np.random.default_rng(0)
    tree = Reader(past, (past + branches.depths_T).tolist(), generator.permutation(4).tolist(), bits_of(branches))
    keys, values = (pool_of([tree], 2, 16, seed, dtype) for seed in (1, 2))
    q, slots = queries_of(len(TREE), 6, 16, dtype), slots_of(tree)
    together = FewRows([tree], PAGE).attend(q, keys, values, window=window)
    for node in range(len(TREE)):
        path = branches.sees_TT[node].nonzero()[:, 0].tolist()
        chain = Reader(past, range(past, past + len(path)), list(range(4)))
        moved = [slots[p] for p in [*range(past), *(past + row for row in path)]]
        own_keys, own_values = (F.pad(pool[:, moved], (0, 0, 0, 16 - len(moved))) for pool in (keys, values))
        alone = FewRows([chain], PAGE).attend(q[:, :, path], own_keys, own_values, window=window)
        assert torch.equal(alone[-1], together[node]), node


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
@pytest.mark.parametrize("requests", [[(0, 1)], [(7, 1), (130, 4), (3, 16)]])
def test_whole_layers_are_their_parts_to_the_last_bit(
    requests: list[tuple[int, int]], normed: bool, threads: None
) -> None:
    D, inner = 40, 300
    step = Step(Case("whole", tuple(requests), heads=(2, 3, 8)))
    H, K, E, T = 6, 2, 8, sum(step.counts)

    def linear(inputs: int, out: int) -> PackedLinear:
        return PackedLinear.fused(nn.Linear(inputs, out))

    generator = torch.Generator().manual_seed(T)
    hidden, cos, sin = (torch.randn(T, width, generator=generator) for width in (D, E, E))
    q_norm, k_norm = (torch.rand(E, generator=generator) if normed else None for _ in range(2))
    norms = Norms(torch.rand(D), torch.rand(D), q_norm, k_norm, eps=1e-5)
    layer = compiled([linear(D, (H + 2 * K) * E), linear(H * E, D), linear(D, 2 * inner), linear(inner, D)],
                     norms, heads=(H, K))  # fmt: skip
    slots = torch.tensor([slot for reader in step.readers for slot in slots_of(reader)[reader.past :]])
    few = FewRows(step.readers, PAGE)
    keys, values, expected = step.keys.clone(), step.values.clone(), hidden.clone()
    queries_keys, v = layer.before_attention(expected, cos, sin)
    q, k = queries_keys.split((H, K), dim=1)
    keys[:, slots], values[:, slots] = k.transpose(0, 1), v.transpose(0, 1)
    attended = few.attend(q.transpose(0, 1)[None], keys, values)
    layer.after_attention(attended.view(T, -1), expected)
    torch.set_num_threads(3)
    layer.forward(hidden, cos, sin, rows=few, cache=Cache(step.keys, step.values, slots))
    assert torch.equal(hidden, expected)
    assert torch.equal(step.keys[:, slots], keys[:, slots]) and torch.equal(step.values[:, slots], values[:, slots])


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
    assert not attends(torch.bfloat16, torch.device("cuda"))
    assert not attends(torch.float64, CPU)


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
