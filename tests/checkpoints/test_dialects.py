"""Every dialect both ways, bit for bit; the spellings of others; the off-by-one; every refusal; corrupted files."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from outrider.checkpoints.checkpoint import load_checkpoint, save_drafter
from outrider.checkpoints.dialects.base import Dialect
from outrider.checkpoints.dialects.deepspec import DeepSpec
from outrider.checkpoints.dialects.eagle3 import Eagle3Dialect
from outrider.checkpoints.dialects.medusa import MedusaDialect
from outrider.checkpoints.dialects.speculators import Speculators
from outrider.checkpoints.dialects.zlab import ZLab, ZLab2
from outrider.checkpoints.registry import dialects, method_of
from outrider.contrib.domino import SpecForgeDomino
from outrider.contrib.jetspec import JetSpecDialect
from outrider.contrib.lilicorr import LiLiCorrDialect
from outrider.drafters.rope import RopeScaling
from tests.toys.dialects import (
    FACTS,
    VD,
    H,
    L,
    V,
    assert_same,
    changed,
    made,
    put,
    random,
    released_medusa,
    reread,
)

Change = dict[str, Any]
FLAGS: list[Change] = [
    {"norm_before_residual": True, "attention_bias": True},
    {"norm_before_fc": True, "qk_norm": True},
    {"fc_norm": True, "norm_output": True, "draft_vocab_size": VD},
]
BLOCKS: list[Change] = [{}, {"sliding_window": 9}, {"draft_vocab_size": VD}]
KINDS: Change = {"sliding_window": 9, "layer_types": ("sliding_attention", "full_attention")}
CAUSAL: list[Change] = [KINDS, {**KINDS, "is_causal": None}, {"sliding_window": 9, "is_causal": True}]
CAPPED: Change = {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}
HEADS: list[Change] = [
    {"markov_head_type": "gated", "draft_vocab_size": VD},
    {"markov_head_type": "rnn"},
    {"enable_confidence_head": False, "sample_from_anchor": False},
    {"markov_rank": 0, "confidence_head_with_markov": False},
]
SCALED: list[tuple[Dialect, str, str]] = [
    (ZLab(), "dflash", ""),
    (DeepSpec(), "dspark", ""),
    (Speculators(), "dspark", ""),
    (Speculators(), "eagle3", "head"),
    (Speculators(), "mtp", ""),
    (Eagle3Dialect(), "eagle3", "head"),
]
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 20.0, "truncate": False},
]
CASES: list[tuple[Dialect, str, str, Change]] = [
    *[(ZLab(), "dflash", own, change) for change, own in zip(BLOCKS, ("", "embedding", "head"), strict=True)],
    *[(ZLab2(), "dflash2", own, change) for change, own in zip(BLOCKS, ("", "embedding", "head"), strict=True)],
    *[
        (SpecForgeDomino(), "domino", own, change)
        for change, own in zip(BLOCKS, ("", "embedding", "head"), strict=True)
    ],
    (SpecForgeDomino(), "domino", "", {"sample_from_anchor": False, "pure_draft_prefix_len": 2, **CAUSAL[1]}),
    *[
        (LiLiCorrDialect(), "lilicorr", own, change)
        for change, own in zip(BLOCKS, ("", "embedding", "head"), strict=True)
    ],
    (LiLiCorrDialect(), "lilicorr", "", {"conv_kernel_size": 2, "conv_group_size": 8, "lilicorr_hidden_size": 0}),
    *[
        (JetSpecDialect(), "jetspec", own, change)
        for change, own in zip(BLOCKS, ("", "embedding", "head"), strict=True)
    ],
    *[(DeepSpec(), "dspark", "", change) for change in [*BLOCKS, *HEADS]],
    *[(ZLab(), "dflash", "", change) for change in [*CAUSAL, {"is_causal": True}]],
    (ZLab2(), "dflash2", "", CAUSAL[1]),
    *[(dialect, method, "", CAPPED) for dialect, method in ((ZLab(), "dflash"), (ZLab2(), "dflash2"))],
    *[(DeepSpec(), "dspark", "", change) for change in CAUSAL],
    *[(Speculators(), "dspark", "", change) for change in CAUSAL],
    *[(Speculators(), "dflash", "", change) for change in BLOCKS],
    *[(Speculators(), "dflash2", "", change) for change in BLOCKS[:2]],
    *[(Speculators(), "dspark", "", change) for change in HEADS],
    *[(Speculators(), "eagle3", "head", change) for change in [{}, *FLAGS]],
    (Speculators(), "eagle3", "head embedding", {"target_layer_ids": (0, 1, 2, 3), "gamma": 2}),
    (Speculators(), "mtp", "", {}),
    *[
        (dialect, method, own, {"rope_scaling": RopeScaling(**scaling)})
        for dialect, method, own in SCALED
        for scaling in SCALINGS
    ],
    *[(Eagle3Dialect(), "eagle3", "head", change) for change in [{}, *FLAGS]],
    (Eagle3Dialect(), "eagle3", "head embedding", {"target_layer_ids": (-1, 2)}),
    (MedusaDialect(), "medusa", "head", {}),
    (MedusaDialect(), "medusa", "head", {"draft_vocab_size": VD}),
    (MedusaDialect(), "medusa", "heads", {"num_layers": 1}),
]
NAMES = [
    f"{dialect.name}-{method}-{'-'.join(map(str, change)) or own or 'plain'}" for dialect, method, own, change in CASES
]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_round_trip_keeps_every_field_and_every_bit(tmp_path: Path, case: tuple[Dialect, str, str, Change]) -> None:
    dialect, method, own, change = case
    checkpoint = made(method, own, **change)
    written = dialect.write(checkpoint.weights.folded(), FACTS)
    directory = put(written, tmp_path / "d")
    found = reread(directory)
    expected = checkpoint.weights.folded()
    if dialect.name == "DeepSpec":
        head_VdH = FACTS.head_VH if expected.draft_ids_Vd is None else FACTS.head_VH[expected.draft_ids_Vd]
        expected = replace(expected, head_VdH=head_VdH, embedding_VH=FACTS.embedding_VH)
    elif dialect.name == "speculators" and expected.draft_ids_Vd is not None and expected.head_VdH is None:
        expected = replace(expected, head_VdH=FACTS.head_VH[expected.draft_ids_Vd])
    assert_same(found, expected)
    again = dialect.write(found, FACTS)
    assert again.config == written.config and again.fallbacks == written.fallbacks
    assert again.tensors.keys() == written.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in written.tensors.items())
    loaded = load_checkpoint(directory, num_target_layers=L)
    assert loaded.config == expected.config
    owners = [one for one in dialects() if one.reads(written.config)]
    assert [type(one) for one in owners] == [type(dialect)], "one dialect claims it"


@pytest.mark.parametrize(
    "method", ["dflash", "dflash2", "domino", "dspark", "eagle3", "jetspec", "lilicorr", "medusa", "hydra", "mtp"]
)
def test_our_own_writing_keeps_heads_of_other_makers(tmp_path: Path, method: str) -> None:
    checkpoint = made(method, "embedding" if method in ("medusa", "hydra") else "head embedding")
    save_drafter(checkpoint, tmp_path / "d")
    assert_same(load_checkpoint(tmp_path / "d").weights.folded(), checkpoint.weights.folded())


def eagle(directory: Path, **changes: Any) -> Path:
    return put(Eagle3Dialect().write(made("eagle3", "head", **changes).weights.folded(), FACTS), directory)


def test_eagle3_layers_by_another_name_and_the_default_aux_layers(tmp_path: Path) -> None:
    """As the official training code leaves it: the base model's name, few fields, tables of zeros."""
    directory = eagle(tmp_path, target_layer_ids=(1,))
    expected = reread(directory)
    weights = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    save_file(
        {**weights, "d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.zeros(V, dtype=torch.bool)},
        directory / "model.safetensors",
    )
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    raw = json.loads((directory / "config.json").read_text())
    few = {name: raw[name] for name in (*kept, "num_hidden_layers", "model_type", "draft_vocab_size")}
    (directory / "config.json").write_text(json.dumps({**few, "architectures": ["LlamaForCausalLM"]}))
    found = reread(directory)
    assert found.config.rope_theta == 10000.0 and found.config.rms_norm_eps == 1e-6 and found.config.gamma == 7
    assert found.config.target_layer_ids == (1,), "layers 2, 5 // 2 and 5 - 3 read the output of layer 1"
    assert found.draft_ids_Vd is None and set(found.tensors) == set(expected.tensors)
    with pytest.raises(ValueError, match=r"does not state num_target_layers.*--target"):
        load_checkpoint(directory)


def test_eagle3_aux_layers_in_two_conventions_of_one_field(tmp_path: Path) -> None:
    raw = json.loads((eagle(tmp_path / "d") / "config.json").read_text())
    name = "eagle_aux_hidden_state_layer_ids"
    assert raw[name] == [1, 2, 4] and raw["eagle_config"][name] == [0, 1, 3]
    changed(tmp_path / "d", {"eagle_config": None})
    assert reread(tmp_path / "d").config.target_layer_ids == (0, 1, 3)
    changed(tmp_path / "d", {name: None, "eagle_config": raw["eagle_config"]})
    assert reread(tmp_path / "d").config.target_layer_ids == (0, 1, 3)
    changed(tmp_path / "d", {name: [0, 1, 3]})
    with pytest.raises(ValueError, match=rf"{name} is \[0, 1, 3\]; it must be \[1, 2, 4\], one more than"):
        reread(tmp_path / "d")


DEEPSPEC_EAGLE3: Change = {"architectures": ["Qwen3Eagle3Model"], "ttt_length": 6, "step_loss_decay": 0.8}


def test_eagle3_as_deepspec_writes_it(tmp_path: Path) -> None:
    """Its config is the target's own with a few fields of the drafter's; embedding and head are copies."""
    directory = eagle(tmp_path, qk_norm=True, target_layer_ids=(0, 1, 3))
    raw = json.loads((directory / "config.json").read_text())
    name = "eagle_aux_hidden_state_layer_ids"
    gone = (name, "eagle_config", "outrider", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states")
    fields: Change = {**dict.fromkeys(gone), **DEEPSPEC_EAGLE3, "num_target_layers": L, "target_layer_ids": [0, 1, 3]}
    tensors = load_file(directory / "model.safetensors")
    layers = {key: tensor for key, tensor in tensors.items() if key.startswith("midlayer.")}
    renamed: dict[str, Any] = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in layers.items()}
    changed(directory, fields, {**dict.fromkeys(layers), **renamed, "embed_tokens.weight": FACTS.embedding_VH})
    assert not {name, "outrider"} & json.loads((directory / "config.json").read_text()).keys()
    found, expected = (
        load_checkpoint(directory),
        made("eagle3", "head", qk_norm=True, target_layer_ids=(0, 1, 3), gamma=6),
    )
    assert found.config == expected.config, "aux hidden states are layer outputs, ttt_length the drafts"
    assert_same(found.weights.folded(), replace(expected.weights.folded(), embedding_VH=FACTS.embedding_VH))
    changed(directory, {name: raw[name]})
    assert load_checkpoint(directory).config.target_layer_ids == (0, 1, 3)
    changed(directory, {name: [0, 1, 3]})
    with pytest.raises(ValueError, match=r"target_layer_ids is \[0, 1, 3\]; it must be \[-1, 0, 2\]"):
        load_checkpoint(directory)
    for other in ("Gemma4Eagle3Model", "Ministral3Eagle3Model"):
        changed(directory, {"architectures": [other]})
        with pytest.raises(ValueError, match=f"{other}.*is not a drafter dialect"):
            load_checkpoint(directory)


def test_speculators_counts_hidden_states(tmp_path: Path) -> None:
    for method, own, name in (
        ("dspark", "", "aux_hidden_state_layer_ids"),
        ("eagle3", "head", "eagle_aux_hidden_state_layer_ids"),
    ):
        parts = made(method, own).weights.folded()
        written = Speculators().write(parts, FACTS)
        assert written.config[name] == [aux_layer + 1 for aux_layer in parts.config.target_layer_ids]
    changed(put(written, tmp_path / "d"), {name: None})
    with pytest.raises(
        ValueError, match="num_aux_hidden_states is 3; it must be 1"
    ):  # one aux layer by default, of 5 layers
        reread(tmp_path / "d")


def test_medusa_as_fasterdecoding_released_it(tmp_path: Path) -> None:
    directory = released_medusa(tmp_path / "d", V)
    assert {"0.1.linear.bias", "2.2.weight"} <= load_file(directory / "medusa_lm_head.safetensors").keys()
    assert_same(reread(directory), made("medusa", "heads").weights.folded())


def test_medusa_without_biases_has_zero_ones(tmp_path: Path) -> None:
    written = MedusaDialect().write(made("medusa", "head").weights.folded(), FACTS)
    put(written, tmp_path)
    changed(tmp_path, {"medusa_fc_bias": False}, {name: None for name in written.tensors if name.endswith("bias")})
    assert not load_checkpoint(tmp_path).weights.module.state_dict()["blocks.1.layers.1.bias"].any()


def test_vllm_renames_no_field_of_our_medusa() -> None:
    """It takes every top-level key with "num" and "heads" or "layers" in it for the number of either."""
    config = MedusaDialect().write(made("medusa", "head").weights.folded(), FACTS).config
    assert [name for name in config if "num" in name] == ["num_heads", "num_hidden_layers"]


def test_dspark_as_specforge_writes_it(tmp_path: Path) -> None:
    parts = made("dspark", markov_head_type="gated").weights.folded()
    written = DeepSpec().write(parts, None)
    inside = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head")
    put(written, tmp_path)
    changed(
        tmp_path,
        {
            **dict.fromkeys(inside),
            "architectures": ["DSparkDraftModel"],
            "dflash_config": {name: written.config[name] for name in inside},
        },
    )
    assert_same(reread(tmp_path), parts)
    changed(tmp_path, {"markov_rank": 7})
    with pytest.raises(ValueError, match=r"markov_rank is 7, dflash_config.markov_rank is 6: .*make them agree"):
        reread(tmp_path)


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}
REFUSED: list[tuple[Dialect, str, Change, str]] = [
    (ZLab(), "dflash", {"layer_types": ["full_attention", "chunked"]}, "layer_types is .*not chunked"),
    (ZLab(), "dflash", {"is_causal": "yes"}, "is_causal is 'yes'; it must be true or false"),
    (ZLab(), "dflash", {**SLIDING, "use_sliding_window": None}, "use_sliding_window is None; it must be true"),
    (ZLab(), "dflash", {"use_sliding_window": True, "sliding_window": 9, "layer_types": None}, "layer_types is None"),
    (DeepSpec(), "dspark", {"output_multiplier": 0.5}, "output_multiplier is 0.5; it must be absent"),
    (ZLab(), "dflash", {"attention_bias": True}, "attention_bias is True; it must be false"),
    (ZLab(), "dflash", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (ZLab(), "dflash", {"output_multiplier": 0.5}, "output_multiplier is 0.5, dflash_config.output_multiplier is 1.0"),
    (ZLab2(), "dflash2", {"final_logit_softcapping": -1.0}, "softcapping is -1.0; it must be a number above 0"),
    (ZLab(), "dflash", {"input_embedding_scale": 2.0}, "is 2.0, dflash_config.input_embedding_scale is 1.0: .*agree"),
    (ZLab2(), "dflash2", {"dflash_config": {"selector_rank": 0}}, "needs the field 'dflash_config.conv_kernel_size'"),
    (Speculators(), "dflash2", {"selector_rank": "x"}, "selector_rank is 'x'; it must be an integer"),
    (SpecForgeDomino(), "domino", {"shift_label": "yes"}, "shift_label is 'yes', dflash_config.shift_label is True"),
    (SpecForgeDomino(), "domino", {"dflash_config": {"projector_type": "domino"}}, "needs the field"),
    (
        LiLiCorrDialect(),
        "lilicorr",
        {"dflash_config": {"lilicorr_num_layers": 2}},
        "'dflash_config.lilicorr_candidate_",
    ),
    (LiLiCorrDialect(), "lilicorr", {"dflash_config": {"lilicorr_enabled": False}}, "lilicorr_enabled is False"),
    (JetSpecDialect(), "jetspec", {"is_causal": False}, "is_causal must be true: a JetSpec drafter without it is"),
    (ZLab(), "dflash", {"rope_theta": 1.0}, "rope_theta is 1.0; it must be 777, as in rope_parameters"),
    (ZLab(), "dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [3, 0]}}, "ascending"),
    (DeepSpec(), "dspark", {"markov_head_type": 3}, "markov_head_type is 3; it must be a string"),
    (Speculators(), "dspark", {"speculators_model_type": "peagle"}, "'peagle'; it must be one of eagle3, dflash"),
    (Speculators(), "dspark", {"target_hidden_size": 64}, "target_hidden_size is 64"),
    (Speculators(), "eagle3", {"draft_vocab_size": 96}, "draft_vocab_size 96 of 97 needs the tensor d2t"),
    (Eagle3Dialect(), "eagle3", {"num_hidden_layers": 2}, "num_hidden_layers is 2; it must be 1"),
    (Eagle3Dialect(), "eagle3", {"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4; it must be 3"),
    (Eagle3Dialect(), "eagle3", {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type is 'longrope'"),
    (Eagle3Dialect(), "eagle3", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.rope_type 'linear' needs"),
    (DeepSpec(), "dspark", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; it must be 1"),
    (
        ZLab(),
        "dflash",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor is 0.5",
    ),
    (
        ZLab(),
        "dflash",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0},
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
        "rope_scaling is .* it must be the scaling of rope_parameters",
    ),
    (MedusaDialect(), "medusa", {"num_heads": 4}, "the LM heads must be 1 matrices|missing blocks.3"),
    (MedusaDialect(), "medusa", {"truncated_vocab_size": 40}, "token_map must be 40 distinct ids below 97"),
]


@pytest.mark.parametrize(("dialect", "method", "change", "message"), REFUSED)
def test_what_no_drafter_here_can_be_is_refused_by_name(
    tmp_path: Path, dialect: Dialect, method: str, change: Change, message: str
) -> None:
    own = "head" if method in ("eagle3", "medusa") else ""
    changed(put(dialect.write(made(method, own).weights.folded(), FACTS), tmp_path), change)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, num_target_layers=L)


UNWRITABLE: list[tuple[Dialect, str, str, Change, str]] = [
    (JetSpecDialect(), "jetspec", "", CAPPED, "output_multiplier 0.5 and final_logit_softcapping 3.0 have no place"),
    (SpecForgeDomino(), "domino", "", CAPPED, "output_multiplier 0.5 and final_logit_softcapping 3.0 have no place"),
    (DeepSpec(), "dspark", "", CAPPED, "output_multiplier 0.5 and final_logit_softcapping 3.0 have no place"),
    (Speculators(), "dflash", "", CAPPED, "output_multiplier 0.5 and final_logit_softcapping 3.0 have no place"),
    (ZLab(), "dflash", "", {"sample_from_anchor": True}, "sample_from_anchor=false"),
    (Speculators(), "dflash2", "", {"draft_vocab_size": VD}, "draft_vocab_size 40 has no place.*=97"),
    (Speculators(), "dflash2", "", {"sample_from_anchor": True}, "sample_from_anchor True has no place"),
    (Speculators(), "mtp", "", {"qk_norm": False}, "qk_norm False has no place"),
    (Speculators(), "mtp", "", {"num_modules": 2}, "num_modules 2 has no place"),
    (Speculators(), "mtp", "", {"draft_vocab_size": VD}, "draft_vocab_size 40 has no place"),
    (Speculators(), "mtp", "head", {}, "lm_head.weight and embed_tokens.weight have no place"),
    (MedusaDialect(), "medusa", "head embedding", {}, "no place for embed_tokens.weight"),
    (
        MedusaDialect(),
        "medusa",
        "heads",
        {"draft_vocab_size": VD},
        "no draft_vocab_size for heads with an LM head each",
    ),
]


@pytest.mark.parametrize(("dialect", "method", "own", "change", "message"), UNWRITABLE)
def test_what_a_dialect_cannot_carry_is_an_error(
    dialect: Dialect, method: str, own: str, change: Change, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dialect.write(made(method, own, **change).weights.folded(), FACTS)


@pytest.mark.parametrize(
    ("dialect", "method"), [(Speculators(), "dspark"), (Eagle3Dialect(), "eagle3"), (MedusaDialect(), "medusa")]
)
def test_dialects_that_state_the_target_ask_for_it(dialect: Dialect, method: str) -> None:
    with pytest.raises(ValueError, match=r"\(--target\)"):
        dialect.write(made(method).weights.folded(), None)


def test_pickles_and_archives_are_refused_by_name(tmp_path: Path) -> None:
    for name, message in (
        ("model.pt", r"model.pt is a pickle.*safetensors only.*weights_only=True"),
        ("drafter.zip", r"drafter.zip is an archive: unpack it"),
        ("d.gguf", r"d.gguf is a GGUF"),
        ("notes.txt", r"notes.txt is a file: give the directory"),
    ):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(ValueError, match=message):
            load_checkpoint(tmp_path / name)
    directory = eagle(tmp_path / "d")
    (directory / "mask_embedding.pt").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"mask_embedding.pt"):
        load_checkpoint(directory)
    (directory / "mask_embedding.pt").unlink()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin is a pickle or an archive"):
        load_checkpoint(directory)


def test_weights_in_parts(tmp_path: Path) -> None:
    directory = eagle(tmp_path)
    expected = reread(directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[half::2]) for half in (0, 1)]
    weight_map = {name: f"part-{half}.safetensors" for half in (0, 1) for name in halves[half]}
    for half in (0, 1):
        save_file(halves[half], directory / f"part-{half}.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_same(reread(directory), expected)
    for bad, message in (
        ({"weight_map": {"a": "../elsewhere.safetensors"}}, "it must name files beside it"),
        ({"weight_map": 3}, "weight_map is not a mapping"),
        ({"weight_map": {**weight_map, "x": "part-9.safetensors"}}, "part-9.safetensors is missing"),
    ):
        index.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=message):
            reread(directory)


def test_a_damaged_draft_vocabulary(tmp_path: Path) -> None:
    eagle(tmp_path, draft_vocab_size=VD)
    good = load_file(tmp_path / "model.safetensors")
    for tensors, message in (
        ({"t2d": torch.ones(V, dtype=torch.bool)}, "t2d is not the mask of the 40 tokens that d2t names"),
        ({"t2d": good["t2d"], "d2t": torch.zeros(VD, dtype=torch.long)}, "t2d is not the mask of the 40 tokens"),
        ({"d2t": torch.zeros(VD)}, "d2t is torch.float32"),
        (
            {"d2t": good["d2t"], "lm_head.weight": random(V, H, seed=1)},
            r"lm_head.weight has shape \[97, 32\].*\[40, 32\]",
        ),
    ):
        changed(tmp_path, tensors=tensors)
        with pytest.raises(ValueError, match=message):
            load_checkpoint(tmp_path)


REDUCED = [
    *[
        (method_of(name).saved_in, name)
        for name in ("dflash", "dflash2", "domino", "dspark", "eagle3", "hydra", "jetspec", "lilicorr")
    ],
    (Speculators(), "dspark"),
    (Eagle3Dialect(), "eagle3"),
]


@pytest.mark.parametrize(("dialect", "method"), REDUCED)
def test_a_draft_vocabulary_names_no_token_twice(tmp_path: Path, dialect: Dialect, method: str) -> None:
    """Two draft tokens of one id: their probabilities would have to be added, and are not."""
    put(dialect.write(made(method, draft_vocab_size=VD).weights.folded(), FACTS), tmp_path)
    ids = load_file(tmp_path / "model.safetensors")["d2t"] + torch.arange(VD)
    ids[17] = ids[5]
    changed(tmp_path, tensors={"d2t": ids - torch.arange(VD), "t2d": None})
    with pytest.raises(ValueError, match=rf"config.json: d2t names target id {int(ids[5])} 2 times"):
        load_checkpoint(tmp_path, num_target_layers=L)


FUZZED: list[tuple[Dialect, str, str, Change]] = [
    (ZLab(), "dflash", "", {"draft_vocab_size": VD}),
    (ZLab2(), "dflash2", "", {}),
    (SpecForgeDomino(), "domino", "", {}),
    (LiLiCorrDialect(), "lilicorr", "", {}),
    (DeepSpec(), "dspark", "", {"sliding_window": 9}),
    (Speculators(), "dspark", "", {"draft_vocab_size": VD}),
    (Speculators(), "eagle3", "head", {}),
    (Speculators(), "mtp", "", {}),
    *[
        (dialect, method, own, {"rope_scaling": RopeScaling(**scaling)})
        for dialect, method, own in SCALED
        for scaling in SCALINGS
    ],
    (Eagle3Dialect(), "eagle3", "head", {"draft_vocab_size": VD}),
    (MedusaDialect(), "medusa", "head", {"draft_vocab_size": VD}),
]
NUMBERS: list[Any] = [True, -1, 0, 1, 2, 10**6, 10**30, -(10**400), 0.5, float("nan"), float("inf"), 1e308]
OTHERS: list[Any] = [None, "", "x", [], [None], ["x"], [1, 1], [10**9], [[1]], {}, {"x": 1}, {"rope_theta": "x"}]
JUNK = NUMBERS + OTHERS


def paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the fields of a config are, sections and lists included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*before, name)
        yield from paths(inner, (*before, name))


@pytest.fixture(scope="module", params=range(len(FUZZED)), ids=[f"{d.name}-{m}" for d, m, _, _ in FUZZED])
def victim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dialect, method, own, change = FUZZED[request.param]
    return put(dialect.write(made(method, own, **change).weights.folded(), FACTS), tmp_path_factory.mktemp("victim"))


# The fields whose change shows in another one: either may be the wrong one.
CONTRADICTED = {
    "num_hidden_layers": ("layer_types",),
    "vocab_size": ("mask_token_id", "draft_vocab_size"),
    "num_target_layers": ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"),
    "dflash_config": ("mask_token_id",),
    "hidden_size": ("target_hidden_size",),
    "transformer_layer_config": ("target_hidden_size",),
    "eagle_aux_hidden_state_layer_ids": ("num_aux_hidden_states",),
}
A_TENSOR = re.compile(r"(missing|unknown) \w[\w.]+|\w has shape \[|\b(d2t|t2d|token_map|lm_heads|LM heads)\b")


def refused_well(directory: Path, *names: str) -> None:
    """Loading works or is refused in words that have one of the names in them or a tensor's: no other exception."""
    try:
        load_checkpoint(directory, num_target_layers=L)
    except ValueError as error:
        said = str(error).replace(str(directory), "")
        assert A_TENSOR.search(said) or any(re.search(rf"\b{re.escape(name)}\b", said) for name in names), error


def test_naming_the_file_alone_is_not_refusing_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(directory: Path, num_target_layers: int) -> None:
        raise ValueError(f"{directory}/config.json: something is wrong.")

    monkeypatch.setitem(globals(), "load_checkpoint", load)
    refused_well(tmp_path / "block_size", "config.json")
    with pytest.raises(AssertionError, match="something is wrong"):
        refused_well(tmp_path / "block_size", "block_size")


few = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@few
@given(data=st.data())
def test_a_corrupted_config_is_a_value_error_that_names_the_field(victim: Path, data: st.DataObject) -> None:
    raw = json.loads((victim / "config.json").read_text())
    damaged = copy.deepcopy(raw)
    *path, name = data.draw(st.sampled_from(list(paths(raw))))
    inner = damaged
    for step in path:
        inner = inner[step]
    if data.draw(st.integers(0, 5)):
        inner[name] = data.draw(st.sampled_from(JUNK))
    else:
        del inner[name]
    (victim / "config.json").write_text(json.dumps(damaged))
    try:
        field = [step for step in (*path, name) if isinstance(step, str)][-1]
        refused_well(victim, field, *CONTRADICTED.get(field, ()))
    finally:
        (victim / "config.json").write_text(json.dumps(raw))


@few
@given(data=st.data())
def test_truncated_and_flipped_files_are_value_errors(victim: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["model.safetensors", "config.json"]))
    whole = (victim / name).read_bytes()
    # Headers are at the beginning; a flipped weight is a weight.
    at = data.draw(st.integers(0, min(len(whole), 4000) - 1))
    damage: Callable[[bytes], bytes] = data.draw(
        st.sampled_from(
            [
                lambda b: b[:at],
                lambda b: b[:at] + bytes([b[at] ^ (1 << (at % 8))]) + b[at + 1 :],
                lambda b: b[:at] + b[at + 1 :],
                lambda b: b + b"\0",
            ]
        )
    )
    (victim / name).write_bytes(damage(whole))
    try:
        fields = {step for path in paths(json.loads(whole)) for step in path} if name == "config.json" else set()
        refused_well(victim, name, *map(str, fields))
    finally:
        (victim / name).write_bytes(whole)


def test_a_config_that_is_no_text_or_too_deep(tmp_path: Path) -> None:
    directory = eagle(tmp_path / "d")
    for content in (b"\xff\xfe", b"[" * 100000, b'{"a": ' * 50000, b"1" * 10000):
        (directory / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"config\.json: not"):
            load_checkpoint(directory)
    shutil.rmtree(directory)
    with pytest.raises(ValueError, match=r"there is no directory .*d: give a drafter directory"):
        load_checkpoint(directory)
