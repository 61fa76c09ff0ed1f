"""outrider demo: prompts -> responses -> a small DSpark drafter -> a measured speedup, on the embedded model."""

from __future__ import annotations

import time
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.cli.evaluate import report, run_evaluation
from outrider.cli.runtime import load, set_up
from outrider.cli.train import run_training
from outrider.drafters.packed import PackedDrafter
from outrider.evaluation.run import EvaluationConfig
from outrider.formats import load_drafter
from outrider.scheduling import ThresholdPolicy
from outrider.training.recipe import load_recipe

_TASKS = ["eval_math", "eval_chat", "eval_code"]
_THRESHOLD = 0.25  # a drafter this young is often wrong, and knows it


def demo(
    out: Annotated[Path, typer.Option(help="where the run goes")] = Path("runs/demo"),
    overrides: Annotated[
        list[str] | None, typer.Argument(help="recipe fields to change: optimizer.steps=20 ...")
    ] = None,
    eval_samples: Annotated[int, typer.Option(min=1, help="held-out prompts per task")] = 6,
    eval_tokens: Annotated[int, typer.Option(min=1, help="new tokens per response")] = 128,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """The whole road in under ten minutes: regenerate, train, evaluate on held-out prompts."""
    console = Console()
    started = time.perf_counter()
    set_up(threads)
    path = Path(str(resources.files("outrider.cli") / "demo.yaml"))
    recipe = load_recipe(path, overrides or []).model_copy(update={"out": str(out)})
    target = load(recipe.target, recipe.device)
    run_training(recipe, target, console)
    checkpoint = load_drafter(out / "drafter")
    packed = PackedDrafter(checkpoint.drafter, target, checkpoint.draft_ids_Vd)
    config = EvaluationConfig(eval_samples, eval_tokens)
    results = run_evaluation(
        target, packed, _TASKS, config, ThresholdPolicy(_THRESHOLD), {"drafter": str(out / "drafter")}, console
    )
    report(results, out / "eval", console)
    console.print(f"demo finished in {(time.perf_counter() - started) / 60:.1f} minutes")
