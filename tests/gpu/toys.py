"""A deep target on a GPU, simulated or real, its drafter, requests to decode there, and what a step may cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention
from transformers import AutoModelForCausalLM, Qwen3Config

import outrider.drafters.flex as flex_module
import outrider.drafters.fused_loss as fused_loss
import outrider.training.parallel as parallel
from outrider.decoding.engine import Engine
from outrider.decoding.request import Request, StopRules
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import BlockDrafter
from outrider.drafters.dspark import DSpark, DSparkConfig
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.gpu.simulated import SimulatedDevice

VOCABULARY, GAMMA = 512, 7
MOST_LAUNCHES = {"plain": 750, "dspark": 1050}
MOST_GRAPHED = {"plain": 20, "dspark": 80}  # a replayed graph is one
MOST_SYNCS = {"greedy": 3, "sampled": 5}
SAMPLED = {
    "plain": SamplingParams(temperature=1.0, seed=1),
    "nucleus": SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01, top_k=40, seed=1),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.1, seed=1),
    "coupled": SamplingParams(temperature=1.0, coupled=True, seed=1),
}


def deep_target(layers: int = 36) -> Target:
    """A random Qwen3 in bfloat16, on the device."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        eos_token_id=1,
        bos_token_id=2,
        pad_token_id=0,
    )
    return Target(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda"), None, "deep")


def dspark(target: Target, layers: int = 5) -> BlockDrafter:
    """A random DSpark of half the vocabulary, five aux layers and a sequential head that says something."""
    last = target.num_layers - 3
    config = DSparkConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY // 2,
        target_layer_ids=tuple(i * last // 4 for i in range(5)) if last >= 4 else (0, 1, 2),
        num_target_layers=target.num_layers,
        mask_token_id=3,
        block_size=GAMMA,
        markov_rank=8,
    )
    module = DSpark(config).to("cuda")
    assert module.markov_head is not None
    torch.nn.init.normal_(module.markov_head.markov_w2.weight, std=0.5)
    ids_Vd = 2 * torch.arange(VOCABULARY // 2, device="cuda")
    return BlockDrafter(DrafterWeights(module, ids_Vd), target)


def decoding(engine: Engine, requests: int, params: SamplingParams, prompt: int = 30) -> None:
    """Submit requests and step until all of them decode."""
    for number in range(requests):
        tokens = torch.randint(4, VOCABULARY, (prompt,), generator=torch.Generator().manual_seed(number)).tolist()
        engine.submit(Request(str(number), tokens, params, StopRules(200, stop_ids=())))
    while engine.last is None or engine.last.requests < requests or engine.last.prefill_tokens:
        engine.step()


def simulate_kernels(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's compiled kernel and Triton's as one launch each, computed densely and by the torch version.

    Draft layers, which are compiled on a GPU, run operation by operation.
    """
    reduce_rows = fused_loss.reduce_rows

    def flex(queries: Tensor, keys: Tensor, values: Tensor, block_mask: Any, enable_gqa: bool) -> Tensor:
        zero, rows, slots = (torch.arange(count, device="cuda") for count in (1, queries.shape[2], keys.shape[2]))
        with device.as_one("flex_attention"):
            visible = block_mask.mask_mod(zero, zero, rows[:, None], slots)
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, enable_gqa=enable_gqa)

    def reduce(*args: Any) -> Any:
        with device.as_one("reduce_rows_triton"):
            return reduce_rows(*args)

    def transposed(*args: Any) -> Any:  # a vmap in it hides from C++ that its indices are on the device
        with device.as_one("transposed tiles"):
            return transpose_ordered(*args)

    monkeypatch.setattr(flex_module, "_flex_kernel", lambda _: flex)
    monkeypatch.setattr(parallel, "compiled", lambda function: function)
    transpose_ordered = flex_attention._transpose_ordered
    monkeypatch.setattr(flex_attention, "_transpose_ordered", transposed)
    monkeypatch.setattr(fused_loss, "row_reducer", lambda logits_CV: reduce if logits_CV.is_cuda else reduce_rows)
