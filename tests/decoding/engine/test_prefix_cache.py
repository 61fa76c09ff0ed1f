"""The prefix cache: requests that hit it draft and say what they would without; blocks are shared, kept and evicted.

That outcomes keep their distribution is enumerated in tests/proof/test_proof_engine.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.checkpoints.registry import methods, tree_methods
from outrider.decoding.engine import Engine
from outrider.decoding.prefix_cache import add_keys
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import BlockAllocator, EngineConfig
from outrider.drafters.base import DraftCalibration, Drafter, DrafterWeights
from outrider.drafters.draft import TreeSize
from outrider.drafters.language_model import StandaloneDrafter
from outrider.drafters.ngram import HybridDrafter, NgramConfig, NgramDrafter
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.toys.drafters import small_model
from tests.toys.engine import assert_solo, finish, prompts, watch_preemptions
from tests.toys.published import PUBLISHED, published_target
from tests.toys.targets import randomise, toy_target, with_mask_token

CONFIG = EngineConfig(max_requests=4, token_budget=64, block_size=4, num_blocks=120, prefix_cache=True)


def served(target: Target, name: str, tree: TreeSize | None = None) -> Drafter:
    """A random drafter of a method."""
    method = next(method for method in methods() if method.name == name)
    layers = {"num_aux_layers": 2} if "num_aux_layers" in method.section.model_fields else {}
    if name == "mtp":
        layers = {"num_modules": 2, "gamma": 4}
    module = method.module(method.config.from_target(with_mask_token(target), **layers))
    randomise(module)
    accuracy = [[0.4, 0.2, 0.1]] * module.config.gamma
    drafter = DrafterWeights(module.eval()).serve(target, DraftCalibration(accuracy=accuracy))
    return drafter if tree is None else drafter.with_trees(tree)


DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    **{method.name: lambda target, name=method.name: served(target, name) for method in methods()},  # type: ignore[misc]
    **{
        f"{name} tree": lambda target, name=name: served(target, name, TreeSize(8))  # type: ignore[misc]
        for name in tree_methods()
    },
    "lm": lambda target: StandaloneDrafter(small_model(), target, 4),
    "ngram": lambda target: NgramDrafter(NgramConfig(4)),
    "hybrid": lambda target: HybridDrafter(served(target, "dspark"), NgramConfig(4)),
}


@dataclass(frozen=True)
class Turn:
    """What a request was answered, what was drafted for it, and how much of its prompt was cached."""

    tokens: list[int]
    drafts: list[list[tuple[int, int, float]]]
    cached: int


def ask(engine: Engine, request: Request) -> Turn:
    engine.submit(replace(request, trace=True))
    tokens, drafts, cached = list[int](), [], 0
    while not engine.idle:
        for output in engine.step():
            assert output.error is None and output.trace is not None
            tokens += output.tokens
            drafts.append([(one.token, one.parent, round(one.p_draft, 4)) for one in output.trace.drafts])
            cached = output.cached_tokens
    return Turn(tokens, drafts, cached)


def chat(engine: Engine, params: SamplingParams, turns: int = 2) -> list[Turn]:
    """Each prompt is all that was said before, and a few tokens more."""
    (history,), found = prompts(1, seed=3, longest=40), list[Turn]()
    for turn in range(turns):
        history = [*history, *range(20 + turn, 29 + turn)]
        found.append(ask(engine, Request(str(turn), history, params, StopRules(15, stop_ids=()))))
        history = [*history, *found[-1].tokens]
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_and_tokens_of_hits_are_those_without(target: Target, name: str, temperature: float) -> None:
    params = SamplingParams(temperature, seed=5)
    cached = chat(Engine(target, DRAFTERS[name](target), config=CONFIG), params)
    plain = chat(Engine(target, DRAFTERS[name](target), config=replace(CONFIG, prefix_cache=False)), params)
    assert [replace(turn, cached=0) for turn in cached] == plain
    assert cached[0].cached == 0 and all(turn.cached >= 24 for turn in cached[1:])
    assert any(draft for turn in cached[1:] for draft in turn.drafts)


@pytest.mark.parametrize("name", PUBLISHED)
def test_targets_whose_blocks_hold_a_prefix_share_it_and_others_refuse(name: str) -> None:
    """Windows are masks over blocks that hold everything; a recurrent state is not in them."""
    target = published_target(name)
    if target.new_states() is not None:
        with pytest.raises(ValueError, match="state from token to token"):
            Engine(target, config=CONFIG)
        return
    params = SamplingParams(repetition_penalty=1.2)
    cached, plain = (chat(Engine(target, config=replace(CONFIG, prefix_cache=on)), params) for on in (True, False))
    assert [turn.tokens for turn in cached] == [turn.tokens for turn in plain] and cached[1].cached >= 24


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_keys_that_depend_on_the_length_of_a_text_are_not_shared(rope: str) -> None:
    target = toy_target()
    target.config = type(target.config)(**target.config.to_dict())
    object.__setattr__(target.config, "rope_parameters", {"rope_type": rope, "rope_theta": 5000.0})
    with pytest.raises(ValueError, match="length"):
        Engine(target, config=replace(CONFIG, max_requests=1))


def test_a_whole_prompt_that_is_cached_is_read_again_from_its_last_block_on(target: Target) -> None:
    """The logits behind the anchor have to be computed, so its block is not taken from the cache."""
    engine = Engine(target, config=CONFIG)
    prompt = list(range(10, 42))
    first, again = (ask(engine, Request(id, prompt, rules=StopRules(6, stop_ids=()))) for id in "ab")
    assert (first.cached, again.cached) == (0, 28) and first.tokens == again.tokens


def test_a_long_cached_prefix_is_given_to_the_drafter_in_parts(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more rows at once than a prompt has in a step; what is drafted is the same."""
    prompt, rules, drafter = [4 + i % 90 for i in range(180)], StopRules(8, stop_ids=()), served(target, "dspark")
    engines = [Engine(target, drafter, config=replace(CONFIG, prefix_cache=on)) for on in (True, False)]
    asked = Request("a", prompt, rules=rules)
    ask(engines[0], asked)
    plain, rows, extend = ask(engines[1], asked), list[int](), drafter.extend

    def watched(sessions: Any, tokens: Any, aux_TLD: Any) -> None:
        rows.append(sum(map(len, tokens)))
        extend(sessions, tokens, aux_TLD)

    monkeypatch.setattr(drafter, "extend", watched)
    assert ask(engines[0], asked) == replace(plain, cached=176)
    assert rows[:3] == [64, 64, 48 + 4]


