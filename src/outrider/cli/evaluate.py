"""outrider eval --target T --drafter D --tasks FILES_OR_NAMES ..."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.cli.runtime import load, set_up
from outrider.drafters.packed import PackedDrafter
from outrider.evaluation.report import table, write_report
from outrider.evaluation.results import Results
from outrider.evaluation.run import EvaluationConfig, evaluate
from outrider.formats import load_drafter, versions
from outrider.sampling import SamplingParams
from outrider.scheduling import FixedPolicy, Policy, ThresholdPolicy
from outrider.target import Target


def evaluate_command(
    target: Annotated[str, typer.Option(help="model id or directory")],
    drafter: Annotated[Path, typer.Option(help="drafter directory")],
    tasks: Annotated[str, typer.Option(help="comma-separated JSONL files or shipped sets (eval_math, ...)")],
    out: Annotated[Path, typer.Option(help="directory for results.json and plots")],
    max_samples: Annotated[int | None, typer.Option(min=1, help="prompts per task; all by default")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    top_k: Annotated[int, typer.Option(min=0)] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    repetition_penalty: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    draft_length: Annotated[int | None, typer.Option(min=0, help="drafts to verify; gamma by default")] = None,
    confidence_threshold: Annotated[
        float | None, typer.Option(help="verify drafts only while their confidence is at least this")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Plain and speculative decoding in one run: speedup, accepted length, identical output."""
    set_up(threads)
    console = Console()
    policy = choose_policy(draft_length, confidence_threshold)
    params = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    loaded = load(target, device)
    checkpoint = load_drafter(drafter)
    packed = PackedDrafter(checkpoint.drafter, loaded, checkpoint.draft_ids_Vd)
    config = EvaluationConfig(max_samples, max_new_tokens, params)
    results = run_evaluation(
        loaded,
        packed,
        [task.strip() for task in tasks.split(",")],
        config,
        policy,
        {"drafter": str(drafter), "drafter_step": checkpoint.metadata.get("step")},
        console,
    )
    report(results, out, console)


def choose_policy(draft_length: int | None, confidence_threshold: float | None) -> Policy:
    """The scheduling policy two options describe.

    Raises:
        ValueError: both are given.
    """
    if confidence_threshold is None:
        return FixedPolicy(draft_length)
    if draft_length is not None:
        raise ValueError("give --draft-length or --confidence-threshold, not both.")
    return ThresholdPolicy(confidence_threshold)


def run_evaluation(
    target: Target,
    drafter: PackedDrafter,
    tasks: list[str],
    config: EvaluationConfig,
    policy: Policy,
    settings: dict[str, object],
    console: Console,
) -> Results:
    """`evaluate` with a progress bar."""
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("eval", total=None)
        return evaluate(
            target,
            drafter,
            tasks,
            config,
            policy,
            settings,
            versions(),
            lambda name, done, total: bar.update(task, description=name, completed=done, total=total),
        )


def report(results: Results, out: Path, console: Console) -> None:
    """Write the files, print the table and say where the plots are.

    Raises:
        ValueError: greedy output differed from plain decoding: a bug worth reporting.
    """
    paths = write_report(results, out)
    console.print(table(results))
    for path in paths:
        console.print(f"  {path}", highlight=False, markup=False, soft_wrap=True)
    wrong = [t.task for t in results.tasks if t.greedy_mismatches]
    if wrong:
        raise ValueError(f"output differs from plain decoding on {', '.join(wrong)}; this is a bug, please report it.")
