"""Trained equals served; nothing leaks; both attention paths agree. The tests that catch off-by-ones.

The training forward (all anchors at once, sparse mask) and the decoding loop (packed weights, caches growing and
rolling back round by round) must give the same acceptance at the same anchors of the same text.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import outrider.drafters.flex as flex_module
import outrider.drafters.layers as layers
from outrider.contrib.peagle import PEagle, PEagleConfig
from outrider.drafters.dflash import DFlash
from outrider.drafters.dspark import DSpark
from outrider.drafters.flex import flex_block_attention
from outrider.drafters.layers import AttentionPattern, BlockLayout, split_attention
from outrider.sampling import SeededSource
from outrider.training.batches import BlockBatch, Schedule
from outrider.training.dataset import choose_draft_ids
from outrider.training.objective import BlockObjective
from tests.toys.alignment import build, check_alignment
from tests.toys.drafters import make_mtp
from tests.toys.eagle3 import inputs_for
from tests.toys.eagle3 import make_drafter as make_eagle3
from tests.toys.targets import randomise, toy_config, toy_samples, toy_target, with_mask_token


def make_drafter(head: str, sample_from_anchor: bool, draft_vocab: int, window: int | None) -> DFlash:
    changes = {"sample_from_anchor": sample_from_anchor, "draft_vocab_size": draft_vocab, "sliding_window": window}
    if head == "none":
        drafter = DFlash(toy_config(dspark=False, **changes))
    else:
        drafter = DSpark(toy_config(markov_head_type=head, **changes))
    randomise(drafter)
    drafter.aux_scale_L.copy_(torch.tensor([0.5, 3.0, 7.0]))
    return drafter


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize(("draft_vocab", "window"), [(97, None), (40, 7)])
def test_trained_equals_served(head: str, sample_from_anchor: bool, draft_vocab: int, window: int | None) -> None:
    target = toy_target("qwen3")
    samples = toy_samples(4)
    drafter = make_drafter(head, sample_from_anchor, draft_vocab, window)
    ids = choose_draft_ids(samples, 97, draft_vocab, frozenset({1}))
    assert check_alignment(target, drafter, samples, ids) > 50


KINDS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}


@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("changes", [KINDS, {**KINDS, "is_causal": None}, {"is_causal": True, "sliding_window": 7}])
def test_trained_equals_served_whatever_each_layer_sees(sample_from_anchor: bool, changes: dict[str, object]) -> None:
    target, samples = toy_target("qwen3"), toy_samples(4)
    drafter = DSpark(toy_config(sample_from_anchor=sample_from_anchor, **changes))
    randomise(drafter)
    assert check_alignment(target, drafter, samples, torch.arange(97)) > 50


def base_logits(drafter: DFlash, compute: BlockObjective, batch: BlockBatch) -> Tensor:
    with torch.no_grad():
        return compute.rows(drafter, batch).hidden_NKH @ compute.head_VH.T


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_nothing_at_or_after_the_anchor_and_no_other_block_leaks_into_a_block(sample_from_anchor: bool) -> None:
    target, samples = toy_target(), toy_samples(3)
    drafter = make_drafter("vanilla", sample_from_anchor, 97, None)
    batch, compute = build(drafter, target, samples, torch.arange(97), Schedule(samples, 3, 6, seed=1).step(0))
    before = base_logits(drafter, compute, batch)
    layout = batch.layout
    starts = torch.tensor([0, *layout.lengths]).cumsum(0)
    for block in (0, 7, len(before) - 1):
        start, anchor = int(starts[layout.sequence_N[block]]), int(layout.anchors_N[block])
        # 1. features at or after the anchor, and every feature of the other sequences
        aux_layers = torch.randn_like(batch.aux_SLD)
        aux_layers[start : start + anchor] = batch.aux_SLD[start : start + anchor]
        # 2. tokens of all other blocks
        previous = torch.randint(4, 97, batch.previous_NK.shape)
        previous[block] = batch.previous_NK[block]
        changed = replace(batch, aux_SLD=aux_layers, previous_NK=previous)
        torch.testing.assert_close(base_logits(drafter, compute, changed)[block], before[block], atol=1e-6, rtol=1e-6)
        # and the test can fail: a feature before the anchor does matter
        aux_layers = batch.aux_SLD.clone()
        aux_layers[start + anchor - 1] += 1
        moved = base_logits(drafter, compute, replace(batch, aux_SLD=aux_layers))[block]
        assert (moved - before[block]).abs().max() > 1e-4


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_sequential_head_sees_only_earlier_tokens_of_its_block(head: str) -> None:
    drafter = make_drafter(head, True, 97, None)
    assert isinstance(drafter, DSpark) and drafter.markov_head is not None
    previous, hidden = torch.randint(4, 97, (5, 4)), torch.randn(5, 4, 32)
    before = drafter.markov_head.unroll(previous, hidden)[0]
    for k in range(4):
        changed = previous.clone()
        changed[2, k] = (changed[2, k] + 1) % 97  # x_{k-1} of position k
        after = drafter.markov_head.unroll(changed, hidden)[0]
        others = torch.arange(5) != 2
        assert torch.equal(after[others], before[others])
        assert torch.equal(after[2, :k], before[2, :k]) and not torch.equal(after[2, k], before[2, k])


PATTERNS = [AttentionPattern(), AttentionPattern(6), AttentionPattern(6, causal=True), AttentionPattern(causal=True)]


def ragged(lengths: list[int], anchors: list[list[int]], heads: int = 4) -> tuple[BlockLayout, list[Tensor]]:
    """A layout of sequences with these anchors, and queries, keys and values for blocks of 4 rows."""
    sequence = [number for number, places in enumerate(anchors) for _ in places]
    layout = BlockLayout(
        lengths, torch.tensor([place for places in anchors for place in places]), torch.tensor(sequence)
    )
    N, S = len(sequence), sum(lengths)
    shapes = [(N, 4, heads, 16), (S, 2, 16), (S, 2, 16), (N, 4, 2, 16), (N, 4, 2, 16)]
    return layout, [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.fixture
def flex_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's dense reference has gradients on a CPU too, which its public function refuses there."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@pytest.mark.usefixtures("flex_backward")
def test_chains_by_flex_attention_are_those_of_split_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE-3's and MTP's rows, of which each sees those of its chain, and P-EAGLE's, which are one call."""
    target = toy_target()
    inputs = inputs_for(target, [9, 14], [0, 3, 9, 1, 14], [0, 0, 0, 1, 1], 4)
    chosen = {"gamma": 4, "target_layer_ids": [0, 2, 3], "draft_vocab_size": 97}
    parallel = PEagle(PEagleConfig.from_target(with_mask_token(target), **chosen))
    randomise(parallel, 0)
    for module in (make_eagle3(target), parallel, make_mtp(target, 2, 4)):
        own = replace(inputs, aux_SLD=inputs.aux_SLD[:, : len(module.config.target_layer_ids)])
        found = []
        for kernel in (split_attention, flex_block_attention):
            monkeypatch.setattr(layers, "kernel_of", partial(lambda kernel, _: kernel, kernel))
            rows = module.rows(own).hidden_NKH
            module.zero_grad()
            rows.square().sum().backward()
            found.append([rows.detach(), *(p.grad for p in module.parameters() if p.grad is not None)])
        for split, flex in zip(*found, strict=True):
            torch.testing.assert_close(split, flex, atol=1e-4, rtol=1e-4)


