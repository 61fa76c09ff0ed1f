"""Plans an experiment: a YAML table of drafters for one target becomes the commands that make and compare them.

rows:
  dspark: {}                                                   trained by the table's recipe
  layers-3: {set: {drafter.num_hidden_layers: 3}}              with recipe fields changed
  dflash: {recipe: dflash.yaml}                                trained by another recipe
  dflash-at-8: {drafter_of: dflash, evaluate: {block_size: 8}} another row's drafters, evaluated with other options
  lookup: {drafter: ngram}                                     not trained

docs/experiments.md describes every field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from outrider.data.sources import find_prompts
from outrider.training.recipe import Recipe, load_recipe, read_fields
from outrider.utils.documents import Section
from outrider.utils.packaged import packaged

Option = str | int | float | bool | list[str]
_OF_DATA = {"data", "features", "device", "precision", "shard_target"}  # of a recipe's sections and fields
_SET_BY_TABLE = {"target", "drafter", "tasks", "data_dir", "label", "out"}  # of outrider eval's options; no row may


class Row(Section):
    """A drafter of the table."""

    recipe: str | None = None  # null: the table's
    set: dict[str, Any] = Field({})  # recipe fields by their dotted names
    drafter: str | None = None  # as `outrider eval --drafter` takes it; not trained
    drafter_of: str | None = None  # the row whose drafters these are
    calibrate: dict[str, Option] | None = None  # options of outrider calibrate; null: not calibrated
    evaluate: dict[str, Option] = Field({})  # options of outrider eval, added to the table's
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


class ExperimentTable(Section):
    """The YAML file of an experiment.

    Recipes, task files and `data_directory` are relative to it or to the working directory, `out` to the latter.
    """

    out: str
    recipe: str
    shared: str | None = None  # directory of the responses and features, for several tables together; null: out
    responses: str | None = None  # a file of outrider prepare; null: prepared by the table's recipe
    data_directory: str | None = None  # where prompts by name are looked for without network; null: $OUTRIDER_DATA
    # Target layers that any row reads. Their features are written once, instead of being computed by every training
    # (three quarters of a step on a CPU). null: no store.
    feature_aux_layers: list[int] | None = None
    seeds: list[int] = Field([0], min_length=1)
    threads: int | None = Field(None, ge=1, le=1024)
    jobs: int = Field(1, ge=1, le=1024)  # trainings, and then evaluations, that run side by side on shares of the cores
    # Recipe fields of every trained row; a row's own come after them. Those of its data section (prompts, max_minutes)
    # are also the ones that responses are made with.
    set: dict[str, Any] = Field({})
    tasks: list[str] = Field(min_length=1)
    evaluate: dict[str, Option] = Field({})
    conditions: dict[str, dict[str, Option]] = Field({})  # names and options of further evaluations of every row
    draft_cost: dict[str, Option] | None = Field({})  # options of outrider bench-drafters; null: not measured
    allow_different: bool = False  # compare rows whose conditions differ, and say so
    questions: dict[str, list[str]] = Field({})  # rows that outrider compare sets side by side, by the question
    rows: dict[str, Row] = Field(min_length=1)

    @model_validator(mode="after")
    def _rows_fit(self) -> ExperimentTable:
        for name, row in self.rows.items():
            if row.drafter_of is not None:
                if row.drafter_of not in self.rows or not self.rows[row.drafter_of].trained:
                    raise ValueError(f"row {name}: drafter_of {row.drafter_of!r} is no row that is trained")
                if unknown := sorted(set(row.seeds or ()) - set(self.seeds_of(row.drafter_of))):
                    raise ValueError(f"row {name}: {row.drafter_of} is not trained with the seeds {unknown}")
            for condition in ("", *self.conditions):
                options = {option.replace("-", "_") for option in self.eval_options(name, condition)}
                if fixed := sorted(options & _SET_BY_TABLE):
                    what = ", ".join(fixed)
                    raise ValueError(f"row {name}: evaluate sets {what}, which the table gives for every row")
        for name in (*self.rows, *self.conditions):
            if name in ("", ".", "..") or set(name) & set("/=,\\"):
                raise ValueError(f"the name {name!r} cannot name a directory: leave out slashes, = and commas")
        for question, names in self.questions.items():
            if not question or not names:
                raise ValueError(f"question {question!r}: give it a text and at least one row")
            if absent := sorted(set(names) - set(self.rows)):
                raise ValueError(f"question {question!r}: there is no row {', '.join(absent)}")
        return self

    @cached_property
    def target(self) -> str:
        """The target of the table's recipe."""
        return load_recipe(Path(self.recipe)).target

    def seeds_of(self, name: str) -> list[int]:
        """The seeds that a row is trained and evaluated with."""
        row = self.rows[name]
        return row.seeds or (self.seeds if row.drafter_of is None else self.seeds_of(row.drafter_of))

    def eval_options(self, name: str, condition: str = "") -> dict[str, Option]:
        """A row's options of outrider eval: the table's, its own, and those of a condition."""
        return self.evaluate | self.rows[name].evaluate | self.conditions.get(condition, {})

    def only(self, names: Sequence[str]) -> ExperimentTable:
        """The table of these rows and of those whose drafters they are.

        Raises:
            ValueError: there is no such row.
        """
        if unknown := sorted(set(names) - set(self.rows)):
            raise ValueError(f"no row {', '.join(unknown)}; the table has {', '.join(self.rows)}.")
        wanted = {*names, *(origin for name in names if (origin := self.rows[name].drafter_of) is not None)}
        rows = {name: row for name, row in self.rows.items() if name in wanted}
        questions = {question: [name for name in asked if name in rows] for question, asked in self.questions.items()}
        questions = {question: asked for question, asked in questions.items() if len(asked) > 1}
        return self.model_copy(update={"rows": rows, "questions": questions})

    def row_recipe(self, name: str) -> Recipe:
        """The recipe that trains a row's drafters, or those of the row named by `drafter_of`."""
        row = self.rows[self.rows[name].drafter_of or name]
        return load_recipe(Path(row.recipe or self.recipe), as_overrides(self.set | row.set))

    @property
    def data_fields(self) -> dict[str, Any]:
        """The table's recipe fields that responses depend on, by dotted names."""
        return {name: value for name, value in self.set.items() if name.partition(".")[0] in _OF_DATA}

    @property
    def feature_fields(self) -> dict[str, Any]:
        """The table's recipe fields that the feature store is written with, by dotted names.

        Fields of optimizer, drafter and loss are left out, so that tables that train differently share a store. If the
        table sets the drafter of every row, all fields are passed: the store is checked against the layers it reads.
        """
        return self.set if any(name.partition(".")[0] == "drafter" for name in self.set) else self.data_fields

    def run_directory(self, name: str, seed: int) -> Path:
        """The directory in which a row is trained with a seed."""
        return Path(self.out) / name / f"seed-{seed}"

    def trainings(self) -> Iterator[tuple[str, int]]:
        """(row, seed) of each training: one seed of every row before the next seed, so partial results compare."""
        trained = {name: self.seeds_of(name) for name, row in self.rows.items() if row.trained}
        for seed in dict.fromkeys(seed for seeds in trained.values() for seed in seeds):
            for name, seeds in trained.items():
                if seed in seeds:
                    yield name, seed

    def drafters(self) -> Iterator[tuple[str, int | None, str]]:
        """(row, seed, drafter) of each evaluation, in the order of the rows; the seed is None where none is trained."""
        for name, row in self.rows.items():
            if row.drafter is not None:
                yield name, None, row.drafter
                continue
            for seed in self.seeds_of(name):
                yield name, seed, str(self.run_directory(row.drafter_of or name, seed) / "drafter")


