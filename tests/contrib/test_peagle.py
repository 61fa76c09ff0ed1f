"""P-EAGLE against EAGLE-3's second implementation in numpy; trained equals served; text is plain decoding's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.contrib.peagle import PEagle, PEagleConfig, PEagleDrafter
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.drafters.base import DraftCall, DrafterWeights
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target.model import Target
from outrider.training.batches import Schedule
from outrider.training.dataset import choose_draft_ids
from tests.toys.alignment import build, check_alignment
from tests.toys.eagle3 import inputs_for
from tests.toys.eagle_reference import Array, EagleReference
from tests.toys.oracle import row_of
from tests.toys.targets import MaskTokenizer, randomise, toy_samples, toy_target, with_mask_token
from tests.toys.training import lower_loss

TOLERANCE, MASK = 1e-4, MaskTokenizer.mask_token_id


def make(target: Target, gamma: int = 4, draft_vocab: int = 97) -> PEagle:
    chosen = {"gamma": gamma, "target_layer_ids": [0, 2, 3], "draft_vocab_size": draft_vocab}
    module = PEagle(PEagleConfig.from_target(with_mask_token(target), **chosen))
    randomise(module)
    module.aux_scale_L.copy_(torch.tensor([0.5, 3.0, 7.0]))
    return module


class Reference(EagleReference):
    """EAGLE-3's reference, whose chain goes on with the masked pair."""

    def block(self, aux_aLD: Tensor, tokens: list[int]) -> Array:
        """What the head reads for all drafts after x_a, the last of `tokens`: [gamma, H]."""
        fused = [
            self.weights["fc.weight"] @ (aux_LD / self.scale_L[:, None]).reshape(-1)
            for aux_LD in aux_aLD.double().numpy()
        ]
        masked = self.weights["fc.weight"] @ self.weights["mask_hidden"].reshape(-1)
        inputs = [(feature, tokens[i + 1]) for i, feature in enumerate(fused)]
        inputs = inputs or [(np.zeros(self.config.hidden_size), tokens[0])]  # nothing precedes the first token
        found = []
        for _ in range(self.config.gamma):
            found.append(self.norm(self.last_output(inputs), "norm"))
            inputs.append((masked, MASK))
        return np.stack(found)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_the_training_forward_equals_the_reference(family: str) -> None:
    target = toy_target(family)
    module = make(target)
    reference = Reference(module, target)
    lengths, anchors, sequence = [9, 12], [0, 4, 9, 2, 12], [0, 0, 0, 1, 1]
    inputs = inputs_for(target, lengths, anchors, sequence, 4)
    rows_NKH = module.rows(inputs).hidden_NKH.detach().numpy()
    for n, (anchor, number) in enumerate(zip(anchors, sequence, strict=True)):
        context = slice(lengths[0] * number, lengths[0] * number + anchor)
        tokens = [0, *inputs.next_tokens_S[context].tolist()] if anchor else [int(inputs.previous_NK[n, 0])]
        np.testing.assert_allclose(rows_NKH[n], reference.block(inputs.aux_SLD[context], tokens), atol=TOLERANCE)


@torch.inference_mode()
def test_served_drafts_equal_the_reference_over_rounds() -> None:
    target = toy_target()
    module = make(target)
    reference, served = Reference(module, target), DrafterWeights(module).serve(target)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(4, 97, (2, 40), generator=generator).tolist()
    aux_layers = 5 * torch.randn(2, 40, 3, 32, generator=generator)
    sessions, at = [served.new_session(40) for _ in texts], [0, 0]
    for counts in ([0, 7], [1, 1], [3, 2], [1, 4]):
        new = [slice(a, a + n) for a, n in zip(at, counts, strict=True)]
        served.extend(
            sessions,
            [x[part] for x, part in zip(texts, new, strict=True)],
            torch.cat([aux_layers[r, part] for r, part in enumerate(new)]),
        )
        at = [part.stop for part in new]
        calls = [
            DraftCall(session, x[a], SamplingParams(temperature=1.0), SeenTokens(97), SeededSource(0), limit)
            for session, x, a, limit in zip(sessions, texts, at, (None, 2), strict=True)
        ]
        for r, proposal in enumerate(served.propose(calls)):
            expected_KH = reference.block(aux_layers[r, : at[r]], texts[r][: at[r] + 1])
            assert len(proposal.tokens) == (2 if r else 4)
            for k in range(len(proposal.tokens)):
                expected_V = np.exp(reference.log_probs(expected_KH[k]))
                np.testing.assert_allclose(row_of(proposal, k).numpy(), expected_V, atol=TOLERANCE)


@pytest.mark.parametrize("draft_vocab", [97, 40])
def test_trained_equals_served(draft_vocab: int) -> None:
    target, samples = toy_target("qwen3"), toy_samples(4)
    ids = choose_draft_ids(samples, 97, draft_vocab, frozenset({1}))
    assert check_alignment(target, make(target, draft_vocab=draft_vocab), samples, ids) > 50


