"""The one training loop, for every block drafter.

    step -> samples and anchors -> features (online) -> forward -> objective -> AdamW, cosine with warm-up, clipping

Logs go to TensorBoard and OUT/metrics.jsonl; OUT/drafter is the checkpoint in its engine dialect, OUT/state what a
resumed run needs. A run that was killed and started again ends with the same weights as one that was not.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from outrider.data.samples import Sample
from outrider.formats import Checkpoint, save_drafter, versions
from outrider.training.batches import BlockBatch, Schedule, build_batch
from outrider.training.features import FeatureSource
from outrider.training.metrics import held_out_metrics
from outrider.training.recipe import OptimizerSection, Recipe
from outrider.training.setup import Run
from outrider.training.state import load_state, save_state

_HELD_OUT_ANCHORS = 24
# What may differ between a run and its resumption: where, how often and with how much memory it is done.
_FREE_TO_CHANGE = {"out", "threads", "device", "feature_cache_gb", "log_every", "eval_every", "save_every"}


def learning_rate(step: int, config: OptimizerSection) -> float:
    """Linear warm-up, then a cosine to zero at `steps`."""
    warmup = max(1, round(config.warmup_fraction * config.steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


class Trainer:
    """Trains `run.drafter` on `run.samples`, resuming from OUT/state where there is one."""

    def __init__(self, recipe: Recipe, run: Run) -> None:
        self.recipe, self.run = recipe, run
        self.out = Path(recipe.out)
        config = recipe.optimizer
        decayed = [p for p in run.drafter.parameters() if p.dim() > 1]
        plain = [p for p in run.drafter.parameters() if p.dim() <= 1]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
        budget = int(recipe.feature_cache_gb * 2**30)
        taps, scale = run.drafter.config.target_layer_ids, run.drafter.tap_scale_L
        self.features = FeatureSource(run.target, run.samples, taps, scale, budget)
        self.held_out = FeatureSource(run.target, run.held_out, taps, scale, budget)
        self.schedule = Schedule(run.samples, config.sequences_per_step, config.anchors_per_sequence, recipe.seed)
        self.settings = recipe.model_dump(mode="json", exclude=_FREE_TO_CHANGE)
        self.settings["samples_sha256"] = _digest([*run.samples, *run.held_out])
        self.last_metrics: dict[str, float] = {}
        self.seconds = 0.0

    def train(self, stop_after: int | None = None) -> dict[str, float]:
        """Run to the recipe's last step (or `stop_after`) and return the last held-out metrics.

        Raises:
            ValueError: the loss is not finite; the last checkpoint stays.
        """
        config, drafter = self.recipe.optimizer, self.run.drafter
        first = load_state(self.out / "state", drafter, self.optimizer, self.settings)
        last = min(config.steps, stop_after or config.steps)
        started = time.perf_counter()
        if first >= last:
            self.last_metrics = self.evaluate()
            return self.last_metrics
        with self._log(first) as log, self._bar() as bar:
            task = bar.add_task("train", total=config.steps, completed=first, status="")
            for step in range(first, last):
                batch = self.batch(self.schedule.step(step), self.features, self.run.samples)
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate(step, config)
                output = self.run.objective(drafter, batch)
                self._check_finite("loss", output.loss.item(), step)
                self.optimizer.zero_grad(set_to_none=True)
                output.loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(drafter.parameters(), config.clip)
                self._check_finite("gradient norm", norm.item(), step)
                self.optimizer.step()
                done = step + 1
                if done % self.recipe.log_every == 0:
                    log.write(
                        done,
                        "train",
                        {
                            "loss": output.loss.item(),
                            "agreement": output.agreement_N.mean().item(),
                            "acceptance": output.acceptance_N.mean().item(),
                            "gradient_norm": norm.item(),
                            "learning_rate": learning_rate(step, config),
                            "seconds": time.perf_counter() - started,
                        },
                    )
                if done % self.recipe.eval_every == 0 or done == last:
                    self.last_metrics = self.evaluate()
                    log.write(done, "held_out", self.last_metrics)
                if done % self.recipe.save_every == 0 or done == last:
                    self.seconds = time.perf_counter() - started
                    self.save(done)
                bar.update(
                    task,
                    completed=done,
                    status=f"loss {output.loss.item():.3f}  "
                    f"tau {self.last_metrics.get('expected_length_greedy', 1):.2f}",
                )
        return self.last_metrics

    def _check_finite(self, what: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            config = self.recipe.optimizer
            raise ValueError(
                f"the {what} is {value} at step {step}: training stopped, the last checkpoint in {self.out} is kept. "
                f"Lower optimizer.learning_rate ({config.learning_rate}) or raise optimizer.warmup_fraction."
            )

    def batch(self, chosen: list[tuple[int, list[int]]], features: FeatureSource, samples: list[Any]) -> BlockBatch:
        return build_batch(chosen, samples, [features[i] for i, _ in chosen], self.run.drafter.config.gamma)

    def evaluate(self) -> dict[str, float]:
        """Held-out metrics on fixed anchors."""
        schedule = Schedule(self.run.held_out, 1, _HELD_OUT_ANCHORS, seed=0)

        def batches() -> Iterator[BlockBatch]:
            for index in range(len(self.run.held_out)):
                yield self.batch([(index, schedule.anchors(index, 0))], self.held_out, self.run.held_out)

        return held_out_metrics(self.run.drafter, self.run.objective, batches())

    def save(self, step: int) -> None:
        """Write OUT/drafter and OUT/state, each atomically."""
        metadata = {
            "recipe": self.recipe.model_dump(mode="json", exclude={"out": True, "data": {"prompts", "responses"}}),
            "target": self.run.target.name,
            "step": step,
            "training_seconds_this_process": round(self.seconds, 1),
            "samples": len(self.run.samples),
            "response_tokens": sum(s.num_supervised for s in self.run.samples),
            "held_out": self.last_metrics,
            "versions": versions(),
        }
        ids = self.run.draft_ids_Vd if self.run.reduced else None
        save_drafter(Checkpoint(self.run.drafter, ids, metadata), self.out / "drafter")
        save_state(self.out / "state", self.run.drafter, self.optimizer, step, self.settings)

    def _log(self, first: int) -> _Log:
        return _Log(self.out, first)

    def _bar(self) -> Progress:
        columns = (
            TextColumn("[bold]train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
        )
        return Progress(*columns)


def _digest(samples: list[Sample]) -> str:
    """Identifies the data a state was trained on: other responses mean another draft vocabulary and other steps."""
    return hashlib.sha256(json.dumps([(s.tokens, s.spans) for s in samples]).encode()).hexdigest()


class _Log:
    """metrics.jsonl and TensorBoard, side by side; entries after a resumed step are dropped first."""

    def __init__(self, out: Path, first: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / "metrics.jsonl"
        kept = path.read_text().splitlines(keepends=True) if path.is_file() and first else []
        whole = [line for line in kept if line.endswith("\n")]  # a killed process may have cut the last one
        path.write_text("".join(line for line in whole if json.loads(line)["step"] <= first))
        self.file = path.open("a")
        self.board = SummaryWriter(str(out / "tensorboard"), purge_step=first)

    def write(self, step: int, group: str, values: dict[str, float]) -> None:
        rounded = {name: round(value, 6) for name, value in values.items()}
        self.file.write(json.dumps({"step": step, "group": group, **rounded}) + "\n")
        self.file.flush()
        for name, value in values.items():
            self.board.add_scalar(f"{group}/{name}", value, step)

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.board.close()
