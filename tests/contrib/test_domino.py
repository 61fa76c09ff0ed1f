"""Domino against a reference: z-lab's backbone and the head's equations in numpy; trained equals served; exact."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dflash.model import DFlashDraftModel
from numpy.typing import NDArray
from torch import Tensor

from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.contrib.domino import Domino, DominoConfig, PrefixHead, PrefixState
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import DraftCalibration, DraftCall, DrafterWeights
from outrider.drafters.confidence import ConfidenceScaling
from outrider.drafters.dflash import DFlash
from outrider.drafters.loss import ObjectiveConfig
from outrider.evaluation.calibration.collect import FeatureRecorder
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target.model import Target
from outrider.training.batches import Schedule
from outrider.training.dataset import choose_draft_ids
from outrider.training.objective import BlockObjective
from tests.toys.alignment import build, check_alignment
from tests.toys.eagle3 import inputs_for
from tests.toys.oracle import row_of
from tests.toys.targets import randomise, toy_config, toy_samples, toy_target, with_mask_token
from tests.toys.training import lower_loss

TOLERANCE = 1e-4
Array = NDArray[np.float64]
ROUNDS = (9, 1, 4, 2)  # committed tokens before each block
LAYOUTS = [(True, 1), (False, 1), (True, 0), (False, 2)]  # sample_from_anchor, pure_draft_prefix_len


def config(**changes: Any) -> DominoConfig:
    own = {"sample_from_anchor": True, "gru_hidden_dim": 10, "emb_dim": 6, "pure_draft_prefix_len": 1}
    return DominoConfig(**{**vars(toy_config(dspark=False)), **own, **changes})


def make(**changes: Any) -> Domino:
    """Random, with a head that bends the parallel logits."""
    module = Domino(config(**changes))
    randomise(module)
    with torch.no_grad():
        module.correction.mul_(5)
        for weight in module.prefix_gru.parameters():
            weight.mul_(3)
    module.aux_scale_L.copy_(torch.tensor([0.5, 3.0, 7.0]))
    return module.eval()


class Reference:
    """z-lab's own DFlash gives all rows of a block; the head is the equations of the paper, token by token."""

    def __init__(self, module: Domino, target: Target, directory: Path) -> None:
        self.module, self.config, self.target = module, module.config, target
        backbone = DFlash(toy_config(dspark=False))  # the layout changes no weight
        state = module.state_dict()
        backbone.load_state_dict({name: state[name] for name in backbone.state_dict()})
        backbone.aux_scale_L.copy_(module.aux_scale_L)
        save_drafter(Checkpoint(DrafterWeights(backbone)), directory)
        self.backbone = DFlashDraftModel.from_pretrained(directory).eval().requires_grad_(False)
        self.weights = {name: tensor.double().numpy() for name, tensor in module.folded_state_dict().items()}
        self.embedding_VH = target.embed_VD.double().numpy() * target.embed_scale
        self.head_VH = target.head_VD.double().numpy()

    def hidden(self, aux_aLD: Tensor, anchor: int) -> Array:
        """h_1 .. h_gamma behind the context features `aux_aLD`."""
        masks = [self.config.mask_token_id] * (self.config.block_size - 1)
        rows = self.backbone(
            target_hidden=aux_aLD.flatten(-2)[None],
            noise_embedding=F.embedding(torch.tensor([[anchor, *masks]]), self.target.embed_VD)
            * self.target.embed_scale,
            position_ids=torch.arange(len(aux_aLD) + self.config.block_size)[None],
            past_key_values=None,
            use_cache=False,
        )[0]
        found: Array = rows[-self.config.gamma :].double().numpy()
        return found

    def logits(self, hidden_KH: Array, previous: list[int]) -> Array:
        """[K, V]; `previous`: the anchor and the drafts before each position."""
        w_ih, w_hh = self.weights["prefix_gru.weight_ih_l0"], self.weights["prefix_gru.weight_hh_l0"]
        w_1, w_2 = self.weights["embed_proj.0.weight"], self.weights["embed_proj.2.weight"]
        s, found = np.zeros(self.config.gru_hidden_dim), []
        for k, (h, token) in enumerate(zip(hidden_KH, previous, strict=True)):
            of_token, of_state = np.split(w_ih @ self.embedding_VH[token], 3), np.split(w_hh @ s, 3)
            reset, update = (1 / (1 + np.exp(-(of_token[i] + of_state[i]))) for i in (0, 1))
            s = (1 - update) * np.tanh(of_token[2] + reset * of_state[2]) + update * s
            z = w_1 @ np.concatenate([h, s])
            corrects = k >= self.config.pure_draft_prefix_len
            found.append(self.head_VH @ h + corrects * (w_2 @ (z / (1 + np.exp(-z)))))
        return np.array(found)


