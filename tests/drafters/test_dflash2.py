"""DFlash 2: numpy references of its two parts, what it may see, how it trains, and that its drafts are lossless."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.training import Setup
from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.data.responses import Sample
from outrider.decoding.cost import SpsTable
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.policies import FixedPolicy, Policy, PrefixScheduler, ThresholdPolicy
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import DraftCalibration, DraftCall, DrafterWeights
from outrider.drafters.chain import sample_rows
from outrider.drafters.confidence import CertaintyEstimator, ChainHeads, ConfidenceScaling
from outrider.drafters.dflash import DFlash
from outrider.drafters.dflash2 import (
    CandidateRows,
    CandidateSelector,
    DFlash2,
    DFlash2Config,
    GroupedDynamicConv,
    SelectorRows,
)
from outrider.drafters.draft import Draft
from outrider.drafters.loss import ObjectiveConfig
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target.model import Target
from outrider.training.batches import Schedule
from outrider.training.dataset import choose_draft_ids
from outrider.training.features import measure_aux_scale
from outrider.training.objective import BlockObjective
from outrider.training.recipe import Precision, Recipe
from outrider.training.setup import Run
from outrider.training.trainer import Trainer
from tests.proof.enumeration import exact_output_distribution, exact_target_distribution, max_deviation
from tests.proof.toys import ToyRequest, ToySelector, ToyTarget
from tests.toys.alignment import build, check_alignment
from tests.toys.oracle import chain_of, drafted_with, row_of
from tests.toys.targets import randomise, toy_config, toy_samples, toy_target, with_mask_token
from tests.toys.training import lower_loss, on_policy_samples, train_until

OWN = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 48}


def config(**changes: Any) -> DFlash2Config:
    return DFlash2Config(**{**vars(toy_config(dspark=False)), **OWN, **changes})


def make(**changes: Any) -> DFlash2:
    """Random weights, with a selector that is heard."""
    drafter = DFlash2(config(**changes))
    randomise(drafter)
    with torch.no_grad():
        drafter.candidate_selector.predecessor_codebook.mul_(5)
    drafter.aux_scale_L.copy_(torch.tensor([0.5, 3.0, 7.0]))
    return drafter


@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_the_convolution_is_its_definition(kernel: int) -> None:
    conv = GroupedDynamicConv(12, kernel, 3)
    randomise(conv)
    x, y = torch.randn(3, 4, 12), torch.randn(3, 4, 12)
    entered, dynamic = conv.before(x)
    left = conv.behind(y, dynamic)
    base, projection = conv.base_kernel.detach().numpy(), conv.kernel_projection.weight.detach().numpy()
    for side, read, found in ((0, x.numpy(), entered), (1, y.numpy(), left)):
        for n in range(3):
            for i in range(4):
                coefficients = (projection @ x[n, i].numpy()).reshape(2, kernel, 4)[side]
                expected = np.zeros(12)
                for o in range(min(kernel, i + 1)):
                    expected += (base[side, o] + np.repeat(coefficients[o], 3)) * read[n, i - o]
                np.testing.assert_allclose(found[n, i].detach().numpy(), expected, atol=1e-5)


@torch.no_grad()
def test_fresh_weights_are_dflash() -> None:
    target, samples = toy_target(), toy_samples(3)
    fresh, plain = DFlash2(config()), DFlash(toy_config(dspark=False))
    randomise(plain)
    fresh.load_state_dict(plain.state_dict(), strict=False)
    batch, compute = build(plain, target, samples, torch.arange(97), Schedule(samples, 2, 4, seed=1).step(0))
    assert torch.equal(compute.rows(fresh, batch).hidden_NKH, compute.rows(plain, batch).hidden_NKH)
    randomise(fresh.layers[0].mlp_conv)
    assert not torch.equal(compute.rows(fresh, batch).hidden_NKH, compute.rows(plain, batch).hidden_NKH)


@pytest.mark.parametrize("reduced", [False, True])
@torch.no_grad()
def test_the_walk_is_its_definition(reduced: bool) -> None:
    """Two requests, one of which stops early; every p_k against softmax over the candidates in numpy."""
    ids = torch.arange(1, 40, 2) if reduced else None
    vocab, C, K = 40, 5, 4
    selector = CandidateSelector(vocab, 20 if reduced else vocab, 8, 3)
    for parameter in selector.parameters():
        torch.nn.init.normal_(parameter)
    hidden, logits = torch.randn(2, K, 8), torch.randn(2, K, 20 if reduced else vocab)
    calls = [
        DraftCall(None, 7 + r, SamplingParams(temperature=0.8), SeenTokens(vocab), SeededSource(r), limit)
        for r, limit in enumerate((None, 2))
    ]
    rows = CandidateRows(lambda _: logits.flatten(0, 1), hidden, selector, C, ids)
    proposals = sample_rows(rows, K, calls, ChainHeads(vocab, draft_ids_Vd=ids))
    assert [len(p.tokens) for p in proposals] == [K, 2]
    A, B, P = (
        p.numpy()
        for p in (
            selector.predecessor_codebook,
            selector.successor_codebook,
            next(selector.hidden_projection.parameters()),
        )
    )
    for r, proposal in enumerate(proposals):
        previous = 7 + r
        for k, token in enumerate(proposal.tokens):
            unary = logits[r, k].numpy()
            candidates = np.argsort(-unary)[:C]
            scores = unary[candidates] + B[candidates] @ (A[previous] * (P @ hidden[r, k].numpy()))
            probs = np.exp(scores / 0.8) / np.exp(scores / 0.8).sum()
            expected = np.zeros(vocab)
            expected[candidates if ids is None else ids.numpy()[candidates]] = probs
            np.testing.assert_allclose(row_of(proposal, k).numpy(), expected, atol=1e-5)
            assert expected[token] == pytest.approx(drafted_with(proposal)[k], abs=1e-5)
            previous = token


@pytest.mark.parametrize(("draft_vocab", "window"), [(97, None), (60, 7)])
def test_trained_equals_served(draft_vocab: int, window: int | None) -> None:
    target, samples = toy_target("qwen3"), toy_samples(5)
    ids = choose_draft_ids(samples, 97, draft_vocab, frozenset({1}))
    drafter = make(draft_vocab_size=draft_vocab, sliding_window=window)
    assert check_alignment(target, drafter, samples, ids) > 90


def wrong_predecessor(selector: CandidateSelector, previous: Tensor, hidden: Tensor) -> Tensor:
    return selector.predecessor_codebook[previous * 0] * selector.hidden_projection(hidden)


def block_end_first(conv: GroupedDynamicConv, y_NKH: Tensor, dynamic_NKOG: Tensor) -> Tensor:
    return conv_behind(conv, y_NKH.flip(1), dynamic_NKOG).flip(1)


conv_behind = GroupedDynamicConv.behind


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [(CandidateSelector, "latent", wrong_predecessor), (GroupedDynamicConv, "behind", block_end_first)],
)
def test_the_alignment_sees_broken_serving(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[..., Tensor]
) -> None:
    target, samples = toy_target("qwen3"), toy_samples(2)
    real, serving = getattr(owner, name), DFlash2.rows

    def trained(drafter: DFlash2, inputs: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(owner, name, real)
            return serving(drafter, inputs)

    monkeypatch.setattr(DFlash2, "rows", trained)
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError, match="Tensor-likes"):
        check_alignment(target, make(), samples, torch.arange(97))


def test_nothing_at_or_after_the_anchor_and_no_other_block_leaks_into_a_block() -> None:
    target, samples = toy_target(), toy_samples(3)
    drafter = make(conv_kernel_size=4)
    batch, compute = build(drafter, target, samples, torch.arange(97), Schedule(samples, 3, 6, seed=1).step(0))
    layout = batch.layout
    starts = torch.tensor([0, *layout.lengths]).cumsum(0)

    def rows(aux_SLD: Tensor, previous_NK: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            found = compute.rows(drafter, replace(batch, aux_SLD=aux_SLD, previous_NK=previous_NK))
        assert isinstance(found, SelectorRows)
        return found.hidden_NKH, found.correction_NKr

    hidden, latent = rows(batch.aux_SLD, batch.previous_NK)
    for block in (0, 7, len(hidden) - 1):
        start, anchor = int(starts[layout.sequence_N[block]]), int(layout.anchors_N[block])
        aux_layers = torch.randn_like(batch.aux_SLD)
        aux_layers[start : start + anchor] = batch.aux_SLD[start : start + anchor]
        previous = torch.randint(4, 97, batch.previous_NK.shape)
        previous[block] = batch.previous_NK[block]
        for before, after in zip((hidden, latent), rows(aux_layers, previous), strict=True):
            torch.testing.assert_close(after[block], before[block], atol=1e-6, rtol=1e-6)
        for k in range(1, drafter.config.gamma):  # x_k: hidden states do not know it, latents behind it do
            previous = batch.previous_NK.clone()
            previous[block, k] = (previous[block, k] + 1) % 97
            after, moved = rows(batch.aux_SLD, previous)
            assert torch.equal(after, hidden)
            differs_K = (moved[block] != latent[block]).any(-1)
            assert differs_K.tolist() == [j == k for j in range(drafter.config.gamma)]
        # and the test can fail: a feature before the anchor does matter
        aux_layers = batch.aux_SLD.clone()
        aux_layers[start + anchor - 1] += 1
        assert (rows(aux_layers, batch.previous_NK)[0][block] - hidden[block]).abs().max() > 1e-4


def run(target: Target, samples: list[Sample], **changes: Any) -> Run:
    torch.manual_seed(0)
    drafter = DFlash2(config(draft_vocab_size=60, selector_top_k=16, **changes))
    drafter.aux_scale_L.copy_(measure_aux_scale(target, samples[:3], drafter.config.target_layer_ids))
    ids = choose_draft_ids(samples, 97, 60, frozenset({1}))
    objective = BlockObjective(target, ids, ObjectiveConfig(ce=1.0))
    return Run(target, drafter, objective, ids, True, samples[2:], samples[:2])


def recipe(out: Path, steps: int) -> Recipe:
    optimizer = {"steps": steps, "sequences_per_step": 4, "anchors_per_sequence": 8, "learning_rate": 1e-2}
    raw = {"target": "toy", "out": str(out), "data": {"prompts": [{"path": "unused"}]}, "optimizer": optimizer}
    return Recipe.model_validate({**raw, "log_every": 10, "eval_every": 1000, "save_every": 1000})


def test_training_learns_and_every_part_takes_part(tmp_path: Path) -> None:
    target = toy_target()
    training = run(target, on_policy_samples(target, 14))
    training.held_out = training.samples[:3]  # toys learn by heart, they do not generalise
    first = {name: tensor.clone() for name, tensor in training.drafter.state_dict().items()}
    learning = recipe(tmp_path, 400)
    before = Trainer(learning, training).evaluate()

    def learned(after: dict[str, float]) -> bool:
        return after["expected_length_greedy"] > 1.5 and after["loss"] < before["loss"] - 0.5

    train_until(learned, learning, training)
    for name, tensor in training.drafter.state_dict().items():
        assert (tensor - first[name]).abs().max() > 1e-3, f"{name} has not moved"
    checkpoint = load_checkpoint(tmp_path / "drafter")
    assert isinstance(checkpoint.weights.module, DFlash2) and checkpoint.config == training.drafter.config


def test_bfloat16_points_the_same_way() -> None:
    target, samples = toy_target(), toy_samples(4)
    drafter = make(draft_vocab_size=60, selector_top_k=16)
    ids = choose_draft_ids(samples, 97, 60, frozenset({1}))
    batch, _ = build(drafter, target, samples, ids, [(i, list(sample.anchors)) for i, sample in enumerate(samples)])
    found = []
    precisions: tuple[Precision, ...] = ("float32", "bfloat16")
    for precision in precisions:
        compute = BlockObjective(target, ids, ObjectiveConfig(), precision)
        output = compute(drafter, batch)
        drafter.zero_grad()
        output.loss.backward()
        slopes = [p.grad.flatten() for p in drafter.parameters() if p.grad is not None]
        assert len(slopes) == len(list(drafter.parameters())) and slopes[0].dtype == torch.float32
        found.append((output.acceptance_N, torch.cat(slopes)))
    (exact_N, slope), (rounded_N, other) = found
    assert 0 < (exact_N - rounded_N).square().mean().sqrt() < 0.03
    assert torch.cosine_similarity(slope, other, dim=0) > 0.98


def test_the_selector_alone_learns_to_accept_nearly_all_that_its_candidates_allow() -> None:
    training = run(toy_target(), toy_samples(14))
    target, drafter, ids = training.target, training.drafter, training.draft_ids_Vd
    anchors = [(i, list(training.samples[i].anchors)) for i in range(3)]
    batch, compute = build(drafter, target, training.samples, ids, anchors)
    with torch.no_grad():
        unary = compute.rows(drafter, batch).hidden_NKH[batch.supervised_NK] @ compute.head_VH.T
        p_t = (batch.target_hidden_NKD[batch.supervised_NK].float() @ target.head_VD.T).softmax(-1)[:, ids]
        most = p_t.gather(1, unary.topk(16).indices).sum(-1).mean().item()
    optimizer = torch.optim.Adam(drafter.candidate_selector.parameters(), lr=0.03)

    def lacking() -> float:
        output = compute(drafter, batch)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        found = output.acceptance_N.mean().item()
        assert found < most
        return most - found

    lower_loss(lacking, to=0.3)


def lossless(
    count: int,
    gamma: int,
    params: SamplingParams,
    policy: Policy,
    ids: list[int] | None = None,
    kind: type[ToySelector] = ToySelector,
) -> float:
    drafter = kind(ToyTarget(4 if ids else 3, params), gamma, count, ids)
    actual = exact_output_distribution(
        lambda context, source: ToyRequest(drafter.target, drafter, context, source), [(0,)], policy, 3
    )
    assert abs(sum(actual.values()) - 1) < 1e-12
    return max_deviation(actual, exact_target_distribution(drafter.target.row, [(0,)], 3))


POLICIES: list[Policy] = [FixedPolicy(), ThresholdPolicy(0.5), PrefixScheduler(SpsTable([1.0, 0.68, 0.56, 0.5, 0.46]))]
WARPS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_k=2),
    SamplingParams(temperature=1.4, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.3),
    SamplingParams(),
]


@pytest.mark.parametrize("params", WARPS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_output_distribution_is_exactly_the_targets(count: int, params: SamplingParams) -> None:
    for policy in POLICIES:
        assert lossless(count, 2, params, policy) <= 1e-12
    assert lossless(count, 3, params, FixedPolicy()) <= 1e-12
    assert lossless(min(count, 2), 2, params, POLICIES[1], ids=[1, 3]) <= 1e-12


class Smoothed(ToySelector):
    """Says that every token could have been drafted, a little."""

    def _sample(self, *arguments: Any) -> Draft:
        drawn, V = super()._sample(*arguments), self.target.vocab_size
        rows = [0.9 * row_of(drawn, k) + 0.1 / V for k in range(len(drawn.tokens))]
        return chain_of(drawn.tokens, torch.stack(rows), drawn.confidences)


def test_the_proof_notices_a_distribution_beyond_the_candidates() -> None:
    assert lossless(2, 2, WARPS[0], FixedPolicy(), kind=Smoothed) > 1e-3


def peaked() -> Target:
    """Few likely tokens: a random drafter's are accepted now and then."""
    model = toy_target().model
    model.lm_head.weight.data[8:] = 0
    return Target(model, None, "toy")


