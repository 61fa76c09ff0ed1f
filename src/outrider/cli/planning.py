"""outrider bench-planning: what deciding costs a step, policy by policy."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.evaluation.planning import planning_medians
from outrider.evaluation.results import machine
from outrider.formats import versions


def bench_planning(
    requests: Annotated[int, typer.Option(min=1, help="requests that draft")] = 256,
    gamma: Annotated[int, typer.Option(min=1, help="drafts each")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="decisions behind one median")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="medians per policy, taking turns")] = 9,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures")] = None,
) -> None:
    """Microseconds of planning one step, for every policy and for the gate that decides who drafts."""
    found = planning_medians(requests, gamma, repeats, rounds)
    view = Table(title=f"planning one step of {requests} requests with {gamma} drafts each: microseconds")
    for heading in ("policy", "median", "least", "most"):
        view.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for name, medians in found.items():
        view.add_row(name, *(f"{value:.0f}" for value in (statistics.median(medians), min(medians), max(medians))))
    Console().print(view)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        setting = {"requests": requests, "gamma": gamma, "repeats": repeats}
        about = {"machine": machine(), "versions": versions()}
        out.write_text(json.dumps({"microseconds": found, **setting, **about}, indent=1) + "\n")
