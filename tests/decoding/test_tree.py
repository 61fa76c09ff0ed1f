"""Trees through real forwards: every node as if its path stood alone, and what stays as if it had been recomputed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.forward import tree_curve
from outrider.decoding.engine import Engine
from outrider.decoding.generate import acceptance, generate
from outrider.decoding.policies import FixedPolicy
from outrider.decoding.request import Output, Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import draft_slots
from outrider.drafters.draft import Draft
from outrider.evaluation.evaluate import compare_greedy
from outrider.sampling import PositionNoise, SamplingParams
from outrider.target.attention import Branches
from outrider.target.model import Target
from tests.toys.targets import TOY_DTYPES, toy_target
from tests.toys.trees import SelfTrees, check_nodes, check_ragged_trees, off, prompt_of, random_tree


def test_depths_and_ancestors() -> None:
    branches = Branches.of([-1, 0, 0, 1, 2])
    assert branches.depths_T.tolist() == [0, 1, 1, 2, 2]
    sees = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    assert [row.nonzero()[:, 0].tolist() for row in branches.sees_TT] == sees
    # Two positions back, itself included: row 4 sees its parent and itself, five slots apart from the cache or not.
    windowed = branches.visible(past=3, low=2, window=2)
    assert windowed[0].tolist() == [True, True, False, False, False, False]
    assert windowed[4].tolist() == [False, False, False, True, False, True]


@pytest.mark.parametrize(("family", "dtype"), TOY_DTYPES, ids=str)
@pytest.mark.parametrize("past", [1, 21])
@torch.inference_mode()
def test_every_node_is_scored_as_if_its_path_stood_alone(family: str, past: int, dtype: torch.dtype) -> None:
    check_nodes(toy_target(family, dtype=dtype), past)


@pytest.mark.parametrize(("family", "dtype"), TOY_DTYPES, ids=str)
@torch.inference_mode()
def test_trees_and_chains_of_many_requests_in_one_ragged_pass(family: str, dtype: torch.dtype) -> None:
    check_ragged_trees(toy_target(family, dtype=dtype))


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def test_a_tree_drafter_is_known_by_its_nodes(target: Target) -> None:
    drafter = SelfTrees(target)
    assert drafter.trees and draft_slots(drafter) == 9 and draft_slots(None) == 0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("policy", [FixedPolicy(), FixedPolicy(6)], ids=repr)
def test_greedy_output_equals_plain_decoding(family: str, policy: FixedPolicy) -> None:
    target = toy_target(family)
    prompt, rules = prompt_of(12), StopRules(30, stop_ids=())
    plain = generate(target, prompt, rules=rules)
    drafter = SelfTrees(target)
    fast = generate(target, prompt, drafter, rules=rules, policy=policy)
    assert compare_greedy(target, prompt, plain.tokens, fast.tokens) != "mismatch"
    assert len(fast.tokens) == 30 and sum(r.accepted for r in fast.rounds) >= 10 and drafter.moved > 0
    assert any(r.verified > r.reach > 1 for r in fast.rounds) and all(r.accepted <= r.reach for r in fast.rounds)
    if policy.length is not None:
        assert max(r.verified for r in fast.rounds) == policy.length


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("blocks", [200, 30], ids=["room", "preemption"])
def test_the_engine_serves_trees(target: Target, blocks: int, replaced: bool) -> None:
    config = EngineConfig(max_requests=5, token_budget=40, block_size=4, num_blocks=blocks)
    drafter = SelfTrees(target, replaced)
    engine = Engine(target, drafter, config=config)
    requests = [Request(str(i), prompt_of(3 + 7 * i, i), rules=StopRules(8 + 4 * i, stop_ids=())) for i in range(5)]
    for request in requests:
        engine.submit(request)
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    accepted = 0
    while not engine.idle:
        for output in engine.step():
            found[output.id] += output.tokens
        assert engine.last is not None and engine.last.tokens <= config.token_budget
        accepted += engine.last.accepted
    assert accepted > 20 and drafter.moved > 0 and engine.scheduler.allocator.used == 0
    for request in requests:
        plain = generate(target, request.prompt, None, request.params, request.rules).tokens
        assert len(found[request.id]) == request.rules.max_new_tokens
        assert compare_greedy(target, request.prompt, plain, found[request.id]) != "mismatch"


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_coupled_tokens_depend_on_the_seed_alone(target: Target, penalty: float) -> None:
    """The child that the target's own noise picks is the one that is accepted."""
    drafter, rules = SelfTrees(target), StopRules(16, stop_ids=())
    accepted = 0
    for seed in range(3):
        params = SamplingParams(0.8, repetition_penalty=penalty, seed=seed, coupled=True)
        plain, fast = (generate(target, prompt_of(9), chosen, params, rules) for chosen in (None, drafter))
        assert plain.tokens == fast.tokens
        accepted += sum(r.accepted for r in fast.rounds)
    assert accepted >= 10


