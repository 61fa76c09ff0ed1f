"""LiLiCorr: its scores against loops over candidates, what it may see, its loss, and that it serves as it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.contrib.lilicorr import (
    LatticeHead,
    LatticeRows,
    LatticeTerms,
    LatticeTrainingRows,
    LiLiCorr,
    LiLiCorrConfig,
    LiLiCorrDrafter,
    LiLiCorrObjective,
    candidate_log_probs,
    lattice_loss,
)
from outrider.data.responses import Sample
from outrider.decoding.cost import SpsTable
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.policies import FixedPolicy, SkipDrafting
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import DraftCall, Drafter, DrafterWeights, DraftRows
from outrider.drafters.dflash2 import ConvolvedLayer
from outrider.drafters.fused_loss import HeadProducts
from outrider.drafters.ngram import HybridDrafter, NgramConfig
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target.model import Target
from outrider.training.batches import Schedule
from outrider.training.dataset import choose_draft_ids
from outrider.training.features import measure_aux_scale
from outrider.training.objective import BlockObjective
from outrider.training.recipe import Precision, Recipe, load_recipe
from outrider.training.setup import Run
from outrider.training.trainer import Trainer
from tests.toys.alignment import build, check_alignment
from tests.toys.dialects import config_of
from tests.toys.oracle import drafted_with, row_of
from tests.toys.targets import randomise, toy_samples, toy_target, with_mask_token
from tests.toys.training import on_policy_samples, train_until

CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 8}


def make(**changes: Any) -> LiLiCorr:
    """Random weights, a lattice as wide as its likeliest tokens go."""
    drafter = LiLiCorr(config_of("lilicorr", **{"lilicorr_candidate_topk": 24, **changes}))
    randomise(drafter)
    drafter.aux_scale_L.copy_(torch.tensor([0.5, 3.0, 7.0]))
    return drafter


# ----------------------------------------------------------------------------
# The scores, written again with one candidate after the other.
# ----------------------------------------------------------------------------


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def softmax(x: Any) -> Any:
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


class Reference:
    """Start and pair scores of one block, from the tensors by name."""

    def __init__(self, config: LiLiCorrConfig, state: dict[str, Tensor]) -> None:
        self.config = config
        self.w = {name: tensor.double().numpy() for name, tensor in state.items()}

    def linear(self, name: str, x: Any) -> Any:
        return self.w[name + ".weight"] @ x + self.w[name + ".bias"]

    def rms(self, name: str, x: Any) -> Any:
        return x / np.sqrt(np.mean(x * x) + self.config.rms_norm_eps) * self.w[name + ".weight"]

    def mlp(self, name: str, x: Any) -> Any:
        return self.linear(f"{name}.down_proj", silu(self.linear(f"{name}.up_proj", x)))

    def unit(self, x: Any) -> Any:
        return x / max(np.sqrt((x * x).sum()), self.config.lilicorr_vector_eps)

    def attention(self, name: str, nodes: list[Any], slots: list[int]) -> list[Any]:
        heads, width = self.config.lilicorr_num_heads, len(nodes[0])
        qkv = [self.linear(f"{name}.in_proj", x).reshape(3, heads, width // heads) for x in nodes]
        out = []
        for i, (query, _, _) in enumerate(qkv):
            mixed = []
            for head in range(heads):
                scores = np.array([query[head] @ key[head] for _, key, _ in qkv]) / np.sqrt(width // heads)
                for j, slot in enumerate(slots):
                    distance = slots[i] - slot
                    scores[j] += self.w["relative_slot_bias"][head, distance + self.config.block_size - 1]
                    scores[j] += self.w["same_slot_bias"][head] if distance == 0 else 0.0
                mixed.append(sum(p * value[head] for p, (_, _, value) in zip(softmax(scores), qkv, strict=True)))
            out.append(self.linear(f"{name}.out_proj", np.concatenate(mixed)))
        return out

    def scores(self, embedded_KcH: Any, log_probs_Kc: Any, hidden_KH: Any, context_H: Any) -> tuple[Any, Any]:
        K, c = log_probs_Kc.shape
        nodes, slots = [], [k for k in range(K) for _ in range(c)]
        for k in range(K):
            for i in range(c):
                log_p = log_probs_Kc[k, i]
                found = np.array([log_p, np.exp(log_p), log_p - log_probs_Kc[k].max(), i / max(1, c - 1), i == 0])
                normed = (found - found.mean()) / np.sqrt(found.var() + 1e-5)
                normed = normed * self.w["feature_norm.weight"] + self.w["feature_norm.bias"]
                embedded = embedded_KcH[k, i]
                token = self.linear("token_proj", embedded) if "token_proj.weight" in self.w else embedded
                node = token + self.linear("pass_hidden_proj", hidden_KH[k]) + self.mlp("feature_mlp", normed)
                nodes.append(node + self.w["slot_embedding"][0, 0, k, 0] + self.w["rank_embedding"][0, 0, 0, i])
        for layer in range(self.config.lilicorr_num_layers):
            name = f"layers.{layer}"
            attended = self.attention(f"{name}.attn", [self.rms(f"{name}.attn_norm", x) for x in nodes], slots)
            nodes = [x + y for x, y in zip(nodes, attended, strict=True)]
            nodes = [x + self.mlp(f"{name}.mlp", self.rms(f"{name}.mlp_norm", x)) for x in nodes]
        anchor = self.linear("context_proj", context_H) if context_H.any() else np.zeros(len(nodes[0]))
        anchor = self.rms("anchor_norm", anchor)
        leaving, entering = [], []
        for node in nodes:
            y = self.rms("output_norm", node)
            z = silu(self.linear("factor_input_proj", np.concatenate([y, anchor, y * anchor])))
            leaving.append(self.unit(self.linear("out_head", z)))
            entering.append(self.unit(self.linear("in_head", z)))
        first, scale = self.unit(self.linear("anchor_out_head", anchor)), self.config.lilicorr_logit_scale
        start = np.array([scale * first @ entering[j] for j in range(c)])
        pairs = [
            [[scale * leaving[k * c + i] @ entering[(k + 1) * c + j] for j in range(c)] for i in range(c)]
            for k in range(K - 1)
        ]
        return start, np.array(pairs)


@pytest.mark.parametrize("width", [16, 0], ids=["narrow", "as-wide-as-the-target"])
@torch.no_grad()
def test_the_scores_are_those_of_loops_over_candidates(width: int) -> None:
    config = config_of("lilicorr", lilicorr_hidden_size=width, lilicorr_candidate_topk=4)
    head, K, H = LatticeHead(config), config.gamma, config.hidden_size
    randomise(head)
    embedded, hidden, context = torch.randn(2, K, 4, H), torch.randn(2, K, H), torch.randn(2, H)
    context[1] = 0
    log_probs = torch.randn(2, K, 9).log_softmax(-1).topk(4).values
    start, pairs = head(embedded, log_probs, hidden, context)
    reference = Reference(config, head.state_dict())
    for n in range(2):
        inputs = (x[n].double().numpy() for x in (embedded, log_probs, hidden, context))
        expected_start, expected_pairs = reference.scores(*inputs)
        np.testing.assert_allclose(start[n].numpy(), expected_start, atol=1e-4)
        np.testing.assert_allclose(pairs[n].numpy(), expected_pairs, atol=1e-4)
    assert start.std() > 0.1 and pairs.std(-1).mean() > 0.1, "random weights tell candidates apart"


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 60}, CONVOLVED], ids=["plain", "reduced", "convolved"])
@torch.inference_mode()
def test_the_walk_is_its_definition(changes: dict[str, Any]) -> None:
    """Two requests, one of which stops early and one that has no context; every p_k against the reference."""
    target, drafter = toy_target("qwen3"), make(lilicorr_candidate_topk=4, **changes)
    ids = torch.arange(0, 60) + 20 if "draft_vocab_size" in changes else None
    served = DrafterWeights(drafter, ids).serve(target)
    assert isinstance(served, LiLiCorrDrafter)
    sessions = [served.new_session(20) for _ in range(2)]
    aux = torch.randn(5, 3, 32)
    served.extend(sessions, [[0] * 5, []], aux)
    calls = [
        DraftCall(session, 7 + r, SamplingParams(temperature=0.8), SeenTokens(97), SeededSource(r), limit)
        for r, (session, limit) in enumerate(zip(sessions, (2, None), strict=True))
    ]
    proposals = served.propose(calls)
    assert [len(p.tokens) for p in proposals] == [2, 3]
    hidden = served.block_hidden(sessions, [7, 8])
    reference = Reference(drafter.config, drafter.lilicorr.state_dict())
    context = drafter.folded().context(aux[-1:])[0]
    for r, proposal in enumerate(proposals):
        logits = (hidden[r] @ (target.head_VD if ids is None else target.head_VD[ids]).T).double().numpy()
        top = np.argsort(-logits, axis=-1)[:, :4]
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        tokens = top if ids is None else ids.numpy()[top]
        start, pairs = reference.scores(
            target.embed_VD.double().numpy()[tokens],
            np.take_along_axis(log_probs, top, -1),
            hidden[r].double().numpy(),
            (context if r == 0 else torch.zeros(32)).double().numpy(),
        )
        scores = start
        for k, token in enumerate(proposal.tokens):
            expected = np.zeros(97)
            expected[tokens[k]] = softmax(scores / 0.8)
            np.testing.assert_allclose(row_of(proposal, k).numpy(), expected, atol=1e-4)
            assert expected[token] == pytest.approx(drafted_with(proposal)[k], abs=1e-4)
            scores = pairs[k, list(tokens[k]).index(token)] if k + 1 < len(hidden[r]) else None


# ----------------------------------------------------------------------------
# Trained equals served; nothing leaks.
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft_vocab", "changes"), [(97, {}), (60, {"sliding_window": 7}), (97, {**CONVOLVED, "lilicorr_hidden_size": 0})]
)
def test_trained_equals_served(draft_vocab: int, changes: dict[str, Any]) -> None:
    target, samples = toy_target("qwen3"), toy_samples(6)
    ids = choose_draft_ids(samples, 97, draft_vocab, frozenset({1}))
    drafter = make(draft_vocab_size=draft_vocab, lilicorr_candidate_topk=48, **changes)
    assert check_alignment(target, drafter, samples, ids) > 90


def ends_with_the_oldest(drafter: LiLiCorrDrafter, sessions: Any, tokens: Any, aux: Any) -> None:
    extend(drafter, sessions, tokens, aux)
    for session in sessions:
        session.waiting = [session.waiting[0].flip(-1)]


def first_candidate(rows: LatticeRows, k: int, active: list[int]) -> Tensor:
    return rows.start_Rc[active] if k == 0 else rows.pairs_RJcc[active, k - 1, 0]


extend = LiLiCorrDrafter.extend


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [(LiLiCorrDrafter, "extend", ends_with_the_oldest), (LatticeRows, "logits", first_candidate)],
)
def test_the_alignment_sees_broken_serving(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError, match="Tensor-likes"):
        check_alignment(toy_target("qwen3"), make(lilicorr_candidate_topk=48), toy_samples(3), torch.arange(97))


@torch.no_grad()
def test_scores_know_what_is_before_the_anchor_alone() -> None:
    target, samples = toy_target(), toy_samples(3)
    drafter = make()
    batch, compute = build(drafter, target, samples, torch.arange(97), Schedule(samples, 3, 6, seed=1).step(0))
    layout = batch.layout
    starts = torch.tensor([0, *layout.lengths]).cumsum(0)
    tokens = torch.randint(4, 97, (*batch.previous_NK.shape, 24))
    log_probs = torch.randn(tokens.shape).log_softmax(-1)

    def scores(aux_SLD: Tensor, previous_NK: Tensor) -> tuple[Tensor, Tensor]:
        rows = compute.rows(drafter, replace(batch, aux_SLD=aux_SLD, previous_NK=previous_NK))
        assert isinstance(rows, LatticeTrainingRows)
        return rows.lattice(tokens, log_probs)

    before = scores(batch.aux_SLD, batch.previous_NK)
    for block in (0, 7, len(tokens) - 1):
        start, anchor = int(starts[layout.sequence_N[block]]), int(layout.anchors_N[block])
        aux_layers = torch.randn_like(batch.aux_SLD)
        aux_layers[start : start + anchor] = batch.aux_SLD[start : start + anchor]
        previous = torch.randint(4, 97, batch.previous_NK.shape)
        previous[:, 0] = batch.previous_NK[:, 0]  # the anchors; of the tokens behind them scores know nothing
        for mine, theirs in zip(scores(aux_layers, previous), before, strict=True):
            torch.testing.assert_close(mine[block], theirs[block], atol=1e-5, rtol=1e-5)
        aux_layers = batch.aux_SLD.clone()
        aux_layers[start + anchor - 1] += 1
        assert (scores(aux_layers, batch.previous_NK)[0][block] - before[0][block]).abs().max() > 1e-3


# ----------------------------------------------------------------------------
# The loss.
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4])
def test_log_probabilities_and_their_gradients_are_those_of_the_whole_softmax(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.drafters.fused_loss._FEWEST_ROWS", 1)
    monkeypatch.setattr("outrider.drafters.fused_loss.CHUNK_BYTES", 5 * 2 * 19 * 8)
    monkeypatch.setattr("outrider.drafters.fused_loss.TILE_BYTES", 3 * count * 6 * 8)
    head, mine = torch.randn(19, 6, dtype=torch.float64), torch.randn(4, 3, 6, dtype=torch.float64)
    theirs, near, weights = mine.clone().requires_grad_(), torch.randint(0, 19, (4, 3)), torch.randn(4, 3, count)
    mine.requires_grad_()
    indices, found = candidate_log_probs(mine, HeadProducts(head, torch.float64), near, count)
    expected, chosen = (theirs @ head.T).log_softmax(-1).topk(count)
    assert torch.equal(indices, chosen)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-12, rtol=0)


def test_the_loss_is_its_definition() -> None:
    """Blocks whose true tokens are candidates throughout, in part and not at all, position by position."""
    N, K, c = 5, 4, 3
    generator = torch.Generator().manual_seed(4)
    start, pairs, targets = (torch.randn(shape, generator=generator) for shape in ((N, c), (N, K - 1, c, c), (N, K, c)))
    log_targets = torch.cat((targets, torch.ones(N, K, 1)), dim=-1).log_softmax(-1)[..., :c]
    place = torch.randint(0, c, (N, K), generator=generator)
    place[1, 2], place[2, 0], place[3, 3] = -1, -1, -1
    true = torch.arange(c) == place[..., None]
    weights = torch.rand(N, K, generator=generator)
    config = LatticeTerms(ce=0.3, margin=0.5, margin_width=1.5, penalty=0.7)
    argmax = torch.arange(c) == 1
    loss, acceptance, agreement = lattice_loss(
        (start, pairs), true, log_targets, config=config, weights_NK=weights, is_argmax_NKc=argmax.expand(N, K, c)
    )
    expected, counted = 0.0, 0
    for n in range(N):
        for k in range(K):
            if k and place[n, k - 1] < 0:
                assert not acceptance[n, k:].any() and not agreement[n, k:].any()
                break
            scores = start[n] if k == 0 else pairs[n, k - 1, int(place[n, k - 1])]
            q = scores.softmax(-1)
            accepted = torch.minimum(q, log_targets[n, k].exp()).sum()
            assert acceptance[n, k].item() == pytest.approx(accepted.item(), abs=1e-6)
            assert bool(agreement[n, k]) == (int(q.argmax()) == 1)
            if (i := int(place[n, k])) >= 0:
                others = [scores[j].item() for j in range(c) if j != i]
                gaps = [max(0.0, (log_targets[n, k, i] - log_targets[n, k, j]).item()) for j in range(c)]
                term = 0.3 * -q[i].log().item() + 0.5 * max(0.0, 1.5 - scores[i].item() + max(others))
                term += 0.7 * sum(q[j].item() * gap for j, gap in enumerate(gaps))
                expected += weights[n, k].item() * term
                counted += 1
    assert loss.item() == pytest.approx(expected, rel=1e-5) and 8 < counted < N * K


def test_dpace_weighs_the_terms_of_the_lattice_too() -> None:
    """By the probabilities of the parallel logits: one block, whose weights are given to the loss without D-PACE."""
    target, samples = toy_target(), toy_samples(3)
    drafter, ids = make(lilicorr_candidate_topk=97), torch.arange(97)
    batch, _ = build(drafter, target, samples, ids, [(0, samples[0].anchors[:1])])
    assert batch.supervised_NK.all() and batch.supervised_NK.shape[1] > 2
    config = LiLiCorrObjective(ce=1.0, l1=0.0, confidence=0.0, lattice=LatticeTerms(margin=0.1))
    compute = BlockObjective(target, ids, config.model_copy(update={"dpace": 0.5}))
    rows = compute.rows(drafter, batch)
    logits_KV = rows.hidden_NKH[0] @ compute.head_VH.T
    likely_K = logits_KV.softmax(-1).gather(1, batch.labels_NK[0, :, None])[:, 0].detach()
    reached = [float((0.5 + 0.5 * likely_K[: j + 1]).prod()) for j in range(len(likely_K))]
    weights_K, count = torch.tensor([sum(reached[k:]) for k in range(len(reached))]), torch.tensor(float(len(reached)))
    given = replace(compute.supervision(batch, count), weights_NK=weights_K[None])
    whole, parallel = rows.loss(given).loss, DraftRows.loss(rows, given).loss
    torch.testing.assert_close(compute(drafter, batch).loss, whole, atol=1e-5, rtol=1e-5)
    assert whole - parallel > 0.1 and (weights_K - 1).abs().max() > 0.1


def test_features_of_16_bits_are_multiplied_in_32() -> None:
    """As features are stored: the target's logits of the candidates have the precision of the rest of the loss."""
    target, samples = toy_target(), toy_samples(3)
    drafter, ids = make(), torch.arange(97)
    batch, compute = build(drafter, target, samples, ids, [(0, samples[0].anchors[:8])])
    stored = replace(batch, target_hidden_NKD=batch.target_hidden_NKD.half())
    read = replace(stored, target_hidden_NKD=stored.target_hidden_NKD.float())
    assert torch.equal(compute(drafter, stored).loss, compute(drafter, read).loss)
    assert torch.equal(compute(drafter, stored).acceptance_N, compute(drafter, read).acceptance_N)


