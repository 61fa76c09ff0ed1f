"""DeepSeek-V4's DSpark: the tensors under `mtp.` in the target's own checkpoint, `dspark_...` in its config.json.

    mtp.{i}.attn.*, attn_norm, ffn_norm, ffn.gate, ffn.shared_experts.w{1,2,3}     layer i, names our own
    mtp.{i}.ffn.experts.{e}.w{1,2,3}.weight                                        one tensor of all experts here
    mtp.{i}.hc_{attn,ffn}_{fn,base,scale}                                          hc_attn.fn, ...
    mtp.0.main_proj, main_norm                                                     fc, hidden_norm
    mtp.{last}.norm, hc_head_{fn,base,scale}, markov_head.*, confidence_head.proj  the heads; the last has no bias

It is read and not written: there is no such checkpoint without its target. A `scale` beside a `weight` is of blocks:

    FP8  float8_e4m3fn [out, in], a scale for each block of `quantization_config.weight_block_size`
    FP4  int8 [out, in / 2], two e2m1 numbers a byte, the low half first; a scale for every 32 numbers of a row

Scales are float8_e8m0fnu (or their bytes) or float32. What is read is bfloat16, which holds products with powers of two
exactly, or float32. Experts are not trained in these formats here: drafts are those of the unrounded activations.

Source: vLLM 0.32 (models/deepseek_v4/nvidia/dspark.py, quant_config.py) and transformers 5.23
(integrations/finegrained_fp8.py). The published tensors were not at hand. DeepSeek-V4.1 has other names, experts of its
own number and connections that read one sublayer earlier; it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoints.dialects.base import (
    LARGEST_VOCABULARY,
    LONGEST_CONTEXT,
    MOST_DRAFTS,
    ExportedCheckpoint,
    Fields,
    Source,
    TargetFacts,
    module_of,
)
from outrider.drafters.base import DrafterWeights
from outrider.drafters.deepseek_v4 import DSparkV4Config
from outrider.utils.files import check_finite
from outrider.utils.measure import dtype_name

_TENSOR = re.compile(r"mtp\.(\d+)\.(.+)")
_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.(w[123])\.weight")
_CONNECTION = re.compile(r"hc_(attn|ffn|head)_(fn|base|scale)")
_OF_THE_MODEL = {"main_proj.weight": "fc.weight", "main_norm.weight": "hidden_norm.weight"}
_HEADS = ("norm.", "markov_head.", "confidence_head.")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class DeepSeekV4:
    """DSpark inside a DeepSeek-V4 checkpoint."""

    name = "DeepSeek-V4"
    spelling = "DeepseekV4ForCausalLM"
    methods: tuple[str, ...] = (DSparkV4Config.algorithm,)
    prefix = "mtp."

    def reads(self, raw: Mapping[str, Any]) -> bool:
        """A target without DSpark, whose `mtp.` is another module, is no drafter."""
        named = self.spelling in (raw.get("architectures") or []) and "dspark_block_size" in raw
        return named or raw.get("model_type") == "deepseek_v41"

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        if raw.get("model_type") == "deepseek_v41":
            raise ValueError(f"{source.where}: DSpark of DeepSeek-V4.1 is not read, only that of DeepSeek-V4.")
        fields = Fields(raw, source.where, self.name)
        for name, wanted in (("hidden_act", "silu"), ("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc")):
            if fields.text(name, wanted) != wanted:
                raise fields.refuse(name, f"{wanted!r}: draft layers have no other here")
        for name, expected in (("norm_topk_prob", True), ("attention_bias", False)):
            if fields.flag(name, expected) != expected:
                raise fields.refuse(name, f"{str(expected).lower()}: draft layers are not otherwise here")
        if fields.integer("n_shared_experts", default=1) != 1:
            raise fields.refuse("n_shared_experts", "1")
        found = _renamed(dequantised(tensors, fields, source))
        layers = 1 + max((int(name.split(".")[1]) for name in found if name.startswith("layers.")), default=-1)
        if not layers:
            raise ValueError(f"{source.where}: no tensors mtp.0.* beside it, where DSpark's draft layers are.")
        confidence = "confidence_head.proj.weight" in found
        if confidence:
            found["confidence_head.proj.bias"] = torch.zeros(1)
        config = DSparkV4Config(**_sizes(fields), num_hidden_layers=layers, enable_confidence_head=confidence)
        return DrafterWeights(module_of(config, found, source))

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        raise ValueError(
            f"the dialect {self.name} is read only: its tensors are part of the target's checkpoint. Leave the drafter "
            "in Outrider's."
        )


def _sizes(fields: Fields) -> dict[str, Any]:
    """The arguments of the config that config.json states."""
    head_dim, vocab = fields.integer("head_dim"), fields.integer("vocab_size", high=LARGEST_VOCABULARY)
    depth = fields.integer("num_hidden_layers")
    partial = int(head_dim * fields.number("partial_rotary_factor")) if "partial_rotary_factor" in fields else 0
    rotated = {"default": partial} if partial else {}
    main = fields.section("rope_parameters", {}).section("main", {})
    return {
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("moe_intermediate_size"),
        "num_attention_heads": fields.integer("num_attention_heads"),
        "num_key_value_heads": fields.integer("num_key_value_heads", default=1),
        "head_dim": head_dim,
        "vocab_size": vocab,
        "draft_vocab_size": fields.integer("draft_vocab_size", high=LARGEST_VOCABULARY, default=vocab),
        "max_position_embeddings": fields.integer("max_position_embeddings", high=LONGEST_CONTEXT),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope_theta": main.number("rope_theta") if "rope_theta" in main else fields.number("rope_theta", 10000.0),
        "num_target_layers": depth,
        "target_layer_ids": fields.integers("dspark_target_layer_ids", low=-1, high=depth - 1),
        "mask_token_id": fields.integer("dspark_noise_token_id", low=0, high=vocab - 1),
        "block_size": fields.integer("dspark_block_size", high=MOST_DRAFTS),
        "markov_rank": fields.integer("dspark_markov_rank"),
        "sliding_window": fields.integer("sliding_window", high=LONGEST_CONTEXT),
        "q_lora_rank": fields.integer("q_lora_rank"),
        "qk_rope_head_dim": fields.integer("qk_rope_head_dim", **rotated),
        "o_groups": fields.integer("o_groups"),
        "o_lora_rank": fields.integer("o_lora_rank"),
        "n_routed_experts": fields.integer("n_routed_experts"),
        "num_experts_per_tok": fields.integer("num_experts_per_tok"),
        "routed_scaling_factor": fields.number("routed_scaling_factor"),
        "swiglu_limit": fields.number("swiglu_limit"),
        "hc_mult": fields.integer("hc_mult"),
        "hc_sinkhorn_iters": fields.integer("hc_sinkhorn_iters"),
        "hc_eps": fields.number("hc_eps"),
    }


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under our names; a name that is not theirs stays as it is, for `module_of` to refuse."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        stage, rest = (match[1], match[2]) if match else ("", name)
        expert, connection = _EXPERT.fullmatch(rest), _CONNECTION.fullmatch(rest)
        if match is None or rest in _OF_THE_MODEL or rest.startswith(_HEADS):
            ours = _OF_THE_MODEL.get(rest, rest)
        elif expert:
            experts.setdefault(f"layers.{stage}.ffn.experts.{expert[2]}", {})[int(expert[1])] = tensor
            continue
        elif connection:
            own = f"hc_{connection[1]}.{connection[2]}"
            ours = own if connection[1] == "head" else f"layers.{stage}.{own}"
        else:
            ours = f"layers.{stage}.{rest}"
        found[name if ours in found else ours] = tensor
    for name, each in experts.items():
        shapes = {tensor.shape for tensor in each.values()}
        if sorted(each) == list(range(len(each))) and len(shapes) == 1:
            found[name] = torch.stack([each[number] for number in range(len(each))])
        else:
            found |= {f"{name}.{number}": tensor for number, tensor in each.items()}
    return found


def dequantised(tensors: Mapping[str, Tensor], fields: Fields, source: Source) -> dict[str, Tensor]:
    """The tensors with weights multiplied by their scales.

    Raises:
        ValueError: a scale without its weight, in another format, or not finite; the message names the tensor.
    """
    scales = {name.removesuffix(".scale"): tensor for name, tensor in tensors.items() if name.endswith(".scale")}
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(".scale")}
    for name, scale in scales.items():
        weight, where = found.get(f"{name}.weight"), f"{source.where}: {name}"
        if weight is None or weight.dim() != 2 or scale.dim() != 2:
            raise ValueError(f"{where}.scale is the scale of no matrix {name}.weight.")
        if weight.dtype in (torch.int8, torch.uint8):
            weight, block = _unpacked(weight), (1, 32)
        elif weight.dtype == torch.float8_e4m3fn:
            block = _block(fields.section("quantization_config"))
        else:
            raise ValueError(f"{where}.weight is {dtype_name(weight.dtype)}: with a scale FP8 (e4m3) and FP4 are read.")
        wanted = [-(-size // side) for size, side in zip(weight.shape, block, strict=True)]
        if list(scale.shape) != wanted:
            raise ValueError(f"{where}.scale has shape {list(scale.shape)}, and blocks of {list(block)} need {wanted}.")
        exact = scale.dtype != torch.float32
        factors = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
        factors = factors.repeat_interleave(block[0], 0)[: weight.shape[0]]
        factors = factors.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
        found[f"{name}.weight"] = (weight.float() * factors).to(torch.bfloat16 if exact else torch.float32)
    if plain := [n for n, t in found.items() if t.dtype.itemsize == 1]:
        raise ValueError(f"{source.where}: {plain[0]} is {dtype_name(found[plain[0]].dtype)} without a scale.")
    check_finite(Path(source.where).parent, found)
    return found


def _block(fields: Fields) -> tuple[int, int]:
    """Rows and columns of a block of FP8."""
    stated = fields.raw("weight_block_size")
    if not (isinstance(stated, list) and [type(side) for side in stated] == [int, int] and min(stated) > 0):
        raise fields.refuse("weight_block_size", "two numbers above 0, as [128, 128]")
    return stated[0], stated[1]


def _unpacked(packed: Tensor) -> Tensor:
    """FP4 [out, in / 2] -> float32 [out, in]."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    codes = packed.contiguous().view(torch.uint8)
    return values[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()]
