"""The one training loop, for every block drafter and any number of ranks.

    step -> samples and anchors -> this rank's share, in micro-batches: features -> forward -> objective -> backward
         -> gradients reduced over ranks -> clipping -> AdamW, cosine with warm-up

The samples and the loss denominator of a step do not depend on who computes it, so N ranks take the steps that one
would. OUT/drafter is the checkpoint in its engine dialect, OUT/state what a resumed run needs. A run that was killed
and started again ends with the same weights as one that was not.
"""

from __future__ import annotations

import hashlib
import json
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from outrider.data.samples import Sample
from outrider.drafters.dflash import DFlash
from outrider.formats import Checkpoint, save_drafter, versions
from outrider.training.batches import BlockBatch, Chosen, Schedule, build_batch, idle_batch, micro_batches, total_weight
from outrider.training.features import FeatureSource
from outrider.training.log import MetricsLog, SilentLog, progress_bar
from outrider.training.metrics import held_out_metrics
from outrider.training.optimizer import build_optimizer, learning_rate
from outrider.training.parallel import ParallelStep, whole_drafter
from outrider.training.ranks import Ranks, whole
from outrider.training.recipe import Recipe
from outrider.training.setup import Run
from outrider.training.sharding import LockStep
from outrider.training.signals import StopSignal
from outrider.training.state import load_state, save_state

_HELD_OUT_ANCHORS = 24
# What may differ between a run and its resumption: where, how often, by how many and with how much memory it is done.
_FREE_TO_CHANGE: Any = {
    **dict.fromkeys(("out", "threads", "device", "feature_cache_gb", "log_every", "eval_every", "save_every"), True),
    **dict.fromkeys(("parallel", "shard_target", "compile"), True),
    "optimizer": {"max_anchors_per_forward", "max_context_per_forward", "checkpoint_activations"},
}


class Watch(Protocol):
    """What may end a run early."""

    def after_evaluation(self, step: int, drafter: DFlash, metrics: dict[str, float]) -> bool:
        """Whether to stop. Asked on the main rank, and on all of them where the target is sharded."""
        ...


@dataclass(frozen=True)
class StepReport:
    """One step over all its ranks: the loss, and means over supervised positions."""

    loss: float
    agreement: float
    acceptance: float
    gradient_norm: float
    stop: bool  # a rank received a signal


