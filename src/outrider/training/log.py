"""OUT/metrics.jsonl and TensorBoard, side by side, and the progress bar. Only the main rank keeps them."""

from __future__ import annotations

import json
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter


class MetricsLog:
    """One line per entry; entries after the step that a run resumes from are dropped first."""

    speed = ""  # of the latest window, for the progress bar

    def __init__(self, out: Path, first: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / "metrics.jsonl"
        kept = path.read_text().splitlines(keepends=True) if path.is_file() and first else []
        whole = [line for line in kept if line.endswith("\n")]  # a killed process may have cut the last one
        path.write_text("".join(line for line in whole if json.loads(line)["step"] <= first))
        self.file = path.open("a")
        self.board = SummaryWriter(str(out / "tensorboard"), purge_step=first + 1)

    def write(self, step: int, group: str, values: dict[str, float]) -> None:
        """An entry; none where there are no values."""
        if not values:
            return
        if "supervised_tokens_per_second" in values:
            self.speed = f"{values['supervised_tokens_per_second']:.0f} tok/s"
        rounded = {name: round(value, 6) for name, value in values.items()}
        self.file.write(json.dumps({"step": step, "group": group, **rounded}) + "\n")
        self.file.flush()
        for name, value in values.items():
            self.board.add_scalar(f"{group}/{name}", value, step)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.board.close()


class SilentLog(MetricsLog):
    """The log of the other ranks: nothing."""

    def __init__(self) -> None:
        pass

    def write(self, step: int, group: str, values: dict[str, float]) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


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
