"""A table of rows becomes commands in order; what is done is not done again, what changed is."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import outrider.data.sources as sources
import outrider.evaluation.run_experiment as experiment
from outrider.cli.experiment import settings_of
from outrider.evaluation.comparison import Comparison
from outrider.evaluation.experiment import ExperimentTable, Row, Stage, load_table, plan
from outrider.evaluation.run_experiment import check_experiment
from outrider.training.dataset import recipe_prompts
from outrider.training.recipe import load_recipe
from outrider.utils.packaged import PACKAGE
from tests.toys.command_line import Run, check_error

ROOT = Path(__file__).parents[2]
TABLES = sorted((PACKAGE / "experiments").glob("*.yaml"))
RECIPES = sorted((PACKAGE / "recipes").rglob("*.yaml"))
RECIPE: dict[str, Any] = {
    "target": "some/model",
    "out": "unused",
    "data": {"prompts": [{"path": "prompts.jsonl"}], "max_new_tokens": 10, "max_prompt_tokens": 200, "held_out": 2},
    "drafter": {"num_hidden_layers": 1, "block_size": 3, "num_aux_layers": 2, "markov_rank": 4},
    "optimizer": {"steps": 2, "sequences_per_step": 2, "anchors_per_sequence": 4},
    "watch": {"decode_every": None},
}
MEDUSA = {"drafter": {"algorithm": "medusa", "num_heads": 2}, "objective.confidence": 0.0}


def write(folder: Path, target: str = "some/model", **changes: Any) -> Path:
    """A recipe, tasks and a table in `folder`; returns the table."""
    (folder / "base.yaml").write_text(yaml.safe_dump({**RECIPE, "target": target}))
    (folder / "tasks.jsonl").write_text('{"turns": ["one"]}\n{"turns": ["two"]}\n')
    table = {"out": str(folder / "out"), "recipe": "base.yaml", "tasks": ["tasks.jsonl"], "seeds": [0, 1]}
    table |= {"evaluate": {"max_new_tokens": 6}, "draft_cost": {"context": 20, "repeats": 3}, "threads": 1}
    table["rows"] = {
        "two": {},
        "flat": {"set": {"objective.decay": float("inf"), "drafter.num_aux_layers": 1}, "seeds": [0]},
        "two-at-2": {"drafter_of": "two", "evaluate": {"block_size": 2}},
    }
    (folder / "table.yaml").write_text(yaml.safe_dump({**table, **changes}, sort_keys=False))
    return folder / "table.yaml"


def test_commands_in_order(tmp_path: Path) -> None:
    path = write(tmp_path)
    commands = [stage.args for stage in plan(load_table(path))]
    verbs = [args[0] for args in commands]
    assert verbs == ["prepare", *["train"] * 3, *["eval"] * 5, "bench-drafters", "compare"]
    out = tmp_path / "out"
    trained = [arg for args in commands[1:4] for arg in args if arg.startswith("out=")]
    assert trained == [f'out="{out}/{run}"' for run in ("two/seed-0", "flat/seed-0", "two/seed-1")]
    assert "objective.decay=.inf" in commands[2] and "data.prompts=[]" in commands[2]
    assert f'data.responses="{out}/responses.jsonl"' in commands[2] and "seed=1" in commands[3]
    last = commands[8]
    assert last[last.index("--drafter") + 1] == f"{out}/two/seed-1/drafter"
    assert last[last.index("--label") + 1] == "two-at-2" and last[last.index("--block-size") + 1] == "2"
    assert last[last.index("--tasks") + 1] == str(tmp_path / "tasks.jsonl")
    drafters = [
        f"two={out}/two/seed-0/drafter",
        f"flat={out}/flat/seed-0/drafter",
        f"two-at-2={out}/two/seed-0/drafter",
    ]
    assert commands[9][1:4] == drafters, "a row that drafts as another one costs the same"
    assert commands[9][commands[9].index("--block-size") + 1] == "two-at-2=2" and "--tree" not in commands[9]
    compared = commands[10]
    assert compared[1:6] == [str(out / name) for name in (
        "two/eval-0", "two/eval-1", "flat/eval-0", "two-at-2/eval-0", "two-at-2/eval-1"
    )]  # fmt: skip


def test_what_drafts_as_its_source_costs_the_same(tmp_path: Path) -> None:
    rows: dict[str, Any] = {"a": {}, "b": {"drafter_of": "a", "evaluate": {"draft_length": 1}}}
    rows["c"] = {"drafter_of": "a", "evaluate": {"tree": 16}}
    path = write(tmp_path, rows=rows)
    (command,) = [stage.args for stage in plan(load_table(path)) if stage.args[0] == "bench-drafters"]
    assert [arg.partition("=")[0] for arg in command[1:3]] == ["a", "c"] and command[3] == "--target"
    assert command[command.index("--tree") + 1] == "c=16"


def test_options_as_given_by_hand(tmp_path: Path) -> None:
    path = write(tmp_path, evaluate={"thinking": True, "max_new_tokens": 6, "top_p": 0.5}, allow_different=True)
    stages = plan(load_table(path, ["rows.two-at-2.evaluate={thinking: false}"]))
    evals = [stage.args for stage in stages if stage.args[0] == "eval"]
    assert ["--thinking" in args for args in evals] == [True, True, True, False, False]
    assert ["--no-thinking" in args for args in evals] == [False, False, False, True, True]
    for args in evals:
        assert args[args.index("--max-new-tokens") + 1] == "6" and "True" not in args and "False" not in args
    assert stages[-1].args[-1] == "--allow-different"


def test_some_seeds_of_another_row(tmp_path: Path) -> None:
    rows = {"a": {}, "b": {"drafter_of": "a", "seeds": [1]}}
    path = write(tmp_path, rows=rows)
    found = [(stage.row, stage.output) for stage in plan(load_table(path)) if stage.args[0] == "eval"]
    assert [(row, output.parent.name) for row, output in found if output is not None] == [
        ("a", "eval-0"), ("a", "eval-1"), ("b", "eval-1")
    ]  # fmt: skip


def test_calibration_follows_the_training(tmp_path: Path) -> None:
    rows = {"a": {"calibrate": {"tasks": ["tasks.jsonl", "eval_chat"], "max_samples": 2}}, "b": {}}
    path = write(tmp_path, rows=rows, seeds=[0])
    stages = plan(load_table(path))
    assert [stage.args[0] for stage in stages[:4]] == ["prepare", "train", "calibrate", "train"]
    calibration, drafter = stages[2], tmp_path / "out/a/seed-0/drafter"
    assert calibration.args[calibration.args.index("--tasks") + 1] == f"{tmp_path}/tasks.jsonl,eval_chat"
    drafter.mkdir(parents=True)
    (drafter / "outrider.json").write_text("trained")
    (drafter / "outrider.json").write_text("calibrated")
    calibration.mark()
    assert calibration.done
    (drafter / "outrider.json").write_text("trained")
    assert not calibration.done, "trained anew"
    (drafter / "outrider.json").write_text("calibrated")
    (tmp_path / "tasks.jsonl").write_text("other")
    assert not calibration.done


def test_rows_share_a_feature_store(tmp_path: Path) -> None:
    path = write(tmp_path)
    stages = plan(load_table(path, ["feature_aux_layers=[0, 2]", "seeds=[5]", "rows.flat.seeds=[5]"]))
    assert [stage.args[0] for stage in stages[:4]] == ["prepare", "features", "train", "train"]
    store = f'features.directory="{tmp_path}/out/features"'
    assert stages[1].args[1] == "write" and stages[1].args[-1] == "--yes"
    for stage in stages[1:4]:
        assert (
            store in stage.args and "features.aux_layers=[0, 2]" in stage.args and 'features.mode="store"' in stage.args
        )
    assert stages[1].output in stages[2].inputs, "a store written anew is trained on anew"
    assert "seed=5" in stages[2].args


def test_tables_share_responses_and_features(tmp_path: Path) -> None:
    """Made with the table's prompts and time, whatever else it trains with, and once."""
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["one"]}\n')
    made: list[Stage] = []
    for name, steps in (("first", 2), ("second", 9)):
        changed = {"data.max_minutes": 7, "data.held_out": 1, "optimizer.steps": steps}
        path = write(tmp_path, out=str(tmp_path / name), shared=str(tmp_path / "data"), set=changed)
        stages = plan(load_table(path, ["feature_aux_layers=[0, 2]"]))
        prepare, features, train = stages[:3]
        assert prepare.args[:3] == ["prepare", "data.max_minutes=7", "data.held_out=1"]
        assert "data.max_minutes=7" in features.args and f"optimizer.steps={steps}" in train.args
        assert not any(arg.startswith("optimizer") for arg in features.args)
        assert f'data.responses="{tmp_path}/data/responses.jsonl"' in train.args
        assert (prepare.done, features.done, train.done) == ((False, False, False) if not made else (True, True, False))
        for stage in (prepare, features):
            assert stage.output is not None and stage.output.is_relative_to(tmp_path / "data")
            stage.output.parent.mkdir(parents=True, exist_ok=True)
            stage.output.write_text("")
        for stage in (prepare, features):
            stage.mark()
        made.append(train)
    assert made[0].output != made[1].output


