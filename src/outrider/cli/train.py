"""`outrider train` (a drafter from a recipe), `features` (the target's, on disk), `recipe`, `init` and `runs`."""

from __future__ import annotations

import json
import shlex
import signal
from dataclasses import asdict
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from outrider.cli.common import responding, show_lines
from outrider.training.config import (
    FeaturesConfig,
    InitConfig,
    RecipeConfig,
    RunsConfig,
    TrainConfig,
    WriteFeaturesConfig,
)
from outrider.utils import measure
from outrider.utils.measure import today, usable_device
from outrider.utils.packaged import PACKAGE
from outrider.utils.terminal import Terminal

if TYPE_CHECKING:
    from outrider.target.model import Target
    from outrider.training.feature_store import StorePlan
    from outrider.training.first_run import FirstRun
    from outrider.training.parallel import Ranks
    from outrider.training.recipe import Recipe
    from outrider.training.run import SavedRun
    from outrider.training.runs import TrainingRun
    from outrider.training.setup import Run

_SHOWN = 4  # drafters that init lists


def train(config: TrainConfig) -> None:
    """Train a drafter on the target's responses; run again to go on."""
    from outrider.cli.dry_run import show_estimate
    from outrider.training.estimate import estimate
    from outrider.training.parallel import join
    from outrider.training.recipe import load_recipe
    from outrider.training.run import SavedRun

    recipe = load_recipe(config.recipe, config.overrides)
    saved = SavedRun.of(recipe)
    with join(recipe.device) as ranks:
        measure.set_up(recipe.threads)
        console = Terminal(quiet=not ranks.main)
        say = partial(show_lines, console)
        if saved.finished:
            _say_finished(recipe, saved, console)
            return
        target = saved.load_target(recipe, ranks, say)
        if config.dry_run:
            show_estimate(estimate(recipe, target, ranks, say=say), Path(recipe.out), console)
            return
        run_training(recipe, target, console, ranks=ranks)
        if ranks.main:
            _say_next(recipe, console)


def _say_next(recipe: Recipe, console: Console) -> None:
    """The command that measures the drafter, on the prompts that `outrider init` put beside the run if any."""
    out = Path(recipe.out)
    drafter = out / ("best" if (out / "best").is_dir() else "drafter")
    tests = out.parent / "test.jsonl"
    words = ("outrider", "eval", "--target", recipe.target, "--drafter", str(drafter), "--out", str(out / "eval"))
    tasks = shlex.quote(str(tests)) if tests.is_file() else "YOUR_PROMPTS.jsonl"
    console.print(f"Next: {shlex.join(words)} --tasks {tasks}", highlight=False, markup=False, soft_wrap=True)


