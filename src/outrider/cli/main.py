"""The `outrider` command: its verbs, and errors of users as one line on stderr with exit status 2."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.markup import escape

from outrider.cli.bench import bench_command, bench_table, simulate_command
from outrider.cli.calibrate import calibrate_command, profile_command
from outrider.cli.checkpoints import export_command, package_command
from outrider.cli.data import inspect_command, prepare_command
from outrider.cli.evaluate import bench_drafters, compare_command, doctor, evaluate_command
from outrider.cli.experiment import demo, experiment
from outrider.cli.generate import generate_command, models
from outrider.cli.options import UsageError, Verb
from outrider.cli.train import check_features, plan_features, train, write_features

_SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
_SHIPPED = "models/smollm2-135m-dspark"
_VERBS = (
    ("Decode", "generate", generate_command, 'outrider generate "Name three rivers." --show-rounds'),
    ("Decode", "models", models, "outrider models SmolLM2"),
    ("Train", "demo", demo, "outrider demo"),
    ("Train", "prepare", prepare_command,
     "outrider prepare --recipe src/outrider/cli/demo.yaml --out runs/mine.jsonl"),
    ("Train", "inspect", inspect_command, f"outrider inspect {_SHIPPED}"),
    ("Train", "train", train,
     "outrider train src/outrider/cli/demo.yaml out=runs/mine optimizer.steps=200"),
    ("Train", "experiment", experiment, "outrider experiment experiments/smollm2-135m.yaml --dry-run"),
    ("Measure", "eval", evaluate_command,
     f"outrider eval --target {_SMOLLM2} --tasks eval_math --out runs/eval"),
    ("Measure", "compare", compare_command, "outrider compare docs/results/shipped-greedy"),
    ("Measure", "doctor", doctor, f"outrider doctor --target {_SMOLLM2} --drafter {_SHIPPED}"),
    ("Measure", "calibrate", calibrate_command,
     f"cp -r {_SHIPPED} mine",
     f"outrider calibrate --target {_SMOLLM2} --drafter mine --tasks eval_math"),
    ("Measure", "profile", profile_command,
     "outrider profile --max-requests 2 --max-tokens 16 --out runs/profile.json"),
    ("Measure", "bench-drafters", bench_drafters, f"outrider bench-drafters {_SHIPPED} ngram --repeats 5"),
    ("Serve", "bench", bench_command,
     "outrider bench --tasks eval_math --concurrency 1,2 --variants fixed-4 --repeats 1 --out runs/bench"),
    ("Serve", "bench-table", bench_table, "outrider bench-table runs/bench"),
    ("Serve", "simulate", simulate_command,
     "outrider simulate --record runs/traces.npz --tasks eval_math --max-samples 4",
     "outrider simulate --traces runs/traces.npz --profile runs/profile.json --out runs/simulated"),
    ("Serve", "export", export_command, f"outrider export {_SHIPPED} --to vllm --out runs/vllm"),
    ("Serve", "package", package_command, f"outrider package {_SHIPPED} runs/smollm2-135m-dspark"),
)  # fmt: skip
_FEATURES = (("plan", plan_features), ("write", write_features), ("check", check_features))

app = typer.Typer(
    help="Train, evaluate and serve draft models for lossless speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
features = typer.Typer(help="Store the target's features on disk, for training.", no_args_is_help=True)
for _panel, _name, _verb, *_example in _VERBS:
    _epilog = "\n".join(["Example:", *_example])
    app.command(_name, cls=Verb, rich_help_panel=_panel, epilog=_epilog)(_verb)
for _name, _verb in _FEATURES:
    _epilog = f"Example:\noutrider features {_name} src/outrider/cli/demo.yaml out=runs/mine"
    features.command(_name, cls=Verb, epilog=_epilog)(_verb)
app.add_typer(features, name="features", rich_help_panel="Train")


def main() -> None:
    """Entry point."""
    try:
        sys.exit(app(standalone_mode=False))
    except UsageError as error:
        if message := error.format_message():  # empty where the help was shown instead
            verb = error.ctx.command_path if error.ctx else "outrider"
            _fail(f"{' '.join(message.replace('Value error, ', '').split())} ({verb} --help)")
        sys.exit(2)
    except (ValueError, OSError) as error:
        _fail(str(error))


def _fail(message: str) -> None:
    # Escaped: paths and lists in the message may look like markup.
    Console(stderr=True).print(f"[red]error:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
