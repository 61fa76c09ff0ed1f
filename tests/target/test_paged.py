"""Paged keys and ragged forwards: every request as if it were alone, whatever its blocks and its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

import outrider.target.kernels as kernels
import outrider.target.paged as ragged
from outrider.decoding.engine import Engine
from outrider.decoding.scheduler import EngineConfig
from outrider.target.hf import ragged_attention
from outrider.target.kernels import kernels_available
from outrider.target.model import Target
from outrider.target.paged import PagedKV, RaggedStep, Span, in_pieces
from outrider.target.paged_attention import Reader, Tables
from tests.toys.ragged import BLOCK, BLOCKS, RAGGED_AUX_LAYERS, ragged_difference, run_alone, run_ragged
from tests.toys.targets import TOY_CONFIGS, toy_target

LEAN = ("llama", "qwen3")


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("family", TOY_CONFIGS)
def test_a_request_is_computed_as_if_it_were_alone(
    monkeypatch: pytest.MonkeyPatch, family: str, compiled: bool
) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "_compiled", lambda: None)
    difference = ragged_difference(toy_target(family))
    assert difference == 0.0 if family in LEAN else difference < 1e-5


def _shifted_write(monkeypatch: pytest.MonkeyPatch) -> None:
    true_init: Callable[..., None] = RaggedStep.__init__

    def init(self: RaggedStep, *args: Any) -> None:
        true_init(self, *args)
        self._slots_T = self._slots_T.clone()
        self._slots_T[-1] = (self._slots_T[-1] + 1) % (37 * BLOCK)

    monkeypatch.setattr(RaggedStep, "__init__", init)


def _shifted_view(monkeypatch: pytest.MonkeyPatch) -> None:
    true_first: Callable[..., int | None] = PagedKV.first_slot

    def first_slot(self: PagedKV, *args: Any) -> int | None:
        slot = true_first(self, *args)
        return slot and slot - 1

    monkeypatch.setattr(PagedKV, "first_slot", first_slot)


def _blocks_in_order_of_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    true_slots: Callable[..., Tensor] = PagedKV.slots
    monkeypatch.setattr(PagedKV, "slots", lambda self, blocks, *rest: true_slots(self, sorted(blocks), *rest))


def _gathered_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    true_context: Callable[..., Any] = ragged._context

    def context(*args: Any, **named: Any) -> Any:
        made = true_context(*args, **named)
        if isinstance(made.source, list):
            return made
        return ragged._Context(torch.cat([made.source[1:], made.source[-1:]]), made.mask_11QN)

    monkeypatch.setattr(ragged, "_context", context)


def _future_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    true_mask: Callable[..., Tensor] = ragged._mask

    def mask(span: Span, *args: Any, **named: Any) -> Tensor:
        made = true_mask(span, *args, **named)
        return made.masked_fill(made < 0, 0.0) if len(span.tokens) == 30 else made

    monkeypatch.setattr(ragged, "_mask", mask)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "mutation",
    [
        _shifted_write,
        _shifted_view,
        _blocks_in_order_of_ids,
        _gathered_one_late,
        _future_visible,
    ],
)
def test_a_wrong_slot_or_mask_is_seen(
    monkeypatch: pytest.MonkeyPatch, family: str, mutation: Callable[[pytest.MonkeyPatch], None]
) -> None:
    target = toy_target(family)
    alone = run_alone(target)
    mutation(monkeypatch)
    assert ragged_difference(target, alone=alone) > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_rows_that_miss_each_other_are_seen_where_attention_is_compiled(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    if not kernels_available(torch.float32, torch.device("cpu")):
        pytest.skip("no C compiler here")
    target = toy_target(family)
    alone = run_alone(target)
    true_tables: Callable[..., Tables] = kernels.tables

    def tables(readers: Sequence[Reader]) -> Tables:
        made = true_tables(readers)
        made.rows_T2[:, 1] = np.concatenate([1 << np.arange(len(reader.positions)) for reader in readers])
        return made

    monkeypatch.setattr(kernels, "tables", tables)
    assert ragged_difference(target, alone=alone) > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_block_of_a_neighbour_is_seen(family: str) -> None:
    """b's second block is also c's first: what one writes, the other reads."""
    leaking = {**BLOCKS, "b": [7, BLOCKS["c"][0], *BLOCKS["b"][2:]]}
    assert ragged_difference(toy_target(family), leaking) > 1e-3


@pytest.mark.parametrize(
    ("family", "dropped"), [("gemma2", "window"), ("gemma3_text", "window"), ("gemma2", "softcap")]
)
def test_a_window_or_soft_cap_that_is_ignored_is_seen(
    monkeypatch: pytest.MonkeyPatch, family: str, dropped: str
) -> None:
    true_attend: Callable[..., Tensor] = RaggedStep.attend

    def attend(self: RaggedStep, layer: int, **arguments: Any) -> Tensor:
        return true_attend(self, layer, **{**arguments, dropped: None})

    target = toy_target(family)
    target.config.attn_logit_softcapping = 1.0
    for layer in target.model.model.layers:
        layer.self_attn.attn_logit_softcapping = 1.0 if family == "gemma2" else None
    assert ragged_difference(target) < 1e-5
    monkeypatch.setattr(RaggedStep, "attend", attend)
    assert ragged_difference(target) > 1e-3


def test_sinks_take_probability_as_in_gpt_oss() -> None:
    """The formula is compared with transformers' own."""
    target = toy_target("qwen3_moe")
    kv = PagedKV(target, 4, BLOCK)
    spans = [Span([5, 6, 7], 0, [2, 3], 1), Span([8, 9], 0, [1], 1)]
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    module: Any = SimpleNamespace(layer_idx=1, num_key_value_groups=2, sinks=torch.randn(4), training=False)
    out, _ = ragged_attention(
        module, q, k, v, None, scaling=0.3, s_aux=module.sinks, ragged_step=RaggedStep(spans, kv), dropout=0.0
    )
    start = 0
    for length in (3, 2):
        rows = slice(start, start + length)
        causal = torch.full((length, length), -torch.inf).triu(1)[None, None]
        expected, _ = eager_attention_forward(module, q[:, :, rows], k[:, :, rows], v[:, :, rows], causal, 0.3)
        torch.testing.assert_close(out[:, rows], expected, atol=1e-6, rtol=1e-6)
        start += length


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_ordinary_forward_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    target, tokens = toy_target(family), torch.tensor([[5, 6, 7, 8]])
    implementation = target.config._attn_implementation
    before = target.forward(tokens, target.new_cache(4), RAGGED_AUX_LAYERS).hidden_BTD
    kv = PagedKV(target, 2, BLOCK)
    output = target.forward_ragged([Span([5, 6, 7, 8], 0, [1], 0)], kv)
    assert output.logits_NV is None and output.aux_TLD is None
    assert torch.equal(target.forward(tokens, target.new_cache(4), RAGGED_AUX_LAYERS).hidden_BTD, before)

    def fail(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(RaggedStep, "attend", fail)
    monkeypatch.setattr(RaggedStep, "whole", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        target.forward_ragged([Span([5], 0, [1], 1)], kv)
    assert target.config._attn_implementation == implementation
    assert torch.equal(target.forward(tokens, target.new_cache(4), RAGGED_AUX_LAYERS).hidden_BTD, before)


@pytest.mark.parametrize(
    "span", [Span([5, 6], 7, [0, 1], 0), Span([], 3, [0], 0), Span([5], 0, [0], 2)], ids=["too long", "empty", "rows"]
)
def test_a_span_that_contradicts_itself_is_a_bug_of_the_caller(span: Span) -> None:
    target = toy_target()
    with pytest.raises(AssertionError):
        target.forward_ragged([span], PagedKV(target, 4, BLOCK))


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("layer_types", ["conv", "full_attention"], "'llama'.*type conv"),
        ("rope_parameters", {"rope_type": "longrope", "rope_theta": 5000.0}, "'llama'.*longrope"),
        ("rope_parameters", {"full_attention": {"rope_type": "dynamic"}}, "'llama'.*dynamic"),
    ],
)
def test_models_whose_requests_cannot_be_decoded_together_are_refused(
    setting: str, value: object, message: str
) -> None:
    target = toy_target()
    changed = type(target.config)(**target.config.to_dict())
    object.__setattr__(changed, setting, value)
    target.config = changed
    with pytest.raises(ValueError, match=message):
        Engine(target, config=EngineConfig(2))


