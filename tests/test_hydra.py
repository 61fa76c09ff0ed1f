"""Hydra: numpy references of training and serving, what head k may see, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import randomise, toy_target
from head_toys import (
    HIDDEN,
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

from outrider.drafters.heads import HeadsModule
from outrider.drafters.hydra import Hydra, HydraDrafter
from outrider.drafters.method import Serving


def rms_normed(x_H: np.ndarray) -> np.ndarray:
    return x_H / np.sqrt(np.mean(x_H**2) + 1e-6)


def reference(module: HeadsModule, feature_H: np.ndarray, embedded_kH: np.ndarray) -> np.ndarray:
    inputs_Z = np.concatenate([rms_normed(part) for part in (feature_H, *embedded_kH)])
    return reference_layers(module.blocks[len(embedded_kH) - 1], feature_H, inputs_Z)


@pytest.fixture(params=[1, 3])
def module(request: pytest.FixtureRequest) -> Hydra:
    module = Hydra(toy_heads(num_layers=request.param))
    randomise(module)
    return module


def test_rows_are_those_of_a_numpy_reference(module: Hydra) -> None:
    check_rows(module, toy_target(), reference)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_served_distributions_are_those_of_a_numpy_reference(module: Hydra, family: str) -> None:
    target = toy_target(family)  # Gemma scales its embeddings
    check_serving(module, HydraDrafter(module, target, Serving()), target, reference)


def test_the_next_head_reads_target_ids_where_the_draft_vocabulary_is_reduced() -> None:
    ids, target, text = torch.arange(2, 90, 2), toy_target(), toy_texts(1)[0]
    module = Hydra(toy_heads(draft_vocab_size=len(ids)))
    randomise(module)
    drafter = HydraDrafter(module, target, Serving(draft_ids_Vd=ids))
    drawn = [int(ids[i]) for i in (5, 0, 40, 7)]
    (proposal,) = drafter.propose([replace(forced_call(drafter, text, 0, drafter.new_session(9)), source=_Indices())])
    assert proposal.tokens == drawn
    embedded = target.embed_VD[[int(text.tokens_T[0]), *drawn[:3]]].double().numpy()
    logits = target.head_VD[ids].double().numpy() @ reference(module, np.zeros(HIDDEN), embedded)
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(proposal.row(3)[ids].numpy(), expected, atol=1e-4)


class _Indices:
    def __init__(self) -> None:
        self.left = [5, 0, 40, 7]

    def choose(self, probs_V: torch.Tensor) -> int:
        return self.left.pop(0)

    def accept(self, probability: float) -> bool:
        raise AssertionError("drafting never accepts")


def test_head_k_sees_the_feature_the_anchor_and_the_drafts_before_it(module: Hydra) -> None:
    target, texts = toy_target(), toy_texts(2)
    inputs = training_inputs(target, texts, [[4, 8], [6]], 4)
    rows = module.rows(inputs).hidden_NKH
    for column in range(4):
        changed = inputs.previous_NK.clone()
        changed[:, column] = (changed[:, column] + 1) % 97
        differs_NK = (module.rows(replace(inputs, previous_NK=changed)).hidden_NKH != rows).any(-1)
        assert differs_NK.tolist() == [[k >= column for k in range(4)]] * 3
    for slot in range(14):  # the second text begins at 8
        taps = inputs.taps_SLD.clone()
        taps[slot] += 1.0
        differs_N = (module.rows(replace(inputs, taps_SLD=taps)).hidden_NKH != rows).flatten(1).any(1)
        assert differs_N.tolist() == [slot == 3, slot == 7, slot == 8 + 5]


def test_fresh_heads_hand_on_the_feature() -> None:
    target, texts = toy_target(), toy_texts(1)
    rows_NKH = Hydra(toy_heads()).rows(training_inputs(target, texts, [[5]], 4)).hidden_NKH
    assert torch.equal(rows_NKH[0], texts[0].features_TH[4].expand(4, HIDDEN))


def test_it_learns() -> None:
    check_learns(Hydra(toy_heads()), toy_target())


@pytest.mark.parametrize("draft_vocab", [97, 40])
def test_trained_equals_served(draft_vocab: int) -> None:
    module = Hydra(toy_heads(draft_vocab_size=draft_vocab))
    randomise(module)
    check_trained_equals_served(module, draft_vocab)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_output_is_that_of_plain_decoding(family: str) -> None:
    target, module = toy_target(family), Hydra(toy_heads())
    fit_to_decoding(module, target, [7, 8, 9])
    check_identity(target, HydraDrafter(module, target, Serving()), [7, 8, 9], least=10)
