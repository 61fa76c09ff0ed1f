"""EAGLE-2's tree against one grown naively from the numpy EAGLE-3; limits, batches, losslessness."""

from __future__ import annotations

import heapq
import itertools
import operator

import pytest
import torch
from torch import Tensor

from outrider.decoding.engine import Engine, config_alone
from outrider.decoding.generate import generate
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.decoding.verification import verify
from outrider.drafters.base import DrafterWeights, draft_slots
from outrider.drafters.draft import Draft, TreeSize
from outrider.drafters.eagle3 import DynamicTreeDrafter, Eagle3Drafter, TreeShape
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.proof.enumeration import enumerate_traces
from tests.toys.alignment import read_prompt
from tests.toys.eagle3 import call_of, make_drafter
from tests.toys.eagle_reference import EagleReference
from tests.toys.engine import assert_solo, finish
from tests.toys.targets import toy_target

Path = tuple[int, ...]
TEXT = [5, 9, 33, 60, 7, 12]


def aux_of(tokens: int, seed: int = 0) -> Tensor:
    return 5 * torch.randn(tokens, 3, 32, generator=torch.Generator().manual_seed(seed))


def naive_tree(reference: EagleReference, aux_TLD: Tensor, text: list[int], shape: TreeShape) -> dict[Path, float]:
    """{path: log of its probability}, as EAGLE-2 describes it, each path by a pass over everything."""
    scores: dict[Path, float] = {(): 0.0}
    level: list[Path] = [()]
    for _ in range(shape.depth):
        children: dict[Path, float] = {}
        for path in level:
            log_probs = reference.log_probs(reference.chain(aux_TLD, text, path)[-1])
            for token in (-log_probs).argsort()[: shape.top_k].tolist():
                children[(*path, token)] = scores[path] + log_probs[token]
        scores |= children
        level = heapq.nlargest(shape.top_k, children, key=lambda path: children[path])
    del scores[()]
    return {path: scores[path] for path in heapq.nlargest(shape.nodes, scores, key=lambda path: scores[path])}


def survivals_of(draft: Draft) -> list[float]:
    return list(itertools.accumulate(draft.confidences, operator.mul))


def paths_of(tree: Draft) -> dict[Path, float]:
    paths = [tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree.tokens))]
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, survivals_of(tree), strict=True))


@pytest.mark.parametrize(
    "shape", [TreeShape(4, 3, 10), TreeShape(1, 5, 4), TreeShape(3, 1, 9), TreeShape(3, 4, 60), TreeShape(2, 9, 25)]
)
def test_the_tree_is_that_of_the_paper(shape: TreeShape) -> None:
    target = toy_target()
    module = make_drafter(target)
    drafter = DynamicTreeDrafter(Eagle3Drafter(DrafterWeights(module), target), shape)
    aux_TLD = aux_of(len(TEXT))
    session = drafter.new_session(16)
    # uneven rounds, a draft in between: what earlier trees wrote must not be seen
    drafter.extend([session], [TEXT[:2]], aux_TLD[:2])
    drafter.propose([call_of(session, TEXT[2])])
    drafter.extend([session], [TEXT[2:5]], aux_TLD[2:5])
    (proposal,) = drafter.propose([call_of(session, TEXT[5])])
    found = paths_of(proposal)
    expected = naive_tree(EagleReference(module, target), aux_TLD[:5], TEXT, shape)
    assert set(found) == set(expected)
    for path, survival in found.items():
        assert survival == pytest.approx(torch.tensor(expected[path]).exp().item(), rel=1e-3)
    assert max(proposal.confidences) <= 1 and not proposal.siblings
    assert proposal.depth <= shape.depth


