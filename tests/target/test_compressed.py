"""DeepSeek-V4 as a target: long texts, rollbacks across the windows that it compresses, and what its streams mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.drafters.base import Drafter
from outrider.drafters.eagle3 import Eagle3Config
from outrider.drafters.hydra import HydraConfig
from outrider.drafters.medusa import MedusaConfig
from outrider.drafters.mtp import MTPConfig
from outrider.sampling import SamplingParams
from outrider.target.cache import KVCache
from outrider.target.compressed import CompressedLayer, Compressor, Tail
from outrider.target.model import Target
from tests.toys.engine import toy_drafter
from tests.toys.oracle import Oracle
from tests.toys.published import published_target
from tests.toys.targets import with_mask_token
from tests.toys.trees import prompt_of

LONG = prompt_of(61)
SPARSE, HEAVY = 4, 8  # tokens of an entry in the toy's layers; its attention window is 8, its indexer picks 3 entries
RULES = StopRules(40, stop_ids=())


@pytest.fixture(scope="module")
def target() -> Target:
    return published_target("deepseek_v4")


def test_long_greedy_text_is_plain_decodings_and_that_of_transformers_cache(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """15 entries of one kind and 7 of the other at first, 25 and 12 at the end; rounds go back over borders."""
    params = SamplingParams(repetition_penalty=3.0)
    plain = generate(target, LONG, params=params, rules=RULES).tokens
    prompt, chosen = torch.tensor([LONG]), {"do_sample": False, "eos_token_id": -1, "repetition_penalty": 3.0}
    theirs = target.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, **chosen)
    assert plain == theirs[0, len(LONG) :].tolist() and len(set(plain)) > 30
    crossed = dict.fromkeys((SPARSE, HEAVY), 0)
    rollback = CompressedLayer.rollback

    def watched(self: CompressedLayer, length: int, cache: Cache) -> None:
        for rate in crossed:
            crossed[rate] += self.length // rate > length // rate
        rollback(self, length, cache)

    monkeypatch.setattr(CompressedLayer, "rollback", watched)
    drafters: list[Drafter] = [Oracle(target, [*LONG, *plain, *plain], 0.3), toy_drafter(target)]
    for drafter in drafters:
        assert generate(target, LONG, drafter, params, RULES).tokens == plain
    assert min(crossed.values()) > 10


def test_long_sampled_text_is_that_of_plain_decoding(target: Target) -> None:
    params = SamplingParams(1.0, seed=7, coupled=True)
    plain = generate(target, LONG, params=params, rules=RULES).tokens
    fast = generate(target, LONG, Oracle(target, [*LONG, *plain], 0.3), params, RULES)
    assert fast.tokens == plain and len(fast.rounds) < 30


# ----------------------------------------------------------------------------
# Rollback.
# ----------------------------------------------------------------------------


def after_rollback(target: Target, past: int, kept: int) -> Tensor:
    """Logits of 9 more tokens, in two forwards, behind `past` tokens and `kept` of a block of 10."""
    cache, block = target.new_cache(80), prompt_of(10, 1)
    target.forward(torch.tensor([prompt_of(past)]), cache)
    target.forward(torch.tensor([block]), cache)
    cache.rollback(past + kept)
    more = prompt_of(9, 2)
    return torch.cat([logits_of(target, part, cache) for part in (more[:4], more[4:])])


def logits_of(target: Target, tokens: list[int], cache: KVCache | None = None) -> Tensor:
    found = target.forward(torch.tensor([tokens]), cache or target.new_cache(0), logits=None).logits_BTV
    assert found is not None
    return found[0]


def off(target: Target, past: int, rows: Iterable[int] = range(11)) -> float:
    """The largest difference to a fresh forward over rollbacks to these rows, relative to the largest logit."""
    worst = 0.0
    for kept in rows:
        found = after_rollback(target, past, kept)
        fresh = logits_of(target, [*prompt_of(past), *prompt_of(10, 1)[:kept], *prompt_of(9, 2)])[-9:]
        worst = max(worst, ((found - fresh).abs().max() / fresh.abs().max()).item())
    return worst


@pytest.mark.parametrize("past", [1, 4, 21, 39])
def test_logits_after_a_rollback_are_those_of_a_fresh_forward(target: Target, past: int) -> None:
    """Before the first window closes, at borders of windows, and within them; a block closes two or three."""
    assert off(target, past) < 1e-5


def test_a_rejected_block_leaves_no_bit(target: Target) -> None:
    """Rows before it are kept as they were computed."""
    with_block, without = target.new_cache(0), target.new_cache(0)
    for cache in (with_block, without):
        target.forward(torch.tensor([LONG]), cache)
    target.forward(torch.tensor([prompt_of(10, 1)]), with_block)
    with_block.rollback(61)
    ours, expected = (logits_of(target, prompt_of(7, 2), cache) for cache in (with_block, without))
    assert torch.equal(ours, expected)


def _without(*names: str) -> Callable[[Compressor], tuple[Tail, ...]]:
    """A compressor some of whose tails do not go back."""
    kept = [name for name in ("kv", "gate", "half_kv", "half_gate", "entries") if name not in names]
    return lambda self: tuple(getattr(self, name) for name in kept)


@pytest.mark.parametrize("names", [("kv", "gate"), ("half_kv",), ("half_gate",), ("entries",)])
def test_what_does_not_go_back_is_seen(target: Target, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compressor, "tails", property(_without(*names)))
    try:
        assert off(target, 21, (1, 2, 5)) > 1e-3
    except RuntimeError as error:  # rows that should be gone do not fit
        assert "size" in str(error) or "shape" in str(error)


def test_going_back_further_than_a_forward_is_an_error(target: Target) -> None:
    cache = target.new_cache(0)
    target.forward(torch.tensor([LONG]), cache)
    target.forward(torch.tensor([[5, 6, 7]]), cache)
    cache.rollback(62)
    cache.rollback(61)
    with pytest.raises(AssertionError, match="last forward"):
        cache.rollback(60)


def test_sequences_of_a_batch_are_those_alone(target: Target) -> None:
    batch = torch.tensor([prompt_of(29, seed) for seed in range(3)])
    cache = target.new_cache(0)
    parts = [target.forward(part, cache, logits=None).logits_BTV for part in batch.split([11, 1, 17], dim=1)]
    for row, tokens in enumerate(batch.tolist()):
        together = torch.cat([part[row] for part in parts if part is not None])
        torch.testing.assert_close(together, logits_of(target, tokens), atol=1e-4, rtol=1e-4)


# ----------------------------------------------------------------------------
# What else is its own.
# ----------------------------------------------------------------------------


def test_every_kind_of_entry_and_the_window_matter(target: Target) -> None:
    """What is compared above would miss a layer that reads nothing of them."""
    torch.manual_seed(0)
    before = logits_of(target, LONG)
    for layer in target.decoder.layers:
        attention = layer.self_attn
        parts = [attention.kv_proj]
        if attention.compressor is not None:
            parts.append(attention.compressor.kv_proj)
            if hasattr(attention.compressor, "indexer"):
                parts.append(attention.compressor.indexer.kv_proj)
        for part in parts:
            weight = part.weight.clone()
            with torch.no_grad():
                part.weight.copy_(torch.randn_like(weight) * weight.std())
                changed = (logits_of(target, LONG) - before)[-1].abs().max()
                part.weight.copy_(weight)
            assert changed > 1e-3, (attention.layer_type, part)
    assert torch.equal(logits_of(target, LONG), before)


@pytest.mark.parametrize("method", [MTPConfig, MedusaConfig, HydraConfig])
def test_methods_that_read_the_normed_hidden_state_are_refused(target: Target, method: Any) -> None:
    with pytest.raises(ValueError, match=r"after the final norm, and toy-deepseek_v4 gives the mean.*dspark_v4"):
        method.from_target(with_mask_token(target))


def test_other_methods_have_its_shapes(target: Target) -> None:
    config = Eagle3Config.from_target(with_mask_token(target))
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta, config.rope_scaling) == (12, 1, 777.0, None)


def test_a_block_counts_what_its_tokens_add_to_the_states(target: Target) -> None:
    """Two layers have 12 and 6 numbers for 4 tokens each, two have 12 for 8."""
    assert target.new_kv(3, 16).block_bytes == 4 * (2 * (12 + 6) * 16 // 4 + 2 * 12 * 16 // 8)
