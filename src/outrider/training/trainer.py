"""The training loop, for every method of the registry and any number of ranks.

    each step   features -> forward, loss, backward in micro-batches -> gradients summed over ranks -> clipping -> AdamW
    then, where due: log, held-out metrics, decoding of held-out prompts (training/watch.py), save

OUT/drafter is the checkpoint in its engine dialect, OUT/best the best one so far, OUT/state what a resumed run needs.
The samples and the loss denominator of a step do not depend on the number of ranks: N ranks take the steps one would. A
run that was killed and started again ends with the same weights as one that was not.

    lr(s) = lr (s + 1) / w   for s < w = warmup_fraction * steps;      lr/2 (1 + cos(pi (s - w) / (steps - w)))   after

With `optimizer.max_minutes`, s is the larger one of the steps taken and of `steps` times the share of the time gone.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.checkpoints.checkpoint import Checkpoint, read_metadata, save_drafter
from outrider.drafters.base import DrafterWeights
from outrider.target.model import full_tensor
from outrider.training.batches import (
    BlockBatch,
    Chosen,
    Schedule,
    build_batch,
    built_ahead,
    idle_batch,
    micro_batches,
    total_weight,
)
from outrider.training.feature_store import open_features, samples_digest
from outrider.training.features import Features, FeatureSource, step_features
from outrider.training.logging import Meters, MetricsLog, progress_bar, sparkline
from outrider.training.machine import feature_cache_bytes
from outrider.training.parallel import LockStep, ParallelStep, Ranks, whole_drafter
from outrider.training.recipe import OptimizerSection, Recipe
from outrider.training.setup import Run, training_precision
from outrider.training.state import StopSignal, check_settings, load_state, read_run, save_state
from outrider.training.watch import Watch, held_out_batches, held_out_metrics
from outrider.utils.locks import LOCK, sole_process
from outrider.utils.measure import versions


def learning_rate(step: float, config: OptimizerSection) -> float:
    """Linear warm-up, then a cosine that is zero at `steps`."""
    warmup = max(1, round(config.warmup_fraction * config.steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def build_optimizer(module: nn.Module, config: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW over all parameters; matrices have weight decay, norms and biases do not."""
    decayed = [p for p in module.parameters() if p.dim() > 1]
    plain = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


@dataclass(frozen=True)
class StepReport:
    """One step over all its ranks: the loss, and means over supervised positions."""

    loss: float
    agreement: float
    acceptance: float
    gradient_norm: float
    stop: bool  # a rank received a signal


_HELD_OUT_ANCHORS = 24
# What may differ between a run and its resumption: where, how often, by how many and with how much memory it is done.
_FREE_TO_CHANGE: Any = {
    **dict.fromkeys(("out", "threads", "device", "feature_cache_gb", "log_every", "eval_every", "save_every"), True),
    "log": True,
    **dict.fromkeys(("parallel", "shard_target", "compile", "watch"), True),
    "features": {"directory", "max_gb", "shard_tokens"},
    # The samples themselves are compared; who made them, and how fast, does not matter.
    "data": {
        "not_in",
        "directory",
        "base_urls",
        "served_model",
        "chat_api",
        "concurrency",
        "timeout",
        "retries",
        "batch_size",
        "max_minutes",
    },
    "optimizer": {"max_minutes", "max_anchors_per_forward", "max_context_per_forward", "checkpoint_activations"},
}

_NOT_RECORDED: Any = {  # places and addresses, which a published checkpoint should not name
    "out": True,
    "data": {"prompts", "not_in", "directory", "responses", "base_urls"},
    "features": {"directory"},
    "start_from": True,
    "log": True,
}


def fixed_settings(recipe: Recipe) -> dict[str, Any]:
    """The fields of a recipe that must stay as they are when its run is resumed."""
    return recipe.model_dump(mode="json", exclude=_FREE_TO_CHANGE)


def saved_run(recipe: Recipe) -> dict[str, Any]:
    """The state of a recipe's run so far (`read_run`), empty for a new one. No model is loaded.

    Raises:
        ValueError: the recipe was changed where a resumed run must not be.
    """
    directory = Path(recipe.out) / "state"
    stored = read_run(directory)
    if stored:
        settings = fixed_settings(recipe)
        if recipe.precision == "auto":
            settings["precision"] = stored["settings"].get("precision")
        began = stored["settings"].get("optimizer")
        if recipe.optimizer.epochs is not None and isinstance(began, dict) and isinstance(began.get("steps"), int):
            settings["optimizer"]["steps"] = began["steps"]  # how many those are follows from the run's samples
        check_settings(directory, stored["settings"], settings)
    return stored


