"""`outrider train` (a drafter from a recipe) and `outrider features` (the target's features on disk)."""

from __future__ import annotations

import os
import shlex
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from outrider.cli import options as opt
from outrider.cli.common import check_outputs, load, responding, show_lines, training_dtype
from outrider.cli.options import option
from outrider.utils.measure import set_up, today, usable_device
from outrider.utils.terminal import Terminal

if TYPE_CHECKING:
    from outrider.target.model import Target
    from outrider.training.feature_store import StorePlan
    from outrider.training.parallel import Ranks
    from outrider.training.recipe import Recipe
    from outrider.training.setup import Run


def train(
    recipe: opt.RecipePath,
    overrides: opt.Overrides = None,
    *,
    dry_run: Annotated[
        bool, option(opt.GENERAL, "only time a few steps and say what all take: time, memory, disk", "--dry-run")
    ] = False,
) -> None:
    """Train a drafter on the target's responses; run again to go on."""
    import torch

    from outrider.cli.dry_run import show_estimate
    from outrider.training.dataset import check_prompt_files
    from outrider.training.estimate import estimate
    from outrider.training.feature_store import check_store_fits
    from outrider.training.logging import check_boards
    from outrider.training.parallel import join, shard_layers
    from outrider.training.recipe import load_recipe
    from outrider.training.setup import check_recipe
    from outrider.training.trainer import saved_run
    from outrider.training.watch import patience_spent

    chosen = load_recipe(recipe, overrides or [])
    check_outputs(Path(chosen.out))
    check_boards(chosen.log)
    began = saved_run(chosen)
    if not began:  # a run that has begun has its samples
        check_prompt_files(chosen.data)
    precision = began.get("settings", {}).get("precision")
    with join(chosen.device) as ranks:
        set_up(chosen.threads)
        console = Terminal(quiet=not ranks.main)
        step = began.get("step", 0)
        last_step = began["settings"]["optimizer"]["steps"] if began else 1
        if step >= last_step or patience_spent(chosen.watch, began.get("watch", {})):
            _say_finished(chosen, step, last_step, console=console)
            return
        if not began:
            check_store_fits(chosen, check_recipe(chosen))
        if (threads := began.get("threads", torch.get_num_threads())) != torch.get_num_threads():
            console.print(
                f"threads: {torch.get_num_threads()}; the run was at {threads}. Its weights will differ in the last "
                f"bits from an uninterrupted run's; threads={threads} avoids that.",
                highlight=False,
                soft_wrap=True,
            )
        spread = chosen.shard_target and ranks.grouped
        place = partial(shard_layers, ranks=ranks) if spread else lambda model: None
        dtype = training_dtype(chosen.precision, ranks.device, console, began_with=precision, ranks=ranks)
        target = load(chosen.target, ranks.device, dtype, place=place, console=console)
        if dry_run:
            say = partial(show_lines, console)
            show_estimate(estimate(chosen, target, ranks, say=say), Path(chosen.out), console)
            return
        run_training(chosen, target, console, ranks=ranks)
        if ranks.main:
            _say_next(chosen, console)


def _say_next(recipe: Recipe, console: Console) -> None:
    """The command that measures the drafter, on the prompts that `outrider init` put beside the run if any."""
    out = Path(recipe.out)
    drafter = out / ("best" if (out / "best").is_dir() else "drafter")
    tests = out.parent / "test.jsonl"
    words = ("outrider", "eval", "--target", recipe.target, "--drafter", str(drafter), "--out", str(out / "eval"))
    tasks = shlex.quote(str(tests)) if tests.is_file() else "YOUR_PROMPTS.jsonl"
    console.print(f"Next: {shlex.join(words)} --tasks {tasks}", highlight=False, markup=False, soft_wrap=True)


def _say_finished(recipe: Recipe, step: int, last_step: int, console: Console) -> None:
    from outrider.checkpoints.checkpoint import read_metadata

    out = Path(recipe.out)
    drafter = out / "drafter"
    length = read_metadata(drafter).get("held_out", {}).get("expected_length_greedy", float("nan"))
    best = ""
    if (out / "best").is_dir():
        best_step = read_metadata(out / "best").get("step")
        best = f", the best one, of step {best_step}, in {out / 'best'}"
        if best_step == 0:
            best = f". No step was better than the drafter that training began with, which is in {out / 'best'}"
    further = f"To train it further: start_from={drafter} out=ANOTHER"
    if step < last_step:
        further = f"Patience ended it: raise watch.patience={recipe.watch.patience} to go on, or null for all steps"
    console.print(
        f"already finished: {step} of {last_step} steps, held-out expected accepted length {length:.2f} "
        f"(temperature 0); drafter in {drafter}{best}. {further}",
        highlight=False,
        soft_wrap=True,
    )


