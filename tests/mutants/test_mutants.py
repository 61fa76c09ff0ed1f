"""The table of mutants fits the code, and the runner tells the killed from the survivors."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.mutants import run
from tests.mutants.mutants import EQUIVALENT, MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_mutant_fits_the_code() -> None:
    """Its old text is in its file exactly once, Python stays Python with the new one, and its tests are there."""
    for mutant in MUTANTS:
        text = mutant.path(ROOT).read_text()
        broken = mutant.applied(text)
        assert broken != text, mutant.name
        if mutant.file.endswith(".py"):
            ast.parse(broken)
        path, _, function = mutant.tests.partition("::")
        assert (ROOT / path).is_file(), f"{mutant.name}: no tests {path}"
        assert not function or function in functions_of(ROOT / path), f"{mutant.name}: no test {mutant.tests}"
        assert mutant.file.split("/")[0] in run.FOLDERS, f"{mutant.name}: run.py has no folders of tests for its room"
        assert run.area(mutant)


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    names = {mutant.name for mutant in MUTANTS}
    assert len(names) == len(MUTANTS) >= 120
    assert min(Counter(map(run.area, MUTANTS)).values()) >= 8
    assert set(EQUIVALENT) <= names


def test_an_edit_that_does_not_fit_is_an_error() -> None:
    mutant = Mutant("m", "", "sampling.py", (("x = 1", "x = 2"),), "tests")
    for text in ("", "x = 1; x = 1"):
        with pytest.raises(ValueError, match=r"times in sampling\.py, not once"):
            mutant.applied(text)


@pytest.mark.slow
def test_the_runner_judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed by the named test, by one of the room, by the time limit; survived; and a test that always fails."""
    place = tmp_path / "tree"
    files = {
        "pytest.ini": "[pytest]\naddopts = --import-mode=importlib\n",
        "src/outrider/__init__.py": "",
        "src/outrider/sampling.py": "a = 1\nb = 1\nc = 1\nd = 1\n",
        "tests/sampling/test_a.py": "import outrider.sampling as s\ndef test_a(): assert s.a == 1\n",
        "tests/sampling/test_b.py": "import outrider.sampling as s\ndef test_b(): assert s.b == 1\n",
        "tests/sampling/test_c.py": "import time, outrider.sampling as s\ndef test_c(): time.sleep(60 * (s.c - 1))\n",
        "tests/other/test_d.py": "def test_d(): assert False\n",
    }
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    worker = run.Worker(place)

    def judged(edit: tuple[str, str], tests: str) -> tuple[str, str]:
        found = worker.judge(Mutant("m", "", "sampling.py", (edit,), tests))
        return found.result, found.by

    assert judged(("a = 1", "a = 2"), "tests/sampling/test_a.py") == (run.KILLED, "tests/sampling/test_a.py::test_a")
    assert judged(("b = 1", "b = 2"), "tests/sampling/test_a.py") == (run.KILLED, "tests/sampling/test_b.py::test_b")
    assert judged(("d = 1", "d = 2"), "tests/sampling/test_a.py") == (run.SURVIVED, "tests/sampling")
    assert judged(("d = 1", "d = 2"), "tests/other/test_d.py")[0] == run.INVALID
    monkeypatch.setattr(run, "NAMED_LIMIT", 8.0)
    assert judged(("c = 1", "c = 2"), "tests/sampling/test_c.py")[0] == run.TIMEOUT
    assert (place / "src/outrider/sampling.py").read_text() == files["src/outrider/sampling.py"]
