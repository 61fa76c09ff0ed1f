"""The YAML of an experiment: rows of drafters for one target, with seeds, tasks and options, checked as a whole.

rows:
  dspark: {}                                                   the table's recipe as it is
  layers-3: {set: {drafter.num_hidden_layers: 3}}              with fields changed
  dflash: {recipe: dflash.yaml}                                another recipe
  dflash-at-8: {drafter_of: dflash, evaluate: {block_size: 8}} a row's drafters, evaluated in another way
  lookup: {drafter: ngram}                                     what needs no training

docs/experiments.md tells every field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider.training.recipe import Recipe, apply_override, load_recipe

Option = str | int | float | bool | list[str]
_TABLES_OWN = {"target", "drafter", "tasks", "label", "out"}  # options of outrider eval that the table itself gives


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Row(_Section):
    """One drafter of the table."""

    recipe: str | None = None  # null: the table's
    set: dict[str, Any] = {}  # recipe fields by their dotted names
    drafter: str | None = None  # as `outrider eval --drafter` takes it; not trained
    drafter_of: str | None = None  # the row whose drafters these are
    calibrate: dict[str, Option] | None = None  # options of outrider calibrate, once it is trained; null: it is not
    evaluate: dict[str, Option] = {}  # options of outrider eval, on top of the table's
    seeds: list[int] | None = Field(None, min_length=1)  # null: the table's, or all of those of drafter_of

    @model_validator(mode="after")
    def _one_origin(self) -> Row:
        if (self.drafter is not None) + (self.drafter_of is not None) + bool(self.recipe or self.set) > 1:
            raise ValueError("give drafter, drafter_of, or what to train (recipe, set): one of the three")
        if self.seeds is not None and self.drafter is not None:
            raise ValueError("seeds are for rows that are trained: leave them out beside drafter")
        if self.calibrate is not None and not self.trained:
            raise ValueError("calibrate is for rows that are trained: leave it out beside drafter and drafter_of")
        return self

    @property
    def trained(self) -> bool:
        return self.drafter is None and self.drafter_of is None


class ExperimentTable(_Section):
    """The YAML file. Recipes and task files are looked for beside it first, `out` is relative to where you are."""

    out: str
    recipe: str
    responses: str | None = None  # made by outrider prepare; null: the table's recipe tells how to make them
    # The target's layers that any row reads: their features are written to OUT/features once, instead of being computed
    # by every training (three quarters of a step on a CPU). null: no store.
    feature_aux_layers: list[int] | None = None
    seeds: list[int] = Field([0], min_length=1)
    threads: int | None = Field(None, ge=1)
    set: dict[str, Any] = {}  # of every row that is trained, before the row's own
    tasks: list[str] = Field(min_length=1)
    evaluate: dict[str, Option] = {}
    draft_cost: dict[str, Option] | None = {}  # options of outrider bench-drafters; null: not measured
    allow_different: bool = False  # compare rows whose conditions differ, and say so
    rows: dict[str, Row] = Field(min_length=1)

    @model_validator(mode="after")
    def _rows_fit(self) -> ExperimentTable:
        for name, row in self.rows.items():
            if row.drafter_of is not None:
                if row.drafter_of not in self.rows or not self.rows[row.drafter_of].trained:
                    raise ValueError(f"row {name}: drafter_of {row.drafter_of!r} is no row that is trained")
                if unknown := sorted(set(row.seeds or ()) - set(self.seeds_of(row.drafter_of))):
                    raise ValueError(f"row {name}: {row.drafter_of} is not trained with the seeds {unknown}")
            if own := sorted({option.replace("-", "_") for option in self.evaluated(name)} & _TABLES_OWN):
                raise ValueError(f"row {name}: evaluate sets {', '.join(own)}, which the table gives for every row")
            if name in ("", ".", "..") or set(name) & set("/=\\"):
                raise ValueError(f"row name {name!r} cannot name a directory")
        return self

    def seeds_of(self, name: str) -> list[int]:
        """What a row is evaluated with, and trained with where it is."""
        row = self.rows[name]
        return row.seeds or (self.seeds if row.drafter_of is None else self.seeds_of(row.drafter_of))

    def evaluated(self, name: str) -> dict[str, Option]:
        """A row's options of outrider eval: the table's and its own."""
        return self.evaluate | self.rows[name].evaluate


def load_table(path: Path, overrides: Sequence[str] = ()) -> ExperimentTable:
    """Read a table and apply `key.path=value` overrides (values are YAML).

    Raises:
        ValueError: unreadable, unknown or invalid fields, or a recipe in it that is.
    """
    if not path.is_file():
        raise ValueError(f"no table {path}.")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError(f"{path}: a table is a YAML mapping with at least out, recipe, tasks and rows.")
        for override in overrides:
            apply_override(raw, override)
        table = ExperimentTable.model_validate(raw)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML ({error}).") from error
    except ValidationError as error:
        lines = [f"  {'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in error.errors()]
        raise ValueError(f"{path}: invalid table\n" + "\n".join(lines)) from error
    target = load_recipe(file_of_table(path, table.recipe)).target
    for name, row in table.rows.items():
        if row.trained and (theirs := row_recipe(table, path, name).target) != target:
            raise ValueError(f"{path}: row {name} is for the target {theirs}, the table for {target}.")
    return table


def row_recipe(table: ExperimentTable, path: Path, name: str) -> Recipe:
    """What a row's drafters are trained by, or those whose drafters it has."""
    row = table.rows[table.rows[name].drafter_of or name]
    return load_recipe(file_of_table(path, row.recipe or table.recipe), as_overrides(table.set | row.set))