def run(target: Target, samples: list[Sample], **changes: Any) -> Run:
    torch.manual_seed(0)
    drafter = LiLiCorr(config_of("lilicorr", draft_vocab_size=60, lilicorr_candidate_topk=16, **changes))
    drafter.aux_scale_L.copy_(measure_aux_scale(target, samples[:3], drafter.config.target_layer_ids))
    ids = choose_draft_ids(samples, 97, 60, frozenset({1}))
    objective = BlockObjective(target, ids, LiLiCorrObjective(ce=1.0, l1=0.0, lattice=LatticeTerms(margin=0.1)))
    return Run(target, drafter, objective, ids, True, samples[2:], samples[:2])


def recipe(out: Path, steps: int) -> Recipe:
    optimizer = {"steps": steps, "sequences_per_step": 4, "anchors_per_sequence": 8, "learning_rate": 5e-3}
    raw = {"target": "toy", "out": str(out), "data": {"prompts": [{"path": "unused"}]}, "optimizer": optimizer}
    return Recipe.model_validate({**raw, "log_every": 10, "eval_every": 1000, "save_every": 1000})


def test_training_learns_and_every_part_takes_part(tmp_path: Path) -> None:
    target = toy_target()
    training = run(target, on_policy_samples(target, 14), **CONVOLVED)
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
    assert isinstance(checkpoint.weights.module, LiLiCorr) and checkpoint.config == training.drafter.config