def test_features_are_written_by_a_drafter_of_the_rows(tmp_path: Path) -> None:
    """With a drafter that the table sets for every row, the recipe's own may read layers that the store has not."""
    changed = {"drafter.target_layer_ids": [0, 2], "data.held_out": 1, "objective.confidence": 0.5}
    stages = plan(load_table(write(tmp_path, set=changed), ["feature_aux_layers=[0, 2]"]))
    features, train = (next(stage for stage in stages if stage.args[0] == verb) for verb in ("features", "train"))
    written, trained = (load_recipe(Path(path), overrides) for path, overrides in (
        (features.args[2], features.args[3:-1]), (train.args[1], train.args[2:])
    ))  # fmt: skip
    assert written.drafter.chosen() == trained.drafter.chosen()
    assert written.drafter.chosen()["target_layer_ids"] == (0, 2) and written.objective == trained.objective


def test_recipe_fields_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, set={"optimizer.steps": 5})
    table = load_table(path, ["set.optimizer.steps=3", "rows.flat.set.drafter.num_aux_layers=2", "set.data.held_out=1"])
    assert table.set == {"optimizer.steps": 3, "data.held_out": 1}
    assert table.row_recipe("two").optimizer.steps == 3 and table.row_recipe("flat").drafter.num_aux_layers == 2
    assert table.rows["flat"].set["objective.decay"] == float("inf")