@pytest.mark.parametrize(("from_anchor", "plain"), LAYOUTS)
@torch.no_grad()
def test_the_training_forward_equals_the_reference(tmp_path: Path, from_anchor: bool, plain: int) -> None:
    target = toy_target()
    module = make(sample_from_anchor=from_anchor, pure_draft_prefix_len=plain)
    reference = Reference(module, target, tmp_path)
    lengths, anchors, sequence = [9, 12], [4, 9, 2, 12], [0, 0, 1, 1]
    inputs = inputs_for(target, lengths, anchors, sequence, module.config.gamma)
    rows = module.rows(inputs)
    assert rows.latent_NKr is not None and rows.w2_Vr is not None
    logits_NKV = rows.hidden_NKH @ target.head_VD.T + rows.latent_NKr @ rows.w2_Vr.T
    for n, (anchor, number) in enumerate(zip(anchors, sequence, strict=True)):
        context = slice(lengths[0] * number, lengths[0] * number + anchor)
        previous = inputs.previous_NK[n].tolist()
        expected = reference.logits(reference.hidden(inputs.aux_SLD[context], previous[0]), previous)
        np.testing.assert_allclose(logits_NKV[n].numpy(), expected, atol=TOLERANCE)


@pytest.mark.parametrize(("from_anchor", "plain"), LAYOUTS)
@torch.inference_mode()
def test_served_drafts_equal_the_reference_over_rounds(tmp_path: Path, from_anchor: bool, plain: int) -> None:
    """The distributions along the drawn path at temperature 0.7, and the greedy path."""
    target = toy_target("qwen3")
    module = make(sample_from_anchor=from_anchor, pure_draft_prefix_len=plain)
    reference, served = Reference(module, target, tmp_path), DrafterWeights(module).serve(target)
    generator = torch.Generator().manual_seed(5)
    aux_TLD = 5 * torch.randn(sum(ROUNDS), 3, 32, generator=generator)
    session, start, bent = served.new_session(64), 0, 0
    for number, count in enumerate(ROUNDS):
        served.extend([session], [[0] * count], aux_TLD[start : start + count])
        start += count
        anchor = int(torch.randint(4, 97, (), generator=generator))
        greedy, drawn = (
            DraftCall(session, anchor, params, SeenTokens(97), SeededSource(number))
            for params in (SamplingParams(), SamplingParams(temperature=0.7))
        )
        hidden_KH = reference.hidden(aux_TLD[:start], anchor)
        for proposal, temperature in zip(served.propose([greedy, drawn]), (0.0, 0.7), strict=True):
            assert len(proposal.tokens) == module.config.gamma
            logits_KV = reference.logits(hidden_KH, [anchor, *proposal.tokens[:-1]])
            if not temperature:
                assert proposal.tokens == logits_KV.argmax(-1).tolist()
                bent += int((proposal.tokens != (hidden_KH @ reference.head_VH.T).argmax(-1)).sum())
                continue
            expected_KV = torch.tensor(logits_KV / temperature).softmax(-1).numpy()
            for k in range(module.config.gamma):
                np.testing.assert_allclose(row_of(proposal, k).numpy(), expected_KV[k], atol=TOLERANCE)
    assert bent >= 2, "a head that changes nothing would prove nothing"


