"""The training loop on toy models: it learns, resumes exactly and leaves nothing half-written."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider.checkpoints.checkpoint as checkpoint_module
import outrider.training.trainer as trainer_module
from outrider.checkpoints.checkpoint import load_checkpoint, read_metadata
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import BlockDrafter
from outrider.drafters.dspark import DSpark
from outrider.training.batches import build_batch
from outrider.training.features import FeatureSource
from outrider.training.recipe import Recipe
from outrider.training.trainer import Trainer, learning_rate, saved_run
from outrider.training.watch import held_out_metrics
from tests.toys.targets import randomise, toy_config, toy_samples, toy_target
from tests.toys.training import OPTIMIZER, make_run, recipe, train_until


@pytest.mark.parametrize(("head", "anchors"), [("vanilla", "random"), ("rnn", "random"), ("vanilla", "blocks")])
def test_a_killed_and_resumed_run_ends_with_the_same_weights(tmp_path: Path, head: str, anchors: str) -> None:
    target, optimizer = toy_target(), {**OPTIMIZER, "anchors": anchors}
    whole = make_run(target, head)
    Trainer(recipe(tmp_path / "whole", optimizer=optimizer), whole).train()
    Trainer(recipe(tmp_path / "parts", optimizer=optimizer), make_run(target, head)).train(stop_after=7)
    resumed = make_run(target, head)
    resumed.drafter.aux_scale_L.mul_(1.5)  # measured a little differently this time: those of the state count
    # another memory budget: features are recomputed, not remembered
    Trainer(recipe(tmp_path / "parts", optimizer=optimizer, feature_cache_gb=0.0), resumed).train()
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(tensor, resumed.drafter.state_dict()[name]), name
    lines = [
        [json.loads(line) for line in (tmp_path / part / "metrics.jsonl").read_text().splitlines()]
        for part in ("whole", "parts")
    ]
    for line in [*lines[0], *lines[1]]:
        line.pop("seconds", None)
    held = [[line for line in part if line["group"] == "train"] for part in lines]
    assert held[0] == held[1], "metrics.jsonl has every step once, with the same figures"


def test_training_learns_and_the_checkpoint_serves(tmp_path: Path) -> None:
    target = toy_target()
    run = make_run(target)
    run.held_out = run.samples[:3]  # random text can be learnt by heart, not generalised
    learning = recipe(tmp_path, optimizer={"steps": 400, "sequences_per_step": 4, "learning_rate": 1e-2})
    before = Trainer(learning, run).evaluate()["loss"]
    after = train_until(lambda held_out: held_out["loss"] < before - 1, learning, run)
    checkpoint = load_checkpoint(tmp_path / "drafter")
    assert checkpoint.metadata["step"] % 20 == 0 and checkpoint.metadata["held_out"] == after
    assert checkpoint.weights.draft_ids_Vd is not None and torch.equal(
        checkpoint.weights.draft_ids_Vd, run.draft_ids_Vd
    )
    served = BlockDrafter(checkpoint.weights, target)
    direct = BlockDrafter(DrafterWeights(run.drafter, run.draft_ids_Vd), target)
    aux_layers = torch.randn(6, 3, 32)
    blocks = []
    for packed in (served, direct):
        session = packed.new_session(16)
        packed.extend([session], [[0] * 6], aux_layers)
        blocks.append(packed.block_hidden([session], [5]))
    torch.testing.assert_close(*blocks, atol=1e-5, rtol=1e-5)
    assert any((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma", "gemma2"])
def test_other_families_train_from_noise(tmp_path: Path, family: str) -> None:
    run = make_run(toy_target(family))
    metrics = Trainer(recipe(tmp_path), run).train(stop_after=3)
    assert metrics["loss"] > 0 and load_checkpoint(tmp_path / "drafter").metadata["step"] == 3


def test_other_responses_may_not_resume(tmp_path: Path) -> None:
    target = toy_target()
    Trainer(recipe(tmp_path), make_run(target)).train(stop_after=2)
    other = make_run(target)
    other.samples = other.samples[1:]
    with pytest.raises(ValueError, match=r"samples_sha256 differs"):
        Trainer(recipe(tmp_path), other).train()


def test_a_loss_that_is_not_finite_stops_training_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    run = make_run(toy_target())
    Trainer(recipe(tmp_path), run).train(stop_after=4)
    saved = (tmp_path / "state" / "state.safetensors").read_bytes()
    broken = make_run(toy_target())
    trainer = Trainer(recipe(tmp_path), broken)
    broken.objective.head_VH = broken.objective.head_VH * torch.nan
    with pytest.raises(ValueError, match=r"loss is nan at step 4.*Lower optimizer\.learning_rate"):
        trainer.train()
    assert (tmp_path / "state" / "state.safetensors").read_bytes() == saved


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(toy_target())
    Trainer(recipe(tmp_path), run).train(stop_after=4)
    before = sorted(p.name for p in tmp_path.iterdir())

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "save_file", full)
    with pytest.raises(OSError, match=r"the disk is full: nothing was saved to .*drafter"):
        Trainer(recipe(tmp_path), make_run(toy_target())).train()
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert load_checkpoint(tmp_path / "drafter").metadata["step"] == 4


def test_another_recipe_may_not_resume(tmp_path: Path) -> None:
    target = toy_target()
    Trainer(recipe(tmp_path), make_run(target)).train(stop_after=2)
    with pytest.raises(ValueError, match=r"another recipe or version: seed was 0, is now 5\."):
        Trainer(recipe(tmp_path, seed=5), make_run(target)).train()


def test_a_state_without_a_field_of_the_recipe_is_refused(tmp_path: Path) -> None:
    Trainer(recipe(tmp_path), make_run(toy_target())).train(stop_after=2)
    path = tmp_path / "state" / "state.json"
    state = json.loads(path.read_text())
    del state["settings"]["drafter"]["is_causal"]
    path.write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"another recipe or version: drafter.is_causal was left out, is now "):
        Trainer(recipe(tmp_path), make_run(toy_target())).train()


def test_other_anchors_may_not_resume(tmp_path: Path) -> None:
    Trainer(recipe(tmp_path), make_run(toy_target())).train(stop_after=2)
    stored = json.loads((tmp_path / "state" / "state.json").read_text())["settings"]["optimizer"]
    assert "anchors" not in stored, "as in states from before there was a choice, which go on"
    with pytest.raises(ValueError, match=r"another recipe or version: optimizer.anchors was left out, is now blocks"):
        Trainer(recipe(tmp_path, optimizer={**OPTIMIZER, "anchors": "blocks"}), make_run(toy_target())).train()


def test_epochs_are_as_many_steps_as_they_deal(tmp_path: Path) -> None:
    """12 samples in threes are four steps an epoch; the run that epochs began goes on as what it is."""
    optimizer = {**OPTIMIZER, "epochs": 3}
    del optimizer["steps"]
    chosen, counted = recipe(tmp_path / "epochs", optimizer=optimizer), recipe(tmp_path / "steps")
    assert "steps" not in chosen.model_dump()["optimizer"] and Recipe.model_validate(chosen.model_dump()) == chosen
    Trainer(chosen, make_run(toy_target())).train(stop_after=5)
    assert saved_run(chosen)["settings"]["optimizer"]["steps"] == 12
    runs = [make_run(toy_target()) for _ in range(2)]
    for one, run in zip((chosen, counted), runs, strict=True):
        Trainer(one, run).train()
    assert saved_run(chosen)["step"] == 12
    for name, tensor in runs[0].drafter.state_dict().items():
        assert torch.equal(tensor, runs[1].drafter.state_dict()[name]), name
    longer = recipe(tmp_path / "epochs", optimizer={**optimizer, "epochs": 4})
    for check in (lambda: saved_run(longer), lambda: Trainer(longer, make_run(toy_target())).train()):
        with pytest.raises(ValueError, match=r"optimizer.epochs was 3, is now 4"):
            check()
    with pytest.raises(ValueError, match="leave steps out, or set epochs to null"):
        recipe(tmp_path, optimizer={**optimizer, "steps": 12})


def test_features_are_bounded_and_do_not_depend_on_the_bound() -> None:
    target, samples = toy_target(), toy_samples(6)
    scale = torch.tensor([1.0, 2.0, 3.0])
    wide = FeatureSource(target, samples, (0, 2, 3), scale, 2**30)
    narrow = FeatureSource(target, samples, (0, 2, 3), scale, 1)
    for index in (0, 1, 2, 0, 5, 1):
        a, b = wide[index], narrow[index]
        assert torch.equal(a.aux_SLD, b.aux_SLD) and torch.equal(a.lse_R, b.lse_R)
    assert len(narrow._kept) == 1 and len(wide._kept) == 4


def test_learning_rate_warms_up_and_ends_at_zero() -> None:
    config = recipe(Path("x"), optimizer={"steps": 100, "learning_rate": 1.0, "warmup_fraction": 0.1}).optimizer
    rates = [learning_rate(s, config) for s in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0 and rates[100] == pytest.approx(0)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_every_step_is_taken_with_its_own_learning_rate(tmp_path: Path) -> None:
    chosen = recipe(tmp_path)
    trainer = Trainer(chosen, make_run(toy_target()))
    trainer.train(stop_after=3)
    rates = [learning_rate(step, chosen.optimizer) for step in range(5)]
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {rates[2]} and len(set(rates[1:4])) == 3


def test_time_ends_a_training_and_its_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which steps take seconds the rate falls to zero within `max_minutes`, long before the last step."""
    now = iter(range(100_000))
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: float(next(now)))
    limited = {"steps": 1000, "max_minutes": 0.5, "learning_rate": 1.0, "warmup_fraction": 0.0}
    trainer = Trainer(recipe(tmp_path, optimizer=limited), make_run(toy_target()))
    rates = list[float]()
    step = Trainer._step

    def noted(self: Trainer, *parts: Any) -> Any:
        report = step(self, *parts)
        rates.append(self.optimizer.param_groups[0]["lr"])
        return report

    monkeypatch.setattr(Trainer, "_step", noted)
    trainer.train()
    print(rates)
    assert 2 < len(rates) < 100 and rates == sorted(rates, reverse=True) and rates[-1] < 0.5 < rates[0]
    assert read_metadata(tmp_path / "drafter")["step"] == len(rates)
    assert trainer.last_metrics, "measured at the end"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_initialisation_copies_the_last_layers(family: str) -> None:
    target = toy_target(family)
    drafter = DSpark(toy_config(intermediate_size=48))
    randomise(drafter)
    drafter.initialize_from(target, [s.tokens for s in toy_samples(2)])
    theirs = target.model.model.layers[-2]
    layer = drafter.layers[0]
    assert torch.equal(layer.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
    expected = theirs.self_attn.q_norm.weight if family == "qwen3" else layer.self_attn.q_norm.weight.mean()
    torch.testing.assert_close(layer.self_attn.q_norm.weight, expected.expand(8))


def test_held_out_metrics_are_products_of_agreement() -> None:
    run = make_run(toy_target())
    trainer = Trainer(recipe(Path("unused")), run)
    metrics = trainer.evaluate()
    assert 1 <= metrics["expected_length_greedy"] <= 1 + run.drafter.config.gamma
    assert held_out_metrics(
        run.drafter,
        run.objective,
        [build_batch([(0, [9])], run.held_out, [trainer.held_out[0]], run.drafter.config.gamma)],
    )