def test_bfloat16_points_the_same_way() -> None:
    target, samples = toy_target(), toy_samples(4)
    drafter = make(draft_vocab_size=60)
    ids = choose_draft_ids(samples, 97, 60, frozenset({1}))
    batch, _ = build(drafter, target, samples, ids, [(i, list(sample.anchors)) for i, sample in enumerate(samples)])
    found = []
    precisions: tuple[Precision, ...] = ("float32", "bfloat16")
    for precision in precisions:
        compute = BlockObjective(target, ids, LiLiCorrObjective(), precision)
        output = compute(drafter, batch)
        drafter.zero_grad()
        output.loss.backward()
        slopes = [p.grad.flatten() for p in drafter.parameters() if p.grad is not None]
        assert len(slopes) == len(list(drafter.parameters())) and slopes[0].dtype == torch.float32
        found.append((output.acceptance_N, torch.cat(slopes)))
    (exact_N, slope), (rounded_N, other) = found
    assert 0 < (exact_N - rounded_N).square().mean().sqrt() < 0.05
    assert torch.cosine_similarity(slope, other, dim=0) > 0.95


# ----------------------------------------------------------------------------
# Decoding, recipes, configs.
# ----------------------------------------------------------------------------


def peaked() -> Target:
    """Few likely tokens: a random drafter's are accepted now and then."""
    model = toy_target().model
    model.lm_head.weight.data[8:] = 0
    return Target(model, None, "toy")


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.8, seed=3, coupled=True)], ids=["greedy", "coupled"]
)
@pytest.mark.parametrize("gated", [False, True], ids=["alone", "copies-and-a-gate"])
def test_output_is_that_of_plain_decoding_alone_and_in_company(params: SamplingParams, gated: bool) -> None:
    target = peaked()
    drafter: Drafter = DrafterWeights(make(lilicorr_candidate_topk=4)).serve(target)
    policy = SkipDrafting(SpsTable([1.0, 0.98, 0.96, 0.94, 0.92, 0.9])) if gated else FixedPolicy()
    drafter = HybridDrafter(drafter, NgramConfig(4)) if gated else drafter
    rules = StopRules(24, stop_ids=())
    prompts = [[5], [9, 8, 7, 30, 31], list(range(10, 23))]
    plain = [generate(target, prompt, None, params, rules) for prompt in prompts]
    alone = [generate(target, prompt, drafter, params, rules, policy) for prompt in prompts]
    assert [g.tokens for g in alone] == [g.tokens for g in plain]
    assert sum(r.accepted for g in alone for r in g.rounds) > 0
    assert 3 <= max(r.proposed for g in alone for r in g.rounds) <= drafter.gamma
    engine = Engine(target, drafter, policy, config=EngineConfig(max_requests=2, num_blocks=40))
    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), prompt, params, rules))
    together: dict[str, list[int]] = {}
    while not engine.idle:
        for output in engine.step():
            together.setdefault(output.id, []).extend(output.tokens)
    assert [together[str(number)] for number in range(3)] == [g.tokens for g in plain]


