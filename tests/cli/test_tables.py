"""Every table of the terminal fits 80 columns with figures of real measurements: nothing is wrapped or cut."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from outrider.cli import bench
from outrider.cli.calibrate import errors_table, print_tables, quality_table, sweep_table
from outrider.decoding.cost import Profile
from outrider.evaluation.calibration.fit import Calibration, ScalingError, SweepPoint
from outrider.evaluation.comparison import Comparison, terminal
from outrider.evaluation.draft_cost import cost_table, load_costs
from outrider.evaluation.figures import table
from outrider.evaluation.loadtest.bench import side_by_side
from outrider.evaluation.loadtest.metrics import Frontier
from outrider.evaluation.loadtest.simulate import compare
from outrider.evaluation.results import Results
from tests.toys.command_line import Run

MEASURED = Path(__file__).parents[2] / "docs" / "results"


def views(*found: RenderableType) -> Callable[[Console], None]:
    def show(console: Console) -> None:
        for view in found:
            console.print(view)

    return show


def engines(directory: Path) -> RenderableType:
    for name in ("local", "vllm", "transformers", "mlx"):
        (directory / name).mkdir()
        shutil.copy(MEASURED / "engines" / f"{name}.json", directory / name / "frontier.json")
    return bench.engines_table(side_by_side(sorted(directory.iterdir())))


def simulated(directory: Path) -> Callable[[Console], None]:
    points = Frontier.load(MEASURED / "load" / "frontier.json").points
    return lambda console: bench.report_simulation(compare(points, points), directory / "v.json", console)


def by_task() -> Calibration:
    path = MEASURED / "calibration-gsm8k" / "calibration.json"
    found = Calibration.model_validate_json(path.read_text())
    kinds = ("none", "sts", "temperatures", "temperatures and offsets")
    errors = [
        ScalingError(task=task, scaling=kind, rounds=12345, ece=[0.123] * 7, ece_noise=[0.1] * 6 + [None])
        for task in ("eval_math-for-gsm8k", "")
        for kind in kinds
    ]
    return found.model_copy(update={"errors": errors})


TABLES: dict[str, Callable[[Path], Callable[[Console], None]]] = {
    "eval": lambda _: views(table(Results.load(MEASURED / "shipped-greedy" / "results.json"))),
    "compare": lambda _: views(
        *terminal(Comparison.model_validate_json((MEASURED / "drafters" / "comparison.json").read_text()))
    ),
    "bench-drafters": lambda _: views(cost_table(load_costs(MEASURED / "drafters" / "draft_cost.json"))),
    "calibrate": lambda _: views(
        quality_table(
            Calibration.model_validate_json((MEASURED / "calibration-gsm8k" / "calibration.json").read_text())
        )
    ),
    "calibrate, by task": lambda _: views(errors_table(by_task())),
    "calibrate --sweep": lambda _: views(
        sweep_table([SweepPoint(**p) for p in json.loads((MEASURED / "calibration-gsm8k" / "sweep.json").read_text())])
    ),
    "profile": lambda _: lambda console: print_tables(Profile.load(MEASURED / "load" / "profile.json"), 256, console),
    "bench": lambda _: lambda console: bench.show_points(Frontier.load(MEASURED / "load" / "frontier.json"), console),
    "bench-table": lambda directory: views(engines(directory)),
    "simulate": lambda _: views(bench.points_table(Frontier.load(MEASURED / "load" / "frontier.json").points)),
    "simulate --validate": simulated,
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_fits_80_columns(name: str, tmp_path: Path) -> None:
    show, printed = TABLES[name](tmp_path), []
    for width in (80, 300):
        console = Console(width=width, file=io.StringIO())
        show(console)
        assert isinstance(console.file, io.StringIO)
        printed.append([line.strip() for line in console.file.getvalue().splitlines() if line[:1] != "/"])
    rows = [
        [line for line in lines if not line.startswith(("additive form: ", "load ", str(tmp_path)))]
        for lines in printed
    ]
    assert rows[0] == rows[1] and not any("…" in line for line in rows[0])
    assert max(map(len, rows[0])) <= 80 and len(rows[0]) > 3


def test_engines_side_by_side(run: Run, tmp_path: Path) -> None:
    status, said, errors = run("bench-table", MEASURED / "load", "--out", tmp_path / "table.md")
    assert status == 0 and "local" in said, errors
    assert (tmp_path / "table.md").read_text().startswith("| engine ")