def test_bfloat16_pools_are_bfloat16() -> None:
    target = toy_target("gemma")
    target = Target(target.model.to(torch.bfloat16), None, "toy")
    kv = PagedKV(target, 4, BLOCK)
    assert kv.dtype == torch.bfloat16
    output = target.forward_ragged([Span([5, 6, 7], 0, [2], 1), Span([5], 0, [1], 1)], kv)
    assert output.logits_NV is not None and output.logits_NV.dtype == torch.bfloat16
    assert output.logits_NV.isfinite().all()


def test_smollm_is_computed_to_the_last_bit_as_alone(smollm: Target) -> None:
    alone, tokens = run_alone(smollm)
    for x, y in zip(alone, run_ragged(smollm, tokens, BLOCKS), strict=True):
        assert torch.equal(x, y)


def test_a_span_in_pieces_is_computed_as_in_one() -> None:
    """In one forward, each piece over those before it; the last rows of the span have the logits."""
    target, tokens, aux_layers = toy_target("qwen3"), [5 + i for i in range(23)], (0, 2)
    span, other = Span(tokens, 0, [3, 1, 2, 5, 4, 0], logits=6), Span([7, 8], 0, [6], logits=2)
    whole = target.forward_ragged([span, other], PagedKV(target, 8, BLOCK), aux_layers)
    pieces = in_pieces([span, other], 5)
    assert [len(piece.tokens) for piece in pieces] == [5, 5, 5, 5, 3, 2]
    assert [piece.logits for piece in pieces] == [0, 0, 0, 3, 3, 2]
    cut = target.forward_ragged(pieces, PagedKV(target, 8, BLOCK), aux_layers)
    torch.testing.assert_close((cut.logits_NV, cut.aux_TLD), (whole.logits_NV, whole.aux_TLD), atol=1e-5, rtol=0)
