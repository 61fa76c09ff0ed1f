"""Two real processes (gloo) against one: the same losses, weights and features, whatever is sharded."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.cli.train import run_training
from outrider.data.responses import Sample
from outrider.drafters.loss import ObjectiveConfig
from outrider.target.model import Target, load_target
from outrider.training.batches import Schedule, micro_batches, total_weight
from outrider.training.features import FeatureSource
from outrider.training.objective import BlockObjective
from outrider.training.parallel import ParallelStep, join
from outrider.training.recipe import load_recipe
from outrider.training.trainer import Trainer
from tests.toys.parallel_worker import (
    AUX_LAYERS,
    OPTIMIZER,
    SCALE,
    SETTINGS,
    features_dict,
    sharded_target,
    toy_drafter,
    train,
    train_context_rows,
    train_experts,
)
from tests.toys.processes import torchrun
from tests.toys.targets import TOY, toy_samples, toy_target
from tests.toys.training import make_run, recipe

TOYS = Path(__file__).parents[1] / "toys"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left behind (tests/parallel_worker.py)."""
    out = tmp_path_factory.mktemp("two")
    done = torchrun(TOYS / "parallel_worker.py", out)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The same run by one rank, trained once."""
    out = tmp_path_factory.mktemp("one")

    def run(name: str) -> Path:
        if not (out / name).exists():
            train(out / name, name)
        return out / name

    return run


def logged(out: Path, *names: str) -> list[float]:
    """Figures of every training step."""
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [entry[name] for entry in entries if entry["group"] == "train" for name in names]


def assert_same_end(a: Path, b: Path, tolerance: float = 1e-3) -> None:
    """Weights and moments of two runs, each tensor as a whole.

    Sums in another order differ in their last bits, and AdamW divides a gradient near zero by its own size: a single
    element can move by a good part of a learning rate. A wrong step moves whole tensors, by several per cent.
    """
    left, right = (load_file(out / "state" / "state.safetensors") for out in (a, b))
    assert set(left) == set(right)
    for name, tensor in left.items():
        distance = (right[name] - tensor).norm() / tensor.norm().clamp(min=1e-12)
        assert distance <= tolerance, f"{name}: relative distance {distance:.1e}"


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["odd", "single", "bounded", "anchored"])
def test_two_ranks_take_the_steps_of_one(two: Path, one: Callable[[str], Path], name: str, mode: str) -> None:
    assert_same_end(one(name), two / f"{name}-{mode}")
    figures = ("loss", "gradient_norm", "agreement", "acceptance")
    expected, found = (logged(out, *figures) for out in (one(name), two / f"{name}-{mode}"))
    assert len(expected) == 4 * OPTIMIZER["steps"] and found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_process_group_of_one_takes_the_same_steps(
    one: Callable[[str], Path], mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_PROCESS_GROUP", "1")
    with join("cpu") as ranks:
        assert torch.distributed.is_initialized() and ranks.world == 1
        trainer = train(tmp_path, "odd", ranks, parallel=mode)
        assert (
            type(trainer.parallel.forward).__name__ == {"ddp": "DistributedDataParallel", "fsdp": "FSDP_Forward"}[mode]
        )
        assert ranks.gather("mine") == ["mine"] and ranks.from_main(lambda: 3) == 3
    assert_same_end(one("odd"), tmp_path)


def test_layers_gather_the_next_ones_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a sharded target and of a drafter: while a layer runs, and the root has no weights of its own."""
    monkeypatch.setenv("OUTRIDER_PROCESS_GROUP", "1")
    drafter = toy_drafter()
    objective = BlockObjective(toy_target(), torch.arange(97), ObjectiveConfig())
    with join("cpu") as ranks:
        target = sharded_target(ranks)
        ParallelStep(drafter, objective, recipe(Path("out"), parallel="fsdp"), ranks)
        for layers in (list(target.decoder.layers), list(drafter.layers)):
            states = [layer._get_fsdp_state() for layer in layers]
            assert [state._states_to_forward_prefetch for state in states] == [*([state] for state in states[1:]), []]
        assert isinstance(target.decoder, FSDPModule)
        assert not isinstance(target.embed_VD, DTensor) and isinstance(next(layers[0].parameters()), DTensor)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_ranks_train_layers_that_run_twice(two: Path, mode: str, tmp_path: Path) -> None:
    train_context_rows(tmp_path)
    assert_same_end(tmp_path, two / f"context-rows-{mode}")


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_ranks_train_experts_that_neither_chooses(two: Path, mode: str, tmp_path: Path) -> None:
    """Gradients of all are reduced, and the routers' biases follow the choices of both ranks.

    The first layer mixes equal streams, which has a gradient of rounding errors alone: AdamW makes steps of them.
    """
    train_experts(tmp_path)
    assert_same_end(tmp_path, two / f"experts-{mode}", tolerance=1e-2)
    state = load_file(tmp_path / "state" / "state.safetensors")
    biases = [tensor for name, tensor in state.items() if name.endswith("gate.bias")]
    assert len(biases) == 2 and all(tensor.any() for tensor in biases)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_bfloat16_follows_float32(two: Path, one: Callable[[str], Path], mode: str) -> None:
    found = logged(two / f"bfloat16-{mode}", "loss")
    assert found == pytest.approx(logged(one("odd"), "loss"), rel=5e-3) and found != logged(two / f"odd-{mode}", "loss")
    state = load_file(two / f"bfloat16-{mode}" / "state" / "state.safetensors")
    assert {t.dtype for t in state.values()} == {torch.float32}, "parameters and moments stay float32"