def test_some_rows_of_a_table(tmp_path: Path) -> None:
    path = write(tmp_path, questions={"which": ["two", "two-at-2", "flat"], "else": ["flat", "two"]})
    table = load_table(path).only(["two-at-2"])
    assert list(table.rows) == ["two", "two-at-2"] and table.questions == {"which": ["two", "two-at-2"]}
    stages = plan(table)
    assert [stage.row for stage in stages if stage.args[0] == "train"] == ["two", "two"]
    assert stages[-1].args[-2:] == ["--question", "which=two,two-at-2"]
    with pytest.raises(ValueError, match="no row three; the table has two, flat, two-at-2"):
        table = load_table(path).only(["three"])


def test_rows_under_other_conditions(run: Run, tmp_path: Path) -> None:
    """All rows once more, in directories and a comparison of their own."""
    path = write(tmp_path, conditions={"sampled": {"temperature": 1.0}}, seeds=[0])
    stages = plan(load_table(path))
    check_experiment(load_table(path), path, stages, settings_of)
    verbs = [stage.args[0] for stage in stages]
    assert verbs == ["prepare", *["train"] * 2, *["eval"] * 6, "bench-drafters", "compare", "compare"]
    outputs = [str(stage.output.parent.name) for stage in stages if stage.args[0] == "eval" and stage.output]
    assert outputs == ["eval-0"] * 3 + ["eval-0-sampled"] * 3
    assert ["--temperature" in stage.args for stage in stages[3:9]] == [False] * 3 + [True] * 3
    assert len({stage.stamp for stage in stages[3:9]}) == 6
    plain, sampled = (stage.args for stage in stages[-2:])
    assert plain[plain.index("--out") + 1] == f"{tmp_path}/out/comparison"
    assert sampled[sampled.index("--out") + 1] == f"{tmp_path}/out/comparison-sampled"
    assert all(arg.endswith("-sampled") for arg in sampled[1:4])
    check_error(run("experiment", write(tmp_path, conditions={"a": {"temperatur": 1}})), "No such option: --temperatur")


