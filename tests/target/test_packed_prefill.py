"""Packed prefill: several documents in one forward, each seeing itself only."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

import outrider.training.features as features_module
from outrider.target.model import Target
from outrider.training.features import FeatureSource
from tests.toys.documents import DOCUMENT_AUX_LAYERS, LENGTHS, documents, largest_difference
from tests.toys.targets import TOY_CONFIGS, toy_samples, toy_target


@pytest.mark.parametrize("family", TOY_CONFIGS)
def test_packed_equals_separate_prefills_and_a_leak_would_show(family: str) -> None:
    target = toy_target(family)
    assert largest_difference(target, target.prefill_packed(documents(), DOCUMENT_AUX_LAYERS)) < 2e-5
    # One document of all tokens is what a packed forward without its mask computes: far beyond the tolerance.
    whole = [token for document in documents() for token in document]
    aux_layers, hidden = target.prefill_packed([whole], DOCUMENT_AUX_LAYERS)
    leaked = aux_layers[0].split(LENGTHS), hidden[0].split(LENGTHS)
    assert largest_difference(target, leaked) > 0.05


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lean_path_packs_to_the_last_bit(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TOY_CONFIGS[family], dtype=dtype)
    target = Target(model, None, "toy")
    if not target.packs_exactly:
        assert dtype == torch.bfloat16, "float32 weights must be packed on this machine"
        return
    together = target.prefill_packed(documents(), DOCUMENT_AUX_LAYERS)
    for index, document in enumerate(documents()):
        aux_layers, hidden = target.prefill_packed([document], DOCUMENT_AUX_LAYERS)
        assert torch.equal(aux_layers[0], together[0][index]) and torch.equal(hidden[0], together[1][index])


def test_a_gap_in_the_packing_is_seen_by_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutations of the packed forward: positions that run on, and a cut one token late."""
    target = toy_target("llama")
    assert target._fused is not None
    true_forward = target._fused.forward_packed
    shifted = (LENGTHS[0] + 1, LENGTHS[1] - 1, *LENGTHS[2:])
    monkeypatch.setattr(
        target._fused, "forward_packed", lambda tokens, lengths, aux_layers: true_forward(tokens, shifted, aux_layers)
    )
    assert largest_difference(target, target.prefill_packed(documents(), DOCUMENT_AUX_LAYERS)) > 0.05
    monkeypatch.undo()
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda n, **where: arange(n, **where) + (n == 17))
    moved = target.prefill_packed(documents(), DOCUMENT_AUX_LAYERS)
    monkeypatch.undo()
    # Rotary attention sees only differences of positions: a shift of a whole document must change nothing.
    assert largest_difference(target, moved) < 2e-5


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_features_do_not_depend_on_what_was_computed_beside_them(family: str) -> None:
    target, samples = toy_target(family), toy_samples(9)
    scale = torch.ones(4)
    alone = FeatureSource(target, samples, DOCUMENT_AUX_LAYERS, scale, 0)
    together = FeatureSource(target, samples, DOCUMENT_AUX_LAYERS, scale, 2**30)
    for index, features in zip((4, 1, 7), together.gather([4, 1, 7], [0, 2, 4, 3]), strict=True):
        expected = alone[index]
        for name in ("aux_SLD", "hidden_RD", "lse_R", "argmax_R"):
            assert torch.equal(getattr(features, name), getattr(expected, name)), name


def test_a_step_and_the_next_ones_share_a_forward_within_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    target, samples = toy_target(), toy_samples(9)
    calls: list[int] = []
    prefill = Target.prefill_packed

    def counted(self: Target, documents: Sequence[list[int]], aux_layers: tuple[int, ...]) -> object:
        calls.append(len(documents))
        return prefill(self, documents, aux_layers)

    monkeypatch.setattr(Target, "prefill_packed", counted)
    roomy = FeatureSource(target, samples, DOCUMENT_AUX_LAYERS, torch.ones(4), 2**30)
    roomy.gather([0, 1], [1, 2, 3])
    roomy.gather([2, 3])
    assert calls == [4], "the second step was computed with the first"
    calls.clear()
    tight = FeatureSource(target, samples, DOCUMENT_AUX_LAYERS, torch.ones(4), 1)
    tight.gather([0, 1], [2, 3])
    assert calls == [2], "nothing is computed that memory would drop again"
    calls.clear()
    monkeypatch.setattr(features_module, "PACK_TOKENS", 40)
    FeatureSource(target, samples, DOCUMENT_AUX_LAYERS, torch.ones(4), 2**30).gather(range(9))
    assert sum(calls) == 9 and len(calls) > 2, "a group is bounded in tokens"


def test_free_memory_may_go_back_behind_every_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    target, samples, calls = toy_target(), toy_samples(3), list[int]()
    monkeypatch.setattr(features_module, "release_free_memory", calls.append)
    source = FeatureSource(target, samples, DOCUMENT_AUX_LAYERS, torch.ones(4), 2**30)
    source.gather([0, 1])
    source.gather([0, 2])
    source.gather([1, 2])
    assert calls == [2**30] * 2, "what is remembered needs no prefill"


def test_a_bfloat16_target_gives_log_sum_exps_of_float32_logits() -> None:
    model = AutoModelForCausalLM.from_config(TOY_CONFIGS["llama"], dtype=torch.bfloat16)
    target, samples = Target(model, None, "toy"), toy_samples(2)
    features = FeatureSource(target, samples, DOCUMENT_AUX_LAYERS, torch.ones(4), 2**30)[0]
    assert features.aux_SLD.dtype == features.hidden_RD.dtype == torch.float16
    expected = (features.hidden_RD.float() @ target.head_VD.float().T).logsumexp(-1)
    torch.testing.assert_close(features.lse_R, expected, atol=1e-5, rtol=1e-6)


def test_smollm_packs_to_the_last_bit(smollm: Target) -> None:
    assert smollm.tokenizer is not None
    texts = ("The three laws of robotics are, in order of priority,", "def fibonacci(n: int) -> int:\n", "Hello")
    documents = [smollm.tokenizer(text)["input_ids"] for text in texts]
    aux_layers, hidden = smollm.prefill_packed(documents, (1, 14, 27))
    for index, document in enumerate(documents):
        alone = smollm.prefill_packed([document], (1, 14, 27))
        assert torch.equal(alone[0][0], aux_layers[index]) and torch.equal(alone[1][0], hidden[index])
        output = smollm.forward(torch.tensor([document]), smollm.new_cache(64), (1, 14, 27), logits=0)
        torch.testing.assert_close(output.hidden_BTD[0], hidden[index], atol=2e-3, rtol=1e-3)