def load_table(path: Path, overrides: Sequence[str] = ()) -> ExperimentTable:
    """Read a table, apply `key.path=value` overrides (values are YAML), and find the files it names.

    After `set.` the rest of a path is one key, the dotted name of a recipe field: `set.optimizer.steps=20`.

    Raises:
        ValueError: unreadable, unknown or invalid fields, or an invalid recipe.
    """
    path = packaged(path, "experiments")
    if not path.is_file():
        raise ValueError(f"no table {path}: give a YAML file, or smollm2-135m, which is packaged.")
    needs = "out, recipe, tasks and rows"
    table = read_fields(path, ExperimentTable, overrides, kind="table", needs=needs, flat="set")
    table = _with_paths(table, path.parent)
    for name, row in table.rows.items():
        if row.trained and (theirs := table.row_recipe(name).target) != table.target:
            raise ValueError(f"{path}: row {name} is for the target {theirs}, the table for {table.target}.")
    return table


def _with_paths(table: ExperimentTable, directory: Path) -> ExperimentTable:
    """Resolve each recipe and task file: in `directory` if it is there, else as it was given.

    A recipe may also be a packaged one.
    """

    def found(name: str) -> str:
        return str(directory / name if (directory / name).is_file() else Path(name))

    def recipe(name: str) -> str:
        return str(packaged(found(name), "recipes"))

    def placed(row: Row) -> Row:
        calibrate = row.calibrate
        if calibrate is not None and isinstance(tasks := calibrate.get("tasks"), list):
            calibrate = calibrate | {"tasks": [found(task) for task in tasks]}
        own = None if row.recipe is None else recipe(row.recipe)
        return row.model_copy(update={"recipe": own, "calibrate": calibrate})

    place = table.data_directory
    if place is not None and (directory / place).is_dir():
        place = str(directory / place)
    rows = {name: placed(row) for name, row in table.rows.items()}
    tasks = [found(task) for task in table.tasks]
    return table.model_copy(
        update={"recipe": recipe(table.recipe), "tasks": tasks, "rows": rows, "data_directory": place}
    )