@torch.no_grad()
def test_a_correction_sees_only_the_tokens_before_its_position() -> None:
    module, embedding = make(), toy_target().embed_VD
    previous_NK, hidden_NKH = torch.randint(4, 97, (5, 4)), torch.randn(5, 4, 32)
    before = module.unroll(embedding[previous_NK], hidden_NKH)
    assert not before[:, 0].any(), "the first draft is uncorrected"
    for k in range(4):
        changed = previous_NK.clone()
        changed[2, k] = (changed[2, k] + 1) % 97
        moved = (module.unroll(embedding[changed], hidden_NKH) - before).abs().amax(-1)
        assert not moved[torch.arange(5) != 2].any() and not moved[2, :k].any()
        assert moved[2, max(k, 1) :].min() > 1e-6, "every later draft reads it"


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize(("draft_vocab", "window"), [(97, None), (40, 7)])
def test_trained_equals_served(from_anchor: bool, draft_vocab: int, window: int | None) -> None:
    target, samples = toy_target("qwen3"), toy_samples(4)
    module = make(sample_from_anchor=from_anchor, draft_vocab_size=draft_vocab, sliding_window=window)
    ids = choose_draft_ids(samples, 97, draft_vocab, frozenset({1}))
    assert check_alignment(target, module, samples, ids) > 50


def forgetful(head: PrefixHead, previous_N: Tensor, hidden_NH: Tensor, state: PrefixState) -> Any:
    """A head that knows the last token alone."""
    return REAL_STEP(head, previous_N, hidden_NH, state._replace(state_NG=torch.zeros_like(state.state_NG)))


def late(head: PrefixHead, previous_N: Tensor, hidden_NH: Tensor, state: PrefixState) -> Any:
    """A head that leaves one draft more uncorrected."""
    return REAL_STEP(head, previous_N, hidden_NH, state._replace(positions=state.positions - 1))


REAL_STEP = PrefixHead.step


@pytest.mark.parametrize("broken", [forgetful, late])
def test_the_alignment_sees_broken_serving(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, samples = toy_target("qwen3"), toy_samples(2)
    monkeypatch.setattr(PrefixHead, "step", broken)
    with pytest.raises(AssertionError, match="Tensor-likes"):
        check_alignment(target, make(), samples, torch.arange(97))


@pytest.mark.parametrize("draft_vocab", [97, 60])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.8, seed=3, coupled=True)], ids=["greedy", "coupled"]
)
def test_output_is_that_of_plain_decoding_alone_and_in_company(draft_vocab: int, params: SamplingParams) -> None:
    model = toy_target().model
    model.lm_head.weight.data[8:] = 0  # few likely tokens: some drafts are accepted
    target = Target(model, None, "toy")
    ids = torch.arange(draft_vocab) if draft_vocab < 97 else None
    drafter = DrafterWeights(make(draft_vocab_size=draft_vocab), ids).serve(target)
    rules = StopRules(24, stop_ids=())
    prompts = [[5], [9, 8, 7, 30, 31], list(range(10, 23))]
    plain = [generate(target, prompt, None, params, rules) for prompt in prompts]
    alone = [generate(target, prompt, drafter, params, rules) for prompt in prompts]
    assert [g.tokens for g in alone] == [g.tokens for g in plain]
    assert sum(r.accepted for g in alone for r in g.rounds) > 0
    engine = Engine(target, drafter, config=EngineConfig(max_requests=2, num_blocks=40))
    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), prompt, params, rules))
    together: dict[str, list[int]] = {}
    while not engine.idle:
        for output in engine.step():
            together.setdefault(output.id, []).extend(output.tokens)
    assert [together[str(number)] for number in range(3)] == [g.tokens for g in plain]


@torch.inference_mode()
def test_requests_that_stop_early_do_not_disturb_the_others() -> None:
    """One with a limit and one that an estimator stops, beside one that drafts its whole block."""
    target = toy_target()
    recorder = FeatureRecorder()  # gives every position a confidence of 0.5
    drafter = DrafterWeights(make()).serve(target, DraftCalibration(ConfidenceScaling(estimator=recorder)))
    sessions = [drafter.new_session(20) for _ in range(2)]
    drafter.extend(sessions, [[0] * 5, [0] * 7], torch.randn(12, 3, 32))

    def call(number: int, limit: int | None) -> DraftCall:
        return DraftCall(sessions[number], 9 + number, SamplingParams(), SeenTokens(97), SeededSource(0), limit)

    (whole,) = drafter.propose([call(1, None)])
    short, beside = drafter.propose([call(0, 2), call(1, None)])
    assert len(short.tokens) == 2 and beside.tokens == whole.tokens and len(whole.tokens) == 4
    assert drafter.propose([call(0, None)], min_confidence=0.6)[0].tokens == []


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_part_learns_while_the_curriculum_goes_on(precision: Any) -> None:
    target, samples = toy_target(), toy_samples(3)
    module = Domino(config())
    batch, _ = build(module, target, samples, torch.arange(97), [(i, list(s.anchors)) for i, s in enumerate(samples)])
    objective = BlockObjective(
        target, torch.arange(97), ObjectiveConfig(ce=1.0, l1=0.0, confidence=0.0, base=1.0), precision
    )
    head = {name for name, _ in module.named_parameters() if name.startswith(("prefix_gru", "embed_proj"))}

    def gradients(progress: float) -> dict[str, float]:
        module.zero_grad()
        objective(module, batch, progress=progress).loss.backward()
        return {name: float(p.grad.abs().sum()) for name, p in module.named_parameters() if p.grad is not None}

    first = gradients(0.0)
    assert {name for name, size in first.items() if size == 0} >= head, "the parallel logits alone"
    assert all(first[name] > 0 for name in first.keys() - head)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)

    def step() -> float:
        optimizer.zero_grad()
        loss = objective(module, batch, progress=0.5).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    lower_loss(step, to=0.8)
    assert all(size > 0 for size in gradients(0.5).values())