def test_the_ranking_of_a_race_begins_with_its_pick() -> None:
    probs = torch.rand(50, generator=torch.Generator().manual_seed(0))
    probs[10:] = 0
    noise = PositionNoise(3, 50)
    for position in range(20):
        order = noise.ranking(probs, position, 12)
        assert order[0] == noise.pick(probs, position) and sorted(order) == list(range(10))
        ids = torch.tensor([4, 2, 7])
        assert noise.ranking(probs[ids], position, 1, ids) == [noise.pick(probs[ids], position, ids)]


def test_sampling_is_reproducible_and_uses_the_whole_tree(target: Target) -> None:
    params, rules = SamplingParams(1.0, seed=4), StopRules(30, stop_ids=())
    first, second = (generate(target, prompt_of(9), SelfTrees(target), params, rules) for _ in range(2))
    assert first.tokens == second.tokens
    assert len({r.accepted for r in first.rounds}) >= 3


def test_acceptance_is_counted_by_depth() -> None:
    def stats(verified: int, depth: int, accepted: int) -> Output:
        tokens = [0] * (accepted + 1)
        return Output("", tokens, "", None, proposed=9, verified=verified, accepted=accepted, reach=depth)

    tau, conditional, histogram = acceptance([stats(9, 3, 3), stats(9, 3, 1), stats(4, 1, 1), stats(5, 2, 0)], 4)
    assert tau == 9 / 4 and histogram == [1, 2, 0, 1, 0]
    assert conditional == [3 / 4, 1 / 2, 1.0, None]


def test_the_shape_of_a_tree() -> None:
    tree = Draft([5, 6, 7, 9, 7], [-1, -1, 0, 0, 1])
    assert tree.depths == [1, 1, 2, 2, 2]
    assert tree.children(0) == [2, 3] and tree.path(4) == [1, 4]


@torch.inference_mode()
def test_smollm_scores_a_tree_of_sixty_nodes_in_one_pass(smollm: Target) -> None:
    assert smollm.tokenizer is not None
    prompt = smollm.tokenizer("The quick brown fox jumps over the lazy dog, and then")["input_ids"]
    proposal = random_tree(60, smollm.vocab_size)
    cache = smollm.new_cache(len(prompt) + 70)
    smollm.forward(torch.tensor([prompt[:-1]]), cache, logits=0)
    rows = torch.tensor([[prompt[-1], *proposal.tokens]])
    logits = smollm.forward(rows, cache, logits=None, parents=proposal.row_parents).logits_BTV
    assert logits is not None
    for row in (0, 1, 17, 42, 60):
        tokens = torch.tensor([[*prompt, *proposal.tokens_before(row)]])
        own = smollm.forward(tokens, smollm.new_cache(tokens.shape[1])).logits_BTV
        assert own is not None and off(logits[0, row], own[0, 0]) <= 1e-4
    path = proposal.path(59)
    cache.keep_path(len(prompt) - 1, [0, *(node + 1 for node in path)])
    after = smollm.forward(torch.tensor([[11]]), cache).logits_BTV
    tokens = torch.tensor([[*prompt, *(proposal.tokens[i] for i in path), 11]])
    own = smollm.forward(tokens, smollm.new_cache(tokens.shape[1])).logits_BTV
    assert after is not None and own is not None and off(after[0, 0], own[0, 0]) <= 1e-4


def test_trees_are_timed_beside_chains(target: Target) -> None:
    points = tree_curve(target, context=8, repeats=2)
    assert [point.nodes for point in points] == [7, 16, 60]
    assert all(min(*point.tree, *point.chain, *point.keep) > 0 for point in points)
