"""DeepSeek-V4's dialect: names, FP8 and FP4 blocks, and what is refused by name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, load_weights, save_drafter
from outrider.checkpoints.describe import describe
from outrider.checkpoints.dialects.base import Source
from outrider.checkpoints.registry import UnknownDialect
from outrider.contrib.deepseek_v4 import DeepSeekV4, DSparkV4
from tests.toys.deepseek_v4 import RAW, published, write
from tests.toys.dialects import assert_same, made

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def quantised(tensors: dict[str, Tensor], scales: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """As published: experts in FP4, other matrices in FP8; and the numbers that are meant, block by block."""
    generator, stored, meant = torch.Generator().manual_seed(5), dict(tensors), dict(tensors)

    def powers(*shape: int) -> Tensor:
        exponents = torch.randint(-4, 0, shape, generator=generator)
        return torch.exp2(exponents.float()) * (1.0 if scales != torch.float32 else 1.3)

    for name, tensor in tensors.items():
        matrix = name.endswith(".weight") and ("attn.w" in name or "experts" in name or "main_proj" in name)
        if not name.startswith("mtp.") or not matrix:
            continue
        rows, columns = tensor.shape
        if ".experts." in name:
            columns -= columns % 2
            codes = torch.randint(0, 16, (rows, columns), generator=generator)
            scale = powers(rows, -(-columns // 32))
            stored[name] = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
            values, height, width = torch.tensor(E2M1)[codes], 1, 32
        else:
            stored[name] = tensor.to(torch.float8_e4m3fn)
            scale, values, height, width = powers(-(-rows // 8), -(-columns // 8)), stored[name].float(), 8, 8
        meant[name] = torch.stack(
            [torch.stack([values[i, j] * scale[i // height, j // width] for j in range(columns)]) for i in range(rows)]
        )
        kept = (scale.log2() + 127).to(torch.uint8) if scales == torch.uint8 else scale.to(scales)
        stored[name.removesuffix("weight") + "scale"] = kept
    return stored, meant


@pytest.mark.parametrize("scales", [torch.float8_e8m0fnu, torch.uint8, torch.float32])
def test_blocks_of_fp8_and_fp4_are_the_numbers_they_stand_for(tmp_path: Path, scales: torch.dtype) -> None:
    stored, meant = quantised(published(), scales)
    found = load_checkpoint(write(tmp_path / "stored", stored), num_target_layers=5)
    expected = load_checkpoint(write(tmp_path / "meant", meant), num_target_layers=5)
    assert_same(found.weights, expected.weights)
    (tensor,) = {t.dtype for n, t in load_weights(tmp_path / "stored").tensors.items() if n.endswith("experts.w1")}
    assert tensor == (torch.float32 if scales == torch.float32 else torch.bfloat16)


def test_every_field_and_tensor_has_its_place(tmp_path: Path) -> None:
    tensors = published()
    found = load_checkpoint(write(tmp_path / "target", tensors))  # the target's config states its own depth
    config, state = found.config, found.weights.tensors
    assert found.algorithm == "dspark_v4" and config.num_target_layers == 5 and config.target_layer_ids == (2, 3, 4)
    assert (config.block_size, config.gamma, config.mask_token_id, config.markov_rank) == (5, 5, 3, 6)
    assert (config.intermediate_size, config.n_routed_experts, config.num_experts_per_tok) == (20, 6, 2)
    assert (config.hc_mult, config.hc_sinkhorn_iters, config.sliding_window, config.rope_theta) == (3, 4, 8, 777.0)
    assert torch.equal(state["layers.1.ffn.experts.w2"][4], tensors["mtp.1.ffn.experts.4.w2.weight"])
    assert torch.equal(state["layers.2.hc_ffn.scale"], tensors["mtp.2.hc_ffn_scale"])
    assert torch.equal(state["layers.0.ffn.gate.bias"], tensors["mtp.0.ffn.gate.bias"])
    assert not state["confidence_head.proj.bias"].any()
    facts = dict(describe(tmp_path / "target"))
    assert facts["dialect"] == "DeepSeek-V4" and facts["experts"] == "2 of 6 and a shared one, 20 wide"
    save_drafter(Checkpoint(found.weights), tmp_path / "ours")
    assert_same(load_checkpoint(tmp_path / "ours").weights, found.weights)


def test_a_checkpoint_without_confidences_has_none(tmp_path: Path) -> None:
    tensors = published()
    del tensors["mtp.2.confidence_head.proj.weight"]
    module = load_checkpoint(write(tmp_path, tensors)).weights.module
    assert isinstance(module, DSparkV4) and module.confidence_head is None


def test_rotary_fields_of_transformers_are_read(tmp_path: Path) -> None:
    rope = {"main": {"rope_theta": 55.0}, "compress": {"rope_theta": 1.0}}
    changes = {"rope_parameters": rope, "qk_rope_head_dim": None, "partial_rotary_factor": 0.5}
    config = load_checkpoint(write(tmp_path, published(), **changes)).config
    assert config.rope_theta == 55.0 and config.qk_rope_head_dim == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v41"}, "DSpark of DeepSeek-V4.1 is not read"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; it must be 'sqrtsoftplus'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False; it must be true"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2; it must be 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True; it must be false"),
        ({"dspark_target_layer_ids": [4, 2]}, "dspark_target_layer_ids is .*ascending"),
        ({"dspark_target_layer_ids": [5]}, "from -1 to 4"),
        ({"dspark_noise_token_id": None}, "needs the field 'dspark_noise_token_id'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2: one latent"),
        ({"n_routed_experts": 7}, r"ffn.gate.weight has shape \[6, 32\]"),
    ],
)
def test_other_layers_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_checkpoint(write(tmp_path, published(), **changes))


def test_a_target_without_dspark_is_no_drafter(tmp_path: Path) -> None:
    with pytest.raises(UnknownDialect):
        load_checkpoint(write(tmp_path / "mtp", published(), dspark_block_size=None))
    nothing = {name: tensor for name, tensor in published().items() if not name.startswith("mtp.")}
    with pytest.raises(ValueError, match=r"no tensors mtp.0"):
        load_checkpoint(write(tmp_path / "nothing", nothing))


FP8, SCALE = torch.float8_e4m3fn, torch.ones(2, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp.0.ffn.experts.3.w1.weight": None}, "missing layers.0.ffn.experts.w1"),
        ({"mtp.1.attn.wkv.weight": None}, "missing layers.1.attn.wkv.weight"),
        ({"mtp.1.ffn.gate.bias_vl": torch.zeros(6)}, "unknown layers.1.ffn.gate.bias_vl"),
        ({"mtp.0.attn.compressor.ape": torch.zeros(6)}, "unknown layers.0.attn.compressor.ape"),
        ({"mtp.0.attn.wkv.weight": torch.zeros(12, 32).to(FP8)}, "mtp.0.attn.wkv.weight is float8_e4m3fn without a"),
        ({"mtp.0.attn.wkv.weight": torch.zeros(12, 32, dtype=torch.int8)}, "mtp.0.attn.wkv.weight is of type int8"),
        ({"mtp.0.attn.wkv.scale": torch.ones(2, 4)}, "mtp.0.attn.wkv.weight is float32: with a scale"),
        ({"mtp.0.attn.lost.scale": torch.ones(2, 4)}, "mtp.0.attn.lost.scale is the scale of no matrix"),
        (
            {"mtp.0.attn.wkv.weight": torch.zeros(12, 32).to(FP8), "mtp.0.attn.wkv.scale": torch.ones(2, 3)},
            r"wkv.scale has shape \[2, 3\], and blocks of \[8, 8\] need \[2, 4\]",
        ),
        (
            {
                "mtp.0.attn.wkv.weight": torch.full((12, 32), torch.nan).to(FP8),
                "mtp.0.attn.wkv.scale": torch.ones(2, 4),
            },
            "mtp.0.attn.wkv.weight has NaN",
        ),
        ({"mtp.0.attn_norm.weight": torch.full((32,), torch.nan)}, "mtp.0.attn_norm.weight has NaN"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, changes: dict[str, Tensor | None], message: str) -> None:
    tensors: dict[str, Any] = {**published(), **changes}
    with pytest.raises(ValueError, match=message):
        load_checkpoint(write(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None}))


JUNK: list[Any] = [
    True,
    -1,
    0,
    10**30,
    0.5,
    float("nan"),
    float("inf"),
    None,
    "",
    "x",
    [],
    [None],
    [10**9],
    {},
    {"x": 1},
]


def test_fields_of_any_kind_are_read_or_refused() -> None:
    tensors, _ = quantised(published(), torch.float32)
    tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    refused = 0
    for name, value in itertools.product([n for n in RAW if n not in ("architectures", "model_type")], JUNK):
        try:
            DeepSeekV4().read({**RAW, name: value}, tensors, Source("target/config.json"))
        except ValueError:
            refused += 1
    assert refused > 200


def test_the_targets_own_weights_are_not_read(tmp_path: Path) -> None:
    """A file with a NaN among the target's: only what begins with mtp. is looked at."""
    write(tmp_path, published())
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        for name in [name for name in tensors if not name.startswith("mtp.")]:
            tensors[name] = torch.full_like(tensors[name], torch.nan)
        save_file(tensors, path)
    assert load_checkpoint(tmp_path).algorithm == "dspark_v4"


def test_it_is_not_written() -> None:
    with pytest.raises(ValueError, match="the dialect DeepSeek-V4 is read only"):
        DeepSeekV4().write(made("dspark_v4").weights.folded(), None)
