"""The shape of the code: imports one way, drafters asked and not recognised, short positional lists, tests apart."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SOURCE, TESTS = ROOT / "src" / "outrider", ROOT / "tests"
ROOMS = [  # a room imports itself and the rooms before it (docs/architecture.md); __init__ may import all
    "utils",
    "sampling",
    "config",
    "target",
    "drafters",
    "checkpoints",
    "decoding",
    "backends",
    "data",
    "api",
    "training",
    "evaluation",
    "serving",
    "doctor",
    "cli",
    "contrib",
]

MOST_PARAMETERS, MOST_VALUES = 7, 3
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef

MODULES = sorted(SOURCE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    """The module's dotted name."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str | None:
    """The room of a dotted name; None for the package itself and for other packages."""
    parts = module.split(".")
    return parts[1] if parts[0] == "outrider" and len(parts) > 1 else None


def imports_of(tree: ast.AST) -> Iterator[tuple[str, str | None, str]]:
    """(module, name or None, what it is called here), imports inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None, alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield node.module or "", alias.name, alias.asname or alias.name


def rooms_imported(path: Path) -> set[str]:
    """Rooms whose modules a file imports, `from outrider import room` included."""
    found = set()
    for module, name, _ in imports_of(tree_of(path)):
        room = room_of(module) or (room_of(f"{module}.{name}") if module == "outrider" else None)
        if room is not None and (SOURCE / room).with_suffix(".py" if (SOURCE / f"{room}.py").exists() else "").exists():
            found.add(room)
    return found


def test_every_module_is_in_a_room() -> None:
    assert {room for path in MODULES if (room := room_of(name_of(path)))} <= set(ROOMS)


def test_imports_run_one_way() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {room}"
        for path in MODULES
        if (own := room_of(name_of(path)))
        for room in sorted(rooms_imported(path))
        if ROOMS.index(room) > ROOMS.index(own)
    ]
    assert not wrong, "\n".join(wrong)


def test_contrib_uses_what_other_packages_may() -> None:
    """Methods of contrib/ import the rooms that any installed method would: no later room knows them."""
    allowed = {"utils", "sampling", "target", "drafters", "checkpoints", "training", "contrib"}
    for path in MODULES:
        if room_of(name_of(path)) == "contrib":
            assert rooms_imported(path) <= allowed, path


def drafter_types() -> set[str]:
    """Classes of drafters/ but those of configs and drafts, which are data: what is asked, never recognised."""
    return {
        node.name
        for path in MODULES
        if path.parent.name in ("drafters", "contrib") and path.stem != "draft"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    }


def test_drafters_are_asked_what_they_can() -> None:
    """No isinstance or issubclass on a type of drafters/ outside that room."""
    types, wrong = drafter_types(), []
    for path in MODULES:
        if room_of(name_of(path)) in ("drafters", "contrib"):
            continue
        for node in ast.walk(tree_of(path)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2):
                continue
            if node.func.id in ("isinstance", "issubclass"):
                asked = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
                asked |= {part.attr for part in ast.walk(node.args[1]) if isinstance(part, ast.Attribute)}
                if found := asked & types:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {sorted(found)}")
    assert not wrong, "\n".join(wrong)


def test_functions_take_few_positional_parameters() -> None:
    """Seven, `self` not counted; more go behind `*`. Triton compiles its kernels' parameters, which have no names."""
    wrong = []
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, FUNCTION) and not any(ast.unparse(d) == "triton.jit" for d in node.decorator_list):
                names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
                names = names[names[:1] in (["self"], ["cls"]) :]
                if len(names) > MOST_PARAMETERS:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {len(names)}")
    assert not wrong, "\n".join(wrong)


def own_names(path: Path) -> set[str]:
    """Functions and classes of ours that a module calls by a plain name."""
    tree = tree_of(path)
    names = {name for module, kind, name in imports_of(tree) if kind is not None and room_of(module) is not None}
    return names | {node.name for node in ast.walk(tree) if isinstance(node, (FUNCTION, ast.ClassDef))}


def test_calls_pass_few_values_by_position() -> None:
    """A call of a function, class or method of ours passes at most three values by position, the rest by name.

    Left out: functions of any number of values, `*values`; stored callables, which have no names; and methods that
    tensors have, too, since who is called cannot be read off the text.
    """
    functions = [node for path in MODULES for node in ast.walk(tree_of(path)) if isinstance(node, FUNCTION)]
    methods = {node.name for node in functions if len(node.args.args) - 1 > MOST_VALUES}
    methods -= {node.name for node in functions if node.args.vararg} | set(dir(torch.Tensor))
    wrong = []
    for path in MODULES:
        plain = own_names(path)
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call) or len(node.args) <= MOST_VALUES:
                continue
            if any(isinstance(argument, ast.Starred) for argument in node.args):
                continue
            if isinstance(node.func, ast.Name):
                ours = node.func.id in plain
            else:
                ours = isinstance(node.func, ast.Attribute) and node.func.attr in methods
            if ours:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node.func)} gets {len(node.args)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_module_is_imported(path: Path) -> None:
    """Helpers are shared through tests/toys and tests/proof, not through test modules."""
    for module, name, _ in imports_of(tree_of(path)):
        parts = [*module.split("."), name or ""]
        assert not (parts[0] == "tests" and any(part.startswith("test_") for part in parts)), f"imports {module}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), "no docstring"


def test_every_module_imports() -> None:
    for path in MODULES:
        if "mlx" not in path.parts:  # an optional dependency with an environment of its own
            importlib.import_module(name_of(path))


def test_code_that_comes_with_a_model_is_never_asked_for() -> None:
    """transformers asks on standard input unless it is told: every call of its Auto classes says no."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("from_pretrained", "from_config")
        if isinstance(node.func.value, ast.Name) and node.func.value.id.startswith("Auto")
        if "trust_remote_code=False" not in map(ast.unparse, node.keywords)
    ]
    assert not wrong, "trust_remote_code=False is missing: " + ", ".join(wrong)


def test_what_the_page_of_papers_names_is_there() -> None:
    """Files of the package and functions, classes or methods in them, files of tests, rows of tables."""
    text = (ROOT / "docs" / "papers.md").read_text()
    named = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", text)
    assert len(named) > 40
    for file, name in named:
        nodes = tree_of(SOURCE / file).body
        for part in name.split("."):
            assigned = {ast.unparse(t): n for n in nodes if isinstance(n, ast.Assign) for t in n.targets}
            defined = {n.name: n for n in nodes if isinstance(n, FUNCTION | ast.ClassDef)}
            found = defined.get(part) or assigned.get(part)
            assert found is not None, f"{file} has no {name}"
            nodes = getattr(found, "body", [])
    for file in set(re.findall(r"tests/[\w/]+\.py", text)):
        assert (ROOT / file).is_file(), file
    tables = "".join(path.read_text() for path in (SOURCE / "experiments").glob("*.yaml"))
    rows = {
        row for part in re.findall(r"rows? ([a-z][\w .,-]+)", text) for row in re.findall(r"[a-z]+[\w-]*-\w+", part)
    }
    assert rows and all(f"  {row}:" in tables for row in rows), sorted(row for row in rows if f"  {row}:" not in tables)