def test_a_recipe_makes_a_drafter_that_begins_as_the_targets_layers() -> None:
    target = with_mask_token(toy_target("qwen3"))
    chosen = {"conv_kernel_size": 2, "conv_group_size": 4, "lilicorr_candidate_topk": 7, "draft_vocab_size": 50}
    made = LiLiCorrConfig.from_target(target, num_aux_layers=2, **chosen)
    assert (made.block_size, made.gamma, made.lilicorr_candidate_topk, made.head_width) == (8, 7, 7, 256)
    drafter = LiLiCorr(made)
    assert all(isinstance(layer, ConvolvedLayer) for layer in drafter.layers)
    drafter.initialize_from(target, [[5, 6, 7, 8]])
    theirs, ours = target.model.model.layers[-1].state_dict(), drafter.layers[-1].state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert ("candidates a position", "7") in made.describe()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_kernel_size": 2}, "conv_kernel_size 2 and conv_group_size 0: the convolutions need both"),
        ({"conv_kernel_size": 5, "conv_group_size": 8}, "conv_kernel_size 5 must be between 1 and block_size 4"),
        ({"lilicorr_num_heads": 3}, "lilicorr_num_heads 3 must divide the head's width 16"),
        ({"lilicorr_candidate_topk": 98}, "lilicorr_candidate_topk 98 must be between 1 and draft_vocab_size 97"),
        ({"lilicorr_vector_eps": 0.0}, "lilicorr_vector_eps 0.0"),
    ],
)
def test_config_refuses_what_it_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of("lilicorr", **changes)


def test_a_recipe_that_leaves_the_terms_of_the_lattice_out_is_written_as_before() -> None:
    assert "lattice" not in LiLiCorrObjective().model_dump()
    chosen = LiLiCorrObjective(lattice=LatticeTerms(margin=0.125))
    assert LiLiCorrObjective.model_validate(chosen.model_dump()) == chosen
    with pytest.raises(ValueError, match=r"objective\.lattice"):
        load_recipe(Path("smollm2-135m/dflash"), ["objective.lattice.margin=0.1"])