def run_training(recipe: Recipe, target: Target, console: Console, ranks: Ranks | None = None) -> Run:
    """Regenerate, train, and say what came out.

    Raises:
        typer.Exit: a signal ended it early; the status is 128 + its number.
    """
    from outrider.evaluation.figures import plot_training
    from outrider.evaluation.plots import short_name
    from outrider.training.parallel import Ranks
    from outrider.training.trainer import Trainer

    ranks = ranks or Ranks(device=target.device)
    run = prepare_with_progress(recipe, target, console, ranks=ranks)
    tokens = sum(s.num_supervised for s in run.samples)
    parameters = sum(p.numel() for p in run.drafter.parameters()) / 1e6
    console.print(
        f"{len(run.samples)} samples, {tokens} response tokens; {run.drafter.algorithm} drafter of {parameters:.1f}M "
        f"parameters, gamma {run.drafter.config.gamma}, aux hidden states {list(run.drafter.config.target_layer_ids)}"
    )
    trainer = Trainer(recipe, run, ranks)
    metrics = trainer.train()
    if trainer.interrupted:
        name = signal.Signals(trainer.interrupted).name
        console.print(f"{name}: stopped and saved; the same command goes on from the checkpoint in {recipe.out}")
        raise typer.Exit(128 + trainer.interrupted)
    console.print(
        f"held-out expected accepted length {metrics.get('expected_length_greedy', float('nan')):.2f} (temperature 0), "
        f"{metrics.get('expected_length_sampled', float('nan')):.2f} (temperature 1); "
        f"drafter in {Path(recipe.out) / 'drafter'}"
    )
    if summary := trainer.watch.summary():
        console.print(f"{summary} (in {Path(recipe.out) / 'best'})")
    metrics_file = Path(recipe.out) / "metrics.jsonl"
    if ranks.main and metrics_file.is_file():
        drafts = f"{run.drafter.algorithm}, gamma {run.drafter.config.gamma}"
        facts = (short_name(recipe.target), f"drafter {short_name(recipe.out)} ({drafts})", today())
        plot_training(
            metrics_file, metrics_file.with_name("training.png"), facts, best_step=trainer.watch.best_step or None
        )
    return run


def prepare_with_progress(recipe: Recipe, target: Target, console: Console, ranks: Ranks | None = None) -> Run:
    """`prepare`, and how far it is."""
    from outrider.training.parallel import ALONE
    from outrider.training.setup import prepare

    with responding(console, recipe.data.max_minutes) as progress:
        return prepare(recipe, target, progress.update, ranks=ranks or ALONE, say=progress.say)


# Without --limit-gb the question comes above 20 GB, or a tenth of the free disk where that is less: a store below both
# surprises nobody.
_LIMIT_GB = 20.0
_FREE_SHARE = 0.1


def plan_features(recipe: opt.RecipePath, overrides: opt.Overrides = None) -> None:
    """Say exactly how large the recipe's store will be. Writes no features; makes responses that are missing."""
    console = Terminal()
    chosen, run = _prepare(recipe, overrides, None, console=console)
    _describe(chosen, run, _plan(chosen, run), console=console)


def write_features(
    recipe: opt.RecipePath,
    overrides: opt.Overrides = None,
    *,
    shard: Annotated[int | None, option("Processes", "this process's number, from 0; else RANK")] = None,
    of: Annotated[int | None, option("Processes", "how many processes write; else WORLD_SIZE")] = None,
    only: Annotated[list[int] | None, option("Processes", "write just this shard; repeatable")] = None,
    limit_gb: Annotated[float | None, option("Size", "ask for --yes above this size")] = None,
    max_bytes: Annotated[
        int | None, option("Size", "keep at most this much, as a rolling window (features.max_gb)")
    ] = None,
    yes: Annotated[bool, option("Size", "write whatever the size", "--yes")] = False,
) -> None:
    """Write the store, or what is missing of it. Processes i of N write the shards i, i + N, ..."""
    from outrider.training.feature_store import (
        begin_store,
        check_store_space,
        missing_bytes,
        store_directory,
        write_store,
    )

    console = Terminal()
    number, count = _process(shard, of)
    chosen, run = _prepare(recipe, overrides, max_bytes, console=console, writes=True)
    if chosen.features.max_gb is not None:
        _fill_window(chosen, run, number, count=count, console=console)
        return
    plan, directory = _plan(chosen, run), store_directory(chosen)
    _describe(chosen, run, plan, console=console)
    needed = missing_bytes(directory, plan)
    check_store_space(directory, needed)
    _ask(directory, needed, limit_gb, yes=yes)
    beyond = [n for n in only or [] if not 0 <= n < len(plan.shards)]
    if beyond:
        raise ValueError(f"--only {beyond[0]}: the store has the shards 0 to {len(plan.shards) - 1}.")
    numbers = only or list(range(number, len(plan.shards), count))
    plan = begin_store(directory, plan)
    with Progress(console=console) as bar:
        task = bar.add_task("shards", total=len(numbers))
        written = write_store(
            directory, plan, run.target, samples=run.samples, numbers=numbers, on_progress=lambda _: bar.advance(task)
        )
    done = (directory / "manifest.json").is_file()
    console.print(
        f"{len(written)} shards written, {len(numbers) - len(written)} were there; the store in {directory} is "
        f"{'complete' if done else 'not complete yet: other processes have shards to write'}"
    )