class Trainer:
    """Trains `run.drafter` on `run.samples`, resuming from OUT/state where there is one."""

    def __init__(self, recipe: Recipe, run: Run, ranks: Ranks | None = None) -> None:
        self.schedule = Schedule.of(recipe.optimizer, run.samples, recipe.seed, gamma=run.drafter.config.gamma)
        # What `auto` and epochs stand for is part of a run's state and of its checkpoint.
        found = {"precision": training_precision(recipe, run.target), "device": run.target.device.type}
        if (epochs := recipe.optimizer.epochs) is not None:
            steps = self.schedule.steps_of(epochs)
            recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"steps": steps})})
        self.recipe = recipe = recipe.model_copy(update=found)
        self.run = run
        self.ranks = ranks or Ranks(device=run.target.device)
        self.out = Path(recipe.out)
        self.parallel = ParallelStep(run.drafter, run.objective, recipe, ranks=self.ranks)
        self.optimizer = build_optimizer(run.drafter, recipe.optimizer)
        self.lock_step = LockStep(run.target, self.ranks)
        self.meters = Meters(self.ranks.device)
        self.weights_K = run.objective.config.position_weights(run.drafter.config.gamma, self.ranks.device)
        self.signal = StopSignal()
        self.watch = Watch(recipe, run)
        aux_layers, scale_L = run.drafter.config.target_layer_ids, run.drafter.aux_scale_L
        memory = feature_cache_bytes(recipe.feature_cache_gb)
        self.held_out = FeatureSource(run.target, run.held_out, aux_layers, aux_scale_L=scale_L, budget_bytes=memory)
        self.settings = fixed_settings(recipe)
        self.settings["samples_sha256"] = samples_digest(chain(run.samples, run.held_out))
        if run.origin:
            self.settings["origin_sha256"] = run.origin
        self.interrupted = 0  # the signal that ended `train` early
        self.last_metrics: dict[str, float] = {}
        self.seconds = self.seconds_before = 0.0

    def train(self, stop_after: int | None = None) -> dict[str, float]:
        """Run to the recipe's last step (or `stop_after`, a signal, the watch) and return the last held-out metrics.

        Raises:
            ValueError: the loss is not finite; the last checkpoint stays.
        """
        first, last = self._resume(), min(self.recipe.optimizer.steps, stop_after or self.recipe.optimizer.steps)
        if first >= last or self.watch.stopped:
            self.last_metrics = self.evaluate()
            return self.last_metrics
        main, started = self.ranks.main, time.perf_counter()
        source = open_features(self.recipe, self.run, rank=self.ranks.rank, world_size=self.ranks.world)
        wanted = ([index for part in self._share(step) for index, _ in part] for step in range(first, last))
        taken = f"{self.out} is being trained by another process; choose another out, or wait."
        try:
            with (
                sole_process(self.out / LOCK, taken=taken) if main else nullcontext(),
                MetricsLog(self.out, first, self.recipe.log, settings=self._recorded(), active=main) as log,
                progress_bar(main) as bar,
                self.signal,
                step_features(source, wanted) as fetched,
                self._batches(range(first, last), fetched) as batches,
            ):
                if not first and self.run.origin:
                    self._evaluate_start(log)
                losses: list[float] = []
                task = bar.add_task("train", total=self.recipe.optimizer.steps, completed=first, status="")
                for done in range(first + 1, last + 1):
                    report = self._step(done - 1, batches)
                    self.seconds = time.perf_counter() - started
                    ended = done == last or self._scheduled(done) >= self.recipe.optimizer.steps
                    stop = self._after_step(done, report, ended, log=log)
                    tau = self.last_metrics.get("expected_length_greedy", 1)
                    losses.append(report.loss)
                    status = f"loss {sparkline(losses)} {report.loss:.3f}  tau {tau:.2f}  {log.speed}"
                    bar.update(task, completed=done, status=status)
                    if main and not bar.console.is_terminal and (ended or done % self.recipe.eval_every == 0):
                        bar.console.print(f"step {done} of {self.recipe.optimizer.steps}: {status}", highlight=False)
                    if stop or ended:
                        break
        finally:
            source.close()
        return self.last_metrics

    def rehearse(self, steps: int, features: Sequence[Features]) -> dict[str, float]:
        """`Meters.window` of `steps` steps after one that is not counted. Nothing is written.

        Args:
            features: of every sample of the run.
        """
        numbers = range(steps + 1)
        fetched = ([features[i] for part in self._share(step) for i, _ in part] for step in numbers)
        with self._batches(numbers, fetched) as batches:
            for step in numbers:
                self._step(step, batches)
                if not step:
                    self.meters.window()
        return self.meters.window()

    def _scheduled(self, step: int) -> float:
        """How far along its schedule step `step` is, in steps; the same on all ranks."""
        config = self.recipe.optimizer
        if (minutes := config.max_minutes) is None:
            return step
        share: float = self.ranks.from_main(lambda: (self.seconds_before + self.seconds) / (60 * minutes))
        return max(float(step), min(share, 1.0) * config.steps)

    def _share(self, step: int) -> list[list[Chosen]]:
        """This rank's micro-batches of a step."""
        config = self.recipe.optimizer
        limits = config.max_anchors_per_forward, config.max_context_per_forward
        return micro_batches(self.schedule.step(step), self.ranks.world, *limits)[self.ranks.rank]

    def _batches(
        self, steps: Iterable[int], fetched: Iterator[Iterable[Features]]
    ) -> AbstractContextManager[Iterator[BlockBatch]]:
        """The batches of this rank's micro-batches; `fetched` yields the features of its samples, step by step."""
        return built_ahead(self._parts(steps, fetched), self._built, self.ranks.device)

    def _parts(
        self, steps: Iterable[int], fetched: Iterator[Iterable[Features]]
    ) -> Iterator[tuple[list[Chosen], list[Features]]]:
        for step in steps:
            with self.meters.features, self.lock_step:
                features = iter(next(fetched))
            for chosen in self._share(step):
                yield chosen, [next(features) for _ in chosen]

    def _built(self, part: tuple[list[Chosen], list[Features]]) -> BlockBatch:
        (chosen, features), drafter, padded = part, self.run.drafter, self.parallel.padded
        if not chosen:
            return idle_batch(drafter, padded)
        device = self.ranks.device
        return build_batch(chosen, self.run.samples, features, gamma=drafter.config.gamma, device=device, padded=padded)

    def _step(self, step: int, batches: Iterator[BlockBatch]) -> StepReport:
        """One optimizer step on the next batches."""
        drafter, samples, config = self.run.drafter, self.run.samples, self.recipe.optimizer
        weight = total_weight(self.schedule.step(step), samples, self.weights_K)
        scheduled = self._scheduled(step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(scheduled, config)
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(5, dtype=torch.float64, device=self.ranks.device)  # ..., positions, signals
        share = self._share(step)
        for number, part in enumerate(share, start=1):
            batch = next(batches)
            with self.meters.forward_backward:
                drafter.train(bool(part))  # routers do not count the rows of an idle batch
                output = self.parallel.backward(
                    batch, weight, last=number == len(share), counts=bool(part), progress=scheduled / config.steps
                )
                if part:
                    values = output.loss.detach(), output.agreement_N.sum(), output.acceptance_N.sum()
                    sums[:3] += torch.stack(values)
                    sums[3] += len(output.agreement_N)
                    self.meters.count(len(output.agreement_N), batch.blocks)
        sums[4] = bool(self.signal.received)
        loss, agreement, acceptance, positions, signals = self.ranks.sum(sums).tolist()
        self._check_finite("loss", loss, step)
        with self.meters.optimizer:
            norm = full_tensor(torch.nn.utils.clip_grad_norm_(drafter.parameters(), config.clip)).item()
            self._check_finite("gradient norm", norm, step)
            self.optimizer.step()
            drafter.after_step(self.ranks.sum)
        self.meters.steps += 1
        return StepReport(loss, agreement / positions, acceptance / positions, gradient_norm=norm, stop=signals > 0)

    def _check_finite(self, what: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            config, out = self.recipe.optimizer, self.recipe.out
            raise ValueError(
                f"the {what} is {value} at step {step}: training stopped, the last checkpoint in {out} is kept. "
                f"Lower optimizer.learning_rate ({config.learning_rate}) or raise optimizer.warmup_fraction."
            )

    def _resume(self) -> int:
        state = self.out / "state"
        first = load_state(state, self.run.drafter, self.optimizer, settings=self.settings)
        self.watch.load_state_dict(read_run(state).get("watch", {}))
        saved = read_metadata(self.out / "drafter")
        self.seconds_before = saved.get("training_seconds", 0.0) if saved.get("step") == first else 0.0
        if self.ranks.from_main(lambda: first) != first:
            raise ValueError(f"{state} is at another step on another rank: out={self.out} must be shared.")
        return first

    def _after_step(self, done: int, report: StepReport, last: bool, log: MetricsLog) -> bool:
        """Log, evaluate, look and save where they are due after `done` steps; whether to stop."""
        recipe, meters = self.recipe, self.meters
        if report.stop and done < recipe.optimizer.steps:
            self.interrupted = self.signal.received or signal.SIGTERM  # this rank's, or another's
        if done % recipe.log_every == 0:
            values = {name: getattr(report, name) for name in ("loss", "agreement", "acceptance", "gradient_norm")}
            rate = self.optimizer.param_groups[0]["lr"]
            log.write(done, "train", {**values, "learning_rate": rate, "seconds": self.seconds})
            log.write(done, "speed", meters.window())
        due = self.watch.due(done) or self._scheduled(done) >= recipe.optimizer.steps
        if done % recipe.eval_every == 0 or last or due:
            with meters.evaluation:
                self.last_metrics = self.evaluate()
                log.write(done, "held_out", self.last_metrics)
        stop = report.stop
        if due:
            with meters.evaluation:
                stop |= self._look(done, log)
        if done % recipe.save_every == 0 or last or stop:
            with meters.evaluation:
                self.save(done)
        return stop

    def _evaluate_start(self, log: MetricsLog) -> None:
        """Measure the drafter that training goes on from, as step 0: OUT/best is never worse than it."""
        with self.meters.evaluation:
            self.last_metrics = self.evaluate()
            log.write(0, "held_out", self.last_metrics)
            self._look(0, log)
        self.last_metrics = {}  # of the start, not of what is saved before the next evaluation

    def _look(self, step: int, log: MetricsLog) -> bool:
        """Let the watch judge the drafter; only the main rank decodes, unless the target needs them all."""
        checkpoint = self.checkpoint(step)

        def judge() -> bool:
            look = self.watch.look(step, checkpoint.weights.module, self.last_metrics)
            log.write(step, "decode", look.decode)
            if look.best and self.ranks.main:
                checkpoint.metadata["decode"] = look.decode
                save_drafter(checkpoint, self.out / "best")
            return self.watch.stopped

        if not self.run.target.sharded:
            return self.ranks.from_main(judge)
        stop = judge()  # with a sharded target a forward of one rank is a forward of all
        return self.ranks.from_main(lambda: stop)

    def evaluate(self) -> dict[str, float]:
        """Held-out metrics on fixed anchors. Every rank computes all of them: a sharded target needs them all."""
        drafter = whole_drafter(self.run.drafter)
        batches = held_out_batches(
            self.run.held_out,
            self.held_out,
            drafter.config.gamma,
            anchors_per_sample=_HELD_OUT_ANCHORS,
            device=self.ranks.device,
            padded=self.parallel.padded,
        )
        return held_out_metrics(drafter, self.run.objective, batches)

    def save(self, step: int) -> None:
        """Write OUT/drafter and OUT/state, each atomically; a collective."""
        checkpoint = self.checkpoint(step)
        self.ranks.from_main(lambda: save_drafter(checkpoint, self.out / "drafter"))
        memory = self.watch.state_dict()
        save_state(
            self.out / "state",
            self.run.drafter,
            self.optimizer,
            step=step,
            settings=self.settings,
            ranks=self.ranks,
            watch=memory,
        )

    def _recorded(self) -> dict[str, Any]:
        """The recipe as a published checkpoint may name it, with the drafter's whole config."""
        recipe = self.recipe.model_dump(mode="json", exclude=_NOT_RECORDED)
        recipe["drafter"] = self.run.drafter.config.as_recipe()
        recipe["initialize_from_target"] &= not self.run.origin
        return recipe

    def checkpoint(self, step: int) -> Checkpoint:
        """The drafter as it is, gathered from all ranks, with how it was made; a collective."""
        metadata = {
            "recipe": self._recorded(),
            "target": self.run.target.name,
            "history": self.run.history,
            "step": step,
            "ranks": self.ranks.world,
            "training_seconds": round(self.seconds_before + self.seconds, 1),
            "anchors": self.schedule.anchors_dealt(step),
            "samples": len(self.run.samples),
            "samples_sha256": self.settings["samples_sha256"],
            "response_tokens": sum(s.num_supervised for s in self.run.samples),
            "responses": self.run.responses,
            "held_out": self.last_metrics,
            "versions": versions(),
        }
        ids = self.run.draft_ids_Vd if self.run.reduced else None
        return Checkpoint(DrafterWeights(whole_drafter(self.run.drafter), ids), metadata)