def as_overrides(fields: Mapping[str, Any]) -> list[str]:
    """Write recipe fields as `key=value` arguments. JSON is YAML, except for infinity, which YAML writes .inf."""
    return [f"{name}={json.dumps(value) if value != float('inf') else '.inf'}" for name, value in fields.items()]


# ----------------------------------------------------------------------------
# The commands of a table, in order; each can also be given by hand.
#
#     prepare          responses of the target, once for all rows
#     features         one store of the target's features that all rows share (feature_aux_layers), where asked for
#     train            each trained row with each seed; calibrate directly after it, where asked for
#     eval             each row and seed, one after another, with the last drafter of its training; then the same
#                      under each of the conditions
#     bench-drafters   the cost of drafting
#     compare          for each condition
#
# A stage is done when its stamp says that the same command succeeded on the same files, so an interrupted experiment
# continues where it stopped.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """One command of an experiment."""

    args: list[str]  # of `outrider`
    inputs: list[Path]  # files whose contents it depends on
    stamp: Path | None  # file that records its success; None: run every time
    output: Path | None = None  # file that exists once all of its work is done
    row: str = ""  # the row it belongs to, "" for none
    prompts: Sequence[str] = ()  # sources of prompts that it depends on, by path or name, as found on this machine
    condition: str = ""  # of the table, under which it evaluates; "" for none

    def digest(self) -> str:
        """SHA-256 of the command and the present contents of its files."""
        digest = hashlib.sha256(json.dumps(self.args).encode())
        for path in [*self.inputs, *map(_prompt_file, self.prompts)]:
            digest.update(hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"-")
        return digest.hexdigest()

    @property
    def done(self) -> bool:
        """Whether the same command succeeded on the same files."""
        if self.stamp is None or not self.stamp.is_file() or not self.complete:
            return False
        return self.stamp.read_text().strip() == self.digest()

    @property
    def complete(self) -> bool:
        """Whether the output is there. A command may succeed earlier: `prepare` stops after data.max_minutes."""
        return self.output is None or self.output.is_file()

    def mark(self) -> None:
        """Write the stamp."""
        if self.stamp is not None:
            self.stamp.parent.mkdir(parents=True, exist_ok=True)
            self.stamp.write_text(self.digest() + "\n")


