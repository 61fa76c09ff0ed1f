"""JetSpec: z-lab's causal blocks, the likeliest paths as trees, trained on distributions; trained equals served."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.contrib.jetspec import JetSpec, JetSpecConfig
from outrider.decoding.engine import Engine, config_alone
from outrider.decoding.generate import generate
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.decoding.verification import verify
from outrider.drafters.base import DrafterWeights, draft_slots
from outrider.drafters.dflash import DFlash, DFlashDrafter
from outrider.drafters.draft import TreeSize
from outrider.drafters.dspark import DSpark
from outrider.drafters.loss import ObjectiveConfig
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from outrider.training.batches import Schedule
from outrider.training.dataset import choose_draft_ids
from outrider.training.objective import BlockObjective
from tests.proof.enumeration import enumerate_traces
from tests.toys.alignment import build, check_alignment, read_prompt
from tests.toys.eagle3 import call_of
from tests.toys.engine import assert_solo, finish
from tests.toys.targets import randomise, toy_config, toy_samples, toy_target
from tests.toys.training import lower_loss
from tests.toys.zlab import TOLERANCE, check_training_forward, reference, reference_block

TEXT = [5, 9, 33, 60, 7, 12]
RULES = StopRules(40, stop_ids=())


def make(kind: type[DFlash] = JetSpec, draft_vocab: int = 97, block_size: int = 4) -> DFlash:
    config = toy_config(dspark=False, draft_vocab_size=draft_vocab, block_size=block_size)
    module = kind(JetSpecConfig(**{**vars(config), "is_causal": True}) if kind is JetSpec else config)
    randomise(module)
    module.aux_scale_L.copy_(torch.tensor([0.5, 3.0, 7.0]))
    return module.eval()


def aux_of(tokens: int) -> Tensor:
    return 5 * torch.randn(tokens, 3, 32, generator=torch.Generator().manual_seed(0))


def easy_target() -> Target:
    """Few likely tokens: a random drafter is right now and then."""
    found = toy_target()
    found.model.lm_head.weight.data[4:] *= 0.01
    return Target(found.model, None, "toy")


def served(target: Target, draft_vocab: int = 4) -> DFlashDrafter:
    """A drafter of the tokens that such a target finds likely."""
    ids = torch.arange(draft_vocab) if draft_vocab < 97 else None
    return DFlashDrafter(DrafterWeights(make(draft_vocab=draft_vocab), ids), target)


def test_blocks_are_z_labs_causal_ones_and_a_shorter_block_begins_alike(tmp_path: Path) -> None:
    module, target = make(), toy_target("qwen3")
    save_drafter(Checkpoint(DrafterWeights(module)), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dflash_config"]["causal_head"] is True
    found, model = load_checkpoint(tmp_path), reference(tmp_path)
    assert found.config == module.config and found.weights.algorithm == "jetspec"
    drafter = DFlashDrafter(found.weights, target)
    session = drafter.new_session(16)
    drafter.extend([session], [[0] * 9], aux_of(9))
    hidden_KH = drafter.block_hidden([session], [11])[0]
    torch.testing.assert_close(hidden_KH, reference_block(model, target, aux_of(9), 11, 9), atol=TOLERANCE, rtol=0)
    short_KH = drafter.of_length(2).block_hidden([session], [11])[0]
    torch.testing.assert_close(short_KH, hidden_KH[:2], atol=1e-5, rtol=0)
    check_training_forward(module.requires_grad_(False), model)


@pytest.mark.parametrize("draft_vocab", [97, 40])
def test_trained_equals_served(draft_vocab: int) -> None:
    samples = toy_samples(4)
    ids = choose_draft_ids(samples, 97, draft_vocab, frozenset({1}))
    assert check_alignment(toy_target("qwen3"), make(draft_vocab=draft_vocab), samples, ids) > 50


def test_its_loss_is_the_divergence_of_all_positions_alike() -> None:
    weights = JetSpecConfig.default_objective({})
    assert weights == {"ce": 0.0, "l1": 0.0, "kl": 1.0, "confidence": 0.0, "decay": math.inf}
    config, target, module, samples = ObjectiveConfig(**weights), toy_target(), make(), toy_samples(4)
    batch, compute = build(module, target, samples, torch.arange(97), Schedule(samples, 3, 6, seed=1).step(0))
    compute = BlockObjective(target, compute.draft_ids_Vd, config)
    keep_NK = batch.supervised_NK
    with torch.no_grad():
        log_d = (compute.rows(module, batch).hidden_NKH @ target.head_VD.T).log_softmax(-1)[keep_NK]
        log_t = (batch.target_hidden_NKD.float() @ target.head_VD.T).log_softmax(-1)[keep_NK]
        expected = (log_t.exp() * (log_t - log_d)).sum(-1).mean()
        torch.testing.assert_close(compute(module, batch).loss, expected, atol=1e-4, rtol=1e-4)
    optimizer = torch.optim.Adam(module.train().parameters(), lr=1e-2)

    def step() -> float:
        optimizer.zero_grad()
        loss = compute(module, batch).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    lower_loss(step, to=0.5)


@pytest.mark.parametrize("kind", [JetSpec, DFlash])
@pytest.mark.parametrize("size", [TreeSize(10), TreeSize(6, depth=2, top_k=2), TreeSize(3, depth=3, top_k=1)])
def test_a_tree_has_the_likeliest_paths_of_all(kind: type[DFlash], size: TreeSize) -> None:
    """Against every path there is; two requests together, one of them with limits."""
    target = toy_target()
    ids = torch.arange(20, 25)
    inner = DFlashDrafter(DrafterWeights(make(kind, draft_vocab=5), ids), target)
    drafter = inner.with_trees(size)
    assert drafter.trees and draft_slots(drafter) == size.nodes and drafter.gamma == (size.depth or 3)
    sessions = [drafter.new_session(16) for _ in range(2)]
    drafter.extend(sessions, [TEXT[:5], TEXT[:2]], torch.cat((aux_of(5), aux_of(2))))
    calls = [
        call_of(session, anchor, limit) for session, anchor, limit in zip(sessions, (7, 8), (None, 1), strict=True)
    ]
    whole, shallow = drafter.propose(calls)
    hidden_RKH = inner.block_hidden(sessions, [7, 8])
    for draft, probs_KVd, depth in zip(
        (whole, shallow), inner.head(hidden_RKH).softmax(-1), (drafter.gamma, 1), strict=True
    ):
        likely = [row.topk(min(size.top_k or 5, 5)).indices.tolist() for row in probs_KVd[:depth]]
        every = {
            path: math.prod(probs_KVd[k, v].item() for k, v in enumerate(path))
            for length in range(1, depth + 1)
            for path in itertools.product(*likely[:length])
        }
        best = sorted(every, key=lambda path: (-every[path], len(path)))[: size.nodes]
        found = [tuple(draft.tokens[i] - 20 for i in draft.path(node)) for node in range(len(draft.tokens))]
        assert sorted(found) == sorted(best) and not draft.siblings
        survivals = itertools.accumulate(draft.confidences, lambda a, b: a * b)
        assert list(survivals) == pytest.approx([every[path] for path in found], rel=1e-4)
    assert drafter.propose(calls[:1])[0].tokens == whole.tokens
    few = drafter.propose([replace(calls[0], nodes=2)])[0]
    assert (few.tokens, few.parents) == (whole.tokens[:2], whole.parents[:2])


def test_trees_leave_the_output_as_it_is() -> None:
    target = easy_target()
    drafter = served(target).with_trees(TreeSize(12))
    for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=3, coupled=True)):
        plain, fast = generate(target, TEXT, params=params, rules=RULES), generate(target, TEXT, drafter, params, RULES)
        assert fast.tokens == plain.tokens and len(plain.tokens) == 40
        assert params.coupled or sum(r.accepted for r in fast.rounds) > 5
    engine = Engine(target, drafter, config=EngineConfig(num_blocks=24, max_requests=3))
    requests = [Request(f"r{i}", prompt, rules=StopRules(20, stop_ids=())) for i, prompt in enumerate((TEXT, TEXT[:1]))]
    for id, tokens in finish(engine, requests).items():
        assert_solo(target, next(request for request in requests if request.id == id), tokens)


def test_sampling_through_a_tree_is_the_targets_own_distribution() -> None:
    """One real round with its acceptance enumerated: the first token has p_t."""
    target = easy_target()
    params, rules = SamplingParams(temperature=0.8, top_p=0.95), StopRules(20 - len(TEXT))
    drafter = DFlashDrafter(DrafterWeights(make()), target).with_trees(TreeSize(12))
    request = Request("", TEXT, params, rules)
    engine = Engine(target, drafter, config=config_alone(target, request, draft_slots(drafter)))
    with torch.inference_mode():
        read_prompt(engine, request)
        step = engine.begin()
        (proposal,) = engine.draft(step)
        (rows,) = engine.score(step, [proposal]).rows
    first_V, deep = torch.zeros(97, dtype=torch.float64), 0.0
    for verdict, weight in enumerate_traces(lambda source: verify(proposal, rows, source)):
        first_V[proposal.tokens[verdict.path[0]] if verdict.path else verdict.next_token] += weight
        deep += weight * (len(verdict.path) > 0)
    torch.testing.assert_close(first_V.float(), rows.row(0), atol=1e-6, rtol=1e-5)
    assert deep > 1e-3, "a tree that is never entered would prove nothing"


def test_trees_that_no_block_has_are_refused() -> None:
    drafter = DFlashDrafter(DrafterWeights(make()), toy_target())
    with pytest.raises(ValueError, match="tree 9,depth=4: a block has 3 drafts one after another"):
        drafter.with_trees(TreeSize(9, depth=4))
    with pytest.raises(ValueError, match="with depth 2 and top_k 2 there are 6 nodes at most"):
        drafter.with_trees(TreeSize(7, depth=2, top_k=2))
    dspark = DSpark(toy_config())
    with pytest.raises(ValueError, match="tree 9: this drafter drafts chains only"):
        DrafterWeights(dspark).serve(toy_target()).with_trees(TreeSize(9))
    with pytest.raises(ValueError, match="is_causal must be true"):
        JetSpecConfig(**{**vars(toy_config(dspark=False)), "is_causal": False})
