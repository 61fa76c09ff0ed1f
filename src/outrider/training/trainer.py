"""The one training loop, for every method of the catalogue and any number of ranks.

    step (stepper.py) -> log -> held-out metrics -> the watch: real decoding, the best drafter, early stop -> save

OUT/drafter is the checkpoint in its engine dialect, OUT/best the best one so far, OUT/state what a resumed run needs. A
run that was killed and started again ends with the same weights as one that was not.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from outrider.drafters.catalogue import method_of
from outrider.formats import Checkpoint, read_metadata, save_drafter, versions
from outrider.training.drafter import as_trained
from outrider.training.features import FeatureSource
from outrider.training.log import MetricsLog, SilentLog, progress_bar
from outrider.training.metrics import held_out_batches, held_out_metrics
from outrider.training.optimizer import learning_rate
from outrider.training.parallel import whole_drafter
from outrider.training.ranks import Ranks
from outrider.training.recipe import Recipe
from outrider.training.setup import Run
from outrider.training.sources import open_features
from outrider.training.state import load_state, load_watch, save_state
from outrider.training.stepper import Stepper, StepReport
from outrider.training.store_plan import samples_digest
from outrider.training.watch import Watch

_HELD_OUT_ANCHORS = 24
# What may differ between a run and its resumption: where, how often, by how many and with how much memory it is done.
_FREE_TO_CHANGE: Any = {
    **dict.fromkeys(("out", "threads", "device", "feature_cache_gb", "log_every", "eval_every", "save_every"), True),
    **dict.fromkeys(("parallel", "shard_target", "compile", "watch"), True),
    "features": {"directory", "max_gb", "shard_tokens"},
    # The samples themselves are compared; who made them, and how fast, does not matter.
    "data": {"base_urls", "served_model", "chat_api", "concurrency", "timeout", "retries", "batch_size", "max_minutes"},
    "optimizer": {"max_anchors_per_forward", "max_context_per_forward", "checkpoint_activations"},
}

_NOT_RECORDED: Any = {  # places and addresses, which a published checkpoint should not name
    "out": True,
    "data": {"prompts", "responses", "base_urls"},
    "features": {"directory"},
    "drafter": {"start_from"},
}


class Trainer:
    """Trains `run.drafter` on `run.samples`, resuming from OUT/state where there is one."""

    def __init__(self, recipe: Recipe, run: Run, ranks: Ranks | None = None) -> None:
        self.recipe, self.run = recipe, run
        self.ranks = ranks or Ranks(device=run.target.device)
        self.out = Path(recipe.out)
        self.stepper = Stepper(recipe, run, self.ranks)
        self.watch = Watch(recipe, run)
        taps, scale_L = run.drafter.config.target_layer_ids, run.drafter.tap_scale_L
        memory = int(recipe.feature_cache_gb * 2**30)
        self.held_out = FeatureSource(run.target, run.held_out, taps, scale_L, memory)
        self.settings = recipe.model_dump(mode="json", exclude=_FREE_TO_CHANGE)
        self.settings["samples_sha256"] = samples_digest([*run.samples, *run.held_out])
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
        taps, scale_L = self.run.drafter.config.target_layer_ids, self.run.drafter.tap_scale_L
        source = open_features(
            self.recipe, self.run.target, self.run.samples, taps, scale_L, self.ranks.rank, self.ranks.world
        )
        try:
            with (
                MetricsLog(self.out, first) if main else SilentLog() as log,
                progress_bar(main) as bar,
                self.stepper.steps(source, first, last) as steps,
            ):
                task = bar.add_task("train", total=self.recipe.optimizer.steps, completed=first, status="")
                for done, report in enumerate(steps, start=first + 1):
                    self.seconds = time.perf_counter() - started
                    stop = self._after_step(done, report, done == last, log)
                    tau = self.last_metrics.get("expected_length_greedy", 1)
                    bar.update(task, completed=done, status=f"loss {report.loss:.3f}  tau {tau:.2f}  {log.speed}")
                    if stop:
                        break
        finally:
            source.close()
        return self.last_metrics

    def _resume(self) -> int:
        state = self.out / "state"
        first = load_state(
            state,
            self.run.drafter,
            self.stepper.optimizer,
            self.settings,
            {"drafter": method_of(self.recipe.drafter.algorithm).defaults()},
        )
        self.watch.load_state_dict(load_watch(state))
        saved = read_metadata(self.out / "drafter")
        self.seconds_before = saved.get("training_seconds", 0.0) if saved.get("step") == first else 0.0
        if self.ranks.from_main(lambda: first) != first:
            raise ValueError(f"{state} is at another step on another rank: out={self.out} must be shared.")
        return first

    def _after_step(self, done: int, report: StepReport, last: bool, log: MetricsLog) -> bool:
        """Log, evaluate, look and save where they are due after `done` steps; whether to stop."""
        recipe, meters = self.recipe, self.stepper.meters
        if report.stop:
            self.interrupted = self.stepper.signal.received or signal.SIGTERM  # this rank's, or another's
        if done % recipe.log_every == 0:
            values = {name: getattr(report, name) for name in ("loss", "agreement", "acceptance", "gradient_norm")}
            rate = learning_rate(done - 1, recipe.optimizer)
            log.write(done, "train", {**values, "learning_rate": rate, "seconds": self.seconds})
            log.write(done, "speed", meters.window())
        if done % recipe.eval_every == 0 or last or self.watch.due(done):
            with meters.evaluation:
                self.last_metrics = self.evaluate()
                log.write(done, "held_out", self.last_metrics)
        stop = report.stop
        if self.watch.due(done):
            with meters.evaluation:
                stop |= self._look(done, log)
        if done % recipe.save_every == 0 or last or stop:
            with meters.evaluation:
                self.save(done)
        return stop

    def _look(self, step: int, log: MetricsLog) -> bool:
        """Let the watch judge the drafter; only the main rank decodes, unless the target needs them all."""
        checkpoint = self.checkpoint(step)

        def judge() -> bool:
            look = self.watch.look(step, checkpoint.drafter, self.last_metrics)
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
        batches = held_out_batches(self.run.held_out, self.held_out, drafter.config.gamma, _HELD_OUT_ANCHORS)
        return held_out_metrics(drafter, self.run.objective, batches)

    def save(self, step: int) -> None:
        """Write OUT/drafter and OUT/state, each atomically; a collective."""
        checkpoint = self.checkpoint(step)
        self.ranks.from_main(lambda: save_drafter(checkpoint, self.out / "drafter"))
        memory = self.watch.state_dict()
        save_state(
            self.out / "state", self.run.drafter, self.stepper.optimizer, step, self.settings, self.ranks, memory
        )

    def checkpoint(self, step: int) -> Checkpoint:
        """The drafter as it is, gathered from all ranks, with how it was made; a collective."""
        recipe = self.recipe.model_dump(mode="json", exclude=_NOT_RECORDED)
        if self.run.origin:
            recipe["drafter"] = as_trained(self.run.drafter)
        metadata = {
            "recipe": recipe,
            "target": self.run.target.name,
            "history": self.run.history,
            "step": step,
            "ranks": self.ranks.world,
            "training_seconds": round(self.seconds_before + self.seconds, 1),
            "anchors": self.stepper.schedule.anchors_dealt(step),
            "samples": len(self.run.samples),
            "samples_sha256": self.settings["samples_sha256"],
            "response_tokens": sum(s.num_supervised for s in self.run.samples),
            "responses": self.run.responses,
            "held_out": self.last_metrics,
            "versions": versions(),
        }
        ids = self.run.draft_ids_Vd if self.run.reduced else None
        return Checkpoint(whole_drafter(self.run.drafter), ids, metadata)
