"""The mutants fit the code, and the runner tells the killed from the survivors."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.mutants import run
from tests.mutants.edit import Mutant
from tests.mutants.mutants import MUTANTS

ROOT = Path(__file__).parents[2]


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_fits_the_code(mutant: Mutant) -> None:
    """Its edit has exactly one place, Python stays Python with it, and its tests are there."""
    path, text = mutant.applied(ROOT)
    if path.suffix == ".py":
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(path.read_text()))
    file, _, function = mutant.tests.partition("::")
    assert (ROOT / "tests" / file).is_file(), f"no tests {file}"
    assert not function or function in functions_of(ROOT / "tests" / file), f"no test {mutant.tests}"


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    assert not [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1]
    assert len(MUTANTS) >= 140
    rooms = Counter(mutant.applied(ROOT)[0].relative_to(ROOT / "src" / "outrider").parts[0] for mutant in MUTANTS)
    assert {"sampling.py", "decoding", "target", "drafters", "training", "serving", "evaluation"} <= set(rooms)


def tree(place: Path) -> Path:
    files = {
        "pytest.ini": "[pytest]\naddopts = --import-mode=importlib\n",
        "src/outrider/__init__.py": "",
        "src/outrider/rules.py": "THREE = 3\ndef one(x):\n    return x + 1\ndef two(x):\n    y = x\n    return y\n",
        "tests/test_one.py": "from outrider.rules import one\ndef test_one(): assert one(1) == 2\n",
        "tests/test_three.py": "import outrider.rules as r\ndef test_three(): assert r.THREE == 3\n",
        "tests/test_wrong.py": "def test_wrong(): assert False\n",
    }
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


def test_an_edit_needs_exactly_one_place(tmp_path: Path) -> None:
    root = tree(tmp_path)
    for where, old in (("one", "x - 1"), ("four", "x"), ("two", "y")):
        with pytest.raises(ValueError, match=r"^m: "):
            Mutant("m", "", "", where, old, "z").applied(root)
    assert "THREE = 4" in Mutant("m", "", "", "THREE", "3", "4").applied(root)[1]
    assert "y = x" not in Mutant("m", "", "", "two", "y = x", "").applied(root)[1]


@pytest.mark.slow
def test_the_runner_judges(tmp_path: Path) -> None:
    """Killed by its tests, survived, and tests that fail without the edit."""
    worker = run.Worker(tree(tmp_path / "tree"))

    def judged(where: str, old: str, new: str, tests: str) -> str:
        return worker.judge(Mutant("m", "", tests, where, old, new)).result

    assert judged("one", "x + 1", "x + 2", "test_one.py") == run.KILLED
    assert judged("THREE", "3", "4", "test_three.py::test_three") == run.KILLED
    assert judged("two", "return y", "return 0", "test_one.py") == run.SURVIVED
    assert judged("two", "return y", "return 0", "test_wrong.py") == run.INVALID
    assert "x + 1" in (worker.place / "src/outrider/rules.py").read_text()
