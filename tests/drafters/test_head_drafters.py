"""Medusa and Hydra: numpy references of training and serving, what a head may see, how it begins and that it learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.drafters.base import DraftCalibration, DrafterWeights
from outrider.drafters.confidence import CertaintyEstimator, ConfidenceScaling
from outrider.drafters.hydra import Hydra, HydraConfig, HydraDrafter
from outrider.drafters.medusa import HeadsDrafter, HeadsModule, Medusa, MedusaConfig, MedusaDrafter
from outrider.target.cache import KVCache
from tests.toys.heads import (
    HIDDEN,
    VOCAB,
    Forced,
    Reference,
    check_identity,
    check_learns,
    check_rows,
    check_serving,
    check_trained_equals_served,
    fit_to_decoding,
    forced_call,
    hidden_at,
    reference_layers,
    toy_heads,
    toy_texts,
    training_inputs,
)
from tests.toys.oracle import row_of
from tests.toys.targets import randomise, toy_target


def medusa_reference(module: HeadsModule, feature_H: np.ndarray, embedded_kH: np.ndarray) -> np.ndarray:
    return reference_layers(module.blocks[len(embedded_kH) - 1], feature_H, feature_H)


def rms_normed(x_H: np.ndarray) -> np.ndarray:
    return x_H / np.sqrt(np.mean(x_H**2) + 1e-6)


def hydra_reference(module: HeadsModule, feature_H: np.ndarray, embedded_kH: np.ndarray) -> np.ndarray:
    inputs_Z = np.concatenate([rms_normed(part) for part in (feature_H, *embedded_kH)])
    return reference_layers(module.blocks[len(embedded_kH) - 1], feature_H, inputs_Z)


@dataclass(frozen=True)
class Kind:
    """One of the two. `reads`: whether head k reads the anchor and the drafts before it."""

    module: Callable[[MedusaConfig], HeadsModule]
    config: type[MedusaConfig]
    serve: Callable[..., HeadsDrafter[Any]]
    reference: Reference
    reads: bool

    def make(self, **changes: int) -> HeadsModule:
        module = self.module(toy_heads(self.config, **changes))
        randomise(module)
        return module


KINDS = {
    "medusa": Kind(Medusa, MedusaConfig, MedusaDrafter, medusa_reference, reads=False),
    "hydra": Kind(Hydra, HydraConfig, HydraDrafter, hydra_reference, reads=True),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.mark.parametrize("layers", [1, 3])
def test_rows_are_those_of_a_numpy_reference(kind: Kind, layers: int) -> None:
    check_rows(kind.make(num_layers=layers), toy_target(), kind.reference)


@pytest.mark.parametrize(("layers", "family"), [(1, "llama"), (3, "gemma")])  # Gemma scales its embeddings
def test_served_distributions_are_those_of_a_numpy_reference(kind: Kind, layers: int, family: str) -> None:
    target, module = toy_target(family), kind.make(num_layers=layers)
    check_serving(module, kind.serve(DrafterWeights(module), target), target, kind.reference)


def test_a_reduced_vocabulary_is_served_and_read_in_target_ids(kind: Kind) -> None:
    ids, target, text = torch.arange(2, 90, 2), toy_target(), toy_texts(1)[0]
    module, indices = kind.make(draft_vocab_size=len(ids)), [5, 0, 40, 7]
    drafter = kind.serve(DrafterWeights(module, draft_ids_Vd=ids), target)
    call = replace(forced_call(drafter, text, 0, drafter.new_session(9)), source=Forced(indices))
    (proposal,) = drafter.propose([call])
    assert proposal.tokens == [int(ids[i]) for i in indices]
    assert row_of(proposal, 3).nonzero().flatten().tolist() == ids.tolist()
    drawn = replace(text, tokens_T=torch.tensor([int(text.tokens_T[0]), *proposal.tokens]))
    logits = target.head_VD[ids].double().numpy() @ hidden_at(module, target, kind.reference, drawn, 0, 3)
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(row_of(proposal, 3)[ids].numpy(), expected, atol=1e-4)


def test_a_medusa_of_the_release_has_an_lm_head_for_each_of_its_heads() -> None:
    target, module, text = toy_target(), KINDS["medusa"].make(), toy_texts(1)[0]
    heads_MVH = torch.randn(4, VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    drafter = MedusaDrafter(DrafterWeights(module, head_VdH=heads_MVH), target)
    call = forced_call(drafter, text, 0, drafter.new_session(9))
    (proposal,) = drafter.propose([call])
    levels = drafter.levels([call], 4)
    for k, head_VH in enumerate(heads_MVH):
        logits = head_VH.double().numpy() @ hidden_at(module, target, medusa_reference, text, 0, k)
        expected = torch.tensor(logits).softmax(-1)
        torch.testing.assert_close(row_of(proposal, k).double(), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(
            levels(k, torch.zeros(1, 1, k + 1))[0, 0].softmax(-1).double(), expected, atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("layers", [1, 3])
def test_a_head_sees_the_feature_before_its_anchor_and_earlier_tokens_if_it_reads(kind: Kind, layers: int) -> None:
    module, inputs = kind.make(num_layers=layers), training_inputs(toy_target(), toy_texts(2), [[4, 8], [6]], 4)
    rows = module.rows(inputs).hidden_NKH
    for column in range(4):
        changed = inputs.previous_NK.clone()
        changed[:, column] = (changed[:, column] + 1) % VOCAB
        differs_NK = (module.rows(replace(inputs, previous_NK=changed)).hidden_NKH != rows).any(-1)
        assert differs_NK.tolist() == [[kind.reads and k >= column for k in range(4)]] * 3
    for slot in range(14):  # the second text begins at 8
        aux_layers = inputs.aux_SLD.clone()
        aux_layers[slot] += 1.0
        differs_N = (module.rows(replace(inputs, aux_SLD=aux_layers)).hidden_NKH != rows).flatten(1).any(1)
        assert differs_N.tolist() == [slot == 3, slot == 7, slot == 8 + 5]


def test_fresh_heads_are_the_lm_head(kind: Kind) -> None:
    """Zero weights hand on the feature: every head repeats what the target said after the token before the anchor."""
    target, module, texts = toy_target(), kind.module(toy_heads()), toy_texts(1)
    rows_NKH = module.rows(training_inputs(target, texts, [[5]], 4)).hidden_NKH
    assert torch.equal(rows_NKH[0], texts[0].features_TH[4].expand(4, HIDDEN))
    text = torch.randint(4, VOCAB, (1, 7))
    output = target.forward(text, KVCache(target.num_layers, 7), logits=1)
    drafter = kind.serve(DrafterWeights(module), target)
    session = drafter.new_session(9)
    drafter.extend([session], [text[0].tolist()], output.hidden_BTD[0][:, None])
    (proposal,) = drafter.propose([forced_call(drafter, texts[0], 0, session)])
    assert output.logits_BTV is not None
    for k in (0, 3):
        torch.testing.assert_close(row_of(proposal, k), output.logits_BTV[0, -1].softmax(-1))


def test_blocks_are_cut_by_limit_and_floor(kind: Kind) -> None:
    """The estimator's confidence is known before the draw; a block ends where it is below the min_confidence."""
    target, text, module = toy_target(), toy_texts(1)[0], kind.make()
    certain = CertaintyEstimator([0.0, 0.0], [9.0, 9.0, -9.0, 9.0])
    drafter = kind.serve(
        DrafterWeights(module),
        target,
        DraftCalibration(ConfidenceScaling(estimator=certain, offsets=[0.0, -1.0, 0.0, 0.0])),
    )
    sessions = [drafter.new_session(9) for _ in range(3)]
    calls = [
        forced_call(drafter, text, 0, session, limit) for session, limit in zip(sessions, (None, 1, 9), strict=True)
    ]
    long, short, longer = drafter.propose(calls)
    assert [len(p.tokens) for p in (long, short, longer)] == [4, 1, 4]
    np.testing.assert_allclose(long.confidences, torch.tensor([9.0, 8.0, -9.0, 9.0]).sigmoid(), rtol=1e-5)
    assert [
        len(p.tokens) for p in drafter.propose([forced_call(drafter, text, 0, sessions[0])], min_confidence=0.5)
    ] == [2]


def test_it_learns(kind: Kind) -> None:
    check_learns(kind.module(toy_heads()), toy_target())


def test_what_does_not_fit_is_refused(kind: Kind) -> None:
    with pytest.raises(ValueError, match="num_heads 0"):
        toy_heads(num_heads=0)
    with pytest.raises(ValueError, match="num_target_layers"):
        kind.serve(DrafterWeights(kind.module(replace(toy_heads(), num_target_layers=6))), toy_target())


@pytest.mark.parametrize("draft_vocab", [97, 40])
def test_trained_equals_served(kind: Kind, draft_vocab: int) -> None:
    check_trained_equals_served(kind.make(draft_vocab_size=draft_vocab), draft_vocab)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_output_is_that_of_plain_decoding(kind: Kind, family: str) -> None:
    target, module = toy_target(family), kind.module(toy_heads())
    fit_to_decoding(module, target, [7, 8, 9])
    check_identity(target, kind.serve(DrafterWeights(module), target), [7, 8, 9], least=10)
