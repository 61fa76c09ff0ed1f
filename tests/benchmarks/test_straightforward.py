"""The straightforward training step computes the same loss and gradients as ours, and precision changes them little."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.straightforward import StraightforwardObjective
from outrider.drafters.dflash import FULL, SLIDING, DFlash
from outrider.drafters.dspark import DSpark
from outrider.drafters.flex import flex_block_attention
from outrider.drafters.layers import EVERYTHING, BlockLayout, split_attention
from outrider.drafters.loss import ObjectiveConfig
from outrider.training.batches import BlockBatch, Schedule, build_batch
from outrider.training.dataset import choose_draft_ids
from outrider.training.features import FeatureSource
from outrider.training.objective import BlockObjective
from outrider.training.recipe import Precision
from tests.toys.targets import randomise, toy_config, toy_samples, toy_target

CONFIG = ObjectiveConfig(ce=0.5, l1=0.9, confidence=0.7)


def setting(head: str, draft_vocab: int, family: str = "llama", **changes: object) -> tuple[DFlash, BlockBatch, tuple]:
    target, samples = toy_target(family), toy_samples(5)
    if head == "none":
        drafter = DFlash(toy_config(dspark=False, draft_vocab_size=draft_vocab, **changes))
    else:
        drafter = DSpark(toy_config(markov_head_type=head, draft_vocab_size=draft_vocab, **changes))
    randomise(drafter)
    features = FeatureSource(target, samples, drafter.config.target_layer_ids, drafter.aux_scale_L, 2**30)
    chosen = Schedule(samples, 3, 6, seed=1).step(0)
    chosen[1] = (chosen[1][0], chosen[1][1][:3])  # sequences with different numbers of blocks
    batch = build_batch(chosen, samples, [features[i] for i, _ in chosen], drafter.config.gamma)
    assert not batch.supervised_NK.all()
    ids = choose_draft_ids(samples, 97, draft_vocab, frozenset({1}))
    return drafter, batch, (target, ids, CONFIG)


def gradients(drafter: DFlash, loss: Tensor) -> dict[str, Tensor]:
    drafter.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("head", "draft_vocab", "changes"),
    [
        ("vanilla", 40, {"sample_from_anchor": True}),
        ("rnn", 97, {"sample_from_anchor": False, "sliding_window": 6}),
        ("none", 97, {"sliding_window": 6, "layer_types": (SLIDING, FULL), "is_causal": None}),
        ("none", 97, {"sample_from_anchor": False}),
    ],
)
def test_same_loss_and_gradients(head: str, draft_vocab: int, changes: dict[str, object]) -> None:
    drafter, batch, frozen = setting(head, draft_vocab, **changes)
    ours, theirs = BlockObjective(*frozen)(drafter, batch).loss, StraightforwardObjective(*frozen)(drafter, batch)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    mine, others = gradients(drafter, ours), gradients(drafter, theirs)
    assert mine.keys() == others.keys()
    for name, gradient in mine.items():
        assert (gradient - others[name]).norm() <= 1e-5 * others[name].norm(), name


def test_the_comparison_notices_a_wider_view() -> None:
    drafter, batch, frozen = setting("vanilla", 97)
    ours = BlockObjective(*frozen)(drafter, batch).loss
    shifted = replace(batch.layout, anchors_N=batch.layout.anchors_N - 1)
    theirs = StraightforwardObjective(*frozen)(drafter, replace(batch, layout=shifted))
    assert (ours - theirs).abs() > 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bfloat16_points_the_same_way(family: str) -> None:
    """Without warnings: norms that fall back to a slow path would give one."""
    drafter, batch, frozen = setting("gated", 40, family)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        precisions: tuple[Precision, ...] = ("float32", "bfloat16")
        for precision in precisions:
            output = BlockObjective(*frozen, precision)(drafter, batch)
            found.append((output, gradients(drafter, output.loss)))
    (exact, slopes), (rounded, other_slopes) = found
    assert (exact.acceptance_N - rounded.acceptance_N).square().mean().sqrt() < 0.02
    assert not torch.equal(exact.acceptance_N, rounded.acceptance_N)
    flat, other = (torch.cat([g.flatten() for g in s.values()]) for s in (slopes, other_slopes))
    assert other.dtype == torch.float32
    assert torch.cosine_similarity(flat, other, dim=0) > 0.995


def test_a_callers_autocast_leaves_the_objective_in_float32() -> None:
    drafter, batch, frozen = setting("vanilla", 97)
    compute = BlockObjective(*frozen)
    with torch.autocast("cpu", torch.bfloat16):
        inside = compute(drafter, batch)
    assert inside.acceptance_N.dtype == torch.float32
    torch.testing.assert_close(inside.loss, compute(drafter, batch).loss, atol=0, rtol=1e-5)


def test_attention_paths_agree_in_bfloat16() -> None:
    layout = BlockLayout([9, 14], torch.tensor([3, 9, 14]), torch.tensor([0, 0, 1]))
    shapes = [(3, 4, 4, 16), (23, 2, 16), (23, 2, 16), (3, 4, 2, 16), (3, 4, 2, 16)]
    exact = [torch.randn(shape) for shape in shapes]
    expected = split_attention(*exact, layout)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = [x.bfloat16() for x in exact]
        for attend in (split_attention, flex_block_attention):
            torch.testing.assert_close(attend(*narrow, layout, EVERYTHING).float(), expected, atol=4e-2, rtol=4e-2)