def test_a_width_of_one_is_the_greedy_chain() -> None:
    target = toy_target()
    plain = Eagle3Drafter(DrafterWeights(make_drafter(target)), target)
    tree = DynamicTreeDrafter(plain, TreeShape(depth=4, top_k=1, nodes=4))
    proposals = []
    for drafter in (plain, tree):
        session = drafter.new_session(8)
        drafter.extend([session], [TEXT[:5]], aux_of(5))
        proposals += drafter.propose([call_of(session, TEXT[5])])
    assert proposals[0].tokens == proposals[1].tokens
    assert proposals[1].is_chain and proposals[1].row_parents is None


def test_a_batch_grows_the_trees_of_lone_requests_each_to_its_own_limit() -> None:
    target = toy_target()
    drafter = DynamicTreeDrafter(Eagle3Drafter(DrafterWeights(make_drafter(target)), target), TreeShape(4, 3, 30))
    parts = [TEXT[:3], TEXT[:1], TEXT]
    aux_TLD = aux_of(sum(map(len, parts)))
    limits = [None, 2, 1]

    def trees(together: bool) -> list[Draft]:
        sessions = [drafter.new_session(8) for _ in parts]
        drafter.extend(sessions, parts, aux_TLD)
        calls = [call_of(session, 40 + r, limits[r]) for r, session in enumerate(sessions)]
        return drafter.propose(calls) if together else [drafter.propose([call])[0] for call in calls]

    batch = trees(True)
    assert batch[0].depth > 2 >= batch[1].depth and batch[2].depth == 1
    for one, other in zip(batch, trees(False), strict=True):
        assert (one.tokens, one.parents) == (other.tokens, other.parents)
        assert one.confidences == pytest.approx(other.confidences, rel=1e-4)


def test_a_reduced_vocabulary_gives_the_targets_ids() -> None:
    target = toy_target()
    ids_Vd = torch.arange(20, 24)
    inner = Eagle3Drafter(DrafterWeights(make_drafter(target, draft_vocab=4), ids_Vd), target)
    drafter = DynamicTreeDrafter(inner, TreeShape(3, 6, 30))  # wider than the vocabulary
    session = drafter.new_session(8)
    drafter.extend([session], [TEXT[:5]], aux_of(5))
    (proposal,) = drafter.propose([call_of(session, TEXT[5])])
    assert set(proposal.tokens) == set(ids_Vd.tolist())
    first = [survivals_of(proposal)[child] for child in proposal.children(-1)]
    assert sum(first) == pytest.approx(1.0, abs=1e-5), "all four tokens follow the anchor"


def easy_target(family: str = "llama") -> Target:
    """Few likely tokens: a random drafter is right now and then."""
    found = toy_target(family)
    found.model.lm_head.weight.data[3:] *= 0.01
    return Target(found.model, None, "toy")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_output_is_plain_decodings(family: str) -> None:
    target = easy_target(family)
    inner = Eagle3Drafter(DrafterWeights(make_drafter(target, draft_vocab=4), torch.arange(4)), target)
    drafter = DynamicTreeDrafter(inner, TreeShape(4, 3, 12))
    rules = StopRules(40, stop_ids=())
    for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=3, coupled=True)):
        plain = generate(target, TEXT, params=params, rules=rules)
        fast = generate(target, TEXT, drafter, params, rules)
        assert fast.tokens == plain.tokens and len(plain.tokens) == 40
        assert all(r.verified <= 12 for r in fast.rounds)
        assert params.coupled or sum(r.accepted for r in fast.rounds) > 5


def test_the_engine_serves_trees() -> None:
    target = easy_target()
    drafter = DynamicTreeDrafter(Eagle3Drafter(DrafterWeights(make_drafter(target)), target), TreeShape(4, 3, 12))
    engine = Engine(target, drafter, config=EngineConfig(num_blocks=24, max_requests=3))
    rules = StopRules(20, stop_ids=())
    requests = [Request(f"r{i}", prompt, rules=rules) for i, prompt in enumerate((TEXT, TEXT[:1], [8, 8, 9]))]
    for id, tokens in finish(engine, requests).items():
        assert_solo(target, next(request for request in requests if request.id == id), tokens)


