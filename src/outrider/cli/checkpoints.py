"""`outrider export` (a drafter in the dialect that an engine loads) and `outrider package` (a drafter to ship)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.cli.options import DRAFTS, EXPORTERS, FILES, MODELS, option
from outrider.utils.packaged import packaged

_DTYPES = ("bfloat16", "float16", "float32")


def export_command(
    drafter: Annotated[Path, typer.Argument(help="drafter directory, in any dialect")],
    *,
    to: Annotated[str, option(FILES, EXPORTERS)],
    out: Annotated[Path, option(FILES, "a new directory")],
    dtype: Annotated[str, option(FILES, "of the weights: float32, bfloat16 or float16")] = "float32",
    target: Annotated[str | None, option(MODELS, "id or directory; the one that the files name by default")] = None,
) -> None:
    """Write a drafter for an engine, with the command that serves it."""
    import torch

    from outrider.backends.export import export_drafter, target_facts
    from outrider.backends.registry import engine_of
    from outrider.checkpoints.checkpoint import load_checkpoint, read_config, read_metadata
    from outrider.checkpoints.describe import named_target

    if dtype not in _DTYPES:
        raise ValueError(f"--dtype {dtype} is not one of {', '.join(_DTYPES)}.")
    engine = engine_of(to)
    if out.exists():
        raise ValueError(f"--out {out} exists: export to a new directory.")
    drafter = packaged(drafter, "models")
    raw, _ = read_config(drafter)
    named = target or named_target(raw, read_metadata(drafter))
    if named is None:
        raise ValueError(f"{drafter} does not say which target it is for: name it with --target.")
    kind = getattr(torch, dtype)
    facts = target_facts(named, kind)
    checkpoint = load_checkpoint(drafter, num_target_layers=facts.num_layers)
    exported = export_drafter(checkpoint, engine, out, target=facts, dtype=kind)
    console = Console(highlight=False, soft_wrap=True)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    console.print(f"{out}: {size:.1f} MB, {len(exported.written.tensors)} tensors", markup=False)
    for sentence in exported.written.fallbacks:
        console.print(f"left out: {sentence}", markup=False)
    for command in exported.commands:
        console.print(command, markup=False)


_PACKAGE_DTYPES = ("bfloat16", "float32")


def package_command(
    drafter: Annotated[Path, typer.Argument(help="drafter directory")],
    out: Annotated[Path, typer.Argument(help="where to; its name is the model's. May be DRAFTER itself")],
    *,
    dtype: Annotated[str, option(FILES, "of the weights on disk: bfloat16 or float32")] = "bfloat16",
    results: Annotated[list[Path] | None, option("Model card", "results.json of outrider eval; repeatable")] = None,
    source: Annotated[list[str] | None, option("Model card", "a source of training prompts; repeatable")] = None,
    license: Annotated[str | None, option("Model card", "of the weights, as the hub spells it: apache-2.0")] = None,
    confidence_threshold: Annotated[
        float | None, option(DRAFTS, "threshold that outrider generate uses by default")
    ] = None,
) -> None:
    """Write a drafter to ship, with a model card made from measurements."""
    import torch

    from outrider.checkpoints.checkpoint import load_checkpoint, save_drafter
    from outrider.checkpoints.dialects.base import UnknownDepth
    from outrider.evaluation.model_card import model_card
    from outrider.evaluation.results import Results
    from outrider.scheduling.policies import ThresholdPolicy

    if dtype not in _PACKAGE_DTYPES:
        raise ValueError(f"--dtype {dtype} is not one of {', '.join(_PACKAGE_DTYPES)}.")
    if lost := foreign(out):
        raise ValueError(
            f"{out} holds something other than a drafter ({', '.join(lost[:3])}) and would be replaced; choose another "
            "place."
        )
    try:
        checkpoint = load_checkpoint(drafter)
    except UnknownDepth as error:
        raise ValueError(
            f"{drafter} was made elsewhere; package a drafter that outrider train wrote. To write it for an engine: "
            f"outrider export {drafter} --to ENGINE --target TARGET --out OUT."
        ) from error
    if confidence_threshold is not None:
        recommended = {"confidence_threshold": ThresholdPolicy(confidence_threshold).threshold}
        checkpoint = replace(checkpoint, metadata={**checkpoint.metadata, "recommended": recommended})
    measured = [Results.load(path) for path in results or []]
    card = model_card(
        checkpoint,
        name=out.resolve().name,
        dtype=getattr(torch, dtype),
        results=measured,
        sources=source or [],
        license=license,
    )
    save_drafter(checkpoint, out, getattr(torch, dtype), card=card)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    Console().print(f"{out}: {size:.1f} MB, model card in README.md", highlight=False, markup=False, soft_wrap=True)


def foreign(out: Path) -> list[str]:
    """Names of what is at `out`, as no part of a drafter of ours, and would be lost if one were written there."""
    from outrider.checkpoints.checkpoint import METADATA

    if not out.is_dir():
        return [out.name] if out.exists() else []
    names = sorted(path.name for path in out.iterdir())
    ours = {"config.json", "model.safetensors", "README.md", METADATA}
    return [name for name in names if name not in ours] if METADATA in names else names
