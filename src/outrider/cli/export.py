"""outrider export DRAFTER --to ENGINE --out DIR: the drafter in the dialect that an engine loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from outrider.formats import load_drafter, read_metadata
from outrider.formats.checkpoint import read_config
from outrider.formats.describe import named_target
from outrider.formats.engines import ENGINES, engine_of
from outrider.formats.export import export_drafter
from outrider.formats.target_facts import target_facts

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def export_command(
    drafter: Annotated[Path, typer.Argument(help="drafter directory, in any dialect")],
    to: Annotated[str, typer.Option(help="; ".join(f"{each.name}: {', '.join(each.dialects)}" for each in ENGINES))],
    out: Annotated[Path, typer.Option(help="a new directory")],
    target: Annotated[str | None, typer.Option(help="id or directory; the one that the files name by default")] = None,
    dtype: Annotated[str, typer.Option(help="of the weights: float32, bfloat16 or float16")] = "float32",
) -> None:
    """Write a drafter for an engine, with a model card and the command that serves it."""
    if dtype not in _DTYPES:
        raise ValueError(f"--dtype {dtype} is not one of {', '.join(_DTYPES)}.")
    engine = engine_of(to)
    if out.exists():
        raise ValueError(f"--out {out} exists: export to a new directory.")
    raw, _ = read_config(drafter)
    named = target or named_target(raw, read_metadata(drafter))
    if named is None:
        raise ValueError(f"{drafter} does not say which target it is for: name it with --target.")
    facts = target_facts(named, _DTYPES[dtype])
    checkpoint = load_drafter(drafter, num_target_layers=facts.num_layers)
    exported = export_drafter(checkpoint, engine, out, facts, _DTYPES[dtype])
    console = Console(highlight=False, soft_wrap=True)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    console.print(f"{out}: {size:.1f} MB, {len(exported.written.tensors)} tensors", markup=False)
    for sentence in exported.written.fallbacks:
        console.print(f"left out: {sentence}", markup=False)
    for command in exported.commands:
        console.print(command, markup=False)
