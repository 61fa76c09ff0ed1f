"""What two ranks do in tests/training/test_parallel.py.

torchrun --nproc-per-node 2 tests/toys/parallel_worker.py DIR
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from outrider.contrib.deepseek_v4 import DSparkV4, DSparkV4Config
from outrider.contrib.dflash_input import DFlashInput, DFlashInputConfig
from outrider.drafters.dflash import DFlash
from outrider.drafters.dspark import DSpark
from outrider.drafters.loss import ObjectiveConfig
from outrider.target.model import Target
from outrider.training.features import Features, FeatureSource
from outrider.training.objective import BlockObjective
from outrider.training.parallel import ALONE, LockStep, Ranks, join, shard_layers
from outrider.training.setup import Run
from outrider.training.trainer import Trainer
from outrider.training.watch import Look, Watch
from tests.toys.targets import TOY_CONFIGS, randomise, toy_config, toy_samples, toy_target, with_mask_token
from tests.toys.training import make_run, recipe

OPTIMIZER: dict[str, Any] = {"steps": 6, "sequences_per_step": 3, "anchors_per_sequence": 4, "learning_rate": 1e-3}
BOUNDED = {**OPTIMIZER, "sequences_per_step": 5, "max_anchors_per_forward": 4, "checkpoint_activations": True}
# name -> recipe fields. Three and five sequences do not divide by two; one leaves a rank without work.
SETTINGS: dict[str, dict[str, Any]] = {
    "odd": {"optimizer": OPTIMIZER},
    "single": {"optimizer": {**OPTIMIZER, "sequences_per_step": 1}},
    "bounded": {"optimizer": BOUNDED},
    "anchored": {"optimizer": {**OPTIMIZER, "anchors_per_sequence": 30, "anchors_per_step": 40}},
    "bfloat16": {"optimizer": OPTIMIZER, "precision": "bfloat16"},
}
AUX_LAYERS, SCALE = (0, 2, 3), torch.tensor([1.0, 2.0, 3.0])


def train(out: Path, name: str, ranks: Ranks = ALONE, target: Target | None = None, **changes: Any) -> Trainer:
    """A whole run on the toy target, or its continuation."""
    settings = recipe(out, **{**SETTINGS[name], **changes})
    run = make_run(target or toy_target(), precision=settings.precision)
    trainer = Trainer(settings, run, ranks)
    trainer.train()
    return trainer


def train_context_rows(out: Path, ranks: Ranks = ALONE, **changes: Any) -> None:
    """A run of a drafter whose layers run for the context and then for the blocks."""
    target, samples = toy_target(), toy_samples(14)
    chosen = {"num_aux_layers": 2, "num_hidden_layers": 2, "block_size": 4}
    torch.manual_seed(0)
    drafter = DFlashInput(DFlashInputConfig.from_target(with_mask_token(target), **chosen))
    ids = torch.arange(target.vocab_size)
    objective = BlockObjective(target, ids, ObjectiveConfig(ce=1.0))
    run = Run(target, drafter, objective, ids, False, samples[2:], samples[:2])
    section = {"algorithm": "dflash_input", **chosen}
    Trainer(recipe(out, drafter=section, optimizer=OPTIMIZER, **changes), run, ranks).train()


def train_experts(out: Path, ranks: Ranks = ALONE, **changes: Any) -> None:
    """A run of a drafter with more experts than a rank's rows choose, in micro-batches that leave a rank idle."""
    target, samples = toy_target(), toy_samples(14)
    chosen = {"num_hidden_layers": 2, "block_size": 4, "n_routed_experts": 40}
    torch.manual_seed(0)
    drafter = DSparkV4(DSparkV4Config.from_target(with_mask_token(target), **chosen))
    randomise(drafter)  # equal streams have gradients of rounding errors alone
    settings = recipe(out, drafter={"algorithm": "dspark_v4", **chosen}, optimizer=BOUNDED, **changes)
    ids = torch.arange(target.vocab_size)
    objective = BlockObjective(target, ids, ObjectiveConfig(ce=1.0), settings.precision)
    run = Run(target, drafter, objective, ids, False, samples[2:], samples[:2])
    Trainer(settings, run, ranks).train()