def _prompt_file(source: str) -> Path:
    """The file of a source of prompts, without fetching it; a path that is not there where none is found."""
    try:
        found = find_prompts(source, fetch=False)
    except ValueError:
        found = None
    return Path(source) if found is None else found.path


def plan(table: ExperimentTable) -> list[Stage]:
    """All commands of a table, in order."""
    data, fields = _data_stages(table)
    given = [] if table.responses is None else [Path(table.responses)]
    inputs = given + [stage.output for stage in data if stage.output is not None]
    costs = [] if table.draft_cost is None else [_draft_cost(table, table.draft_cost)]
    measured = [list(_evaluations(table, condition)) for condition in ("", *table.conditions)]
    comparisons = [_comparison(table, evaluations, costs) for evaluations in measured]
    return [*data, *_trainings(table, fields, inputs), *chain.from_iterable(measured), *costs, *comparisons]


def side_by_side(stages: Sequence[Stage]) -> Iterator[list[list[Stage]]]:
    """The stages in groups that follow each other; the chains of a group may run at once, each in its order.

    The trainings, each followed by its calibration, are one group, and the evaluations are another. All other stages
    run alone, so that nothing disturbs the measured costs of drafting.
    """
    for verb, group in groupby(stages, key=lambda stage: stage.args[0].replace("calibrate", "train")):
        chains: list[list[Stage]] = []
        for stage in group:
            if not chains or (verb in ("train", "eval") and stage.args[0] != "calibrate"):
                chains.append([])
            chains[-1].append(stage)
        yield chains


def _comparison(table: ExperimentTable, evaluations: Sequence[Stage], costs: Sequence[Stage]) -> Stage:
    """The stage that compares what was evaluated under one condition."""
    condition = evaluations[0].condition
    directories = [str(stage.output.parent) for stage in evaluations if stage.output is not None]
    command = ["compare", *directories, "--out", str(Path(table.out) / _named("comparison", condition))]
    for stage in costs:
        command += ["--draft-cost", str(stage.output)]
    for question, names in table.questions.items():
        command += ["--question", f"{question}={','.join(names)}"]
    if table.allow_different:
        command.append("--allow-different")
    return Stage(command, [], None)


def _named(name: str, condition: str) -> str:
    return f"{name}-{condition}" if condition else name


def _data_stages(table: ExperimentTable) -> tuple[list[Stage], dict[str, Any]]:
    """The stages that make responses and the feature store, and the recipe fields that use them."""
    out, base = Path(table.shared or table.out), Path(table.recipe)
    stages = []
    responses = out / "responses.jsonl" if table.responses is None else Path(table.responses)
    if table.responses is None:
        changed = as_overrides(table.data_fields)
        command = ["prepare", *changed, "--recipe", str(base), "--out", str(responses), *_shared(table)]
        prompts = [source.path for source in load_recipe(base, changed).data.prompts]
        stages.append(Stage(command, [base], out / "stamps" / "prepare", output=responses, prompts=prompts))
    fields: dict[str, Any] = {"data.prompts": [], "data.responses": str(responses)}
    if table.feature_aux_layers is not None:
        store = out / "features"
        fields |= {"features.mode": "store", "features.directory": str(store)}
        fields["features.aux_layers"] = table.feature_aux_layers
        overrides = as_overrides(table.feature_fields | fields | {"out": str(store)} | _thread_field(table))
        command = ["features", "write", str(base), *overrides, "--yes"]
        stages.append(Stage(command, [base, responses], out / "stamps" / "features", output=store / "manifest.json"))
    return stages, fields