def test_accumulated_steps_are_whole_steps(tmp_path: Path, one: Callable[[str], Path]) -> None:
    undivided = {name: v for name, v in SETTINGS["bounded"]["optimizer"].items() if "per_forward" not in name}
    train(tmp_path / "undivided", "bounded", optimizer={**undivided, "checkpoint_activations": False})
    assert_same_end(tmp_path / "undivided", one("bounded"))
    train(tmp_path / "context", "bounded", optimizer={**undivided, "max_context_per_forward": 30})
    assert_same_end(tmp_path / "undivided", tmp_path / "context")


def test_a_state_goes_on_at_another_world_size(two: Path, one: Callable[[str], Path]) -> None:
    """Three steps by two FSDP ranks; the rest by two DDP ranks, or by one."""
    assert_same_end(one("odd"), two / "half-by-two")
    train(two / "half", "odd", parallel="ddp")
    assert_same_end(one("odd"), two / "half")
    assert logged(two / "half", "loss") == pytest.approx(logged(one("odd"), "loss"), abs=1e-5), "every step once"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Target:
    """The toy target on transformers' own forward, which sharded layers take."""
    monkeypatch.setattr(Target, "_fusable", lambda self: False)
    return toy_target()


def test_a_sharded_target_gives_the_same_features(two: Path, plain: Target) -> None:
    source = FeatureSource(plain, toy_samples(8), AUX_LAYERS, SCALE, 2**30)
    for rank, indices in enumerate([[0, 1, 2], [3]]):
        found = load_file(two / f"features{rank}.safetensors")
        assert len(found) == 4 * len(indices)
        for index in indices:
            for name, tensor in features_dict(source[index]).items():
                torch.testing.assert_close(found[f"{index}.{name}"], tensor, atol=1e-5, rtol=1e-3)
    drafter = toy_drafter()
    drafter.initialize_from(plain, [s.tokens for s in toy_samples(8)[:2]])
    for rank in (0, 1):
        found = load_file(two / f"initial{rank}.safetensors")
        for name, tensor in drafter.state_dict().items():
            torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