def trainings(table: ExperimentTable) -> Iterator[tuple[str, int]]:
    """(row, seed), a seed of every row before the next seed: what there is so far compares."""
    trained = {name: table.seeds_of(name) for name, row in table.rows.items() if row.trained}
    for seed in dict.fromkeys(seed for seeds in trained.values() for seed in seeds):
        for name, seeds in trained.items():
            if seed in seeds:
                yield name, seed


def drafters(table: ExperimentTable) -> Iterator[tuple[str, int | None, str]]:
    """(row, seed, drafter), in the order of the rows; what is not trained has no seed."""
    for name, row in table.rows.items():
        if row.drafter is not None:
            yield name, None, row.drafter
            continue
        source = name if row.drafter_of is None else row.drafter_of
        for seed in table.seeds_of(name):
            yield name, seed, str(run_directory(Path(table.out), source, seed) / "drafter")


def run_directory(out: Path, name: str, seed: int) -> Path:
    """Where a row is trained with a seed."""
    return out / name / f"seed-{seed}"


def file_of_table(table: Path, name: str) -> Path:
    """A file the table names: beside it, or else where you are."""
    found = table.parent / name
    return found if found.is_file() else Path(name)


def as_overrides(fields: dict[str, Any]) -> list[str]:
    """JSON is YAML, but for infinity, which YAML spells .inf."""
    return [f"{name}={json.dumps(value) if value != float('inf') else '.inf'}" for name, value in fields.items()]


