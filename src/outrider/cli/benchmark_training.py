"""outrider bench-objective and bench-training: the training step beside the straightforward implementation."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.runtime import load, set_up
from outrider.data.samples import join_turns
from outrider.evaluation.objective_memory import MemoryCase, MemoryResult, measure_apart, relative_errors
from outrider.evaluation.plots import plot_objective_memory
from outrider.evaluation.results import machine
from outrider.evaluation.run_speed import RunSpeed, run_speed
from outrider.evaluation.training_speed import StepSpeed, training_speed
from outrider.formats import versions
from outrider.target.linear import native_bfloat16
from outrider.training.dataset import existing_responses, responses_path
from outrider.training.recipe import load_recipe
from outrider.training.step import Precision

_PRECISIONS = ("float32", "bfloat16")


def _precisions(names: list[str]) -> list[Precision]:
    unknown = [name for name in names if name not in _PRECISIONS]
    if unknown:
        raise ValueError(f"precision {unknown[0]!r} is not one of: {', '.join(_PRECISIONS)}.")
    return cast("list[Precision]", names)


def bench_objective(
    anchors: Annotated[int, typer.Option(min=4, help="of the largest case; the others are 1/4 and 1/2 of it")] = 512,
    gamma: Annotated[int, typer.Option(min=1)] = 7,
    vocab: Annotated[int, typer.Option(min=64)] = 151_936,
    hidden: Annotated[int, typer.Option(min=1)] = 2560,
    rank: Annotated[int, typer.Option(min=1, help="of the sequential head")] = 256,
    dtype: Annotated[
        str, typer.Option(help="of head and vocabulary-sized products: float32, bfloat16, float64 (exact gradients)")
    ] = "float32",
    device: str = "cpu",
    out: Annotated[Path, typer.Option(help="directory for the figures and the plot")] = Path("runs/bench-objective"),
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Peak memory of one forward and backward of the objective, each in a process of its own."""
    if dtype not in (*_PRECISIONS, "float64"):
        raise ValueError(f"dtype {dtype!r} is not one of: {', '.join(_PRECISIONS)}, float64.")
    set_up(threads)
    console = Console()
    threads_used = torch.get_num_threads()
    largest = MemoryCase("ours", anchors, gamma, vocab, hidden, rank, cast("Any", dtype), device, threads=threads_used)
    results: list[MemoryResult] = []
    with tempfile.TemporaryDirectory() as place:
        files = {variant: Path(place) / f"{variant}.safetensors" for variant in ("ours", "straightforward")}
        for count in (anchors // 4, anchors // 2, anchors):
            for variant, path in files.items():
                gradients = str(path) if count == anchors else None
                case = replace(largest, variant=cast("Any", variant), anchors=count, gradients=gradients)
                results.append(measure_apart(case))
                peak = f"{results[-1].peak_bytes / 2**20:,.0f} MiB"
                console.print(f"{count} anchors, {variant}: {peak}, {results[-1].seconds:.1f} s", highlight=False)
        errors = relative_errors(files["ours"], files["straightforward"])
    ratio = results[-2].peak_bytes / results[-1].peak_bytes
    differences = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    console.print(
        f"at {anchors} x {gamma} x {vocab} ours takes {ratio:.3f} of the straightforward peak; gradients differ by "
        f"{differences} (relative)",
        highlight=False,
    )
    out.mkdir(parents=True, exist_ok=True)
    measured = [asdict(r) for r in results]
    for result in measured:
        del result["case"]["gradients"]  # a temporary file
    figures = {"results": measured, "ratio": ratio, "gradient_relative_error": errors}
    environment = {"machine": machine(), "versions": versions()}
    (out / "objective_memory.json").write_text(json.dumps({**figures, **environment}, indent=1) + "\n")
    plot_objective_memory(results, out / "objective_memory.png")


def bench_training(
    recipe: Annotated[Path, typer.Argument(help="a recipe: drafter, objective and optimizer settings")],
    overrides: Annotated[list[str] | None, typer.Argument(help="fields to change, as for train")] = None,
    responses: Annotated[Path | None, typer.Option(help="a responses file; the recipe's own by default")] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help="float32, bfloat16 or both (where the CPU has it)")
    ] = None,
    steps: Annotated[int, typer.Option(min=2)] = 7,
    epochs: Annotated[int, typer.Option(min=0, help="of online training, the target included; 0 for none")] = 4,
    full_vocabulary: Annotated[bool, typer.Option(help="measure the target's whole vocabulary too")] = True,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures")] = None,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Supervised tokens per second of whole training steps, ours and the straightforward one taking turns."""
    chosen = load_recipe(recipe, overrides or [])
    precisions = _precisions(precision or list(_PRECISIONS if native_bfloat16() else _PRECISIONS[:1]))
    set_up(threads or chosen.threads)
    target = load(chosen.target, chosen.device)
    _, replies = existing_responses(responses or responses_path(chosen), target)
    samples = join_turns(replies)[: (steps + 1) * chosen.optimizer.sequences_per_step]
    found = training_speed(chosen, target, samples, precisions, steps)
    if full_vocabulary and found[0].draft_vocab < target.vocab_size:
        whole = chosen.drafter.model_copy(update={"draft_vocab_size": None})
        found += training_speed(chosen.model_copy(update={"drafter": whole}), target, samples, precisions, steps)
    Console().print(_speed_table(found))
    runs: list[RunSpeed] = []
    for each in precisions if epochs else []:
        loaded = target if each == "float32" else load(chosen.target, chosen.device, torch.bfloat16)
        runs += run_speed(chosen, loaded, samples, each, epochs)
    if runs:
        Console().print(_run_table(runs))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        settings = {
            "steps": steps,
            "drafter": chosen.drafter.model_dump(),
            "optimizer": chosen.optimizer.model_dump(),
            "objective": chosen.objective.model_dump(),
        }
        figures = {
            "results": [asdict(speed) for speed in found],
            "runs": [asdict(speed) for speed in runs],
            "settings": settings,
        }
        out.write_text(json.dumps({**figures, "machine": machine(), "versions": versions()}, indent=1) + "\n")


def _run_table(runs: list[RunSpeed]) -> Table:
    view = Table(title="online training, target included: supervised tokens per second")
    for heading in ("variant", "precision", "by epoch", "whole run", "against straightforward"):
        view.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        by_epoch = ", ".join(f"{rate:.0f}" for rate in run.epochs)
        view.add_row(run.variant, run.precision, by_epoch, f"{run.whole:.0f}", f"{run.ratio:.2f}x")
    return view


def _speed_table(found: list[StepSpeed]) -> Table:
    view = Table(title="training steps: supervised tokens per second, median (quartiles)")
    for heading in ("draft vocabulary", "variant", "precision", "tokens/s", "against straightforward", "first loss"):
        view.add_column(heading, justify="right", no_wrap=True)
    for speed in found:
        low, middle, high = speed.tokens_per_second
        ratio = f"{speed.ratio[1]:.2f}x ({speed.ratio[0]:.2f}-{speed.ratio[2]:.2f})"
        rate = f"{middle:.0f} ({low:.0f}-{high:.0f})"
        cells = str(speed.draft_vocab), speed.variant, speed.precision, rate, ratio, f"{speed.losses[0]:.4f}"
        view.add_row(*cells)
    return view