def test_a_sharded_target_is_halved_and_no_logits_cross(two: Path, plain: Target) -> None:
    everything = sum(p.nbytes for p in plain.model.model.layers.parameters())
    for rank in (0, 1):
        report = json.loads((two / f"sharded{rank}.json").read_text())
        assert report["bytes"] == pytest.approx(everything / 2, rel=0.02), "after forwards, too"
        kinds = {kind.split("_.")[0] for kind, _ in report["collectives"]}
        assert kinds == {"allreduce", "_allgather_base"}, "the recorder saw both"
        layer = everything // 4 // len(plain.model.model.layers)
        for kind, shape in report["collectives"]:
            assert TOY["vocab_size"] not in shape and len(shape) <= 1
            assert shape == [] if "allreduce" in kind else shape[0] in (layer, layer // 2), "whole layers or nothing"


def test_training_on_a_sharded_target_ends_the_same(two: Path, plain: Target, tmp_path: Path) -> None:
    train(tmp_path, "odd", target=plain)
    assert_same_end(tmp_path, two / "sharded")


def test_a_watch_or_a_signal_on_any_rank_stops_all_of_them(two: Path, tmp_path: Path) -> None:
    steps = {
        name: json.loads((two / name / "state" / "state.json").read_text())["step"] for name in ("watched", "signalled")
    }
    assert steps["watched"] == 3 and 1 < steps["signalled"] < 12
    assert [json.loads((two / f"stopped{rank}.json").read_text()) for rank in (0, 1)] == [signal.SIGTERM] * 2
    Trainer(recipe(tmp_path / "whole"), make_run(toy_target())).train()
    Trainer(recipe(two / "signalled"), make_run(toy_target())).train()
    assert_same_end(tmp_path / "whole", two / "signalled")


@pytest.mark.slow
def test_the_command_runs_under_torchrun(toy: Path, tmp_path: Path) -> None:
    """One process regenerates and trains; two do so from the same responses, with drafter and target sharded."""
    path = tmp_path / "recipe.yaml"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(i), "turns": [f"add {i} and 3"]}) + "\n" for i in range(8)))
    path.write_text(
        f"""
target: {toy / "target"}
out: {tmp_path / "out"}
threads: 1
precision: float32
data:
  prompts: [{{path: {prompts}}}]
  max_new_tokens: 16
  max_prompt_tokens: 200
  held_out: 2
  responses: {tmp_path / "responses.jsonl"}
drafter: {{num_hidden_layers: 1, block_size: 4, target_layer_ids: [0, 2], markov_rank: 4}}
optimizer: {{steps: 3, sequences_per_step: 3, anchors_per_sequence: 4}}
"""
    )
    run_training(load_recipe(path, ["log_every=1"]), load_target(toy / "target"), Console(quiet=True))
    responses = (tmp_path / "responses.jsonl").read_bytes()
    changes = ("log_every=1", "parallel=fsdp", "shard_target=true", f"out={tmp_path / 'two'}")
    done = torchrun("-m", "outrider.cli.main", "train", path, *changes)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("held-out expected accepted length") == 1, "one rank talks"
    assert (tmp_path / "responses.jsonl").read_bytes() == responses
    for out, ranks in (("out", 1), ("two", 2)):
        metadata = load_checkpoint(tmp_path / out / "drafter").metadata
        assert metadata["step"] == 3 and metadata["ranks"] == ranks
    assert logged(tmp_path / "two", "loss") == pytest.approx(logged(tmp_path / "out", "loss"), abs=1e-3)


def test_every_rank_has_as_many_micro_batches_within_the_bounds() -> None:
    chosen = [(i, list(range(first, first + 4))) for i, first in enumerate([3, 30, 7, 9, 40, 5, 2])]
    for world in (1, 2, 3, 8):
        plan = micro_batches(chosen, world, max_anchors=8, max_context=30)
        assert len(plan) == world and len({len(batches) for batches in plan}) == 1
        assert sorted(s[0] for batches in plan for part in batches for s in part) == list(range(7))
        for part in (part for batches in plan for part in batches if len(part) > 1):
            assert sum(len(a) for _, a in part) <= 8 and sum(a[-1] for _, a in part) <= 30
    assert micro_batches(chosen, 1) == [[chosen]]


