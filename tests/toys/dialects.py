"""Random toy drafters of every method, and a target's facts, for the tests of dialects and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.checkpoints.checkpoint import Checkpoint, load_weights
from outrider.checkpoints.dialects.base import ExportedCheckpoint, TargetFacts
from outrider.checkpoints.dialects.medusa import MedusaDialect
from outrider.checkpoints.registry import method_of
from outrider.contrib.deepseek_v4 import DSparkV4Config
from outrider.contrib.dflash_input import DFlashInputConfig
from outrider.contrib.domino import DominoConfig
from outrider.contrib.jetspec import JetSpecConfig
from outrider.contrib.lilicorr import LiLiCorrConfig
from outrider.contrib.peagle import PEagleConfig
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import DFlashConfig
from outrider.drafters.dflash2 import DFlash2Config
from outrider.drafters.eagle3 import Eagle3Config
from outrider.drafters.hydra import HydraConfig
from outrider.drafters.medusa import MedusaConfig
from outrider.drafters.mtp import MTPConfig
from tests.toys.targets import randomise, toy_config

V, VD, H, L = 97, 40, 32, 5
SHAPES = {
    "hidden_size": H,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": V,
    "draft_vocab_size": V,
    "num_target_layers": L,
    "rope_theta": 777.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


FACTS = TargetFacts("toys/target", ("ToyForCausalLM",), L, random(V, H, seed=1), random(V, H, seed=2))


DFLASH2_SIZES = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
LILICORR_SIZES = {
    "conv_kernel_size": 0,
    "conv_group_size": 0,
    "lilicorr_candidate_topk": 4,
    "lilicorr_hidden_size": 16,
    "lilicorr_num_heads": 2,
    "lilicorr_factor_dim": 12,
}
DOMINO_SIZES = {"gru_hidden_dim": 10, "emb_dim": 6, "pure_draft_prefix_len": 1, "sample_from_anchor": True}
V4_SIZES = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "sliding_window": 6,
    "sample_from_anchor": True,
    "markov_rank": 6,
    "intermediate_size": 12,
    "n_routed_experts": 5,
    "q_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "o_groups": 2,
    "o_lora_rank": 7,
    "hc_mult": 3,
}
SIZED: dict[str, tuple[type[DFlashConfig], dict[str, Any]]] = {
    "dflash_input": (DFlashInputConfig, {}),
    "dflash2": (DFlash2Config, DFLASH2_SIZES),
    "domino": (DominoConfig, DOMINO_SIZES),
    "jetspec": (JetSpecConfig, {"is_causal": True}),
    "lilicorr": (LiLiCorrConfig, LILICORR_SIZES),
    "dspark_v4": (DSparkV4Config, V4_SIZES),
}


def config_of(method: str, **changes: Any) -> Any:
    """A toy config of a method."""
    if method in ("dflash", "dspark"):
        return toy_config(method == "dspark", **changes)
    if method in SIZED:
        kind, sizes = SIZED[method]
        shared = {name: value for name, value in changes.items() if name in DFlashConfig.__dataclass_fields__}
        return kind(**{**vars(toy_config(False, **shared)), **sizes, **changes})
    if method in ("eagle3", "peagle"):
        eagle = Eagle3Config if method == "eagle3" else PEagleConfig
        return eagle(**{**SHAPES, "target_layer_ids": (0, 1, 3), "gamma": 4, **changes})
    if method == "mtp":
        return MTPConfig(**{**SHAPES, "target_layer_ids": (L - 1,), "gamma": 3, "qk_norm": True, **changes})
    heads = HydraConfig if method == "hydra" else MedusaConfig
    return heads(**{"hidden_size": H, "vocab_size": V, "draft_vocab_size": V, "num_target_layers": L, **changes})


def made(method: str, own: str = "", **changes: Any) -> Checkpoint:
    """A random drafter; 40 scattered draft ids where the config says so.

    `own`: "head", "heads" (one each), "embedding", or several of them.
    """
    heads = {"num_heads": 3, "num_layers": 2} if method in ("medusa", "hydra") else {}
    config = config_of(method, **{**heads, **changes})
    module = method_of(method).module(config)
    randomise(module)
    if method in (*SIZED, "dflash", "dspark", "eagle3"):
        module.aux_scale_L.copy_(torch.tensor([0.5, 3.0, 7.0, 2.0][: len(config.target_layer_ids)]))
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:VD].sort().values
    rows = config.draft_vocab_size
    head = random(rows, H, seed=4) if "head" in own.split() else None
    head = random(3, rows, H, seed=5) if "heads" in own.split() else head
    embedding = random(V, H, seed=6) if "embedding" in own.split() else None
    return Checkpoint(DrafterWeights(module.eval(), ids if rows == VD else None, head, embedding))


def put(written: ExportedCheckpoint, directory: Path) -> Path:
    """The two files of a checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(written.config))
    save_file({name: tensor.contiguous() for name, tensor in written.tensors.items()}, directory / "model.safetensors")
    return directory


def released_medusa(directory: Path, vocab: int) -> Path:
    """Medusa as FasterDecoding released it: no depth, no sizes, names and a file of their own."""
    parts = made("medusa", "heads", vocab_size=vocab, draft_vocab_size=vocab).weights.folded()
    tensors = {}
    for name, tensor in MedusaDialect().write(parts, None).tensors.items():
        old = name.replace("blocks.", "").replace(".layers.", ".")
        kind = name.rsplit(".", 1)[1]
        head = name.split(".")[1]
        tensors[f"{head}.2.weight" if "lm_heads" in name else f"{old.removesuffix(kind)}linear.{kind}"] = tensor
    directory.mkdir()
    save_file(tensors, directory / "medusa_lm_head.safetensors")
    raw = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def changed(
    directory: Path, config: dict[str, Any] | None = None, tensors: dict[str, Tensor | None] | None = None
) -> None:
    """Change fields of config.json and tensors of a checkpoint; None removes one."""
    path = directory / "config.json"
    raw = {**json.loads(path.read_text()), **(config or {})}
    path.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))
    if tensors:
        weights = directory / "model.safetensors"
        kept: dict[str, Any] = {**load_file(weights), **tensors}
        save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, weights)


def assert_same(found: DrafterWeights, expected: DrafterWeights) -> None:
    """The same drafter, bit for bit."""
    assert found.algorithm == expected.algorithm
    assert found.config == expected.config
    assert set(found.tensors) == set(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name
    for name in ("draft_ids_Vd", "head_VdH", "embedding_VH"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert (mine is None) == (theirs is None), name
        assert mine is None or torch.equal(mine, theirs), name


def reread(directory: Path) -> DrafterWeights:
    """As `load_weights`, for a target of the toys' depth."""
    return load_weights(directory, L)
