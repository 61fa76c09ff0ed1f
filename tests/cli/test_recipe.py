"""`outrider recipe`: packaged recipes and their copies, and every field explained from the schema that editors use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from outrider.cli.train import packaged_recipes
from outrider.training.recipe import load_recipe, recipe_fields, recipe_schema
from tests.toys.command_line import Run, check_error, in_process


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    return in_process(monkeypatch, capfd, "recipe")


def names_in(value: object, prefix: str = "") -> Iterator[str]:
    """Dotted names of the values of a YAML mapping; items of a list of sections have the list's name."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from names_in(inner, f"{prefix}.{name}".lstrip("."))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for item in value:
            yield from names_in(item, prefix)
    else:
        yield prefix


def test_every_field_is_explained_with_its_type_default_and_meaning(run: Run) -> None:
    fields = recipe_fields()
    assert not [field.name for field in fields if not field.meaning or "any" in field.kind.split()]
    known = {field.name for field in fields}
    for name, file in packaged_recipes().items():
        assert set(names_in(yaml.safe_load(file.read_text()))) <= known, name
    status, shown, _ = run("--explain")
    assert status == 0 and all(f"{name}  " in shown for name in known)
    assert "optimizer.steps  integer >= 1, default 1000\n    Optimizer steps" in shown
    assert "data.prompts.path  string, required" in shown
    assert 'drafter.markov_head_type  vanilla | gated | rnn or null, default "vanilla", of dspark' in shown
    one = run("--explain", "objective")[1]
    terms = {f"objective.{term}" for term in ("ce", "l1", "confidence", "decay")}
    shown = {line.split()[0] for line in one.splitlines()[::2]}
    assert shown == {name for name in known if name.partition(".")[0] == "objective"} > terms
    check_error(run("--explain", "objective.l2"), "no field 'objective.l2'; did you mean objective.l1?")


def test_the_schema_describes_sections_and_drafters(run: Run) -> None:
    status, text, _ = run("--schema")
    schema = json.loads(text)
    assert status == 0 and schema == recipe_schema() and schema["required"] == ["target", "out", "data"]
    sections = [one["$ref"].rsplit("/", 1)[-1] for one in schema["properties"]["drafter"]["anyOf"]]
    assert "MedusaConfigSection" in sections and not schema["$defs"]["DSparkConfigSection"]["additionalProperties"]
    steps = schema["$defs"]["OptimizerSection"]["properties"]["steps"]
    assert (steps["minimum"], steps["default"], steps["type"]) == (1, 1000, "integer") and steps["description"]


def test_recipes_are_listed_and_copied(run: Run, tmp_path: Path) -> None:
    status, shown, _ = run()
    assert status == 0
    assert {line.split()[0] for line in shown.splitlines()} == set(packaged_recipes()) >= {"demo"}
    made = tmp_path / "new" / "mine.yaml"
    assert run("demo", "--copy", made)[0] == 0 and load_recipe(made) == load_recipe(packaged_recipes()["demo"])
    assert run("demo")[1] == made.read_text()
    check_error(run("demo", "--copy", made), "exists")
    check_error(run("--copy", tmp_path / "x.yaml"), "name the recipe")
    check_error(run("dmo"), "did you mean demo?")
    check_error(run("--explain", "--schema"), "give one of them")