def test_sampling_through_a_tree_is_the_targets_own_distribution() -> None:
    """One real round with its acceptance enumerated: the first two tokens have the target's probabilities."""
    target = easy_target()
    drafter = DynamicTreeDrafter(Eagle3Drafter(DrafterWeights(make_drafter(target)), target), TreeShape(3, 4, 9))
    params, rules = SamplingParams(temperature=0.8, top_p=0.95), StopRules(20 - len(TEXT))
    request = Request("", TEXT, params, rules)
    engine = Engine(target, drafter, config=config_alone(target, request, draft_slots(drafter)))
    with torch.inference_mode():
        read_prompt(engine, request)
        step = engine.begin()
        (proposal,) = engine.draft(step)
        (rows,) = engine.score(step, [proposal]).rows
    first_V, deep = torch.zeros(97, dtype=torch.float64), 0.0
    for verdict, weight in enumerate_traces(lambda source: verify(proposal, rows, source)):
        path = verdict.path
        first_V[proposal.tokens[path[0]] if path else verdict.next_token] += weight
        deep += weight * (len(path) > 0)
    torch.testing.assert_close(first_V.float(), rows.row(0), atol=1e-6, rtol=1e-5)
    assert deep > 1e-3, "a tree that is never entered would prove nothing"


@pytest.mark.parametrize("gamma, depth", [(3, 3), (7, 6)])
def test_trees_are_as_deep_as_the_paper_s_if_trained_so_far(gamma: int, depth: int) -> None:
    target = toy_target()
    drafter = Eagle3Drafter(DrafterWeights(make_drafter(target, gamma=gamma)), target)
    assert drafter.with_trees(TreeSize(16)).shape == TreeShape(depth, 10, 16)
    assert drafter.with_trees(TreeSize(16, depth=8)).shape == TreeShape(8, 10, 16), "deeper, when asked for"
    assert drafter.with_trees(TreeSize(16, top_k=4)).shape == TreeShape(depth, 4, 16)
    with pytest.raises(ValueError, match="a tree of 7 nodes: with depth 2 and top_k 2 there are 6 at most"):
        drafter.with_trees(TreeSize(7, depth=2, top_k=2))


def test_a_tree_deeper_than_the_training_is_lossless() -> None:
    target = easy_target()
    inner = Eagle3Drafter(DrafterWeights(make_drafter(target, draft_vocab=4, gamma=2), torch.arange(4)), target)
    drafter = inner.with_trees(TreeSize(12, depth=5, top_k=2))
    rules = StopRules(30, stop_ids=())
    found = generate(target, TEXT, drafter, rules=rules)
    assert found.tokens == generate(target, TEXT, rules=rules).tokens
    session = drafter.new_session(8)
    drafter.extend([session], [TEXT[:5]], aux_of(5))
    assert drafter.propose([call_of(session, TEXT[5])])[0].depth > 2


def test_what_users_write_of_a_tree() -> None:
    for text, size in (
        ("60", TreeSize(60)),
        ("60,depth=8", TreeSize(60, 8)),
        ("60,depth=8,top_k=10", TreeSize(60, 8, 10)),
        ("16,top_k=4", TreeSize(16, None, 4)),
    ):
        assert TreeSize.parse(text) == size and str(size) == text
        assert size.setting == (60 if text == "60" else text)
    assert TreeSize.parse("60, top_k=4, depth=2") == TreeSize(60, 2, 4)
    for text in (
        "",
        "0",
        "-3",
        "six",
        "1.5",
        "6,8",
        "6,depth",
        "6,depth=0",
        "6,width=2",
        "6,depth=2,depth=3",
        "depth=2",
    ):
        with pytest.raises(ValueError, match=r"write NODES\[,depth=D\]\[,top_k=K\]"):
            TreeSize.parse(text)


def test_sizes_that_make_no_tree_are_refused() -> None:
    for name in ("depth", "top_k", "nodes"):
        with pytest.raises(ValueError, match=f"tree {name} 0"):
            TreeShape(**{name: 0})