@pytest.mark.parametrize("draft_vocab", [97, 60])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.8, seed=3, coupled=True)], ids=["greedy", "coupled"]
)
def test_output_is_that_of_plain_decoding_alone_and_in_company(draft_vocab: int, params: SamplingParams) -> None:
    target = peaked()
    ids = torch.arange(draft_vocab) if draft_vocab < 97 else None
    drafter = DrafterWeights(make(draft_vocab_size=draft_vocab, selector_top_k=4), ids).serve(target)
    rules = StopRules(24, stop_ids=())
    prompts = [[5], [9, 8, 7, 30, 31], list(range(10, 23))]
    plain = [generate(target, prompt, None, params, rules) for prompt in prompts]
    alone = [generate(target, prompt, drafter, params, rules) for prompt in prompts]
    assert [g.tokens for g in alone] == [g.tokens for g in plain]
    assert sum(r.accepted for g in alone for r in g.rounds) > 0
    assert max(r.proposed for g in alone for r in g.rounds) == 3
    engine = Engine(target, drafter, config=EngineConfig(max_requests=2, num_blocks=40))
    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), prompt, params, rules))
    together: dict[str, list[int]] = {}
    while not engine.idle:
        for output in engine.step():
            together.setdefault(output.id, []).extend(output.tokens)
    assert [together[str(number)] for number in range(3)] == [g.tokens for g in plain]