def test_what_is_done_is_not_done_again_until_something_changed(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["one"]}\n')
    path = write(tmp_path)
    stages = plan(load_table(path))
    assert not any(stage.done for stage in stages)
    for stage in stages:
        if stage.output is not None:
            stage.output.parent.mkdir(parents=True, exist_ok=True)
            stage.output.write_text("")
    for stage in stages:
        stage.mark()
    assert [stage.done for stage in stages] == [True] * 10 + [False], "comparing is done every time"
    results = tmp_path / "out" / "two" / "eval-0" / "results.json"
    results.unlink()
    assert [stage.output for stage in stages if not stage.done] == [results, None], "what was deleted is made again"
    results.write_text("")
    (tmp_path / "tasks.jsonl").write_text('{"turns": ["three"]}\n')
    assert [stage.args[0] for stage in stages if not stage.done] == ["eval"] * 5 + ["compare"]
    again = plan(load_table(write(tmp_path, seeds=[0, 2])))
    todo = [stage.stamp.name for stage in again if not stage.done and stage.stamp is not None]
    assert todo == ["train-two-2", "two-eval-2", "two-at-2-eval-2"]
    (tmp_path / "out/flat/seed-0/drafter/outrider.json").write_text("{}")
    changed = [stage for stage in again if not stage.done and stage.stamp is not None]
    names = [stage.stamp.name for stage in changed if stage.stamp is not None]
    assert set(names) - set(todo) == {"flat-eval-0", "bench-drafters"}, "calibrated, for example"
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["more"]}\n')
    assert next(stage.args[0] for stage in again if not stage.done) == "prepare"
    (tmp_path / "base.yaml").write_text((tmp_path / "base.yaml").read_text() + "# changed\n")
    assert [stage.args[0] for stage in again if not stage.done][:4] == ["prepare", "train", "train", "train"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": {}}, "rows: Dictionary should have at least 1 item"),
        ({"rows": {"a": {"drafter": "ngram", "set": {"seed": 1}}}}, "one of the three"),
        ({"rows": {"a": {"drafter": "ngram"}, "b": {"drafter_of": "a"}}}, "'a' is no row that is trained"),
        (
            {"rows": {"a": {"drafter": "ngram", "seeds": [1]}}},
            "rows.a: seeds are for rows that are trained",
        ),
        ({"rows": {"a": {}, "b": {"drafter_of": "a", "seeds": [1, 5]}}}, "a is not trained with the seeds [5]"),
        ({"rows": {"a": {}, "b": {"drafter_of": "a", "calibrate": {}}}}, "calibrate is for rows that are trained"),
        ({"evaluate": {"out": "x", "tasks": "y"}}, "row two: evaluate sets out, tasks, which the table gives"),
        ({"rows": {"a/b": {}}}, "'a/b' cannot name a directory"),
        ({"rows": {"a": {"set": {"optimizer.step": 3}}}}, "optimizer.step: Extra inputs"),
        ({"rows": {"a": {"set": {"target": "other"}}}}, "row a is for the target other, the table for some/model"),
        ({"set": {"drafter.block_size": 0}}, "drafter.block_size"),
        ({"recipe": "nope.yaml"}, "no recipe"),
        ({"sets": {}}, "sets: Extra inputs"),
        ({"conditions": {"a": {"label": "x"}}}, "row two: evaluate sets label, which the table gives"),
        ({"conditions": {"a/b": {}}}, "'a/b' cannot name a directory"),
        ({"questions": {"which": ["two", "three"]}}, "question 'which': there is no row three"),
        ({"questions": {"which": []}}, "question 'which': give it a text and at least one row"),
        ({"questions": {"": ["two"]}}, "question '': give it a text and at least one row"),
        ({"rows": {"a,b": {}}}, "'a,b' cannot name a directory: leave out slashes, = and commas"),
        ({"feature_aux_layers": "all"}, "feature_aux_layers"),
    ],
)
def test_mistakes_are_found_before_anything_runs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as found:
        load_table(write(tmp_path, **changes))
    assert message in str(found.value)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh clone's place: an empty working directory and cache, no network, no directory of prompts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("OUTRIDER_DATA", raising=False)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_every_table_of_the_project_begins_as_shipped(path: Path, alone: None) -> None:
    """All that is checked before its first command: tasks are read, verbs take their options, rows are comparable."""
    table = load_table(path)
    stages = plan(table)
    check_experiment(table, path, stages, settings_of)
    assert stages[0].args[0] == "prepare" and stages[-1].args[0] == "compare"
    assert not any(stage.done for stage in stages)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_recipe_of_the_project_has_prompts_as_shipped(
    path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of large targets name data sets of the hub, for which rows of their forms stand here."""

    class Rows(list[dict[str, Any]]):
        column_names = ("conversations", "messages")

    def open_dataset(name: str, split: str, config: str | None) -> Rows:
        assert path.parent.name == "large" and config is None
        asked = [f"{name} {split} {i}" for i in range(150)]
        if name in ("mlabonne/open-perfectblend", "Aeala/ShareGPT_Vicuna_unfiltered"):
            said = (("human", "{}"), ("gpt", "two"))
            return Rows({"conversations": [{"from": who, "value": t.format(a)} for who, t in said]} for a in asked)
        assert name in ("nvidia/Nemotron-Post-Training-Dataset-v2", "HuggingFaceH4/ultrachat_200k")
        turns = (("user", "{}"), ("assistant", "two"))
        return Rows({"messages": [{"role": who, "content": t.format(a)} for who, t in turns]} for a in asked)

    monkeypatch.setattr(sources, "open_dataset", open_dataset)
    monkeypatch.setattr(sources, "stdlib_turns", lambda: iter([("s", "sum")]))  # half a minute of parsing, in all
    data = load_recipe(path).data
    prompts = recipe_prompts(data)
    assert len(prompts) > 2 * data.held_out and len({p.turns for p in prompts}) == len(prompts), "none twice"


def test_prompts_by_name_are_among_what_a_stage_depends_on(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "prompts"
    place.mkdir()
    path = write(tmp_path, tasks=["gsm8k"], data_directory="prompts")
    (stage, *_) = [stage for stage in plan(load_table(path)) if stage.args[0] == "eval"]
    assert stage.args[stage.args.index("--data-dir") + 1] == str(place)
    digests = [stage.digest()]
    monkeypatch.setenv("OUTRIDER_DATA", str(place))  # as the verb does
    for text in ("one", "two"):
        (place / "gsm8k.jsonl").write_text(json.dumps({"turns": [text]}) + "\n")
        digests.append(stage.digest())
    assert len(set(digests)) == 3


def test_dry_run_prints_the_commands(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("experiment", write(tmp_path), "--dry-run")
    assert status == 0 and "[1/11] outrider prepare --recipe" in out and "[11/11] outrider compare" in out
    assert not (tmp_path / "out").exists()
    status, out, _ = run("experiment", tmp_path / "table.yaml", "--rows", "flat", "--dry-run")
    assert status == 0 and "/flat/" in out and "/two/" not in out
    check_error(run("experiment", tmp_path / "nope.yaml"), "no table")


def test_what_evaluation_would_miss_is_found_before_training(run: Run, tmp_path: Path) -> None:
    def rows(drafter: str) -> dict[str, Any]:
        return {"two": {}, "other": {"drafter": drafter}}

    path = write(tmp_path, rows=rows("ngrm"))
    check_error(
        run("experiment", path), "row other: drafter 'ngrm' is no directory with a config.json, none that a row"
    )
    assert run("experiment", path, "--dry-run")[0] == 0
    check_error(run("experiment", write(tmp_path, rows=rows("lm:"))), "write ngram, ngram@8")
    check_error(run("experiment", write(tmp_path, rows=rows(str(tmp_path / "out/two/seed-7/drafter")))), "row other")
    (tmp_path / "mine").mkdir()
    check_error(run("experiment", write(tmp_path, rows=rows(str(tmp_path / "mine")))), "row other")
    check_error(run("experiment", write(tmp_path, tasks=["tasks.jsonl", "maths.jsonl"])), "maths.jsonl")
    check_error(run("experiment", write(tmp_path, tasks=["tasks.jsonl", "./tasks.jsonl"])), "two task files")
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine" / "config.json").touch()
    for drafter in (tmp_path / "mine", tmp_path / "out/two/seed-1/drafter", tmp_path / "out/two/seed-0/best"):
        path = write(tmp_path, rows=rows(str(drafter)))
        check_experiment(loaded := load_table(path), path, plan(loaded), settings_of)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate": {"max_token": 3}}, "row two: No such option: --max-token"),
        ({"evaluate": {"max_new_tokens": "many"}}, "row two: Invalid value for '--max-new-tokens'"),
        ({"draft_cost": {"content": 3}}, "bench-drafters: No such option: --content"),
        ({"rows": {"a": {"calibrate": {"max_samples": 3}}}}, "row a: Missing option '--tasks'"),
        ({"rows": {"a": {"calibrate": {"tasks": ["eval_maths"]}}}}, "row a: no prompt file 'eval_maths'"),
        ({"rows": {"a": {}, "b": {"drafter_of": "a", "evaluate": {"tree": 6}}}}, "row b: tree 6: dspark drafts chains"),
        ({"rows": {"a": {"drafter": "ngram", "evaluate": {"tree": 6}}}}, "row a: tree 6: ngram drafts chains"),
        ({"rows": {"a": {"set": MEDUSA, "evaluate": {"block_size": 6}}}}, "row a: block_size 6: medusa has no blocks"),
        (
            {"rows": {"a": {"set": MEDUSA, "evaluate": {"tree": 6, "confidence_threshold": 0.3}}}},
            "row a: --tree with --confidence-threshold",
        ),
        ({"rows": {"a": {}, "b": {"drafter_of": "a", "evaluate": {"top_p": 2}}}}, "row b: --top-p 2.0"),
        (
            {"rows": {"a": {}, "b": {"drafter_of": "a", "evaluate": {"temperature": 1}}}},
            "rows are not comparable: temperature: 0.0 (a), 1.0 (b). allow_different: true compares",
        ),
        (
            {"rows": {"a": {}, "b": {"drafter_of": "a", "evaluate": {"typical": "default"}}}},
            "rows are not comparable: typical: None (a), default (b).",
        ),
    ],
)
def test_options_are_checked_before_training(run: Run, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    check_error(run("experiment", write(tmp_path, **changes)), message)
    assert not (tmp_path / "out").exists()


def test_what_may_be_asked_for(tmp_path: Path) -> None:
    """Trees of heads, another block, a policy of its own; and a lossy row where the table says that it may differ."""
    rows: dict[str, Any] = {"a": {}, "heads": {"set": MEDUSA, "calibrate": {"tasks": "eval_math,eval_chat"}}}
    rows["tree"] = {"drafter_of": "heads", "evaluate": {"tree": 16, "draft_length": 8}}
    rows["block"] = {"drafter_of": "a", "evaluate": {"block_size": 6, "confidence-threshold": 0.3}}
    path = write(tmp_path, rows=rows)
    check_experiment(table := load_table(path), path, plan(table), settings_of)
    rows["lossy"] = {"drafter_of": "a", "evaluate": {"typical": "0.1,0.3"}}
    path = write(tmp_path, rows=rows, allow_different=True)
    check_experiment(table := load_table(path), path, plan(table), settings_of)


def test_the_table_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = re.findall("```yaml\n(.*?)```", (ROOT / "docs" / "experiments.md").read_text(), re.DOTALL)
    (tmp_path / "table.yaml").write_text(found)
    monkeypatch.chdir(ROOT)
    table = load_table(tmp_path / "table.yaml")
    assert set(yaml.safe_load(found)) == set(ExperimentTable.model_fields), "it shows every field"
    used = {field for row in yaml.safe_load(found)["rows"].values() for field in row}
    assert used == set(Row.model_fields)
    table = table.model_copy(update={"tasks": ["eval_math"]})
    check_experiment(table, tmp_path / "table.yaml", plan(table), settings_of)


@pytest.mark.slow
def test_a_table_from_prompts_to_the_comparison(
    run: Run, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [{"id": f"c{i}", "turns": ["word " + "abc"[i % 3] * (i % 7 + 1)]} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    heads = {"set": MEDUSA, "seeds": [0], "calibrate": {"tasks": ["tasks.jsonl"], "max_new_tokens": 80}}
    tree = {"drafter_of": "heads", "evaluate": {"tree": 4}}
    rows = {**yaml.safe_load(write(tmp_path).read_text())["rows"], "heads": heads, "heads-tree": tree}
    path = write(tmp_path, str(toy / "target"), rows=rows, questions={"decay": ["two", "flat"]})

    stages = plan(load_table(path))
    for stage in stages:  # in this process: `Runner` starts one for each
        status, _, stderr = run(*stage.args)
        assert status == 0 and stage.complete, stderr
        stage.mark()
    assert [stage.done for stage in stages] == [True] * 14 + [False]
    out = tmp_path / "out" / "comparison"
    comparison = Comparison.model_validate_json((out / "comparison.json").read_text())
    assert [(g.label, len(g.entries)) for g in comparison.groups] == [
        ("two", 2), ("flat", 1), ("two-at-2", 2), ("heads", 1), ("heads-tree", 1)
    ]  # fmt: skip
    tree_settings = json.loads((tmp_path / "out/heads-tree/eval-0/results.json").read_text())["settings"]
    assert tree_settings["drafter"].endswith("(tree of 4, measured accuracies)")
    assert comparison.draft_cost is not None
    drafted = {one.info.label: one.info for one in comparison.draft_cost.drafters}
    assert list(drafted) == ["two", "flat", "two-at-2", "heads", "heads-tree"]
    assert drafted["two"].gamma == 3 and drafted["two-at-2"].gamma == 2 and drafted["heads-tree"].nodes == 4
    trainings = [entry.drafter.training for entry in comparison.groups[0].entries]
    assert [t.seed for t in trainings if t] == [0, 1] and all(t and t.steps == 2 and t.anchors for t in trainings)
    assert not comparison.budgets and not comparison.differences
    assert (out / "draft_cost.png").is_file() and (out / "convergence.png").is_file()


# ----------------------------------------------------------------------------
# Running stages, whose commands are scripts here: they note when they began and ended, and on which cores.
# ----------------------------------------------------------------------------

SCRIPT = """
import json, os, pathlib, signal, sys, time
directory, name, task, others = sys.argv[1:]
def note(what):
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with open(os.path.join(directory, "notes"), "a") as notes:
        notes.write(json.dumps([name, what, cores]) + "\\n")
def save(*_):
    time.sleep(0.6)
    note("saved")
    sys.exit(3)
signal.signal(signal.SIGINT, save)
signal.signal(signal.SIGTERM, save)
note("began")
while not all(f'"{other}", "began"' in pathlib.Path(directory, "notes").read_text() for other in others.split(",")):
    time.sleep(0.02)
if task == "fail":
    print("what went wrong")
    sys.exit(5)
stays_until = time.monotonic() + 60 * (task == "stay")
while time.monotonic() < stays_until:
    time.sleep(0.1)
note("ended")
"""


def stages_of(directory: Path, *rows: tuple[str, str, str, str]) -> list[Stage]:
    """Stages (verb, name, task, names of those that have to run before it goes on)."""
    return [
        Stage([verb, str(directory), name, task, others or name], [], directory / f"stamp-{name}", row=name)
        for verb, name, task, others in rows
    ]


def notes(directory: Path) -> list[tuple[str, str, list[int]]]:
    return [tuple(json.loads(line)) for line in (directory / "notes").read_text().splitlines()]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "command_of", lambda stage: [sys.executable, "-c", SCRIPT, *stage.args[1:]])


def test_stages_side_by_side(scripts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`a` and `b` wait for each other, so that they end only if they run at once; so do `e` and `f`."""
    stages = stages_of(
        tmp_path,
        ("features", "z", "", ""),
        ("train", "a", "", "b"),
        ("calibrate", "c", "", ""),
        ("train", "b", "", "a"),
        ("eval", "e", "", "f"),
        ("eval", "f", "", "e"),
        ("bench-drafters", "d", "", ""),
    )
    experiment.Runner(stages, jobs=2, logs=tmp_path / "logs", say=print).run()
    assert all(stage.done for stage in stages)
    found = notes(tmp_path)
    order = [f"{name} {what}" for name, what, _ in found]
    assert order[:2] == ["z began", "z ended"] and order[-2:] == ["d began", "d ended"]
    assert order.index("c began") > order.index("a ended")
    assert min(map(order.index, ("e began", "f began"))) > max(map(order.index, ("b ended", "c ended")))
    cores = {name: used for name, _, used in found}
    if whole := cores["z"]:
        assert cores["a"] == cores["c"] and not set(cores["a"]) & set(cores["b"])
        assert len(cores["a"]) == len(cores["b"]) == len(whole) // 2 and cores["d"] == whole
    told = capsys.readouterr().out
    assert "[2/7] outrider train" in told and "[2/7] ended well after 0.0 min" in told
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"stamp-{name}.log" for name in "abcef"]
    experiment.Runner(stages, jobs=2, logs=tmp_path / "logs", say=print).run()
    assert notes(tmp_path) == found and capsys.readouterr().out.count("done: ") == 7