class Trainer:
    """Trains `run.drafter` on `run.samples`, resuming from OUT/state where there is one."""

    def __init__(self, recipe: Recipe, run: Run, ranks: Ranks | None = None, watch: Watch | None = None) -> None:
        self.recipe, self.run, self.watch = recipe, run, watch
        self.ranks = ranks or Ranks(device=run.target.device)
        self.out = Path(recipe.out)
        config = recipe.optimizer
        self.parallel = ParallelStep(run.drafter, run.objective, recipe, self.ranks)
        self.optimizer = build_optimizer(run.drafter, config)
        self.lock_step = LockStep(run.target, self.ranks)
        self.features, self.held_out = self._features(run.samples), self._features(run.held_out)
        self.schedule = Schedule(
            run.samples, config.sequences_per_step, config.anchors_per_sequence, recipe.seed, config.anchors_per_step
        )
        self.weights_K = run.objective.config.position_weights(run.drafter.config.gamma, self.ranks.device)
        self.settings = recipe.model_dump(mode="json", exclude=_FREE_TO_CHANGE)
        self.settings["samples_sha256"] = _digest([*run.samples, *run.held_out])
        self.signal = StopSignal()
        self.interrupted = 0  # the signal that ended `train` early
        self.last_metrics: dict[str, float] = {}
        self.seconds = 0.0

    def _features(self, samples: list[Sample]) -> FeatureSource:
        taps, budget = self.run.drafter.config.target_layer_ids, int(self.recipe.feature_cache_gb * 2**30)
        return FeatureSource(self.run.target, samples, taps, self.run.drafter.tap_scale_L, budget)

    def train(self, stop_after: int | None = None) -> dict[str, float]:
        """Run to the recipe's last step (or `stop_after`, a signal, the watch) and return the last held-out metrics.

        Raises:
            ValueError: the loss is not finite; the last checkpoint stays.
        """
        config, recipe = self.recipe.optimizer, self.recipe
        first = self._resume()
        last = min(config.steps, stop_after or config.steps)
        started = time.perf_counter()
        if first >= last:
            self.last_metrics = self.evaluate()
            return self.last_metrics
        main = self.ranks.main
        with MetricsLog(self.out, first) if main else SilentLog() as log, progress_bar(main) as bar, self.signal:
            task = bar.add_task("train", total=config.steps, completed=first, status="")
            for step in range(first, last):
                report = self._step(step)
                done, stop = step + 1, report.stop
                if stop:
                    self.interrupted = self.signal.received or signal.SIGTERM  # this rank's, or another's
                if done % recipe.log_every == 0:
                    values = {name: getattr(report, name) for name in ("loss", "agreement", "acceptance")}
                    values |= {"gradient_norm": report.gradient_norm, "learning_rate": learning_rate(step, config)}
                    log.write(done, "train", {**values, "seconds": time.perf_counter() - started})
                if done % recipe.eval_every == 0 or done == last:
                    self.last_metrics = self.evaluate()
                    log.write(done, "held_out", self.last_metrics)
                    stop |= self._stopped_by_watch(done)
                if done % recipe.save_every == 0 or done == last or stop:
                    self.seconds = time.perf_counter() - started
                    self.save(done)
                tau = self.last_metrics.get("expected_length_greedy", 1)
                bar.update(task, completed=done, status=f"loss {report.loss:.3f}  tau {tau:.2f}")
                if stop:
                    break
        return self.last_metrics

    def _resume(self) -> int:
        first = load_state(self.out / "state", self.run.drafter, self.optimizer, self.settings)
        if self.ranks.from_main(lambda: first) != first:
            raise ValueError(f"{self.out / 'state'} is at another step on another rank: out={self.out} must be shared.")
        return first

    def _step(self, step: int) -> StepReport:
        """One optimizer step, over all ranks."""
        config, device = self.recipe.optimizer, self.ranks.device
        chosen = self.schedule.step(step)
        shares = micro_batches(chosen, self.ranks.world, config.max_anchors_per_forward, config.max_context_per_forward)
        weight = total_weight(chosen, self.run.samples, self.weights_K)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        self.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(5, dtype=torch.float64, device=device)  # loss, agreements, acceptances, positions, signals
        mine = shares[self.ranks.rank]
        for number, part in enumerate(mine, start=1):
            with self.lock_step:
                batch = self.batch(part, self.features, self.run.samples) if part else idle_batch(self.run.drafter)
            output = self.parallel.backward(batch, weight, last=number == len(mine), counts=bool(part))
            if part:
                sums[0] += output.loss.detach()
                sums[1] += output.agreement_N.sum()
                sums[2] += output.acceptance_N.sum()
                sums[3] += len(output.agreement_N)
        sums[4] = bool(self.signal.received)
        loss, agreement, acceptance, positions, signals = self.ranks.sum(sums).tolist()
        self._check_finite("loss", loss, step)
        norm = whole(torch.nn.utils.clip_grad_norm_(self.run.drafter.parameters(), config.clip)).item()
        self._check_finite("gradient norm", norm, step)
        self.optimizer.step()
        return StepReport(loss, agreement / positions, acceptance / positions, norm, signals > 0)

    def _check_finite(self, what: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            config = self.recipe.optimizer
            raise ValueError(
                f"the {what} is {value} at step {step}: training stopped, the last checkpoint in {self.out} is kept. "
                f"Lower optimizer.learning_rate ({config.learning_rate}) or raise optimizer.warmup_fraction."
            )

    def batch(self, chosen: list[Chosen], features: FeatureSource, samples: list[Sample]) -> BlockBatch:
        return build_batch(chosen, samples, [features[i] for i, _ in chosen], self.run.drafter.config.gamma)

    def evaluate(self) -> dict[str, float]:
        """Held-out metrics on fixed anchors. Every rank computes all of them: a sharded target needs them all."""
        schedule = Schedule(self.run.held_out, 1, _HELD_OUT_ANCHORS, seed=0)

        def batches() -> Iterator[BlockBatch]:
            for index in range(len(self.run.held_out)):
                yield self.batch([(index, schedule.anchors(index, 0))], self.held_out, self.run.held_out)

        return held_out_metrics(whole_drafter(self.run.drafter), self.run.objective, batches())

    def _stopped_by_watch(self, step: int) -> bool:
        if self.watch is None:
            return False
        drafter = whole_drafter(self.run.drafter)
        asked = self.ranks.main or self.run.target.sharded
        stop = self.watch.after_evaluation(step, drafter, self.last_metrics) if asked else False
        return self.ranks.from_main(lambda: stop)

    def save(self, step: int) -> None:
        """Write OUT/drafter and OUT/state, each atomically; a collective."""
        metadata = {
            "recipe": self.recipe.model_dump(mode="json", exclude={"out": True, "data": {"prompts", "responses"}}),
            "target": self.run.target.name,
            "step": step,
            "ranks": self.ranks.world,
            "training_seconds_this_process": round(self.seconds, 1),
            "samples": len(self.run.samples),
            "response_tokens": sum(s.num_supervised for s in self.run.samples),
            "held_out": self.last_metrics,
            "versions": versions(),
        }
        ids = self.run.draft_ids_Vd if self.run.reduced else None
        drafter = whole_drafter(self.run.drafter)
        if self.ranks.main:
            save_drafter(Checkpoint(drafter, ids, metadata), self.out / "drafter")
        save_state(self.out / "state", self.run.drafter, self.optimizer, step, self.settings, self.ranks)


def _digest(samples: list[Sample]) -> str:
    """Identifies the data a state was trained on: other responses mean another draft vocabulary and other steps."""
    return hashlib.sha256(json.dumps([(s.tokens, s.spans) for s in samples]).encode()).hexdigest()