def assert_alike(layout: BlockLayout, tensors: list[Tensor], pattern: AttentionPattern) -> Tensor:
    """FlexAttention's output and gradients are the split path's; returns the output."""
    found = []
    weights = torch.randn(tensors[0].shape)
    for attend in (split_attention, flex_block_attention):
        out = attend(*tensors, layout, pattern)
        found.append([out, *torch.autograd.grad((out * weights).sum(), tensors)])
    for split, flex in zip(*found, strict=True):
        torch.testing.assert_close(split, flex, atol=1e-5, rtol=1e-5)
    return found[0][0].detach()


@pytest.mark.usefixtures("flex_backward")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_flex_attention_and_split_attention_agree(pattern: AttentionPattern) -> None:
    """In what they give and in the gradients, and both with plain softmax attention over the visible keys."""
    layout, leaves = ragged([9, 14, 5], [[3, 9], [1, 8, 14], [5]])
    split = assert_alike(layout, leaves, pattern)
    q, *tensors = (leaf.detach() for leaf in leaves)
    starts = [0, 9, 23]
    for block in range(6):
        start, anchor = starts[int(layout.sequence_N[block])], int(layout.anchors_N[block])
        for row in range(4):
            first = 0 if pattern.window is None else max(0, anchor + row - pattern.window + 1)
            own = slice(None, row + 1 if pattern.causal else None)
            context = slice(start + first, start + max(first, anchor))
            for h in range(4):
                keys = torch.cat((tensors[0][context, h // 2], tensors[2][block, own, h // 2]))
                values = torch.cat((tensors[1][context, h // 2], tensors[3][block, own, h // 2]))
                expected = (keys @ q[block, row, h] / 4).softmax(0) @ values
                torch.testing.assert_close(split[block, row, h], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("rows", "own"), [(4, 4), (1, 3)])
def test_tiles_of_flex_attention_hold_what_rows_see(
    pattern: AttentionPattern, rows: int, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel computes the tiles that are listed: each with a visible pair is one of them; in the whole ones, which
    it computes without the mask, every pair is visible."""
    monkeypatch.setattr(flex_module, "_TILE", 4)
    layout, _ = ragged([9, 14, 5, 60], [[0, 3, 9], [1, 8, 14], [5], [6, 20, 21, 22, 40, 60]])
    found = flex_module._flex_mask(layout, rows, own, pattern)
    count, slots = 13 * rows, 88 + 13 * own
    zero = torch.zeros(1, dtype=torch.long)
    visible = found.mask_mod(zero, zero, torch.arange(count)[:, None], torch.arange(slots))
    assert visible.any(dim=1).all()
    rows_of_tiles = torch.cat((visible, visible[-1:].expand(-count % 4, -1)))  # of none behind the last row
    padded = torch.nn.functional.pad(rows_of_tiles, (0, -slots % 4)).view(-(-count // 4), 4, -(-slots // 4), 4)
    seen = padded.any(dim=3).any(dim=1)
    assert tuple(found.seq_lengths) == (count, slots)

    def listed(numbers: Tensor, indices: Tensor) -> Tensor:
        tiles = torch.zeros_like(seen)
        for row, number in enumerate(numbers[0, 0].tolist()):
            tiles[row, indices[0, 0, row, :number].long()] = True
        return tiles

    partial, whole = (
        listed(found.kv_num_blocks, found.kv_indices),
        listed(found.full_kv_num_blocks, found.full_kv_indices),
    )
    assert not (partial & whole).any() and bool((partial | whole)[seen].all())
    assert bool(padded.all(dim=3).all(dim=1)[whole].all())
    assert whole.any() or pattern.window is not None
    assert (partial | whole).sum() <= 1.5 * seen.sum()


@pytest.mark.usefixtures("flex_backward")
def test_flex_attention_is_compiled_for_the_first_batches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second epoch of other lengths, anchors and numbers of blocks compiles nothing, in training and evaluation.

    The compiler's graphs run uncompiled here: FlexAttention has no compiled backward on CPUs.
    """
    pattern = AttentionPattern(6, causal=True)
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, **options, backend=counter))
    kernel = flex_module._flex_kernel.__wrapped__(True)
    monkeypatch.setattr(flex_module, "_flex_kernel", lambda _: kernel)
    counts = []
    for epoch in range(2):
        for batch in range(3):
            lengths = [9 + 7 * batch + 5 * epoch, 14 + epoch, 6 + 3 * batch][: 2 + batch]
            layout, tensors = ragged(lengths, [[3, 5 + batch], [1, 8, 14][: 2 + epoch], [5]][: len(lengths)])
            assert_alike(layout, tensors, pattern)
            with torch.no_grad():
                flex_block_attention(*tensors, layout, pattern)
        counts.append(counter.frame_count)
    assert 1 <= counts[0] <= 4 and counts[1] == counts[0]
    assert torch._dynamo.config.fail_on_recompile_limit_hit


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention's compiled kernel needs a CUDA device")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_compiled_flex_attention_on_cuda_agrees_with_the_cpu_path(pattern: AttentionPattern) -> None:
    layout = BlockLayout([9, 14], torch.tensor([3, 9, 14]), torch.tensor([0, 0, 1]))
    q = torch.randn(3, 8, 4, 64)
    tensors = [torch.randn(23, 2, 64), torch.randn(23, 2, 64), torch.randn(3, 8, 2, 64), torch.randn(3, 8, 2, 64)]
    there = BlockLayout(layout.lengths, layout.anchors_N.cuda(), layout.sequence_N.cuda())
    flex = flex_block_attention(q.cuda(), *[t.cuda() for t in tensors], there, pattern)
    torch.testing.assert_close(flex.cpu(), split_attention(q, *tensors, layout, pattern), atol=1e-2, rtol=1e-2)


def test_seeded_source_is_reproducible() -> None:
    probs = torch.rand(50)
    probs /= probs.sum()
    first, second = SeededSource(7), SeededSource(7)
    assert [first.choose(probs) for _ in range(20)] == [second.choose(probs) for _ in range(20)]