def _trainings(table: ExperimentTable, shared: dict[str, Any], inputs: list[Path]) -> list[Stage]:
    """The stages that train, each followed by its calibration."""
    stamps, stages = Path(table.out) / "stamps", []
    for name, seed in table.trainings():
        row, directory = table.rows[name], table.run_directory(name, seed)
        recipe = row.recipe or table.recipe
        fields = table.set | row.set | shared | {"seed": seed, "out": str(directory)} | _thread_field(table)
        command = ["train", recipe, *as_overrides(fields)]
        made = directory / "drafter" / "config.json"
        stages.append(Stage(command, [Path(recipe), *inputs], stamps / f"train-{name}-{seed}", output=made, row=name))
        if row.calibrate is not None:
            drafter, tasks = str(directory / "drafter"), row.calibrate.get("tasks")
            command = ["calibrate", "--target", table.target, "--drafter", drafter]
            command += [*_options(row.calibrate), *_shared(table)]
            # outrider.json, which it writes, is among its inputs: stages are stamped after they end, and a drafter
            # that was trained again has lost its calibration even if the weights came out the same.
            used = tasks if isinstance(tasks, list) else str(tasks).split(",")
            files, stamp = _checkpoint_files(drafter), stamps / f"calibrate-{name}-{seed}"
            stages.append(Stage(command, files, stamp, row=name, prompts=used))
    return stages


def _evaluations(table: ExperimentTable, condition: str) -> Iterator[Stage]:
    """The stages that evaluate every row, under a condition of the table or, with "", under none.

    Each measures its own drafter alone: the others are the table's rows.
    """
    out = Path(table.out)
    for name, seed, drafter in table.drafters():
        directory = out / name / _named("eval" if seed is None else f"eval-{seed}", condition)
        command = ["eval", "--target", table.target, "--drafter", drafter, "--label", name, "--out", str(directory)]
        options = {"tasks": table.tasks} | table.eval_options(name, condition)
        command += [*_options(options), "--no-others", *_shared(table)]
        inputs, output = _checkpoint_files(drafter), directory / "results.json"
        stamp = out / "stamps" / directory.relative_to(out).as_posix().replace("/", "-")
        yield Stage(command, inputs, stamp, output=output, row=name, prompts=table.tasks, condition=condition)


def _draft_cost(table: ExperimentTable, options: dict[str, Option]) -> Stage:
    """The stage that times drafting, with the first seed of each row and the draft shapes of its evaluation.

    A row with `drafter_of` and the draft shape of that row costs the same and is left out.
    """
    first = {name: drafter for name, _, drafter in reversed(list(table.drafters()))}
    shapes: dict[str, dict[str, Option]] = {}
    for name in table.rows:
        options_of = {option.replace("_", "-"): value for option, value in table.eval_options(name).items()}
        shapes[name] = {option: options_of[option] for option in ("tree", "block-size") if option in options_of}
    origins = {name: row.drafter_of for name, row in table.rows.items()}
    measured = [name for name, origin in origins.items() if origin is None or shapes[name] != shapes[origin]]
    cost = Path(table.out) / "comparison" / "draft_cost.json"
    command = ["bench-drafters", *(f"{name}={first[name]}" for name in measured), "--target", table.target]
    for name in measured:
        command += _options({option: f"{name}={size}" for option, size in shapes[name].items()})
    command += ["--out", str(cost), *_options(options), *_threads(table)]
    drafters = dict.fromkeys(first[name] for name in measured)
    inputs = [file for drafter in drafters for file in _checkpoint_files(drafter)]
    return Stage(command, inputs, Path(table.out) / "stamps" / "bench-drafters", output=cost)


def _checkpoint_files(drafter: str) -> list[Path]:
    """The files of a drafter; outrider.json holds its calibration."""
    return [Path(drafter) / name for name in ("config.json", "model.safetensors", "outrider.json")]


def _shared(table: ExperimentTable) -> list[str]:
    """The options of every command that reads prompts."""
    data = [] if table.data_directory is None else ["--data-dir", table.data_directory]
    return [*data, *_threads(table)]


def _threads(table: ExperimentTable) -> list[str]:
    return [] if table.threads is None else ["--threads", str(table.threads)]


def _thread_field(table: ExperimentTable) -> dict[str, Any]:
    return {} if table.threads is None else {"threads": table.threads}


def _options(fields: Mapping[str, Option]) -> list[str]:
    """Options as on the command line: `--name value`, and --name or --no-name for true and false."""
    args: list[str] = []
    for name, value in fields.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            args.append(f"--{option}" if value else f"--no-{option}")
        else:
            args += [f"--{option}", ",".join(value) if isinstance(value, list) else str(value)]
    return args
