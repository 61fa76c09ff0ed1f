"""Code prompts made from the documented functions of the running Python's own standard library.

    def name(arguments):  +  its docstring   ->   "implement this function"

Sources are parsed, never imported, so nothing runs and nothing of the library is stored in the project.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

NAME = "stdlib_functions"
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "__pycache__"}
_DOCSTRING_CHARACTERS = range(40, 900)
_WORDINGS = (
    "Write a Python function for this signature and description, and check that it does what is asked.",
    "Implement the following function in Python.",
    "Complete this Python function so that it behaves as documented:",
    "Solve this programming task. The function must do what its docstring says.",
)


def stdlib_turns() -> Iterator[tuple[str, str]]:
    """(id, user turn) for every documented public function and method, in an order that mixes modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if _SKIPPED & set(place.parts) or any(part.startswith("_") for part in place.parts[:-1]):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for name, definition in _functions(tree, ".".join(place.with_suffix("").parts)):
            key = hashlib.sha256(definition.encode()).hexdigest()
            wording = _WORDINGS[int(key[:8], 16) % len(_WORDINGS)]
            found.setdefault(key, (f"stdlib-{name}-{key[:6]}", f"{wording}\n```python\n{definition}\n```"))
    yield from (found[key] for key in sorted(found))


def _functions(tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        docstring = ast.get_docstring(node)
        if docstring is None or len(docstring) not in _DOCSTRING_CHARACTERS or not (node.args.args or node.args.vararg):
            continue
        arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("cls, ")
        if arguments in ("self", "cls"):
            continue
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        text = docstring.replace("\n", "\n    ").replace("\n    \n", "\n\n")
        yield f"{module}.{node.name}", f'def {node.name}({arguments}){returns}:\n    """{text}\n    """'