# ----------------------------------------------------------------------------
# A table of drafters from nothing to a comparison: YAML (experiment_table.py) -> the commands that make it, in order.
#
#     prepare   responses of the target, once, the same for every row
#     features  one store of the target's features that all rows share (feature_aux_layers), where the table wants one
#     train     every row that is trained, with every seed
#     calibrate right after it, where the row wants that
#     eval      every row and seed, back to back, the last drafter of its training (no choice among checkpoints)
#     bench-drafters, compare
#
# Every command is one that can be given by hand. A stage is done when its stamp says that the same command ended well
# on the same files, so an interrupted table goes on where it was.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """One command. `inputs`: files whose bytes it depends on; `output`: one that is there when all was done.

    `stamp` None: run every time. `row`: whose it is, "" where it is not of one row.
    """

    args: list[str]
    inputs: list[Path]
    stamp: Path | None
    output: Path | None = None
    row: str = ""

    def digest(self) -> str:
        """Of the command and its files as they are now."""
        found = hashlib.sha256(json.dumps(self.args).encode())
        for path in self.inputs:
            found.update(hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"-")
        return found.hexdigest()

    @property
    def done(self) -> bool:
        """Whether this very command ended well on these very files."""
        if self.stamp is None or not self.stamp.is_file() or not self.complete:
            return False
        return self.stamp.read_text().strip() == self.digest()

    @property
    def complete(self) -> bool:
        """A command may end well before its time: responses stop after data.max_minutes."""
        return self.output is None or self.output.is_file()

    def mark(self) -> None:
        """Remember that it ended well."""
        if self.stamp is not None:
            self.stamp.parent.mkdir(parents=True, exist_ok=True)
            self.stamp.write_text(self.digest() + "\n")


def plan(table: ExperimentTable, path: Path) -> list[Stage]:
    """All commands in order; `path` is the table's own."""
    data, fields = _data_stages(table, path)
    given = [] if table.responses is None else [Path(table.responses)]
    inputs = given + [stage.output for stage in data if stage.output is not None]
    evaluations = _evaluations(table, path)
    directories = [str(stage.output.parent) for stage in evaluations if stage.output is not None]
    compared = ["compare", *directories, "--out", str(Path(table.out) / "comparison")]
    measured = _draft_cost(table, path)
    if measured is not None:
        compared += ["--draft-cost", str(measured.output)]
    if table.allow_different:
        compared.append("--allow-different")
    costs = [] if measured is None else [measured]
    return [*data, *_trainings(table, path, fields, inputs), *evaluations, *costs, Stage(compared, [], None)]


def _data_stages(table: ExperimentTable, path: Path) -> tuple[list[Stage], dict[str, Any]]:
    """What makes responses and the feature store, and the recipe fields that use them."""
    out, base = Path(table.out), file_of_table(path, table.recipe)
    stages = []
    responses = out / "responses.jsonl" if table.responses is None else Path(table.responses)
    if table.responses is None:
        command = ["prepare", "--recipe", str(base), "--out", str(responses), *_threads(table)]
        prompts = [Path(source.path) for source in load_recipe(base).data.prompts]
        stages.append(Stage(command, [base, *prompts], out / "stamps" / "prepare", responses))
    fields: dict[str, Any] = {"data.prompts": [], "data.responses": str(responses)}
    if table.feature_aux_layers is not None:
        store = out / "features"
        fields |= {
            "features.mode": "store",
            "features.directory": str(store),
            "features.aux_layers": table.feature_aux_layers,
        }
        overrides = as_overrides(table.set | fields | {"out": str(store)} | _thread_field(table))
        command = ["features", "write", str(base), *overrides, "--yes"]
        stages.append(Stage(command, [base, responses], out / "stamps" / "features", store / "manifest.json"))
    return stages, fields


def _trainings(table: ExperimentTable, path: Path, shared: dict[str, Any], inputs: list[Path]) -> list[Stage]:
    out, stages = Path(table.out), []
    for name, seed in trainings(table):
        row = table.rows[name]
        recipe, directory = file_of_table(path, row.recipe or table.recipe), run_directory(out, name, seed)
        fields = table.set | row.set | shared | {"seed": seed, "out": str(directory)} | _thread_field(table)
        command = ["train", str(recipe), *as_overrides(fields)]
        made = directory / "drafter" / "config.json"
        stages.append(Stage(command, [recipe, *inputs], out / "stamps" / f"train-{name}-{seed}", made, name))
        if row.calibrate is not None:
            stages.append(_calibration(table, path, name, seed, row.calibrate))
    return stages


