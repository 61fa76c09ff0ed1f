"""Watching a run: real decoding on the way, the best drafter, early stopping, meters, and going on from a drafter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import outrider.training.setup as run_setup
from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.data.responses import Sample
from outrider.decoding.generate import acceptance, generate
from outrider.decoding.request import StopRules
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import BlockDrafter, DFlash
from outrider.drafters.dspark import DSpark
from outrider.drafters.layers import BlockLayout
from outrider.drafters.loss import ObjectiveConfig
from outrider.drafters.medusa import Medusa, MedusaConfig
from outrider.evaluation.figures import plot_training
from outrider.target.model import Target
from outrider.training.batches import build_batch
from outrider.training.dataset import Dataset, choose_draft_ids
from outrider.training.features import measure_aux_scale
from outrider.training.logging import Meters, peak_memory_gib, read_metrics
from outrider.training.objective import BlockObjective
from outrider.training.recipe import Recipe, load_recipe
from outrider.training.setup import Run, prepare
from outrider.training.state import read_run
from outrider.training.trainer import Trainer
from outrider.training.watch import Watch, decode_check, first_prompts
from tests.toys.targets import randomise, toy_config, toy_target
from tests.toys.training import on_policy_samples, train_until

WATCH = {"decode_every": 2, "decode_prompts": 2, "decode_tokens": 12}
LEARNING = {"steps": 400, "sequences_per_step": 4, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


@pytest.fixture(scope="module")
def samples(target: Target) -> list[Sample]:
    return on_policy_samples(target, 9)


def recipe(out: Path, **changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "target": "toy",
        "out": str(out),
        "data": {"prompts": [{"path": "unused"}]},
        "optimizer": {"steps": 12, "sequences_per_step": 3, "anchors_per_sequence": 4, "learning_rate": 1e-2},
        "objective": {"ce": 1.0},
        "watch": WATCH,
        "log_every": 1,
        "eval_every": 6,
        "save_every": 4,
    }
    return Recipe.model_validate({**fields, **changes})


def make_run(target: Target, samples: list[Sample]) -> Run:
    config = toy_config(draft_vocab_size=90)
    torch.manual_seed(0)
    drafter = DSpark(config)
    drafter.aux_scale_L.copy_(measure_aux_scale(target, samples[:3], config.target_layer_ids))
    ids = choose_draft_ids(samples, 97, 90, frozenset({1}))
    objective = BlockObjective(target, ids, ObjectiveConfig(ce=1.0))
    return Run(target, drafter, objective, ids, True, samples, samples[:3])  # learnt by heart: toys do not generalise


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.drafter.state_dict().items()}


def entries(out: Path, group: str) -> list[dict[str, Any]]:
    return read_metrics(out / "metrics.jsonl").get(group, [])


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("tokens_per_second", "seconds", "share_of_time", "break_even")
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


def test_decode_checks_do_not_touch_training(tmp_path: Path, target: Target, samples: list[Sample]) -> None:
    seen = []
    for name, watch in (("with", WATCH), ("without", {"decode_every": None})):
        run = make_run(target, samples)
        state = torch.get_rng_state()
        Trainer(recipe(tmp_path / name, watch=watch), run).train()
        assert torch.equal(torch.get_rng_state(), state)
        seen.append(weights(run))
    assert entries(tmp_path / "with", "decode") and not entries(tmp_path / "without", "decode")
    for name, tensor in seen[0].items():
        assert torch.equal(tensor, seen[1][name]), name


def test_a_decode_check_between_backward_and_update_leaves_gradients_and_weights(
    target: Target, samples: list[Sample]
) -> None:
    run = make_run(target, samples)
    trainer = Trainer(recipe(Path("unused")), run)
    run.objective(
        run.drafter, build_batch([(0, [5, 6])], run.held_out, [trainer.held_out[0]], run.drafter.config.gamma)
    ).loss.backward()
    before = weights(run)
    gradients = {n: p.grad.clone() for n, p in run.drafter.named_parameters() if p.grad is not None}
    decode_check(run.drafter, target, run.draft_ids_Vd, first_prompts(run.held_out, 2), 8, temperature=1.0)
    for name, parameter in run.drafter.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.requires_grad
        if name in gradients:
            assert parameter.grad is not None and torch.equal(parameter.grad, gradients[name])
    assert gradients and run.drafter.training


def test_a_decode_check_is_the_decoding_of_the_saved_drafter(
    tmp_path: Path, target: Target, samples: list[Sample]
) -> None:
    run = make_run(target, samples)
    out, prompts = tmp_path / "run", first_prompts(run.held_out, 3)
    figures: dict[str, float] = {}

    def accepts(_: dict[str, float]) -> bool:  # rounds without accepted drafts show little
        figures.update(decode_check(run.drafter, target, run.draft_ids_Vd, prompts, 16))
        return figures["tau"] > 1.5

    train_until(accepts, recipe(out, optimizer=LEARNING, watch={**WATCH, "decode_every": 20}), run)
    checkpoint = load_checkpoint(out / "drafter")
    packed = BlockDrafter(checkpoint.weights, target)
    decoded = [generate(target, prompt, packed, rules=StopRules(16)) for prompt in prompts]
    for generation, prompt in zip(decoded, prompts, strict=True):
        assert generation.tokens == generate(target, prompt, rules=StopRules(16)).tokens
    rounds = [r for generation in decoded for r in generation.rounds]
    tau, conditional, _ = acceptance(rounds, run.drafter.config.gamma)
    assert figures["tau"] == tau and figures["rounds"] == len(rounds)
    for k, value in enumerate(conditional, 1):
        assert figures.get(f"conditional_acceptance_{k}") == value
    assert 0 < figures["tokens"] / figures["tokens_per_second"] < figures["seconds"]
    last = entries(out, "decode")[-1]
    assert last["step"] == checkpoint.metadata["step"] and 0 < last["share_of_time"] < 1


def test_a_bfloat16_target_decodes_with_the_drafter_in_training(target: Target, samples: list[Sample]) -> None:
    import copy

    half = Target(copy.deepcopy(target.model).to(torch.bfloat16), None, "toy-bfloat16")
    run = make_run(target, samples)
    randomise(run.drafter)
    prompts = first_prompts(run.held_out, 3)
    for ids in (run.draft_ids_Vd, None):
        drafter = run.drafter if ids is not None else DSpark(toy_config())
        figures = decode_check(drafter, half, ids, prompts, 8)
        assert 1 <= figures["tau"] <= 1 + drafter.config.gamma
        packed = BlockDrafter(DrafterWeights(drafter, ids), half)
        plain = [generate(half, p, rules=StopRules(8)).tokens for p in prompts]
        assert [generate(half, p, packed, rules=StopRules(8)).tokens for p in prompts] == plain
        assert figures["tokens"] == sum(map(len, plain))


def test_prompts_are_the_first_of_each_conversation() -> None:
    split = [Sample("a", [5, 6, 7, 8], ((2, 3), (3, 4))), Sample("a", [5, 6, 7, 9, 9], ((4, 5),))]
    assert first_prompts([*split, Sample("b", [4, 4], ((1, 2),))], 5) == [[5, 6], [4]]
    assert first_prompts([*split, Sample("b", [4, 4], ((1, 2),))], 1) == [[5, 6]]


def follow(values: list[float], run: Run, **watch: Any) -> Watch:
    """A watch that has seen these held-out lengths at steps 1, 2, ..., its memory passed through JSON every time."""
    watched = Watch(recipe(Path("unused"), watch={"decode_every": None, **watch}), run)
    for step, value in enumerate(values, 1):
        memory = json.loads(json.dumps(watched.state_dict()))
        watched = Watch(recipe(Path("unused"), watch={"decode_every": None, **watch}), run)
        watched.load_state_dict(memory)
        assert not watched.stopped, "nobody looks again after the stop"
        watched.look(step, run.drafter, {"expected_length_greedy": value})
    return watched


def test_patience_and_the_best_step(target: Target, samples: list[Sample]) -> None:
    run = make_run(target, samples)
    assert follow([1.0, 2.0, 1.9, 1.9], run, patience=3).best_step == 2
    assert not follow([1.0, 2.0, 1.9, 1.9, 2.1], run, patience=3).stopped
    stopped = follow([1.0, 2.0, 1.9, 1.9, 2.0], run, patience=3)
    assert stopped.stopped and (stopped.best, stopped.best_step) == (2.0, 2)
    assert stopped.summary() == "patience of 3 checks spent; best drafter: step 2, expected_length_greedy 2.00"
    assert not follow([1.0] * 9, run).stopped
    assert follow([1.0], run).summary() == "best drafter: step 1, expected_length_greedy 1.00"
    began = Watch(recipe(Path("unused"), watch={"decode_every": None}), run)
    for step, value in enumerate([2.0, 1.9, 2.0]):
        began.look(step, run.drafter, {"expected_length_greedy": value})
    assert (
        began.summary() == "no step was better than the drafter that training began with, expected_length_greedy 2.00"
    )
    # small steps: each is the best drafter so far, none alone passes min_delta, together they do
    small = follow([1.0, 1.06, 1.12], run, patience=2, min_delta=0.1)
    assert not small.stopped and small.best_step == 3
    flat = follow([1.0, 1.04, 1.08], run, patience=2, min_delta=0.1)
    assert flat.stopped and flat.best_step == 3


def test_what_is_due_depends_on_the_step_only(target: Target, samples: list[Sample]) -> None:
    run = make_run(target, samples)
    decoding = Watch(recipe(Path("x"), watch={"decode_every": 5}), run)
    assert [s for s in range(1, 13) if decoding.due(s)] == [5, 10]
    plain = Watch(recipe(Path("x"), watch={"decode_every": None}), run)
    assert [s for s in range(1, 13) if plain.due(s)] == [6, 12]
    assert (decoding.metric, plain.metric) == ("decode_tau", "expected_length_greedy")


def test_another_measure_begins_anew(target: Target, samples: list[Sample]) -> None:
    run = make_run(target, samples)
    memory = follow([3.0], run).state_dict()
    same = Watch(recipe(Path("x"), watch={"decode_every": None, "patience": 4}), run)
    same.load_state_dict(memory)
    assert same.best == 3.0
    other = Watch(recipe(Path("x"), watch={"decode_every": 5}), run)
    other.load_state_dict(memory)
    assert other.best is None and other.state_dict() == {} and other.summary() == ""
    other.load_state_dict({})
    assert other.best is None


class Killed(BaseException):
    pass


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    check = Trainer._check_finite

    def checked(self: Trainer, what: str, value: float, now: int) -> None:
        if now == step:
            raise Killed
        check(self, what, value, now)

    monkeypatch.setattr(Trainer, "_check_finite", checked)


@pytest.mark.parametrize("killed", [3, 7])
def test_a_killed_run_finds_the_same_best_drafter(
    tmp_path: Path, target: Target, samples: list[Sample], killed: int
) -> None:
    Trainer(recipe(tmp_path / "whole"), make_run(target, samples)).train()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, killed)
        Trainer(recipe(tmp_path / "parts"), make_run(target, samples)).train()
    Trainer(recipe(tmp_path / "parts"), make_run(target, samples)).train()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert read_run(whole / "state")["watch"] == read_run(parts / "state")["watch"] != {}
    assert without_times(entries(whole, "decode")) == without_times(entries(parts, "decode"))
    assert [e["step"] for e in entries(whole, "decode")] == [2, 4, 6, 8, 10, 12]
    for name in ("best/model.safetensors", "drafter/model.safetensors", "state/state.safetensors"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name


def test_training_stops_when_nothing_improves_and_stays_stopped(
    tmp_path: Path, target: Target, samples: list[Sample]
) -> None:
    still = {"steps": 12, "sequences_per_step": 3, "anchors_per_sequence": 4, "learning_rate": 1e-12}
    patient = recipe(tmp_path, optimizer=still, watch={**WATCH, "patience": 2})
    first = Trainer(patient, make_run(target, samples))
    first.train(stop_after=5)  # one check failed, at step 4; stopping here is no check of its own
    assert read_run(tmp_path / "state")["watch"]["failed"] == 1 and not first.watch.stopped
    second = Trainer(patient, make_run(target, samples))
    second.train()
    assert second.watch.stopped and second.watch.best_step == 2
    stored = json.loads((tmp_path / "state" / "state.json").read_text())
    assert stored["step"] == 6 and stored["watch"]["failed"] == 2
    assert load_checkpoint(tmp_path / "best").metadata["step"] == 2
    assert load_checkpoint(tmp_path / "drafter").metadata["step"] == 6
    third = Trainer(patient, make_run(target, samples))
    assert third.train() and third.watch.stopped
    assert json.loads((tmp_path / "state" / "state.json").read_text()) == stored
    # more patience may be given afterwards
    Trainer(recipe(tmp_path, optimizer=still), make_run(target, samples)).train()
    assert load_checkpoint(tmp_path / "drafter").metadata["step"] == 12


def test_the_best_checkpoint_has_its_own_figures(tmp_path: Path, target: Target, samples: list[Sample]) -> None:
    run = make_run(target, samples)
    optimizer = {**LEARNING, "steps": 40}
    trainer = Trainer(recipe(tmp_path, optimizer=optimizer, watch={**WATCH, "decode_every": 8}), run)
    trainer.train()
    best = load_checkpoint(tmp_path / "best")
    taus = {e["step"]: e["tau"] for e in entries(tmp_path, "decode")}
    step = max(taus, key=lambda s: (taus[s], -s))
    assert best.metadata["step"] == step == trainer.watch.best_step
    assert best.metadata["decode"]["tau"] == trainer.watch.best == pytest.approx(taus[step], abs=1e-6)
    held_out = next(e for e in entries(tmp_path, "held_out") if e["step"] == step)
    assert best.metadata["held_out"]["loss"] == pytest.approx(held_out["loss"], abs=1e-6)
    again = decode_check(best.weights.module, target, best.weights.draft_ids_Vd, first_prompts(run.held_out, 2), 12)
    assert again["tau"] == trainer.watch.best


def test_meters_reach_the_logs(tmp_path: Path, target: Target, samples: list[Sample]) -> None:
    Trainer(recipe(tmp_path), make_run(target, samples)).train()
    speed = entries(tmp_path, "speed")
    assert len(speed) == 12
    for line in speed:
        parts = [line[f"{part}_seconds"] for part in ("features", "forward_backward", "optimizer")]
        assert all(part > 0 for part in parts) and sum(parts) <= line["step_seconds"] + 1e-5
        assert line["anchors_per_second"] < line["supervised_tokens_per_second"]
        assert 0.01 < line["peak_memory_gib"] < 500
    # steps 2, 4, ... were checked, so the windows after them say so
    assert [line["evaluation_seconds"] > 0 for line in speed] == [s % 2 == 1 and s > 1 for s in range(1, 13)]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    assert {"decode/tau", "decode/conditional_acceptance_1", "decode/share_of_time", "speed/anchors_per_second"} <= tags


def test_meters_count_what_they_are_told() -> None:
    import time

    begun = time.perf_counter()
    meters = Meters(torch.device("cpu"))
    for _ in range(2):
        with meters.features:
            time.sleep(0.02)
        with meters.evaluation:
            time.sleep(0.05)
        meters.count(30, 10)
        meters.steps += 1
    figures = meters.window()
    assert figures["supervised_tokens_per_second"] == pytest.approx(3 * figures["anchors_per_second"])
    assert 0.02 <= figures["features_seconds"] <= figures["step_seconds"]
    assert figures["evaluation_seconds"] >= 0.1 and figures["optimizer_seconds"] == 0
    assert figures["step_seconds"] + figures["evaluation_seconds"] / 2 <= time.perf_counter() - begun
    assert figures["supervised_tokens_per_second"] == pytest.approx(30 / figures["step_seconds"])
    assert meters.window()["anchors_per_second"] == 0


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the second opinion is Linux's own")
def test_peak_memory_is_the_high_water_mark() -> None:
    high_water = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    assert peak_memory_gib(torch.device("cpu")) == pytest.approx(int(high_water.split()[1]) / 2**20, rel=0.05)


def test_the_picture_shows_the_run(tmp_path: Path, target: Target, samples: list[Sample]) -> None:
    Trainer(recipe(tmp_path / "run"), make_run(target, samples)).train()
    metrics = tmp_path / "run" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 13, "group": "tr')  # a killed process cut this line
    assert set(read_metrics(metrics)) == {"train", "held_out", "decode", "speed"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plt, "close", lambda figure: None)
        plot_training(metrics, tmp_path / "all.png", ["toy", "2026-11-22"], best_step=4)
    figure = plt.gcf()
    labels = [{text.get_text() for text in panel.texts} for panel in figure.axes]
    expected = {"expected, T = 0", "expected, T = 1", "decoded", "break-even"}
    assert labels[:2] == [{"training", "held out"}, expected] and labels[2] <= {f"k = {k}" for k in range(1, 8)}
    assert [len(panel.lines) for panel in figure.axes] == [2, 5, len(labels[2]), 1] and labels[2]
    assert figure.get_suptitle() == "Training\ntoy | 2026-11-22 | dotted: best drafter, step 4"
    plt.close(figure)
    lines = metrics.read_text().splitlines(keepends=True)[:-1]
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(line for line in lines if '"decode"' not in line))
    plot_training(fewer, tmp_path / "fewer.png", best_step=4)
    pictures = [(tmp_path / name).read_bytes() for name in ("all.png", "fewer.png")]
    assert all(p.startswith(b"\x89PNG") and len(p) > 20_000 for p in pictures) and pictures[0] != pictures[1]
    fewer.write_text("")
    plot_training(fewer, tmp_path / "empty.png")


# --- going on from a drafter


@pytest.mark.parametrize("dspark", [True, False])
def test_aux_scales_fold_in_and_out_without_changing_the_function(dspark: bool) -> None:
    drafter = (DSpark if dspark else DFlash)(toy_config(dspark))  # type: ignore[arg-type]
    randomise(drafter)
    aux_layers = torch.randn(9, 3, 32) * torch.tensor([1.0, 300.0, 0.02])[:, None]
    layout = BlockLayout([9], torch.tensor([4, 7]), torch.tensor([0, 0]))
    embedded = torch.randn(2, 4, 32)
    with torch.no_grad():
        before = drafter(aux_layers, embedded, layout)
        stored = drafter.folded_state_dict()["fc.weight"].clone()
        for scale in (torch.tensor([1.1, 290.0, 0.03]), torch.tensor([7.0, 2.0, 0.5])):
            drafter.rescale_aux(scale)
            assert torch.equal(drafter.aux_scale_L, scale)
            torch.testing.assert_close(drafter(aux_layers, embedded, layout), before, atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(drafter.folded_state_dict()["fc.weight"], stored, atol=1e-6, rtol=1e-6)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory, target: Target, samples: list[Sample]) -> Path:
    """A run whose drafter has some drafts accepted, and a reduced vocabulary."""
    out = tmp_path_factory.mktemp("parent")
    learning = recipe(out, optimizer=LEARNING, watch={"decode_every": None})
    train_until(lambda held_out: held_out["expected_length_greedy"] > 1.5, learning, make_run(target, samples))
    return out


def continued(
    target: Target,
    samples: list[Sample],
    out: Path,
    section: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Recipe, Run]:
    section = dict(section)
    short = {"prompts": [{"path": "unused"}], "max_prompt_tokens": 64, "max_new_tokens": 64}
    own = {name: section.pop(name) for name in ("start_from", "initialize_from_target") if name in section}
    chosen = recipe(out, drafter=section, data=short, **own)
    monkeypatch.setattr(run_setup, "recipe_samples", lambda *_, **__: Dataset(samples, samples[:3], {}))
    return chosen, prepare(chosen, target, say=say)


def test_a_run_goes_on_where_the_drafter_stood(
    tmp_path: Path, target: Target, samples: list[Sample], parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {"start_from": str(parent / "drafter"), "block_size": 4, "num_aux_layers": 3, "sample_from_anchor": None}
    chosen, run = continued(target, samples, tmp_path, section, monkeypatch)
    stored = load_checkpoint(parent / "drafter")
    assert run.drafter.config == stored.config and run.reduced
    assert stored.weights.draft_ids_Vd is not None and torch.equal(run.draft_ids_Vd, stored.weights.draft_ids_Vd)
    assert not torch.equal(run.drafter.aux_scale_L, torch.ones(3))
    (first,) = run.history
    assert first["step"] == stored.metadata["step"] and first["optimizer"] == stored.metadata["recipe"]["optimizer"]
    before = stored.metadata["held_out"]
    trainer = Trainer(chosen, run)
    after = trainer.evaluate()
    assert after == {name: pytest.approx(value, rel=2e-3) for name, value in before.items()}
    assert after["expected_length_greedy"] > 1.4, "a trained drafter, not a new one"
    start = weights(run)
    trainer.train(stop_after=2)
    metadata = load_checkpoint(tmp_path / "drafter").metadata
    recorded, config = metadata["recipe"]["drafter"], stored.config
    assert recorded.pop("target_layer_ids") == list(config.target_layer_ids)
    assert not metadata["recipe"]["initialize_from_target"]
    assert recorded["markov_rank"] == 6 != chosen.drafter.markov_rank, "what was trained, not the section's default"
    assert metadata["history"][0]["initialize_from_target"] and metadata["history"][0]["target"] == "toy-llama"
    assert all(p.requires_grad for p in run.drafter.parameters())
    assert any(not torch.equal(tensor, start[name]) for name, tensor in run.drafter.state_dict().items())


def test_the_method_gone_on_with_is_recorded(
    tmp_path: Path, target: Target, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"hidden_size": 32, "vocab_size": 97, "draft_vocab_size": 97, "num_target_layers": 5}
    heads = Medusa(MedusaConfig(**shapes, num_heads=3, num_layers=2))
    save_drafter(Checkpoint(DrafterWeights(heads)), tmp_path / "heads")
    chosen, run = continued(target, samples, tmp_path / "out", {"start_from": str(tmp_path / "heads")}, monkeypatch)
    assert chosen.drafter.algorithm == "dspark" and run.drafter.algorithm == "medusa"
    recorded = Trainer(chosen, run).checkpoint(0).metadata["recipe"]["drafter"]
    assert recorded == {
        "algorithm": "medusa", "num_heads": 3, "num_layers": 2, "draft_vocab_size": 97
    }  # fmt: skip


def test_a_resumed_run_refuses_another_origin(
    tmp_path: Path, target: Target, samples: list[Sample], parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = load_checkpoint(parent / "drafter")
    save_drafter(stored, tmp_path / "origin")
    section = {"start_from": str(tmp_path / "origin")}
    chosen, run = continued(target, samples, tmp_path / "out", section, monkeypatch)
    Trainer(chosen, run).train(stop_after=3)
    chosen, run = continued(target, samples, tmp_path / "out", section, monkeypatch)
    Trainer(chosen, run).train(stop_after=4)
    with torch.no_grad():
        stored.weights.module.norm.weight.add_(1)
    save_drafter(stored, tmp_path / "origin")
    chosen, run = continued(target, samples, tmp_path / "out", section, monkeypatch)
    with pytest.raises(ValueError, match="origin_sha256 differs"):
        Trainer(chosen, run).train()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, there 2"),
        ({"block_size": 7}, "block_size is 7, there 4"),
        ({"markov_rank": 64, "block_size": 5}, "block_size is 5, there 4; markov_rank is 64, there 6"),
        ({"markov_head_type": "rnn"}, "markov_head_type is rnn, there vanilla"),
        ({"algorithm": "dflash"}, "algorithm is dflash, there dspark"),
        ({"num_aux_layers": 4}, "num_aux_layers is 4, there 3"),
        ({"target_layer_ids": [3, 1, 0]}, r"target_layer_ids is \[0, 1, 3\], there \[0, 2, 3\]"),
        ({"sliding_window": 9}, "sliding_window is 9, there None"),
        ({"initialize_from_target": True}, "initialize_from_target is True, there False"),
    ],
)
def test_a_recipe_that_contradicts_the_drafter_is_refused(
    tmp_path: Path,
    target: Target,
    samples: list[Sample],
    parent: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=f"contradicts .*drafter: {message}. Leave these fields out"):
        continued(target, samples, tmp_path, {"start_from": str(parent / "drafter"), **section}, monkeypatch)


@pytest.mark.parametrize(("wanted", "size"), [(50, 50), (95, 95), (None, 97)])
def test_a_drafter_goes_on_with_another_draft_vocabulary(
    tmp_path: Path,
    target: Target,
    samples: list[Sample],
    parent: Path,
    monkeypatch: pytest.MonkeyPatch,
    wanted: int | None,
    size: int,
) -> None:
    """Its tokens are those of a new drafter; what was learned of a token stays with it, and others know nothing."""
    section = {"start_from": str(parent / "drafter"), "draft_vocab_size": wanted}
    said: list[str] = []
    chosen, run = continued(target, samples, tmp_path / "out", section, monkeypatch, say=said.append)
    assert said == [f"draft vocabulary: {size} tokens, 90 in {parent / 'drafter'}"]
    ids = run.draft_ids_Vd.tolist()
    fresh = choose_draft_ids(samples, 97, size, always=target.eos_ids)
    assert run.drafter.config.draft_vocab_size == len(ids) == size and run.reduced == (size < 97)
    stored = load_checkpoint(parent / "drafter").weights
    assert stored.draft_ids_Vd is not None
    before = stored.draft_ids_Vd.tolist()
    assert ids == fresh.tolist() if size != 95 else {*ids} >= {*before}
    assert bool({*ids} - {*before}) == (size > 90), "the first tokens of a small vocabulary are those of a large one"
    for name, rows in stored.module.state_dict().items():
        own = run.drafter.state_dict()[name]
        if name == "markov_head.markov_w2.weight":
            for token, row in zip(ids, own, strict=True):
                assert torch.equal(row, rows[before.index(token)] if token in before else torch.zeros_like(row))
        elif name not in ("aux_scale_L", "fc.weight"):
            assert torch.equal(own, rows)
    Trainer(chosen, run).train(stop_after=2)
    chosen, run = continued(target, samples, tmp_path / "out", section, monkeypatch)
    Trainer(chosen, run).train(stop_after=3)
    saved = load_checkpoint(tmp_path / "out" / "drafter").weights
    assert (saved.draft_ids_Vd is None) == (size == 97)
    assert saved.draft_ids_Vd is None or saved.draft_ids_Vd.tolist() == ids


def test_what_the_recipe_repeats_is_no_contradiction(
    tmp_path: Path, target: Target, samples: list[Sample], parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = {"target_layer_ids": [3, 2, 0], "draft_vocab_size": 90, "markov_rank": 6, "initialize_from_target": False}
    same |= {"num_hidden_layers": 2, "sliding_window": None, "algorithm": "dspark"}
    assert continued(target, samples, tmp_path, {"start_from": str(parent / "drafter"), **same}, monkeypatch)


def test_aux_layers_and_vocabulary_are_the_checkpoints(
    tmp_path: Path, target: Target, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = DFlash(toy_config(False, target_layer_ids=(0, 2, 3)))
    randomise(drafter)
    save_drafter(Checkpoint(DrafterWeights(drafter)), tmp_path / "odd")
    section = {"start_from": str(tmp_path / "odd")}
    with pytest.raises(ValueError, match=r"is a dflash drafter.*\(confidence, decay, l1\).*algorithm=dflash"):
        continued(target, samples, tmp_path / "out", section, monkeypatch)
    section["algorithm"] = "dflash"
    chosen, run = continued(target, samples, tmp_path / "out", section, monkeypatch)
    assert (chosen.objective.ce, chosen.objective.l1) == (1.0, 0.0), "the loss of DFlash, not that of DSpark"
    assert run.drafter.config.target_layer_ids == (0, 2, 3) and not run.reduced and len(run.draft_ids_Vd) == 97
    whole = torch.arange(97)
    objective = BlockObjective(target, whole, run.objective.config)
    theirs = Trainer(chosen, Run(target, drafter, objective, whole, False, run.samples, run.held_out)).evaluate()
    assert Trainer(chosen, run).evaluate() == {name: pytest.approx(value, rel=2e-3) for name, value in theirs.items()}


def test_a_drafter_for_another_target_or_vocabulary_is_refused(
    tmp_path: Path, target: Target, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    for change, message in (
        ({"vocab_size": 98, "draft_vocab_size": 98}, "vocab_size is 98, toy-llama has 97"),
        ({"num_target_layers": 9}, "num_target_layers is 9"),
        ({"hidden_size": 16}, "hidden_size is 16"),
        ({"target_layer_ids": (0, 4)}, "this drafter cannot read the final layer, 4"),
    ):
        save_drafter(Checkpoint(DrafterWeights(DSpark(toy_config(**change)))), tmp_path / "other")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            continued(target, samples, tmp_path / "out", {"start_from": str(tmp_path / "other")}, monkeypatch)
    with pytest.raises(ValueError, match=r"there is no directory .*none"):
        continued(target, samples, tmp_path / "out", {"start_from": str(tmp_path / "none")}, monkeypatch)
    assert not (tmp_path / "out").exists()


def test_a_run_may_not_overwrite_its_origin(
    target: Target, samples: list[Sample], parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("drafter", "best"):
        with pytest.raises(ValueError, match=f"{name} would be overwritten by this run"):
            continued(target, samples, parent, {"start_from": str(parent / name)}, monkeypatch)


def test_the_origin_is_found_beside_the_recipe_or_from_here(
    tmp_path: Path, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = tmp_path / "recipes"
    save_drafter(load_checkpoint(parent / "drafter"), recipes / "kept")
    path = recipes / "r.yaml"
    path.write_text(
        "target: t\nout: o\ndata: {prompts: [{path: train_math}]}\nstart_from: kept\ndrafter: {block_size: 4}\n"
    )
    found = load_recipe(path)
    assert found.start_from == str(recipes / "kept") and found.drafter.chosen() == {"block_size": 4}
    assert load_recipe(path, ["start_from=runs/x"]).start_from == "runs/x"
    assert load_recipe(path, ["start_from=null"]).start_from is None