def test_the_alignment_sees_another_spacing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, samples = toy_target("qwen3"), toy_samples(2)
    module, real = make(target), PEagleDrafter.advance
    monkeypatch.setattr(PEagleDrafter, "advance", lambda *args, spacing: real(*args, spacing=0))
    with pytest.raises(AssertionError, match="Tensor-likes"):
        check_alignment(target, module, samples, torch.arange(97))


@torch.no_grad()
def test_a_draft_sees_the_text_up_to_its_anchor_only() -> None:
    target, samples = toy_target(), toy_samples(3)
    module = make(target)
    batch, compute = build(module, target, samples, torch.arange(97), Schedule(samples, 3, 6, seed=1).step(0))
    before = compute.rows(module, batch).hidden_NKH
    layout = batch.layout
    starts = torch.tensor([0, *layout.lengths]).cumsum(0)
    for block in (0, 7, len(before) - 1):
        start, anchor = int(starts[layout.sequence_N[block]]), int(layout.anchors_N[block])
        own = slice(start, start + anchor)
        aux_layers, following = torch.randn_like(batch.aux_SLD), torch.randint(4, 97, batch.next_tokens_S.shape)
        previous = torch.randint(4, 97, batch.previous_NK.shape)
        aux_layers[own], following[own] = batch.aux_SLD[own], batch.next_tokens_S[own]
        previous[block, 0] = batch.previous_NK[block, 0]
        changed = replace(batch, aux_SLD=aux_layers, next_tokens_S=following, previous_NK=previous)
        torch.testing.assert_close(compute.rows(module, changed).hidden_NKH[block], before[block], atol=1e-6, rtol=1e-6)
        previous[block, 0] = (previous[block, 0] + 1) % 97
        moved = compute.rows(module, replace(changed, previous_NK=previous)).hidden_NKH[block]
        assert (moved - before[block]).abs().amax(-1).min() > 1e-4, "every draft reads the anchor"


def test_loss_falls_and_every_part_takes_part() -> None:
    target, samples = toy_target(), toy_samples(3)
    module = PEagle(make(target).config)
    batch, compute = build(
        module, target, samples, torch.arange(97), [(i, list(s.anchors)) for i, s in enumerate(samples)]
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)

    def step() -> float:
        rows = compute.rows(module, batch).hidden_NKH[batch.supervised_NK]
        loss = F.cross_entropy(rows @ target.head_VD.T, batch.labels_NK[batch.supervised_NK])
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
        optimizer.step()
        return loss.item()

    lower_loss(step, to=0.8)


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.8, seed=3, coupled=True)], ids=["greedy", "coupled"]
)
@pytest.mark.parametrize("draft_vocab", [97, 60])
def test_output_is_that_of_plain_decoding(draft_vocab: int, params: SamplingParams) -> None:
    model = toy_target().model
    model.lm_head.weight.data[3:] = 0  # few likely tokens: some drafts are accepted
    target = Target(model, None, "toy")
    ids = torch.arange(draft_vocab) if draft_vocab < 97 else None
    drafter = DrafterWeights(make(target, draft_vocab=draft_vocab), ids).serve(target)
    rules, accepted = StopRules(24, stop_ids=()), 0
    for prompt in ([5], [9, 8, 7, 30, 31], [40, 41, 42]):
        drafted = generate(target, prompt, drafter, params, rules)
        assert drafted.tokens == generate(target, prompt, None, params, rules).tokens
        accepted += sum(r.accepted for r in drafted.rounds)
    assert accepted > 0


@torch.no_grad()
def test_scales_fold_into_the_checkpoint_and_come_back(tmp_path: Path) -> None:
    target = toy_target()
    module = make(target)
    inputs = inputs_for(target, [9], [3, 9], [0, 0], 4)
    before = module.rows(inputs).hidden_NKH
    save_drafter(Checkpoint(DrafterWeights(module)), tmp_path / "drafter")
    loaded = load_checkpoint(tmp_path / "drafter").weights.module
    assert isinstance(loaded, PEagle) and loaded.config == module.config
    torch.testing.assert_close(loaded.rows(inputs).hidden_NKH, before, atol=1e-5, rtol=1e-5)
    loaded.rescale_aux(module.aux_scale_L)
    torch.testing.assert_close(loaded.mask_hidden, module.mask_hidden)
    torch.testing.assert_close(loaded.rows(inputs).hidden_NKH, before, atol=1e-5, rtol=1e-5)


def test_what_it_cannot_be() -> None:
    config = make(toy_target()).config
    assert isinstance(config, PEagleConfig) and config.mask_token_id == MASK
    for change, message in (({"gamma": 1}, "gamma 1"), ({"mask_token_id": 97}, "mask_token_id 97 is outside")):
        with pytest.raises(ValueError, match=message):
            replace(config, **change)
    chosen = {"mask_token": "x", "gamma": 4}
    assert config.comparable_fields(chosen, with_mask_token(toy_target()))["mask_token"] == (MASK, MASK)
