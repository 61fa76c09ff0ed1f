"""The `outrider` command: its verbs, and errors of users as one line on stderr with exit status 2.

PyTorch and transformers take seconds to import, which help and misspelt verbs and options need not wait for. So a
verb's module is imported when the verb is run or asked for its help, and the modules in cli/ import what needs PyTorch
inside the functions that use it.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Annotated, Any, ClassVar, NamedTuple

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from outrider.cli.command import UsageError, command_of
from outrider.config import SMOLLM2
from outrider.utils.terminal import Terminal

_SHIPPED = "smollm2-135m-dspark"
_TENSOR_PARALLEL = ("--tp-size", "--tp", "--tensor-parallel-size")
_SPREAD = (
    " Tensor parallelism is vLLM's and SGLang's; here a model runs on one device: outrider serve --engine vllm "
    "--engine-args '--tensor-parallel-size 2', or --engine sglang --engine-args '--tp-size 2'."
)


class Listed(NamedTuple):
    """A verb as the group lists it: its panel, name and help, the function in cli/ that runs it, an example."""

    panel: str | None
    name: str
    help: str  # the first line of the function's docstring
    function: str  # MODULE.FUNCTION
    example: str

    def load(self) -> Any:
        """The command, its module imported."""
        module, function = self.function.split(".")
        verb = getattr(import_module(f"outrider.cli.{module}"), function)
        return command_of(verb, self.name, epilog=f"Example:\n{self.example}")


class LazyGroup(TyperGroup):
    """A group that shows its verbs from `listed` and imports the module of the one that is asked for."""

    listed: ClassVar[tuple[Listed, ...]] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        shown: dict[str, Any] = {
            verb.name: TyperCommand(verb.name, help=verb.help, rich_help_panel=verb.panel) for verb in self.listed
        }
        self.commands = {**shown, **self.commands}

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, without the kind of flags, and without what only prints what another option installs."""
        params: list[Any] = self.get_params(ctx)
        for param in params:
            param.metavar, param.hidden = "", param.name == "show_completion"
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """(name, command, its arguments): the command itself, where `commands` has its name and line of help."""
        name, command, rest = super().resolve_command(ctx, args)
        found = next((verb.load() for verb in self.listed if verb.name == name), command)
        return name, found, rest


