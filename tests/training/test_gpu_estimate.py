"""`--dry-run --gpus`: plans from a config and a tokenizer, without weights; operations against a counted step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from outrider.target.model import outline_target
from outrider.training.gpu_estimate import GPUS, active_parameters, estimate_on_gpus, parse_gpus
from outrider.training.recipe import Recipe
from tests.toys.command_line import Run

# Published shapes: hidden, inner, layers, heads, key heads, vocabulary; parameters of all and of a token's layers.
DENSE = {"head_dim": 128, "tie_word_embeddings": False}
TARGETS: dict[str, tuple[str, tuple[int, ...], dict[str, Any], float, float]] = {
    "Qwen3-8B": ("qwen3", (4096, 12288, 36, 32, 8, 151936), DENSE, 8.19e9, 6.95e9),
    "Qwen3-14B": ("qwen3", (5120, 17408, 40, 40, 8, 151936), DENSE, 14.77e9, 13.21e9),
    "Llama-3.1-8B": ("llama", (4096, 14336, 32, 32, 8, 128256), DENSE, 8.03e9, 6.98e9),
    "Qwen3-Coder-30B-A3B": (
        "qwen3_moe",
        (2048, 6144, 48, 32, 4, 151936),
        {**DENSE, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        30.53e9,
        2.73e9,
    ),
}
METHODS: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": 16, "num_hidden_layers": 5},
    "dspark": {"block_size": 7, "num_hidden_layers": 5, "markov_rank": 256},
    "eagle3": {"gamma": 7},
}


def described(name: str, toy: Path, place: Path) -> Path:
    """A directory with a config of these shapes and a tokenizer, and no weights."""
    family, (hidden, inner, layers, heads, kv_heads, vocabulary), more, _, _ = TARGETS[name]
    shutil.copytree(toy / "target", place, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 40960,
        **more,
    }
    (place / "config.json").write_text(json.dumps(config))
    return place


def plan(target: Path, method: str = "dspark", **fields: Any) -> Recipe:
    return Recipe.model_validate({
        "target": str(target),
        "out": "nowhere",
        "data": {"prompts": [{"path": "train_math"}], "max_new_tokens": 2048, "max_prompt_tokens": 1024},
        "drafter": {"algorithm": method, "draft_vocab_size": 32000, **METHODS[method]},
        "optimizer": {"anchors_per_sequence": 512, "sequences_per_step": 64, "max_anchors_per_forward": 512},
        **fields,
    })  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_published_targets_without_weights(name: str, toy: Path, tmp_path: Path) -> None:
    *_, whole, active = TARGETS[name]
    place = described(name, toy, tmp_path / name)
    assert active_parameters(outline_target(place)) == pytest.approx(active, rel=0.01)
    for method in METHODS:
        found = estimate_on_gpus(plan(place, method), *parse_gpus("8xh200"))
        assert found.memory["target"] == pytest.approx(2 * whole, rel=0.01)
        assert found.seconds["features"] > 64 * 2 * active * 1500 / (8 * 0.4 * GPUS["h200"].operations)
        assert sum(found.memory.values()) < GPUS["h200"].memory


def test_what_gpus_and_sequences_change(toy: Path, tmp_path: Path) -> None:
    place = described("Qwen3-8B", toy, tmp_path / "target")
    one = estimate_on_gpus(plan(place), *parse_gpus("1xH100"))
    eight = estimate_on_gpus(plan(place, parallel="fsdp", shard_target=True), *parse_gpus("8xH100"))
    for part in ("features", "drafter", "objective"):
        assert one.seconds[part] == pytest.approx(8 * eight.seconds[part])
    state, target = "drafter, gradients, moments", "target"
    assert one.memory[state] == pytest.approx(8 * eight.memory[state])
    assert eight.memory[target] < one.memory[target] / 3
    assert "gradients' exchange" in eight.seconds and "gradients' exchange" not in one.seconds
    assert one.hours == pytest.approx(one.steps * one.step_seconds / 3600)


def test_operations_are_those_of_a_counted_step(toy: Path) -> None:
    """Up to gradients that frozen embeddings and features need not have, and what fused attention computes again."""
    from outrider.training.batches import build_batch
    from outrider.training.features import FeatureSource
    from outrider.training.gpu_estimate import _Load, _operations
    from outrider.training.loss import BlockObjective
    from outrider.training.setup import new_drafter
    from tests.toys.targets import toy_samples, toy_target, with_mask_token

    target = with_mask_token(toy_target("qwen3"))
    (sample,) = toy_samples(1)
    recipe = plan(
        toy / "target", drafter={"algorithm": "dspark", "markov_rank": 6, "block_size": 4, "num_aux_layers": 2}
    )
    drafter = new_drafter(recipe, target)
    anchors = [position - 1 for position in sample.supervised_positions[:-4]]
    layers = drafter.config.target_layer_ids
    features = FeatureSource(target, [sample], layers, aux_scale_L=torch.ones(len(layers)), budget_bytes=2**30)
    batch = build_batch([(0, anchors)], [sample], [features[0]], gamma=drafter.config.gamma)
    objective = BlockObjective(target, torch.arange(target.vocab_size), recipe.objective)
    with FlopCounterMode(display=False) as counter:
        objective(drafter, batch).loss.backward()
    context = anchors[-1]
    load = _Load(1, context, 2 * (context - sum(anchors) / len(anchors)), len(anchors), drafts=4)
    expected = _operations(recipe, target, drafter, load=load)
    assert counter.get_total_flops() == pytest.approx(expected["drafter"] + expected["objective"], rel=0.15)


def test_the_verb(toy: Path, tmp_path: Path, run: Run) -> None:
    place = described("Llama-3.1-8B", toy, tmp_path / "target")
    arguments = ["train", "qwen3-8b-dspark", f"target={place}", f"out={tmp_path / 'run'}"]
    status, out, error = run(*arguments, "--dry-run", "--gpus", "8xh100")
    assert status == 0, error
    assert "GPU-hours" in out and "objective" in out and not (tmp_path / "run").exists()
    status, _, error = run(*arguments, "--dry-run", "--gpus", "8xk80")
    assert status == 2 and "known are a100, h100" in error
    status, _, error = run(*arguments, "--gpus", "8xh100")
    assert status == 2 and "--gpus is for --dry-run" in error