def test_requests_share_prefixes_with_those_of_their_salt(target: Target) -> None:
    engine, prompt = Engine(target, config=CONFIG), list(range(10, 42))
    salts = ["", "mine", "", "mine", "yours"]
    rules = StopRules(6, stop_ids=())
    turns = [ask(engine, Request(str(i), prompt, rules=rules, cache_salt=salt)) for i, salt in enumerate(salts)]
    assert [turn.cached for turn in turns] == [0, 0, 28, 28, 0]


def test_a_key_stands_for_all_tokens_before() -> None:
    def keys(tokens: list[int], salt: str = "") -> list[bytes]:
        found: list[bytes] = []
        add_keys(found, tokens[:5], 2, salt)
        add_keys(found, tokens, 2, salt)  # as a text grows
        return found

    one = keys([1, 2, 3, 4, 5, 6, 7])
    assert len(one) == 3 and one == keys([1, 2, 3, 4, 5, 6, 9])
    others = [keys([1, 2, 3, 9, 5, 6]), keys([9, 2, 3, 4, 5, 6]), keys([1, 2, 3, 4, 5, 6], "salt")]
    assert [sum(a == b for a, b in zip(one, other, strict=True)) for other in others] == [1, 0, 0]


def test_a_pool_too_small_for_all_prefixes_evicts_and_preempts(target: Target) -> None:
    """Requests that begin alike in company, in so few blocks that cached ones are taken and running ones give way."""
    common = prompts(1, seed=5, longest=40)[0][:16]
    chooser = random.Random(1)
    requests = [
        Request(str(i), [*common[: chooser.choice([4, 9, 16])], *prompt], rules=StopRules(14, stop_ids=()))
        for i, prompt in enumerate(prompts(24, seed=2, longest=12))
    ]
    drafter = served(target, "dspark")
    engine = Engine(target, drafter, config=replace(CONFIG, num_blocks=26))
    preempted, allocator, shared = watch_preemptions(engine), engine.scheduler.allocator, 0

    def look() -> None:
        nonlocal shared
        held = [block for progress in engine.scheduler.running.values() for block in progress.blocks]
        assert len(set(held)) == allocator.used and not set(held) & set(allocator.prefixes.idle)
        shared += len(held) > len(set(held))

    found = finish(engine, requests, look)
    assert preempted and shared and allocator.used == 0
    for request in requests:
        assert_solo(target, request, found[request.id])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 6)), max_size=60), st.integers(8, 20))
@settings(max_examples=200, deadline=None)
def test_the_books_of_shared_blocks_balance(actions: list[tuple[int, int, int]], total: int) -> None:
    """Texts 0 to 3 come and go: a block that is held is never handed out, and a kept one holds what its key says."""
    allocator = BlockAllocator(total)
    held: dict[int, list[int]] = {}
    content: dict[int, bytes] = {}
    for owner, text, count in actions:
        if owner in held:
            allocator.release(held.pop(owner))
        else:
            keys = [bytes([text, place]) for place in range(count)]
            blocks = allocator.share(keys)
            assert [content[block] for block in blocks] == keys[: len(blocks)]
            if count - len(blocks) > allocator.available:
                allocator.release(blocks)
                continue
            fresh = allocator.allocate(count - len(blocks), blocks[-1] if blocks else None)
            assert not set(fresh) & {block for other in held.values() for block in other}
            held[owner] = blocks + fresh
            for block, key in zip(held[owner], keys, strict=True):
                content[block] = key
                allocator.prefixes.keep(block, key)
        used = {block for blocks in held.values() for block in blocks}
        assert allocator.used == len(used) and not used & set(allocator.prefixes.idle)
        assert len(allocator.prefixes.idle) <= allocator.available


def test_the_block_used_longest_ago_goes_first_and_the_end_of_a_prefix_before_its_beginning() -> None:
    allocator = BlockAllocator(6)
    keys = [[bytes([text, place]) for place in range(3)] for text in range(2)]
    texts = [allocator.allocate(3) for _ in keys]
    for blocks, own in zip(texts, keys, strict=True):
        for block, key in zip(blocks, own, strict=True):
            allocator.prefixes.keep(block, key)
        allocator.release(blocks)
    allocator.release(allocator.share(keys[0]))  # used again
    assert allocator.allocate(2) and [len(allocator.prefixes.find(own)) for own in keys] == [3, 1]


def test_hidden_states_of_cached_blocks_count_in_the_pool(target: Target) -> None:
    with_aux, without = (Engine(target, served(target, "dspark"), config=one) for one in (CONFIG, EngineConfig()))
    more = with_aux.kv.block_bytes * 16 // CONFIG.block_size - without.kv.block_bytes
    assert more == 16 * 2 * target.hidden_size * torch.float32.itemsize