def check_features(recipe: opt.RecipePath, overrides: opt.Overrides = None) -> None:
    """Compare every shard with its SHA-256 and name what is damaged, missing or foreign."""
    from outrider.training.feature_store import check_store, store_directory

    console = Terminal()
    chosen, run = _prepare(recipe, overrides, None, console=console)
    wrong = check_store(store_directory(chosen), _plan(chosen, run))
    if wrong:
        raise ValueError("\n".join(wrong))
    console.print(f"the store in {store_directory(chosen)} is complete and undamaged")


def _store_recipe(path: Path, overrides: list[str] | None, max_bytes: int | None) -> Recipe:
    from outrider.training.recipe import load_recipe

    extra = [] if max_bytes is None else [f"features.max_gb={max_bytes / 2**30!r}"]
    return load_recipe(path, ["features.mode=store", *(overrides or []), *extra])


def _prepare(
    path: Path, overrides: list[str] | None, max_bytes: int | None, console: Console, writes: bool = False
) -> tuple[Recipe, Run]:
    from outrider.training.feature_store import check_store_fits
    from outrider.training.setup import check_recipe

    recipe = _store_recipe(path, overrides, max_bytes)
    set_up(recipe.threads)
    device = usable_device(recipe.device)
    drafter = check_recipe(recipe)
    if writes:
        check_store_fits(recipe, drafter)
    target = load(recipe.target, device, training_dtype(recipe.precision, device, console), console=console)
    return recipe, prepare_with_progress(recipe, target, console)


def _plan(recipe: Recipe, run: Run) -> StorePlan:
    from outrider.training.feature_store import recipe_plan

    return recipe_plan(
        recipe,
        run.target,
        run.samples,
        aux_layers=run.drafter.config.target_layer_ids,
        aux_scale_L=run.drafter.aux_scale_L,
    )


def _process(shard: int | None, of: int | None) -> tuple[int, int]:
    number = int(os.environ.get("RANK", 0)) if shard is None else shard
    count = int(os.environ.get("WORLD_SIZE", 1)) if of is None else of
    if count < 1:
        raise ValueError(f"--of {count} must be at least 1.")
    if not 0 <= number < count:
        raise ValueError(f"--shard {number} --of {count}: processes are numbered 0 to {count - 1}.")
    return number, count


def _describe(recipe: Recipe, run: Run, plan: StorePlan, console: Console) -> None:
    from outrider.training.feature_store import extent, store_directory

    slots, rows = extent(run.samples)
    console.print(
        f"{store_directory(recipe)}: {plan.bytes} bytes ({plan.bytes / 2**30:.2f} GB) in {len(plan.shards)} shards, "
        f"{plan.dtype}: {len(run.samples)} samples, {slots} tokens x {len(plan.aux_layers)} aux layers and "
        f"{rows} generated tokens x 1 hidden state, {plan.hidden_size} numbers each",
        highlight=False,
        soft_wrap=True,
    )


def _ask(directory: Path, needed: int, limit_gb: float | None, yes: bool) -> None:
    from outrider.utils.files import free_bytes

    limit = min(_LIMIT_GB * 2**30, _FREE_SHARE * free_bytes(directory)) if limit_gb is None else limit_gb * 2**30
    if needed > limit and not yes:
        raise ValueError(
            f"this writes {needed} bytes ({needed / 2**30:.2f} GB), more than {limit / 2**30:.2f} GB: add --yes, or "
            "raise --limit-gb, or choose features.dtype=int8, or bound it with --max-bytes."
        )


def _fill_window(recipe: Recipe, run: Run, number: int, count: int, console: Console) -> None:
    from outrider.training.feature_store import FeatureWindow, check_store_space, open_features

    aux_layers, scale_L = run.drafter.config.target_layer_ids, run.drafter.aux_scale_L
    window = open_features(
        recipe, run.target, run.samples, aux_layers=aux_layers, aux_scale_L=scale_L, rank=number, world_size=count
    )
    assert isinstance(window, FeatureWindow)
    check_store_space(window.directory, max(0, min(window.max_bytes, _plan(recipe, run).bytes) - window.bytes))
    window.warm()
    console.print(f"window of {window.bytes} bytes (at most {window.max_bytes}) in {window.directory}", highlight=False)
