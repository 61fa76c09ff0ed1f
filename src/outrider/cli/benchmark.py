"""outrider bench-forward: what a forward of n tokens costs, trees too, and plain decoding beside transformers.

Two variants take turns (A B A B ...) in one process; figures are medians with their quartiles.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.runtime import set_up
from outrider.evaluation.forward import forward_curve, plain_against_transformers, tree_curve
from outrider.evaluation.results import machine
from outrider.formats import versions
from outrider.target import load_target
from outrider.target.resolve import EMBEDDED_ID


def bench_forward(
    target: Annotated[str, typer.Option(help="model id or directory")] = EMBEDDED_ID,
    context: Annotated[int, typer.Option(min=1, help="tokens already in the cache")] = 256,
    repeats: Annotated[int, typer.Option(min=3)] = 15,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures")] = None,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Print the SPS curve (1..32 tokens, packed and F.linear), trees, and plain decoding against transformers."""
    set_up(threads)
    console = Console()
    loaded = load_target(target)
    curve = forward_curve(loaded, context, repeats)
    view = Table(title=f"one forward after {context} cached tokens: milliseconds, median (quartiles)")
    for heading in ("tokens", "packed", "F.linear", "packed / 1", "SPS"):
        view.add_column(heading, justify="right", no_wrap=True)
    one = curve[0].packed[1]
    for point in curve:
        cells = [f"{q[1] * 1e3:.1f} ({q[0] * 1e3:.1f}-{q[2] * 1e3:.1f})" for q in (point.packed, point.linear)]
        view.add_row(str(point.tokens), *cells, f"{point.packed[1] / one:.2f}x", f"{1 / point.packed[1]:.1f}")
    console.print(view)
    trees = tree_curve(loaded, context, repeats)
    beside = Table(title="anchor and drafts as a tree (two children per node) or a chain: milliseconds, median")
    for heading in ("drafts", "tree", "chain", "tree / chain of 7", "keep the path"):
        beside.add_column(heading, justify="right", no_wrap=True)
    for branched in trees:
        cells = [f"{q[1] * 1e3:.1f} ({q[0] * 1e3:.1f}-{q[2] * 1e3:.1f})" for q in (branched.tree, branched.chain)]
        ratio = f"{branched.tree[1] / trees[0].chain[1]:.2f}x"
        beside.add_row(str(branched.nodes), *cells, ratio, f"{branched.keep[1] * 1e3:.2f}")
    console.print(beside)
    plain = plain_against_transformers(loaded, repeats=min(repeats, 5))
    console.print(
        f"plain decoding: outrider {plain['outrider']:.1f} tok/s, "
        f"transformers.generate {plain['transformers']:.1f} tok/s, ratio {plain['ratio']:.2f} "
        f"(quartiles {plain['ratio_low']:.2f}-{plain['ratio_high']:.2f}), same tokens: "
        f"{'yes' if plain['identical'] else 'no'}"
    )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        figures = {"curve": [vars(p) for p in curve], "trees": [vars(p) for p in trees], "plain": plain}
        about = {"machine": machine(), "versions": versions(), "context": context, "repeats": repeats}
        out.write_text(json.dumps(figures | about, indent=1) + "\n")
