"""A mutant is an edit of the syntax tree of one definition, so that moving or reformatting code does not break it.

    Mutant("verify_ratio_inverted", "accept with p_d / p_t", tests="proof/test_proof.py",
           where="_try_children", old="probability / drawn_with", new="drawn_with / probability")

`where` names a function, method, class or module-level constant anywhere in the package by its qualified name, and
`old` one expression, or a run of statements, that is in it exactly once. C sources are edited as text: `where` is
then the file's name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Mutant:
    """One broken version of the code.

    Attributes:
        what: what is wrong with it. "(biased)": the output is no longer distributed as the target's.
        tests: expected to fail: a file under tests/, or file::function.
        where, old, new: the edit, see above; an empty `new` deletes statements.
    """

    name: str
    what: str
    tests: str
    where: str
    old: str
    new: str

    def applied(self, root: Path) -> tuple[Path, str]:
        """The edited file of the tree at `root` and its new text.

        Raises:
            ValueError: no or several definitions of that name, or `old` is not in it exactly once.
        """
        source = root / "src" / "outrider"
        if self.where.endswith(".c"):
            (path,) = source.rglob(self.where)
            text = path.read_text()
            if text.count(self.old) != 1:
                raise ValueError(f"{self.name}: {text.count(self.old)} times in {self.where}, not once: {self.old!r}")
            return path, text.replace(self.old, self.new)
        paths = [path for path, names in index(source).items() if self.where in names]
        if len(paths) != 1:
            raise ValueError(f"{self.name}: {len(paths)} files define {self.where}")
        tree = ast.parse(paths[0].read_text())
        nodes = [node for name, node in definitions(tree) if name == self.where]
        wanted, given = _parsed(self.old), _parsed(self.new)
        if isinstance(wanted, list) or isinstance(given, list):
            wanted, given = ast.parse(self.old).body, ast.parse(self.new or "pass").body
        places = [place for node in nodes for place in _places(node, wanted)]
        if len(places) != 1:
            raise ValueError(f"{self.name}: {len(places)} times in {self.where}, not once: {self.old}")
        parent, field, at = places[0]
        value = getattr(parent, field)
        if at is None:
            setattr(parent, field, given)
        elif isinstance(wanted, list):
            value[at : at + len(wanted)] = given
        else:
            value[at] = given
        return paths[0], ast.unparse(ast.fix_missing_locations(tree)) + "\n"


@cache
def index(source: Path) -> dict[Path, frozenset[str]]:
    """The qualified names that each file of the package defines."""
    return {
        path: frozenset(name for name, _ in definitions(ast.parse(path.read_text())))
        for path in sorted(source.rglob("*.py"))
    }


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions, classes and assigned names of a module or class with their qualified names."""
    for child in getattr(node, "body", []):
        if isinstance(child, DEFINITION):
            yield prefix + child.name, child
            yield from definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Assign | ast.AnnAssign) and not isinstance(node, ast.FunctionDef):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            for target in targets:
                yield from ((prefix + part.id, child) for part in ast.walk(target) if isinstance(part, ast.Name))


def _parsed(text: str) -> ast.expr | list[ast.stmt]:
    """An expression, if `text` is one, else statements."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return ast.parse(text).body


def _key(node: ast.AST) -> str:
    """Equal for equal trees, whether they are read or assigned to."""
    return ast.dump(node).replace("ctx=Store()", "ctx=Load()").replace("ctx=Del()", "ctx=Load()")


def _places(node: ast.AST, wanted: ast.expr | list[ast.stmt]) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where `wanted` is in the tree of `node`: its parent, the field, and the index in a field that is a list."""
    for parent in ast.walk(node):
        for field, value in ast.iter_fields(parent):
            if isinstance(wanted, list):
                if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                    keys, run = [_key(part) for part in value], [_key(part) for part in wanted]
                    starts = range(len(keys) - len(run) + 1)
                    yield from ((parent, field, i) for i in starts if keys[i : i + len(run)] == run)
            elif isinstance(value, ast.expr):
                if _key(value) == _key(wanted):
                    yield parent, field, None
            elif isinstance(value, list):
                same = (isinstance(part, ast.expr) and _key(part) == _key(wanted) for part in value)
                yield from ((parent, field, i) for i, equal in enumerate(same) if equal)