@torch.inference_mode()
def test_an_estimators_confidences_stop_the_walk() -> None:
    target = toy_target()
    estimator = CertaintyEstimator([1.0, 0.0], [0.0] * 3)
    drafter = DrafterWeights(make(selector_top_k=4)).serve(
        target, DraftCalibration(ConfidenceScaling(estimator=estimator))
    )
    session = drafter.new_session(20)
    drafter.extend([session], [[0] * 5], torch.randn(5, 3, 32))
    calls = [DraftCall(session, t, SamplingParams(temperature=1.0), SeenTokens(97), SeededSource(t)) for t in (9, 8)]
    whole = drafter.propose(calls)
    for proposal in whole:
        top = [row_of(proposal, k).max().item() for k in range(3)]  # sigmoid(logit(max p_k)) over the candidates
        assert proposal.confidences == pytest.approx(top, abs=1e-5)
    min_confidence = sorted(c for proposal in whole for c in proposal.confidences)[3]
    calls = [replace(call, source=SeededSource(call.anchor)) for call in calls]
    for before, after in zip(whole, drafter.propose(calls, min_confidence), strict=True):
        kept = next((k for k, c in enumerate(before.confidences) if c < min_confidence), 3)
        assert after.tokens == before.tokens[:kept]


def test_a_recipe_makes_a_drafter_that_begins_as_the_targets_layers() -> None:
    target = with_mask_token(toy_target("qwen3"))
    chosen = {"conv_group_size": 4, "selector_rank": 5, "selector_top_k": 7, "draft_vocab_size": 50}
    made = DFlash2Config.from_target(target, num_aux_layers=2, **chosen)
    assert (made.block_size, made.gamma, made.conv_kernel_size) == (8, 7, 2)
    assert (made.conv_group_size, made.selector_rank, made.selector_top_k) == (4, 5, 7)
    assert made.comparable_fields(chosen, target)["conv_group_size"] == (4, 4)
    drafter = DFlash2(made)
    drafter.initialize_from(target, [[5, 6, 7, 8]])
    theirs, ours = target.model.model.layers[-1].state_dict(), drafter.layers[-1].state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    with pytest.raises(ValueError, match=r"drafter\.sample_from_anchor"):
        DFlash2Config.from_target(target, num_aux_layers=2, conv_group_size=4, sample_from_anchor=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_kernel_size": 5}, "conv_kernel_size 5 must be between 1 and block_size 4"),
        ({"conv_group_size": 5}, "conv_group_size 5 must divide hidden_size 32"),
        ({"selector_rank": 0}, "selector_rank 0"),
        ({"selector_top_k": 98}, "selector_top_k 98 must be between 1 and draft_vocab_size 97"),
        ({"block_size": 1}, "block_size 1"),
    ],
)
def test_config_refuses_what_it_cannot_be(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


PLAIN = {"output_multiplier": 1.0, "final_logit_softcapping": None}  # logits


def test_saved_and_loaded_with_a_reduced_draft_vocabulary(tmp_path: Path) -> None:
    drafter, ids = make(draft_vocab_size=50), torch.randperm(97)[:50].sort().values
    save_drafter(Checkpoint(DrafterWeights(drafter, ids)), tmp_path / "d")
    raw = json.loads((tmp_path / "d" / "config.json").read_text())
    assert raw["architectures"] == ["DFlash2DraftModel"] and raw["block_size"] == 4
    assert raw["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [0, 2, 3], **PLAIN, **OWN}
    loaded = load_checkpoint(tmp_path / "d")
    assert loaded.config == drafter.config and type(loaded.weights.module) is DFlash2
    assert loaded.weights.draft_ids_Vd is not None and torch.equal(loaded.weights.draft_ids_Vd, ids)
    for name, tensor in drafter.folded_state_dict().items():
        assert torch.equal(loaded.weights.module.state_dict()[name], tensor), name


def test_a_config_of_z_lab_keeps_the_block_in_its_section_and_may_ask_for_too_much(tmp_path: Path) -> None:
    save_drafter(Checkpoint(DrafterWeights(make())), tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["dflash_config"]["block_size"] = raw.pop("block_size")
    path.write_text(json.dumps(raw))
    assert load_checkpoint(tmp_path).config == config()
    raw["dflash_config"]["output_multiplier"] = 0.5
    path.write_text(json.dumps(raw))
    assert load_checkpoint(tmp_path).config == config(output_multiplier=0.5)


def test_the_straightforward_step_does_not_know_it() -> None:
    drafter = {"algorithm": "dflash2", "block_size": 4, "num_aux_layers": 2, "draft_vocab_size": 40}
    raw = {"target": "toy", "out": "nowhere", "data": {"prompts": [{"path": "none"}]}, "drafter": drafter}
    with pytest.raises(ValueError, match="knows block drafters only"):
        Setup.of(Recipe.model_validate(raw), with_mask_token(toy_target()), toy_samples(8))
