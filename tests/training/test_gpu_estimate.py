"""`--dry-run --gpus`: the large recipes and any target without weights; operations against a counted step."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from outrider.data.sources import load_prompts
from outrider.training.gpu_estimate import (
    GPUS,
    TARGETS,
    active_parameters,
    estimate_on_gpus,
    parse_gpus,
    planned_target,
)
from outrider.training.recipe import Recipe, load_recipe
from tests.toys.command_line import Run

# Published parameters of all, and of the layers of a token, in billions.
PARAMETERS = {
    "Qwen/Qwen3-4B": (4.02, 3.63),
    "Qwen/Qwen3-8B": (8.19, 6.95),
    "Qwen/Qwen3-14B": (14.77, 13.21),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (30.53, 2.73),
    "meta-llama/Llama-3.1-8B-Instruct": (8.03, 6.98),
    "google/gemma-4-12B-it": (11.9, 10.9),
}
LARGE = [f"large/{method}" for method in ("dflash", "dspark", "eagle3")]


@pytest.mark.parametrize("recipe", LARGE)
@pytest.mark.parametrize("target", PARAMETERS)
def test_large_targets_are_planned_without_their_files(recipe: str, target: str, run: Run) -> None:
    """No directory, no network: the shapes are known. Every plan fits, the largest target's with its layers spread."""
    whole, active = PARAMETERS[target]
    spread = ["shard_target=true"] if whole > 20 else []
    status, out, error = run("train", recipe, f"target={target}", *spread, "--dry-run", "--gpus", "8xh100")
    assert status == 0, error
    assert "GPU-hours" in out and "objective" in out and "not enough memory" not in out
    chosen = load_recipe(Path(recipe), [f"target={target}"])
    found = estimate_on_gpus(chosen, *parse_gpus("8xh200"))
    assert active_parameters(planned_target(target, "<mask>")) == pytest.approx(active * 1e9, rel=0.01)
    assert found.memory["target"] == pytest.approx(2e9 * whole, rel=0.01)
    assert found.seconds["features"] > 512 * 2 * active * 1e9 * 1500 / (8 * 0.4 * GPUS["h200"].operations)
    conversations = chosen.data.prompts[0].limit
    assert conversations is not None and chosen.optimizer.epochs is not None
    assert found.steps == chosen.optimizer.epochs * ((conversations - 64) // 512)


def test_every_target_that_is_known_has_its_parameters_compared() -> None:
    assert set(TARGETS) == set(PARAMETERS)


def test_what_gpus_and_sequences_change() -> None:
    chosen = load_recipe(Path("large/dspark"))
    one = estimate_on_gpus(chosen.model_copy(update={"parallel": "auto"}), *parse_gpus("1xH100"))
    eight = estimate_on_gpus(chosen.model_copy(update={"shard_target": True}), *parse_gpus("8xH100"))
    for part in ("features", "drafter", "objective"):
        assert one.seconds[part] == pytest.approx(8 * eight.seconds[part])
    state, target = "drafter, gradients, moments", "target"
    assert one.memory[state] == pytest.approx(8 * eight.memory[state])
    assert eight.memory[target] < one.memory[target] / 3
    assert "gradients' exchange" in eight.seconds and "gradients' exchange" not in one.seconds
    assert one.hours == pytest.approx(one.steps * one.step_seconds / 3600)


@pytest.mark.parametrize("algorithm", ["dspark", "dspark_v4"])
def test_operations_are_those_of_a_counted_step(algorithm: str) -> None:
    """Up to gradients that frozen embeddings and features need not have, and what fused attention computes again."""
    from outrider.training.batches import build_batch
    from outrider.training.features import FeatureSource
    from outrider.training.gpu_estimate import _Load, _operations
    from outrider.training.loss import BlockObjective
    from outrider.training.setup import new_drafter
    from tests.toys.targets import toy_samples, toy_target, with_mask_token

    target = with_mask_token(toy_target("qwen3"))
    (sample,) = toy_samples(1)
    section: dict[str, object] = {"algorithm": algorithm, "markov_rank": 6, "block_size": 4, "num_aux_layers": 2}
    section |= {"n_routed_experts": 12, "sliding_window": 8} if algorithm == "dspark_v4" else {}
    data = {"prompts": [{"path": "train_math"}]}
    recipe = Recipe.model_validate({"target": "toy", "out": "nowhere", "data": data, "drafter": section})
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


def test_another_target_is_planned_from_its_config_and_tokenizer(toy: Path, tmp_path: Path, run: Run) -> None:
    """Without weights; a source without a limit is counted."""
    place = tmp_path / "target"
    shutil.copytree(toy / "target", place, ignore=shutil.ignore_patterns("*.safetensors"))
    arguments = ["train", "large/dflash", f"target={place}", f"out={tmp_path / 'run'}", "drafter.num_aux_layers=2"]
    arguments += ["data.prompts=[{path: train_math}]", "optimizer.sequences_per_step=10", "data.held_out=4"]
    status, out, error = run(*arguments, "--dry-run", "--gpus", "8xh100")
    assert status == 0, error
    steps = 6 * ((len(load_prompts("train_math")) - 4) // 10)
    assert f"{steps} steps" in out and not (tmp_path / "run").exists()
    status, _, error = run(*arguments, "--dry-run", "--gpus", "8xk80")
    assert status == 2 and "known are a100, h100" in error
    status, _, error = run(*arguments, "--gpus", "8xh100")
    assert status == 2 and "--gpus is for --dry-run" in error
