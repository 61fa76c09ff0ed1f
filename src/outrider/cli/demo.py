"""outrider demo: prompts -> responses -> a small DSpark drafter -> a measured speedup, on the embedded model.

Where a drafter for the model is shipped, it is measured on the same prompts after the fresh one, to show what longer
training gives.
"""

from __future__ import annotations

import time
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.cli.drafters import recommended_threshold
from outrider.cli.evaluate import report, run_evaluation
from outrider.cli.options import choose_policy
from outrider.cli.runtime import load, set_up
from outrider.cli.train import run_training
from outrider.evaluation.run import EvaluationConfig
from outrider.formats import load_drafter, read_metadata, shipped_drafter
from outrider.target import Target
from outrider.training.recipe import load_recipe

_TASKS = ["eval_math", "eval_chat", "eval_code"]
_THRESHOLD = 0.25  # a drafter this young is often wrong, and knows it


def demo(
    out: Annotated[Path, typer.Option(help="where the run goes")] = Path("runs/demo"),
    overrides: Annotated[
        list[str] | None, typer.Argument(help="recipe fields to change: optimizer.steps=20 ...")
    ] = None,
    eval_samples: Annotated[int, typer.Option(min=1, help="held-out prompts per task and drafter")] = 3,
    eval_tokens: Annotated[int, typer.Option(min=1, help="new tokens per response")] = 96,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """The whole road in under ten minutes: regenerate, train, evaluate on held-out prompts, and the shipped drafter."""
    console = Console()
    started = time.perf_counter()
    set_up(threads)
    path = Path(str(resources.files("outrider.cli") / "demo.yaml"))
    recipe = load_recipe(path, overrides or []).model_copy(update={"out": str(out)})
    target = load(recipe.target, recipe.device)
    run_training(recipe, target, console)
    config = EvaluationConfig(eval_samples, eval_tokens)
    console.rule("the drafter trained just now")
    _measure(out / "drafter", target, config, _THRESHOLD, out / "eval", console)
    shipped = shipped_drafter(recipe.target)
    if shipped is not None:
        console.rule("the shipped drafter, trained for longer")
        threshold = recommended_threshold(read_metadata(shipped))
        _measure(shipped, target, config, threshold, out / "eval-shipped", console)
    console.print(f"demo finished in {(time.perf_counter() - started) / 60:.1f} minutes")


def _measure(
    directory: Path, target: Target, config: EvaluationConfig, threshold: float | None, out: Path, console: Console
) -> None:
    packed, policy = load_drafter(directory).packed(target), choose_policy(None, threshold)
    results = run_evaluation(target, packed, _TASKS, config, policy, {"drafter": str(directory)}, console)
    report(results, out, console)
