"""The `outrider` command. Users' mistakes end in one line on stderr and exit status 2, not in a traceback."""

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
from outrider.cli.train import features_app, train

app = typer.Typer(
    help="Train, evaluate and serve draft models for lossless speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("prepare")(prepare_command)
app.command("inspect")(inspect_command)
app.command("train")(train)
app.command("eval")(evaluate_command)
app.command("compare")(compare_command)
app.command("experiment")(experiment)
app.command("calibrate")(calibrate_command)
app.command("profile")(profile_command)
app.command("bench")(bench_command)
app.command("models")(models)
app.command("bench-table")(bench_table)
app.command("package")(package_command)
app.command("export")(export_command)
app.command("generate")(generate_command)
app.command("demo")(demo)
app.add_typer(features_app, name="features")
app.command("doctor")(doctor)
app.command("simulate")(simulate_command)
app.command("bench-drafters")(bench_drafters)


def main() -> None:
    """Entry point."""
    try:
        app()
    except (ValueError, OSError) as error:
        # Escaped: paths and lists in the message may look like markup.
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
