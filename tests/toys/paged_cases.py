"""Paged attention against dense attention in float64: on "cpu" with TRITON_INTERPRET=1, which is read at import."""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

import outrider.target.paged_attention as paged_attention
import outrider.target.paged_attention_triton as kernels
from outrider.target.graphs import StepGraphs, inputs_of, shape_of
from outrider.target.model import Target
from outrider.target.paged import PagedKV, RaggedStep, Span
from outrider.target.paged_attention import Plan, Reader, Sizes, attend, most_items, plan
from tests.toys.paged_reference import CASES, PAGE, Case, dense, readers_of
from tests.toys.targets import toy_target
from tests.toys.trees import random_tree

BOUNDS = {torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}  # of values of about 1
HALF = ("ragged", "all of it", "slots in turn under a window")  # cases that are computed in all types


def difference(case: Case, dtype: torch.dtype, device: str) -> float:
    """The largest difference from dense attention."""
    generator = torch.Generator().manual_seed(len(case.name))
    readers, pages = readers_of(case, np.random.default_rng(len(case.name)))
    K, G, E = case.heads
    rows = sum(len(reader.positions) for reader in readers)
    q_THE, keys, values = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows + case.padding, K * G, E), (K, pages * PAGE, E), (K, pages * PAGE, E))
    )
    sinks_H = torch.randn(K * G, generator=generator) if case.sinks else None
    sizes = None
    if case.padding:
        sizes = Sizes(rows + case.padding, rows + case.padding, most_items(rows + case.padding), 3 * pages)
    host = plan(readers, G, PAGE, window=case.window, sizes=sizes)
    there = torch.from_numpy(host.numbers).to(device)
    options = {"split": host.split, "window": case.window, "drafts": case.slots > 0}
    made = Plan.of(there, host.sizes, PAGE, **options)

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sinks = None if sinks_H is None else sinks_H.to(device)
        return attend(q, k, v, made, scale=case.scale, softcap=case.softcap, sinks_H=sinks)

    wide = torch.cat([q_THE, q_THE], dim=1)[:, : K * G]  # rows that lie in a larger tensor
    found = compute(*(x.to(device) for x in (wide, keys, values)))[:rows]
    expected = dense(
        *(x.double() for x in (q_THE[:rows], keys, values)),
        readers=readers,
        page_size=PAGE,
        window=case.window,
        drafts=case.slots > 0,
        scale=case.scale,
        softcap=case.softcap,
        sinks_H=sinks_H,
    )
    return (found.cpu().double() - expected).abs().max().item()


def same_bits(dtype: torch.dtype, device: str) -> None:
    """A row at a position is the same alone, behind earlier rows, before later ones, and where chunks are one more."""
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(2, 240, 16, generator=generator).to(dtype).to(device) for _ in range(2))
    for position in (63, 200):
        q_HE, found = torch.randn(4, 16, generator=generator).to(dtype), []
        for past, rows in ((position, 1), (position, 16), (position - 15, 16), (position - 3, 9)):
            reader = Reader(past, range(past, past + rows), list(range(60)))
            host = plan([reader], 2, PAGE, sizes=Sizes(16, 16, most_items(16), 64))
            q_THE = torch.randn(16, 4, 16, generator=generator).to(dtype)
            q_THE[position - past] = q_HE
            made = Plan.of(torch.from_numpy(host.numbers).to(device), host.sizes, PAGE)
            found.append(attend(q_THE.to(device), keys, values, made)[position - past].tolist())
        assert found == [found[0]] * 4, position


@torch.inference_mode()
def steps(device: str) -> None:
    """The packed step of a target against the spans' own attention: requests after prompts, a tree, and a prompt."""
    target = toy_target("qwen3")
    target = Target(target.model.to(device), None, target.name)
    decoder, aux_layers = target._fused, (0, 2)
    assert decoder is not None
    kv, alone = PagedKV(target, 61, PAGE), PagedKV(target, 60, PAGE)
    kv.spare_slot = 60 * PAGE
    blocks, tree = [list(range(start, start + 20)) for start in (40, 0, 20)], random_tree(14, 97, 4)
    prompts = [Span([7 + i] * 70, 0, own, 1) for i, own in enumerate(blocks[:2])]
    for pool in (kv, alone):
        decoder.forward_ragged(RaggedStep(prompts, pool), ())
    spans = [Span([9], 70, blocks[0], 1), Span([7, *tree.tokens], 60, blocks[1], 1, tree.row_parents)]
    spans.append(Span([3, 4], 0, blocks[2], 1))
    shape = shape_of(spans, kv, aux_layers)
    numbers = torch.from_numpy(inputs_of(spans, shape, kv, groups=decoder.groups)).to(device)
    found_TD, aux_TLD = StepGraphs(decoder)._run(numbers, shape, kv)
    hidden_1TD, captured = decoder.forward_ragged(RaggedStep(spans, alone), aux_layers)
    rows = hidden_1TD.shape[1]
    assert aux_TLD is not None and rows < len(found_TD)
    torch.testing.assert_close(found_TD[:rows], hidden_1TD[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(aux_TLD[:rows, 1], captured[2][0], atol=1e-4, rtol=1e-4)


def main(device: str) -> None:
    # Chunks of 64, then of 128 positions, so that short contexts have several.
    paged_attention._CHUNK, paged_attention._ALIKE = 64, 2
    kernels._WIDEN = device == "cpu"
    for case in CASES:
        for dtype, bound in BOUNDS.items() if case.name in HALF else [(torch.float32, BOUNDS[torch.float32])]:
            worst = difference(case, dtype, device)
            print(f"{case.name}, {dtype}: {worst:.1e}")
            assert worst <= bound, f"{case.name}, {dtype}: {worst:.1e} above {bound:.0e}"
    for dtype in (torch.float32, torch.bfloat16):
        same_bits(dtype, device)
    steps(device)


if __name__ == "__main__":
    main(sys.argv[1])
