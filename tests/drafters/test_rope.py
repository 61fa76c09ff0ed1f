"""Scaled rotary positions of drafters: transformers' own functions, the target's scaling in training, and serving."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.checkpoints.dialects.base import Source
from outrider.checkpoints.dialects.eagle3 import Eagle3Dialect
from outrider.checkpoints.dialects.own import Own
from outrider.contrib.deepseek_v4 import DSparkV4Config
from outrider.contrib.peagle import PEagle, PEagleConfig
from outrider.drafters.dspark import DSparkConfig
from outrider.drafters.eagle3 import Eagle3Config
from outrider.drafters.mtp import MTPConfig
from outrider.drafters.rope import RopeScaling, RopeTables, frequencies, rope_table
from tests.toys.alignment import check_alignment
from tests.toys.dialects import config_of, made
from tests.toys.published import LLAMA3_ROPE, published_target
from tests.toys.targets import toy_samples, toy_target

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, all set": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False},
    "yarn, mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn, half of the scales": {**YARN, "mscale": 0.8},
    "yarn, no original length": {"rope_type": "yarn", "factor": 4.0},
    "older spelling": {"type": "linear", "factor": 3.0},
}


@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str, head_dim: int) -> None:
    rope = SCALINGS[name]
    theirs = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=256,
        rope_parameters={**rope, "rope_theta": 5000.0},
    )
    kind = rope.get("rope_type", rope.get("type"))
    expected_F, factor = ROPE_INIT_FUNCTIONS[kind](theirs, None)
    scaling = RopeScaling.of({**rope, "rope_theta": 5000.0}, 256)
    config = config_of("eagle3", head_dim=head_dim, rope_theta=5000.0, rope_scaling=scaling)
    found_F, found = frequencies(config)
    torch.testing.assert_close(found_F, expected_F, atol=1e-9, rtol=1e-6)
    assert found == pytest.approx(factor, abs=1e-12)
    cos, sin = rope_table(torch.tensor([0, 3, 200]), config)
    angles = torch.tensor([0.0, 3.0, 200.0])[:, None] * expected_F
    torch.testing.assert_close(cos[:, 0, : head_dim // 2], angles.cos() * factor, atol=1e-4, rtol=0)
    torch.testing.assert_close(sin[:, 0, head_dim // 2 :], angles.sin() * factor, atol=1e-4, rtol=0)
    kept = RopeTables(config, torch.device("cpu"))([0, 3, 200])
    assert torch.equal(kept[0], cos) and torch.equal(kept[1], sin), "serving rotates as training does"


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type is 'longrope'; .*linear, llama3, yarn"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type is 'dynamic'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({**YARN, "partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ({"rope_type": "linear"}, "needs the field 'factor'"),
        ({**LLAMA3, "low_freq_factor": None}, "needs the field 'low_freq_factor'"),
        ({**LLAMA3, "high_freq_factor": 0.5}, "high_freq_factor is 0.5; it must be above"),
        ({**YARN, "mrope_section": [1, 1, 2]}, "mrope_section: rope_type 'yarn' has no such fields"),
        ({"rope_type": "linear", "factor": -1.0}, "factor is -1.0"),
        ({**YARN, "truncate": 1}, "truncate is 1"),
    ],
)
def test_what_draft_layers_do_not_have_is_refused_by_name(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling.of(rope, 256)


@pytest.mark.parametrize("method", ["dspark", "dflash", "eagle3", "peagle", "mtp", "dflash_input"])
def test_a_scaled_drafter_drafts_what_it_was_trained_on(method: str) -> None:
    scaling = RopeScaling.of(LLAMA3, 256)
    drafter = made(method, rope_scaling=scaling).weights.module.eval()
    assert check_alignment(toy_target(), drafter, toy_samples(3), torch.arange(97)) > 20
    other = replace(drafter.config, rope_scaling=None)
    assert not torch.equal(frequencies(drafter.config)[0], frequencies(other)[0])


def test_a_scaling_is_kept_in_our_own_dialect_and_read_by_transformers_elsewhere() -> None:
    for rope in (LLAMA3, YARN):
        weights = made("peagle", rope_scaling=RopeScaling.of(rope, 256)).weights.folded()
        own = Own(PEagleConfig, PEagle)
        written = own.write(weights, None)
        as_json = json.loads(json.dumps(written.config))
        assert own.read(as_json, written.tensors, Source("config.json")).config == weights.config
    scaled = made("eagle3", "head", rope_scaling=RopeScaling.of(LLAMA3, 256)).weights.folded()
    theirs = LlamaConfig(**Eagle3Dialect().write(scaled, None).config)
    assert theirs.rope_parameters == {**LLAMA3, "rope_theta": 777.0}


def test_drafters_take_the_target_s_scaling() -> None:
    """Llama 3.1's and yarn's; the kinds that draft layers do not have leave them unscaled."""
    kinds: list[Any] = [DSparkConfig, Eagle3Config, MTPConfig]
    for family, rope_type in (("llama3.1", "llama3"), ("gpt_oss", "yarn"), ("qwen3", None), ("gemma4", None)):
        target = published_target(family)
        target.tokenizer = SimpleNamespace(mask_token_id=9)  # type: ignore[assignment]
        aux = {DSparkConfig: {"num_aux_layers": 2}, Eagle3Config: {"target_layer_ids": [1, 2]}}
        for kind in kinds:
            found = kind.from_target(target, **aux.get(kind, {})).rope_scaling
            assert (None if found is None else found.rope_type) == rope_type, (family, kind)
            if family == "llama3.1":
                assert found.fields() == {name: v for name, v in LLAMA3_ROPE.items() if name != "rope_theta"}
        assert DSparkV4Config.from_target(target, num_aux_layers=1).rope_scaling is None