def _calibration(table: ExperimentTable, path: Path, name: str, seed: int, options: dict[str, Option]) -> Stage:
    target = load_recipe(file_of_table(path, table.recipe)).target
    out, drafter = Path(table.out), str(run_directory(Path(table.out), name, seed) / "drafter")
    tasks = options.get("tasks")
    named = [str(file_of_table(path, task)) for task in tasks] if isinstance(tasks, list) else []
    options = options | ({"tasks": named} if named else {})
    command = ["calibrate", "--target", target, "--drafter", drafter, *_options(options), *_threads(table)]
    # outrider.json, where it writes, is among its inputs: stages are stamped when they have ended, and a drafter that
    # was trained anew has lost what was found, even where the weights came out the same.
    inputs = [*_checkpoint(drafter), *map(Path, named)]
    return Stage(command, inputs, out / "stamps" / f"calibrate-{name}-{seed}", row=name)


def _evaluations(table: ExperimentTable, path: Path) -> list[Stage]:
    target = load_recipe(file_of_table(path, table.recipe)).target
    out, tasks = Path(table.out), [str(file_of_table(path, task)) for task in table.tasks]
    stages = []
    for name, seed, drafter in drafters(table):
        directory = out / name / (f"eval-{seed}" if seed is not None else "eval")
        options = _options({"tasks": tasks} | table.evaluated(name))
        command = ["eval", "--target", target, "--drafter", drafter, "--label", name, "--out", str(directory)]
        inputs = [*_checkpoint(drafter), *map(Path, tasks)]
        stamp = out / "stamps" / directory.relative_to(out).as_posix().replace("/", "-")
        stages.append(Stage([*command, *options, *_threads(table)], inputs, stamp, directory / "results.json", name))
    return stages


def _draft_cost(table: ExperimentTable, path: Path) -> Stage | None:
    """The cost of drafting with the first seed of every row, drafting as it is evaluated.

    A row that is evaluated in another way, but drafts as the row whose drafters it has, costs the same: it is left out.
    """
    if table.draft_cost is None:
        return None
    target = load_recipe(file_of_table(path, table.recipe)).target
    out = Path(table.out)
    first = {name: drafter for name, _, drafter in reversed(list(drafters(table)))}
    shapes = {name: _shape(table, name) for name in table.rows}
    origins = {name: row.drafter_of for name, row in table.rows.items()}
    measured = [name for name, origin in origins.items() if origin is None or shapes[name] != shapes[origin]]
    cost = out / "comparison" / "draft_cost.json"
    command = ["bench-drafters", *(f"{name}={first[name]}" for name in measured), "--target", target]
    for name in measured:
        command += [part for option, size in shapes[name].items() for part in (option, f"{name}={size}")]
    command += ["--out", str(cost), *_options(table.draft_cost), *_threads(table)]
    inputs = [file for drafter in dict.fromkeys(first[name] for name in measured) for file in _checkpoint(drafter)]
    return Stage(command, inputs, out / "stamps" / "bench-drafters", cost)


def _shape(table: ExperimentTable, name: str) -> dict[str, Option]:
    """The options of a row's evaluation that decide what its drafts cost."""
    found = {f"--{option.replace('_', '-')}": value for option, value in table.evaluated(name).items()}
    return {option: found[option] for option in ("--tree", "--block-size") if option in found}


def _checkpoint(drafter: str) -> list[Path]:
    """Its files; outrider.json holds what calibration found."""
    return [Path(drafter) / name for name in ("config.json", "model.safetensors", "outrider.json")]


def _threads(table: ExperimentTable) -> list[str]:
    return [] if table.threads is None else ["--threads", str(table.threads)]


def _thread_field(table: ExperimentTable) -> dict[str, Any]:
    return {} if table.threads is None else {"threads": table.threads}


def _options(fields: dict[str, Option]) -> list[str]:
    """As given by hand: `--name value`, and --name or --no-name for true and false."""
    found: list[str] = []
    for name, value in fields.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{option}" if value else f"--no-{option}")
        else:
            found += [f"--{option}", ",".join(value) if isinstance(value, list) else str(value)]
    return found