def _say_finished(recipe: Recipe, saved: SavedRun, console: Console) -> None:
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
    if saved.step < saved.last_step:
        further = f"Patience ended it: raise watch.patience={recipe.watch.patience} to go on, or null for all steps"
    console.print(
        f"already finished: {saved.step} of {saved.last_step} steps, held-out expected accepted length {length:.2f} "
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


def plan_features(config: FeaturesConfig) -> None:
    """Say exactly how large the recipe's store will be. Writes no features; makes responses that are missing."""
    from outrider.training.feature_store import recipe_plan

    console = Terminal()
    recipe, run = _open_store(config, console)
    _describe(recipe, run, recipe_plan(recipe, run), console=console)


def write_features(config: WriteFeaturesConfig) -> None:
    """Write the store, or what is missing of it. Processes i of N write the shards i, i + N, ..."""
    from outrider.training.feature_store import begin_store, missing_bytes, recipe_plan, store_directory, write_store
    from outrider.training.run import check_store_size, fill_window, shards_to_write

    console = Terminal()
    recipe, run = _open_store(config, console, writes=True)
    if recipe.features.max_gb is not None:
        window = fill_window(recipe, run, config.process)
        show_lines(console, f"window of {window.bytes} bytes (at most {window.max_bytes}) in {window.directory}")
        return
    plan, directory = recipe_plan(recipe, run), store_directory(recipe)
    _describe(recipe, run, plan, console=console)
    check_store_size(config, directory, missing_bytes(directory, plan))
    numbers = shards_to_write(config, plan.shards)
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


def check_features(config: FeaturesConfig) -> None:
    """Compare every shard with its SHA-256 and name what is damaged, missing or foreign."""
    from outrider.training.feature_store import check_store, recipe_plan, store_directory

    console = Terminal()
    recipe, run = _open_store(config, console)
    if wrong := check_store(store_directory(recipe), recipe_plan(recipe, run)):
        raise ValueError("\n".join(wrong))
    console.print(f"the store in {store_directory(recipe)} is complete and undamaged")


def _open_store(config: FeaturesConfig, console: Console, writes: bool = False) -> tuple[Recipe, Run]:
    """The recipe and its run, with the responses that were missing."""
    from outrider.training.recipe import load_recipe
    from outrider.training.run import load_for_store

    recipe = load_recipe(config.recipe, config.changes)
    measure.set_up(recipe.threads)
    device = usable_device(recipe.device)
    target = load_for_store(recipe, device, partial(show_lines, console), writes=writes)
    return recipe, prepare_with_progress(recipe, target, console)


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


# ----------------------------------------------------------------------------
# outrider recipe and init
# ----------------------------------------------------------------------------


def recipes_directory() -> Path:
    """The directory of the packaged recipes."""
    return PACKAGE / "recipes"


def packaged_recipes() -> dict[str, Path]:
    """{name: file}; a name is the path below the recipes' directory, without its suffix."""
    top = recipes_directory()
    return {file.relative_to(top).with_suffix("").as_posix(): file for file in sorted(top.rglob("*.yaml"))}


def recipe(config: RecipeConfig) -> None:
    """List the packaged recipes, copy one, or explain the fields."""
    console = Terminal(highlight=False, soft_wrap=True)
    name, copy = config.name, config.copy
    if config.schema:
        from outrider.training.recipe import recipe_schema  # here: it imports PyTorch

        print(json.dumps(recipe_schema(), indent=2))
    elif config.explain:
        _explain(name, console)
    elif name is not None:
        text = _packaged(name).read_text(encoding="utf-8")
        if copy is None:
            print(text, end="")
            return
        if copy.exists():
            raise ValueError(f"--copy {copy} exists: name a new file.")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
        console.print(f"{copy}: set target, out and data.prompts in it, then: outrider train {copy}", markup=False)
    else:
        found = packaged_recipes()
        width = max(map(len, found))
        for known, file in found.items():
            first = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
            console.print(f"[bold]{known:{width}}[/bold]  {escape(first)}")


def _packaged(name: str) -> Path:
    found = packaged_recipes()
    if name not in found:
        near = get_close_matches(name, found, 1)
        raise ValueError(f"no packaged recipe {name!r}; {f'did you mean {near[0]}?' if near else ', '.join(found)}")
    return found[name]


def _explain(wanted: str | None, console: Console) -> None:
    from outrider.training.recipe import nearest_field, recipe_fields

    fields = recipe_fields()
    shown = [field for field in fields if wanted in (None, field.name) or field.name.startswith(f"{wanted}.")]
    if not shown:
        near = nearest_field(str(wanted), [field.name for field in fields])
        raise ValueError(f"recipes have no field {wanted!r}; {f'did you mean {near}?' if near else 'see --explain'}")
    for field in shown:
        default = "required" if field.required else f"default {json.dumps(field.default)}"
        if "section" in field.kind and not field.required:
            default = "see its fields"
        only = f", of {field.only}" if field.only else ""
        console.print(f"[bold]{field.name}[/bold]  [dim]{escape(f'{field.kind}, {default}{only}')}[/dim]")
        if field.meaning:
            console.print(f"    {escape(field.meaning)}")


def init(config: InitConfig) -> None:
    """Look at a model and prompts; write a recipe and say what to run."""
    from outrider.training.first_run import PACKAGED, commands, offer_name, plan_first_run

    measure.set_up(None)
    console = Terminal(highlight=False, soft_wrap=True, markup=False)
    first = plan_first_run(config)
    first.write()
    estimate = _estimated(first, console)

    def say(label: str, *lines: str) -> None:
        for number, line in enumerate(lines):
            console.print(f"{'' if number else label:10}{line}")

    text, split, fitting = first.text, first.split, first.fitting
    shape = f"{text.num_hidden_layers} layers, hidden size {text.hidden_size}, {text.vocab_size:,} tokens"
    say("target", f"{config.target}: {text.model_type}, {shape}", *first.plan.chat.notes(thinking=False))
    say("base", *first.base)
    more = len(fitting) - _SHOWN
    listed = [f"{offer_name(offer)}, made for {offer.made_for}" for offer in fitting[:_SHOWN]]
    say("drafters", *listed, *([f"{more} more: outrider models"] if more > 0 else []), "ngram: nothing to train")
    packaged = f"none given, so packaged ones are used ({', '.join(PACKAGED)})"
    left_out = f"; {split.duplicates} left out, there twice" if split.duplicates else ""
    counts = f"{len(split.train)} to train, {len(split.held_out)} held out, {len(split.test)} to test{left_out}"
    say("prompts", ", ".join(config.prompts) or packaged, counts)
    say("estimate", estimate)
    say("written", str(first.recipe), *map(str, first.files.values()))
    console.print("\nnext, in this order (stop where the speed is enough):")
    for reason, command in commands(first):
        console.print(f"\n# {reason}\n{command}")


def _estimated(first: FirstRun, console: Console) -> str:
    """What training takes, in words."""
    from outrider.cli.dry_run import spoken_size, spoken_time
    from outrider.training.machine import free_memory_bytes
    from outrider.utils.files import free_bytes

    try:
        measured = first.estimate(partial(show_lines, console))
    except ValueError as error:
        return f"not measured: {error}; outrider train {shlex.quote(str(first.recipe))} --dry-run"
    free = f"free: {spoken_size(free_memory_bytes())}, {spoken_size(free_bytes(first.plan.directory))}"
    return (
        f"training {spoken_time(measured.seconds)}, {spoken_size(measured.memory + measured.cached)} of memory, "
        f"{spoken_size(measured.disk)} on disk ({free})"
    )


# ----------------------------------------------------------------------------
# outrider runs
# ----------------------------------------------------------------------------


def runs(config: RunsConfig) -> None:
    """List trainings: how far they are, how good, whether they run."""
    from outrider.training.runs import find_runs

    directory = config.directory
    if not directory.is_dir():
        raise ValueError(f"no directory {directory}: give the one that holds the runs.")
    trainings = list(find_runs(directory))
    if config.json_out:
        print(json.dumps([asdict(run) for run in trainings], indent=1))
        return
    console = Terminal()
    if not trainings:
        console.print(f"no trainings in {directory}; outrider train RECIPE begins one", highlight=False)
        return
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("run", "target"):
        table.add_column(heading, overflow="ellipsis")
    table.add_column("drafter", no_wrap=True)
    for heading in ("step", "best", "speedup", "state", "age", "size"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    for run in trainings:
        table.add_row(*_cells(run))
    console.print(table, highlight=False)
    console.print("best: tokens per round on held-out prompts", style="dim", highlight=False)


def _cells(run: TrainingRun) -> list[str]:
    return [
        run.run,
        Path(run.target or "-").name,
        run.algorithm or "-",
        f"{run.step}/{run.steps or '-'}",
        "-" if run.best is None else f"{run.best:.2f}",
        "-" if run.speedup is None else f"{run.speedup:.2f}x",
        run.status,
        _age(run.seconds),
        f"{run.bytes / 2**30:.1f}G" if run.bytes >= 2**30 else f"{run.bytes / 2**20:.0f}M",
    ]


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
