"""Medusa: numpy references of training and serving, what a head may see, how it begins and that it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import randomise, toy_target
from head_toys import (
    VOCAB,
    check_identity,
    check_learns,
    check_rows,
    check_serving,
    check_trained_equals_served,
    fit_to_decoding,
    forced_call,
    reference_layers,
    toy_heads,
    toy_texts,
    training_inputs,
)

from outrider.drafters.estimator import CertaintyEstimator
from outrider.drafters.heads import HeadsModule
from outrider.drafters.medusa import Medusa, MedusaDrafter
from outrider.drafters.method import Serving
from outrider.target.cache import KVCache


def reference(module: HeadsModule, feature_H: np.ndarray, embedded_kH: np.ndarray) -> np.ndarray:
    return reference_layers(module.blocks[len(embedded_kH) - 1], feature_H, feature_H)


@pytest.fixture(params=[1, 3])
def module(request: pytest.FixtureRequest) -> Medusa:
    module = Medusa(toy_heads(num_layers=request.param))
    randomise(module)
    return module


def test_rows_are_those_of_a_numpy_reference(module: Medusa) -> None:
    check_rows(module, toy_target(), reference)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_served_distributions_are_those_of_a_numpy_reference(module: Medusa, family: str) -> None:
    target = toy_target(family)
    check_serving(module, MedusaDrafter(module, target, Serving()), target, reference)


def test_a_reduced_vocabulary_is_served() -> None:
    ids, target = torch.arange(3, 73, 2), toy_target()
    module = Medusa(toy_heads(draft_vocab_size=len(ids)))
    randomise(module)
    text = toy_texts(1)[0]
    drafter = MedusaDrafter(module, target, Serving(draft_ids_Vd=ids))
    call = replace(forced_call(drafter, text, 0, drafter.new_session(9)), source=_First())
    (proposal,) = drafter.propose([call])
    assert proposal.tokens == [3] * 4
    assert proposal.row(2).nonzero().flatten().tolist() == ids.tolist()


class _First:
    def choose(self, probs_V: torch.Tensor) -> int:
        return 0

    def accept(self, probability: float) -> bool:
        raise AssertionError("drafting never accepts")


def test_a_head_sees_the_feature_before_its_anchor_and_nothing_else(module: Medusa) -> None:
    target, texts = toy_target(), toy_texts(2)
    inputs = training_inputs(target, texts, [[4, 8], [6]], 4)
    rows = module.rows(inputs).hidden_NKH
    assert torch.equal(module.rows(replace(inputs, previous_NK=inputs.previous_NK + 1)).hidden_NKH, rows)
    read = [3, 7, 8 + 5]  # slots: the second text begins at 8
    for slot in range(14):
        changed = inputs.taps_SLD.clone()
        changed[slot] += 1.0
        differs = (module.rows(replace(inputs, taps_SLD=changed)).hidden_NKH != rows).flatten(1).any(1)
        assert differs.tolist() == [slot == expected for expected in read]


def test_fresh_heads_are_the_lm_head() -> None:
    """Zero weights: head 1 says again what the target itself said after the token before the anchor."""
    target, module = toy_target(), Medusa(toy_heads())
    text = torch.randint(4, VOCAB, (1, 7))
    output = target.forward(text, KVCache(target.num_layers, 7), logits=1)
    drafter = MedusaDrafter(module, target, Serving())
    session = drafter.new_session(9)
    drafter.extend([session], [text[0].tolist()], output.hidden_BTD[0][:, None])
    (proposal,) = drafter.propose([forced_call(drafter, toy_texts(1)[0], 0, session)])
    assert output.logits_BTV is not None
    torch.testing.assert_close(proposal.row(0), output.logits_BTV[0, -1].softmax(-1))
    torch.testing.assert_close(proposal.row(3), proposal.row(0))


def test_blocks_are_cut_by_limit_and_floor(module: Medusa) -> None:
    """The estimator's confidence is known before the draw; a block ends where it is below the floor."""
    target, text = toy_target(), toy_texts(1)[0]
    certain = CertaintyEstimator([0.0, 0.0], [9.0, 9.0, -9.0, 9.0])
    drafter = MedusaDrafter(module, target, Serving(estimator=certain, offsets=[0.0, -1.0, 0.0, 0.0]))
    sessions = [drafter.new_session(9) for _ in range(3)]
    calls = [
        forced_call(drafter, text, 0, session, limit) for session, limit in zip(sessions, (None, 1, 9), strict=True)
    ]
    long, short, longer = drafter.propose(calls)
    assert [len(p.tokens) for p in (long, short, longer)] == [4, 1, 4]
    np.testing.assert_allclose(long.confidences, torch.tensor([9.0, 8.0, -9.0, 9.0]).sigmoid(), rtol=1e-5)
    assert [len(p.tokens) for p in drafter.propose([forced_call(drafter, text, 0, sessions[0])], floor=0.5)] == [2]


def test_it_learns() -> None:
    check_learns(Medusa(toy_heads()), toy_target())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="num_heads 0"):
        toy_heads(num_heads=0)
    target = toy_target()
    with pytest.raises(ValueError, match="num_target_layers"):
        MedusaDrafter(Medusa(replace(toy_heads(), num_target_layers=6)), target, Serving())


@pytest.mark.parametrize("draft_vocab", [97, 40])
def test_trained_equals_served(draft_vocab: int) -> None:
    module = Medusa(toy_heads(draft_vocab_size=draft_vocab))
    randomise(module)
    check_trained_equals_served(module, draft_vocab)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_output_is_that_of_plain_decoding(family: str) -> None:
    target, module = toy_target(family), Medusa(toy_heads())
    fit_to_decoding(module, target, [7, 8, 9])
    check_identity(target, MedusaDrafter(module, target, Serving()), [7, 8, 9], least=10)