def test_steps_of_so_many_anchors() -> None:
    samples = [Sample(str(i), list(range(n + 1)), ((1, n + 1),)) for i, n in enumerate([2, 9, 30, 1, 1, 12, 4, 3])]
    schedule = Schedule(samples, 1, 10, seed=0, anchors_per_step=12)
    seen: list[int] = []
    for step in range(40):
        chosen = schedule.step(step)
        sizes = [len(anchors) for _, anchors in chosen]
        assert sum(sizes) >= 12 > sum(sizes[:-1]), "closed by the sample that fills it"
        seen += [i for i, _ in chosen]
    assert set(seen) == set(range(8)) and max(map(seen.count, range(8))) - min(map(seen.count, range(8))) <= 20
    again = Schedule(samples, 1, 10, seed=0, anchors_per_step=12)
    assert again.step(39) == schedule.step(39) and again.step(3) == schedule.step(3), "no memory of earlier steps"


def test_the_denominator_counts_supervised_positions() -> None:
    sample = Sample("a", list(range(9)), ((2, 4), (6, 9)))  # two responses: blocks end with their own
    weights_K = ObjectiveConfig(decay=2.0).position_weights(3, torch.device("cpu"))
    found = total_weight([(0, [1, 2, 5, 7])], [sample], weights_K)
    torch.testing.assert_close(found, weights_K[:2].sum() + weights_K[0] + weights_K.sum() + weights_K[0])


def test_a_signal_saves_the_state_and_sets_the_status(tmp_path: Path) -> None:
    def at_step_three(trainer: Trainer) -> None:
        step = trainer._step

        def signalled(number: int, *rest: object) -> object:
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return step(number, *rest)

        trainer._step = signalled  # type: ignore[method-assign, assignment]

    trainer = Trainer(recipe(tmp_path / "parts"), make_run(toy_target()))
    at_step_three(trainer)
    before = signal.getsignal(signal.SIGINT)
    trainer.train()
    assert trainer.interrupted == signal.SIGINT and signal.getsignal(signal.SIGINT) is before
    assert json.loads((tmp_path / "parts" / "state" / "state.json").read_text())["step"] == 3
    Trainer(recipe(tmp_path / "parts"), make_run(toy_target())).train()
    Trainer(recipe(tmp_path / "whole"), make_run(toy_target())).train()
    assert_same_end(tmp_path / "whole", tmp_path / "parts", tolerance=0)
    ended = Trainer(recipe(tmp_path / "ended", optimizer={**OPTIMIZER, "steps": 3}), make_run(toy_target()))
    at_step_three(ended)
    ended.train()
    assert not ended.interrupted, "nothing was left to do"


def test_devices_that_cannot_be_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'cuda': PyTorch sees no CUDA device"), join("cuda"):
        pass
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"'cuda:0' names one GPU for 2 ranks; use device=cuda"), join("cuda:0"):
        pass


def test_two_threads_see_one_schedule() -> None:
    """Prefetching asks for steps while the trainer does."""
    samples = toy_samples(3000)
    for attempt in range(3):
        shared = Schedule(samples, 1, 30, attempt, anchors_per_step=100)
        start = threading.Barrier(2)

        def ask(shared: Schedule = shared, start: threading.Barrier = start) -> None:
            start.wait()
            shared.step(0)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        alone = Schedule(samples, 1, 30, attempt, anchors_per_step=100)
        epochs = len(alone._deal(0)) + len(alone._deal(1))
        assert [shared.step(s) for s in range(epochs - 3, epochs + 3)] == [
            alone.step(s) for s in range(epochs - 3, epochs + 3)
        ]