@torch.no_grad()
def test_nothing_after_the_anchor_leaks_into_a_block() -> None:
    target, samples = toy_target(), toy_samples(3)
    module = make()
    batch, compute = build(module, target, samples, torch.arange(97), Schedule(samples, 3, 6, seed=1).step(0))
    before = compute.rows(module, batch)
    assert before.latent_NKr is not None
    previous = torch.randint(4, 97, batch.previous_NK.shape)
    previous[4] = batch.previous_NK[4]
    after = compute.rows(module, replace(batch, previous_NK=previous))
    assert after.latent_NKr is not None
    torch.testing.assert_close(after.latent_NKr[4], before.latent_NKr[4], atol=1e-6, rtol=1e-6)
    assert (after.latent_NKr[5] - before.latent_NKr[5]).abs().max() > 1e-4


def test_fresh_weights_are_dflash() -> None:
    target = with_mask_token(toy_target("qwen3"))
    made = DominoConfig.from_target(target, num_aux_layers=2, draft_vocab_size=50, block_size=7)
    assert (made.gamma, made.gru_hidden_dim, made.emb_dim, made.pure_draft_prefix_len) == (7, 256, 64, 1)
    module = Domino(made)
    assert not module.correction.any(), "training starts from the parallel drafter"
    assert dict(made.describe_heads())["sequential head"] == "GRU of 256, rank 64, from draft 2 on"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pure_draft_prefix_len": 4}, "pure_draft_prefix_len 4 leaves none of 4 drafts"),
        ({"pure_draft_prefix_len": 3, "sample_from_anchor": False}, "pure_draft_prefix_len 3 leaves none of 3 drafts"),
        ({"gru_hidden_dim": 0}, "gru_hidden_dim 0"),
        ({"emb_dim": 0}, "emb_dim 0"),
    ],
)
def test_config_refuses_what_it_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_published_configs_are_read(tmp_path: Path) -> None:
    """SpecForge's own: DominoDraftModel, emb_dim at the top too; no prefix length is 0, no layout is anchor + masks."""
    module = make(sample_from_anchor=False, pure_draft_prefix_len=0)
    save_drafter(Checkpoint(DrafterWeights(module)), tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    assert raw["architectures"] == ["DFlashDraftModel"] and raw["dflash_config"]["projector_type"] == "domino"
    section = {name: v for name, v in raw["dflash_config"].items() if name not in ("shift_label",)}
    del section["pure_draft_prefix_len"]
    path.write_text(json.dumps({**raw, "architectures": ["DominoDraftModel"], "emb_dim": 6, "dflash_config": section}))
    assert load_checkpoint(tmp_path).config == module.config
    path.write_text(json.dumps({**raw, "emb_dim": 7}))
    with pytest.raises(ValueError, match=r"emb_dim is 7, dflash_config\.emb_dim is 6"):
        load_checkpoint(tmp_path)
    path.write_text(json.dumps({**raw, "dflash_config": {**raw["dflash_config"], "output_multiplier": 0.5}}))
    with pytest.raises(ValueError, match=r"output_multiplier 0\.5 .* no place in the SpecForge dialect"):
        load_checkpoint(tmp_path)
