"""Measures time, throughput and memory of training, and writes metrics.jsonl, TensorBoard, W&B and a progress bar.

    step = features + forward_backward + optimizer + the rest;      evaluation (checks and saving) is kept apart
    supervised tokens/s, anchors/s = counted / (window - evaluation)

Counts are per process. On CUDA a phase ends when the GPU is done with it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from outrider.utils.documents import parse_json
from outrider.utils.measure import Clock

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes


def peak_memory_gib(device: torch.device) -> float:
    """Most memory in use so far: allocated on a CUDA device, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT / 2**30


class Meters:
    """Clocks to be held open (`with meters.features:`) around the phases of a step, and counters."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.features, self.forward_backward = Clock(device), Clock(device)
        self.optimizer, self.evaluation = Clock(device), Clock(device)
        self._restart()

    def _restart(self) -> None:
        self._started = time.perf_counter()
        self.steps = self._supervised = self._anchors = 0

    def count(self, supervised: int, anchors: int) -> None:
        """One more micro-batch, of so many supervised positions and anchors."""
        self._supervised += supervised
        self._anchors += anchors

    def window(self) -> dict[str, float]:
        """Figures since the last call (seconds are per step, evaluation's are of the whole window); starts again."""
        seconds = time.perf_counter() - self._started
        evaluation = self.evaluation.take()
        steps, training = max(1, self.steps), max(seconds - evaluation, 1e-9)
        figures = {
            "supervised_tokens_per_second": self._supervised / training,
            "anchors_per_second": self._anchors / training,
            "step_seconds": training / steps,
            "features_seconds": self.features.take() / steps,
            "forward_backward_seconds": self.forward_backward.take() / steps,
            "optimizer_seconds": self.optimizer.take() / steps,
            "evaluation_seconds": evaluation,
            "peak_memory_gib": peak_memory_gib(self.device),
        }
        self._restart()
        return figures


# ----------------------------------------------------------------------------
# OUT/metrics.jsonl, the boards of the recipe's `log` beside it, and the progress bar. Only the main rank keeps them.
# ----------------------------------------------------------------------------


def check_boards(names: Sequence[str]) -> None:
    """Raise ValueError if W&B is asked for and is not installed."""
    if "wandb" in names and find_spec("wandb") is None:
        raise ValueError("log: wandb is not installed: pip install wandb, or leave it out of log.")


Board = tuple[Callable[[int, Mapping[str, float]], object], Callable[[], object]]  # write and close


def _tensorboard(out: Path, first: int) -> Board:
    """OUT/tensorboard."""
    writer = SummaryWriter(str(out / "tensorboard"), purge_step=first + 1)

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def _weights_and_biases(out: Path, first: int, settings: Mapping[str, Any]) -> Board:
    """A run of W&B, which goes on when training does: OUT/wandb-id names it. Project: $WANDB_PROJECT, else outrider."""
    import wandb  # here: an optional dependency

    name = out / "wandb-id"
    if not first or not name.is_file():
        name.write_text(uuid.uuid4().hex[:8] + "\n")
    project, identity = os.environ.get("WANDB_PROJECT", "outrider"), name.read_text().strip()
    try:
        run = wandb.init(
            project=project, name=out.name, id=identity, dir=str(out), resume="allow", config=dict(settings)
        )
    except wandb.Error as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"wandb: {reason} WANDB_MODE=offline keeps the run in {out / 'wandb'}.") from error
    return lambda step, values: run.log(dict(values), step=step), run.finish


class MetricsLog:
    """One line per entry; entries after the step that a run resumes from are dropped first.

    Args:
        boards: `log` of the recipe, written to as well.
        settings: of the run, for boards that show them.
        active: False: nothing is written, for the other ranks.
    """

    speed = ""  # of the latest window, for the progress bar

    def __init__(
        self, out: Path, first: int, boards: Sequence[str], settings: Mapping[str, Any], *, active: bool = True
    ) -> None:
        self.active = active
        if not active:
            return
        out.mkdir(parents=True, exist_ok=True)
        path = out / "metrics.jsonl"
        kept = path.read_text().splitlines(keepends=True) if path.is_file() and first else []
        whole = [line for line in kept if line.endswith("\n")]  # a killed process may have cut the last one
        path.write_text("".join(line for line in whole if _entry(path, line)["step"] <= first))
        self.file = path.open("a")
        self.boards: list[Board] = [_tensorboard(out, first)] if "tensorboard" in boards else []
        if "wandb" in boards:
            self.boards.append(_weights_and_biases(out, first, settings))

    def write(self, step: int, group: str, values: dict[str, float]) -> None:
        """An entry; none where there are no values."""
        if not values or not self.active:
            return
        if "supervised_tokens_per_second" in values:
            self.speed = f"{values['supervised_tokens_per_second']:.0f} tok/s"
        rounded = {name: round(value, 6) for name, value in values.items()}
        self.file.write(json.dumps({"step": step, "group": group, **rounded}) + "\n")
        self.file.flush()
        for write, _ in self.boards:
            write(step, {f"{group}/{name}": value for name, value in values.items()})

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            self.file.close()
            for _write, close in self.boards:
                close()


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """A curve of at most `width` characters, each the mean of as many values; the lowest is `▁`, the highest `█`."""
    parts = min(width, len(values))
    means = [fmean(values[len(values) * i // parts : len(values) * (i + 1) // parts]) for i in range(parts)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(_BARS[round(7 * (mean - low) / (high - low))] if high > low else _BARS[0] for mean in means)


def progress_bar(shown: bool) -> Progress:
    """The bar of a training run; its tasks have a `status`."""
    columns = (
        TextColumn("[bold]train"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, disable=not shown)


Groups = dict[str, list[dict[str, Any]]]


def _entry(path: Path, line: str) -> dict[str, Any]:
    """An entry of metrics.jsonl; ValueError for other lines."""
    with suppress(ValueError):
        found = parse_json(line)
        if isinstance(found, dict) and isinstance(found.get("step"), int) and isinstance(found.get("group"), str):
            return found
    raise ValueError(f"{path}: {line[:80]!r} is no entry of metrics; remove that line.")


def read_metrics(path: Path) -> Groups:
    """Entries by group, in the order of steps; a line that a killed process cut short is left out."""
    groups: Groups = {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            entry = _entry(path, line)
            groups.setdefault(entry["group"], []).append(entry)
    return groups
