"""`outrider train --dry-run`: the estimate of a run as a table (training/estimate.py says how it is measured)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from outrider.cli.common import show_lines
from outrider.utils.files import free_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.training.estimate import Estimate


def show_estimate(found: Estimate, out: Path, console: Console) -> None:
    """Print the parts and their sum, memory, ranks, and a warning if the disk has too little room.

    Args:
        out: the directory of the run.
    """
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("part", no_wrap=True)
    for heading in ("time", "disk"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("from")
    for part in found.parts:
        table.add_row(part.name, spoken_time(part.seconds), spoken_size(part.disk), part.source)
    free = free_bytes(out)
    total = spoken_time(found.seconds), spoken_size(found.disk), f"{spoken_size(free)} free on disk"
    table.add_row("total", *total, style="bold")
    console.print(table, highlight=False)
    show_lines(
        console,
        f"memory: {spoken_size(found.memory)} at the peak of a step, {spoken_size(found.cached)} for features",
        f"ranks: {found.ranks}",
    )
    if found.disk > free:
        show_lines(console, f"warning: not enough disk: {spoken_size(found.disk)} wanted, {spoken_size(free)} free")
    show_lines(console, "dry run: nothing of the run was written")


def spoken_time(seconds: float) -> str:
    """`2.5 h`, `12.0 min`, `40 s`, `< 1 s`; `-` for none."""
    if not seconds:
        return "-"
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else "< 1 s"


def spoken_size(size: float) -> str:
    """`1.5 GB`, `120 MB`; `-` for none."""
    if not size:
        return "-"
    return f"{size / 2**30:.1f} GB" if size >= 0.1 * 2**30 else f"{max(1.0, size / 2**20):.0f} MB"