class _Verbs(LazyGroup):
    listed = (
        Listed("Use", "generate", "Answer a prompt, streamed.",
               function="generate.generate", example='outrider generate "Name three rivers." --show-rounds'),
        Listed("Use", "serve", "Serve OpenAI's API, with drafts; a key, if any, is in $OUTRIDER_API_KEY.",
               function="generate.serve", example="outrider serve --port 8000"),
        Listed("Use", "models", "List drafters by target, on this machine and published.",
               function="generate.models", example="outrider models SmolLM2"),
        Listed("Use", "export", "Write a drafter for an engine, with the command that serves it.",
               function="checkpoints.export", example=f"outrider export {_SHIPPED} --to vllm --out runs/vllm"),
        Listed("Use", "package", "Write a drafter to ship, with a model card made from measurements.",
               function="checkpoints.package",
               example=f"outrider package {_SHIPPED} --out runs/smollm2-135m-dspark"),
        Listed("Use", "push", "Put a packaged drafter on the Hugging Face hub, with its model card.",
               function="checkpoints.push", example="outrider push runs/smollm2-135m-dspark ME/smollm2-dspark"),
        Listed("Train", "demo", "Race a drafter, then train, evaluate and report a small one, in ten minutes.",
               function="demo.demo", example="outrider demo"),
        Listed("Train", "init", "Look at a model and prompts; write a recipe and say what to run.",
               function="train.init", example=f"outrider init --target {SMOLLM2} --out runs/first"),
        Listed("Train", "prepare", "Generate the target's responses for training; run again to go on.",
               function="data.prepare", example="outrider prepare --recipe demo --out runs/mine.jsonl"),
        Listed("Train", "inspect", "Show which tokens are trained on, or what a checkpoint is.",
               function="data.inspect", example=f"outrider inspect {_SHIPPED}"),
        Listed("Train", "recipe", "List the packaged recipes, copy one, or explain the fields.",
               function="train.recipe", example="outrider recipe --explain optimizer"),
        Listed("Train", "train", "Train a drafter on the target's responses; run again to go on.",
               function="train.train", example="outrider train demo out=runs/mine optimizer.steps=200"),
        Listed("Train", "runs", "List trainings: how far they are, how good, whether they run.",
               function="train.runs", example="outrider runs runs"),
        Listed("Train", "experiment", "Train, evaluate and compare a table of drafters (docs/experiments.md).",
               function="experiment.experiment", example="outrider experiment smollm2-135m --dry-run"),
        Listed("Measure", "eval", "Decode tasks with and without a drafter: speedup, accepted length, same output.",
               function="evaluate.evaluate",
               example=f"outrider eval --target {SMOLLM2} --tasks eval_math --out runs/eval"),
        Listed("Measure", "compare", "Compare results of eval; those of one name are seeds of one drafter.",
               function="evaluate.compare", example="outrider compare runs/eval"),
        Listed("Measure", "report", "Write one HTML page of what was measured: verdicts, pictures, traces, settings.",
               function="evaluate.report_page", example="outrider report runs --out runs/report.html"),
        Listed("Measure", "doctor", "Check target, drafter and data, or a server; status 1 if a fault is found.",
               function="doctor.doctor", example=f"outrider doctor --target {SMOLLM2} --drafter {_SHIPPED}"),
        Listed("Measure", "calibrate", "Fit confidences to acceptance; of medusa and hydra, measure accuracies.",
               function="calibrate.calibrate",
               example=f"outrider package {_SHIPPED} --out mine\n"
               f"outrider calibrate --target {SMOLLM2} --drafter mine --tasks eval_math"),
        Listed("Measure", "profile", "Measure the cost of a step on this machine, for load-aware policies.",
               function="calibrate.profile",
               example="outrider profile --max-requests 2 --max-tokens 16 --out runs/profile.json"),
        Listed("Measure", "bench-drafters", "Time drafts by their length, drafters taking turns.",
               function="evaluate.bench_drafters", example=f"outrider bench-drafters {_SHIPPED} ngram --repeats 5"),
        Listed("Measure", "bench", "Put load on an engine, ours or another: throughput against user speed.",
               function="bench.bench",
               example="outrider bench --tasks eval_math --concurrency 1,2 --variants fixed-4 --repeats 1 "
               "--out runs/bench"),
        Listed("Measure", "bench-table", "Compare engines that bench measured, each with itself without speculation.",
               function="bench.bench_table", example="outrider bench-table runs/bench"),
        Listed("Measure", "simulate", "Predict a load test from a profile and recorded drafts.",
               function="bench.simulate",
               example="outrider simulate --record runs/traces.npz --tasks eval_math --max-samples 4\n"
               "outrider simulate --traces runs/traces.npz --profile runs/profile.json --out runs/simulated"),
    )  # fmt: skip


class _FeatureVerbs(LazyGroup):
    listed = (
        Listed(None, "plan", "Say exactly how large the recipe's store will be. Writes no features; makes responses "
               "that are missing.",
               function="train.plan_features", example="outrider features plan demo out=runs/mine"),
        Listed(None, "write", "Write the store, or what is missing of it. Processes i of N write the shards i, i + N, "
               "...",
               function="train.write_features", example="outrider features write demo out=runs/mine"),
        Listed(None, "check", "Compare every shard with its SHA-256 and name what is damaged, missing or foreign.",
               function="train.check_features", example="outrider features check demo out=runs/mine"),
    )  # fmt: skip


app = typer.Typer(cls=_Verbs, no_args_is_help=True, pretty_exceptions_enable=False)
features = typer.Typer(
    cls=_FeatureVerbs, help="Store the target's features on disk, for training.", no_args_is_help=True
)
app.add_typer(features, name="features", rich_help_panel="Train")


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version  # here, since only this option needs it

        typer.echo(f"outrider {version('outrider')}")
        raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train, evaluate and serve draft models for lossless speculative decoding."""


class _Messages(logging.Handler):
    """Prints what the package tells beside results, such as where prompts are from, on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        Terminal(stderr=True).print(record.getMessage(), highlight=False, markup=False, soft_wrap=True)


_MESSAGES = _Messages(logging.INFO)


def main() -> None:
    """Entry point."""
    told = logging.getLogger("outrider")
    told.setLevel(logging.INFO)
    told.addHandler(_MESSAGES)  # once, however often it is called
    try:
        sys.exit(app(standalone_mode=False))
    except UsageError as error:
        if message := error.format_message():  # empty where the help was shown instead
            if getattr(error, "option_name", None) in _TENSOR_PARALLEL:
                message += _SPREAD
            verb = error.ctx.command_path if error.ctx else "outrider"
            _fail(f"{' '.join(message.replace('Value error, ', '').split())} ({verb} --help)")
        sys.exit(2)
    except (ValueError, OSError) as error:
        _fail(" ".join(str(error).splitlines()))


def _fail(message: str) -> None:
    # Escaped: paths and lists in the message may look like markup.
    Terminal(stderr=True).print(f"[red]error:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