def test_a_stage_that_fails_ends_the_experiment(
    scripts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other one is told to save, and nothing else begins."""
    stages = stages_of(tmp_path, ("train", "a", "stay", ""), ("train", "b", "fail", "a"), ("train", "c", "", ""))
    with pytest.raises(experiment.StageFailed) as ended:
        experiment.Runner(stages, jobs=2, logs=tmp_path / "logs", say=print).run()
    assert ended.value.status == 5
    assert [f"{name} {what}" for name, what, _ in notes(tmp_path)][2:] == ["a saved"]
    assert not any(stage.done for stage in stages)
    told = capsys.readouterr().out
    assert told.count("failed; the end of") == 1 and "what went wrong" in told


def test_a_stage_that_stops_early_is_not_done(scripts: None, tmp_path: Path) -> None:
    (stage,) = stages_of(tmp_path, ("prepare", "a", "", ""))
    stage = replace(stage, output=tmp_path / "responses.jsonl")
    with pytest.raises(ValueError, match="not complete"):
        experiment.Runner([stage], jobs=1, logs=tmp_path, say=print).run()
    assert not stage.done
    (tmp_path / "responses.jsonl").write_text("")
    experiment.Runner([stage], jobs=1, logs=tmp_path, say=print).run()
    assert stage.done
    (tmp_path / "responses.jsonl").unlink()
    assert not stage.done


def test_more_jobs_than_cores(tmp_path: Path) -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system does not bind processes to cores, so that any number of jobs is as good")
    with pytest.raises(ValueError, match=r"jobs 1000: this process may use \d+ cores"):
        experiment.Runner([], jobs=1000, logs=tmp_path, say=print)


@pytest.mark.parametrize(("number", "jobs"), [(signal.SIGINT, 2), (signal.SIGTERM, 2), (signal.SIGTERM, 1)])
def test_stages_have_time_to_save(number: signal.Signals, jobs: int, tmp_path: Path) -> None:
    """As `outrider train` does: a signal, a second of saving, a status of its own."""
    rows = [("train", name, "stay", "") for name in "abc"]
    parent = f"""
import sys
from pathlib import Path
import outrider.evaluation.run_experiment as experiment
from tests.evaluation.test_experiment import SCRIPT, stages_of
experiment.command_of = lambda stage: [sys.executable, "-c", SCRIPT, *stage.args[1:]]
directory = Path({str(tmp_path)!r})
try:
    experiment.Runner(stages_of(directory, *{rows!r}), jobs={jobs}, logs=directory, say=print).run()
except experiment.StageFailed as ended:
    sys.exit(ended.status)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True, cwd=ROOT)
    deadline = time.monotonic() + 300
    while not (tmp_path / "notes").exists() or len(notes(tmp_path)) < jobs:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    assert process.wait(300) == 128 + number
    assert sorted(f"{name} {what}" for name, what, _ in notes(tmp_path) if what != "began") == [
        f"{name} saved" for name in "ab"[:jobs]
    ]