class Collectives(TorchDispatchMode):
    """Sizes of every tensor that goes into or comes out of a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace:
            self.seen += [
                (func.__name__, list(t.shape)) for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)
            ]
        return out


def sharded_target(ranks: Ranks) -> Target:
    """The toy target with its layers spread over the ranks."""
    plain = toy_target()
    model = AutoModelForCausalLM.from_config(TOY_CONFIGS["llama"], dtype=torch.float32)
    model.load_state_dict(plain.model.state_dict())
    shard_layers(model, ranks)
    return Target(model, None, plain.name)


def check_sharded(out: Path, ranks: Ranks) -> None:
    """Features from a sharded target, three on one rank and one on the other, and what crossed between them."""
    target = sharded_target(ranks)
    samples = toy_samples(8)
    source = FeatureSource(target, samples, AUX_LAYERS, SCALE, 2**30)
    mine = [0, 1, 2] if ranks.main else [3]
    with Collectives() as collectives, LockStep(target, ranks):
        found = {index: source[index] for index in mine}
    tensors = {f"{index}.{name}": t for index, f in found.items() for name, t in features_dict(f).items()}
    save_file(tensors, out / f"features{ranks.rank}.safetensors")
    local = sum(p.to_local().nbytes for p in target.model.model.layers.parameters())
    drafter = toy_drafter()
    drafter.initialize_from(target, [s.tokens for s in samples[:2]])
    save_file(drafter.state_dict(), out / f"initial{ranks.rank}.safetensors")
    report = {"bytes": local, "collectives": collectives.seen}
    (out / f"sharded{ranks.rank}.json").write_text(json.dumps(report))
    train(out / "sharded", "odd", ranks, target, parallel="fsdp", shard_target=True, feature_cache_gb=0.0)


def toy_drafter() -> DSpark:
    """Layers in the toy target's shapes, always the same."""
    torch.manual_seed(1)
    return DSpark(toy_config(intermediate_size=48))


def features_dict(features: Features) -> dict[str, torch.Tensor]:
    return {name: getattr(features, name) for name in ("aux_SLD", "hidden_RD", "lse_R", "argmax_R")}


class WatchThree(Watch):
    """Ends the run at its third step; rank 1 is never asked."""

    def look(self, step: int, drafter: DFlash, held_out: Mapping[str, float]) -> Look:
        assert int(os.environ["RANK"]) == 0 and all(type(p.data) is torch.Tensor for p in drafter.parameters())
        self.step = step
        return super().look(step, drafter, held_out)

    @property
    def stopped(self) -> bool:
        return getattr(self, "step", 0) >= 3


def check_stops(out: Path, ranks: Ranks) -> None:
    """A watch that stops, and a signal that only rank 1 receives."""
    settings = recipe(out / "watched", eval_every=1, parallel="fsdp", watch={"decode_every": None})
    watched = Trainer(settings, make_run(toy_target()), ranks)
    watched.watch = WatchThree(settings, watched.run)
    watched.train()
    stopped = Trainer(recipe(out / "signalled", parallel="ddp"), make_run(toy_target()), ranks)
    backward = stopped.parallel.backward

    def signalled(*args: Any, **named: Any) -> Any:
        if ranks.rank == 1 and stopped.optimizer.state:
            os.kill(os.getpid(), signal.SIGTERM)
        return backward(*args, **named)

    stopped.parallel.backward = signalled  # type: ignore[method-assign]
    stopped.train()
    (out / f"stopped{ranks.rank}.json").write_text(json.dumps(stopped.interrupted))


def check_mistake(ranks: Ranks) -> None:
    """What the main rank alone finds wrong ends every rank."""

    def make() -> None:
        raise ValueError(f"found by rank {ranks.rank}")

    with pytest.raises(ValueError, match="found by rank 0"):
        ranks.from_main(make)


def main(out: Path) -> None:
    with join("cpu") as ranks:
        check_mistake(ranks)
        for mode in ("ddp", "fsdp"):
            for name in SETTINGS:
                train(out / f"{name}-{mode}", name, ranks, parallel=mode)
            train_context_rows(out / f"context-rows-{mode}", ranks, parallel=mode)
            train_experts(out / f"experts-{mode}", ranks, parallel=mode)
        half = Trainer(recipe(out / "half", **SETTINGS["odd"], parallel="fsdp"), make_run(toy_target()), ranks)
        half.train(stop_after=3)
        if ranks.main:
            shutil.copytree(out / "half", out / "half-by-two")
        ranks.wait()
        train(out / "half-by-two", "odd", ranks, parallel="ddp")
        check_sharded(out, ranks)
        check_stops(out, ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
