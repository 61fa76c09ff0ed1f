"""Write the generated pages of the site: verbs, recipe fields, metrics of the server, findings of the doctor,
commands and their tests.

    python docs/site/reference.py DIRECTORY

Verbs come from the program's parser, fields from the recipe's schema, findings from rules of the doctor. Metrics are
read from the source without running it: their texts are the literals of the calls, with "..." for figures.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from typer.main import get_command

import outrider.cli.main as main
from outrider.doctor.checkpoints import CHECKS
from outrider.training.recipe import recipe_fields

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # tests/ is no part of the package
from tests.toys.documentation import command_rows, other_rows  # noqa: E402

SOURCE = ROOT / "src" / "outrider"


def cell(text: object) -> str:
    """A text as a cell of a Markdown table; code in it stays as it is."""
    parts = re.split(r"(`[^`]*`)", str(text).replace("\n", " "))
    prose = [re.sub(r"([|\[])", r"\\\1", part.replace("<", "&lt;")) for part in parts[::2]]
    code = [part.replace("|", r"\|") for part in parts[1::2]]
    return "".join(chain.from_iterable(zip_longest(prose, code, fillvalue="")))


def table(headings: list[str], rows: list[list[object]]) -> list[str]:
    lines = ["", f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return [*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows), ""]


def verbs() -> Iterator[str]:
    """A section for each verb: what it does, arguments, options, an example."""
    top: Any = get_command(main.app)
    yield "# Verbs\n\nGenerated from the program. `outrider VERB --help` shows the same in the terminal."
    for name, group in top.commands.items():
        command = top.resolve_command(top.context_class(top), [name])[1]
        below = getattr(command, "commands", None)
        for inner in below or [None]:
            found = command if inner is None else command.resolve_command(command.context_class(command), [inner])[1]
            yield f"\n## outrider {name}{'' if inner is None else f' {inner}'}\n\n{found.help or group.help}"
            rows: list[list[object]] = []
            for param in found.params:
                if param.name == "help":
                    continue
                option = any(opt.startswith("--") for opt in param.opts)
                shown = ", ".join(f"`{opt}`" for opt in param.opts) if option else f"`{param.name.upper()}`"
                default = param.default
                if callable(default) or default in (None, False, "", (), []):
                    default = "required" if param.required else ""
                rows.append([shown, param.help or "", f"`{default}`" if default not in ("", "required") else default])
            yield from table(["option", "meaning", "default"], rows)
            if found.epilog:
                yield "```\n" + found.epilog.split("\n", 1)[1] + "\n```"


def fields() -> Iterator[str]:
    """A row for each field of a recipe."""
    yield "# Recipe fields\n\nGenerated from the schema; `outrider recipe --schema` prints it as JSON for editors."
    rows: list[list[object]] = []
    for field in recipe_fields():
        default = "required" if field.required else f"`{json.dumps(field.default)}`"
        if "section" in field.kind and not field.required:
            default = ""
        kind = f"{field.kind}, of {field.only}" if field.only else field.kind
        rows.append([f"`{field.name}`", kind, default, field.meaning or ""])
    yield from table(["field", "type", "default", "meaning"], rows)


def commands() -> Iterator[str]:
    """A row for each command in a block of README and the site."""
    yield "# Commands and their tests\n"
    yield (
        "Generated. Of every command in a block: the tests that run its verb with its options, and what else\n"
        "it needs. Tests run on toy targets, unless their file is of an engine or of SmolLM2.\n"
        "`tests/cli/test_cli.py` reads every command by the program's parser, and fails where no test has an option."
    )
    rows: list[list[object]] = [
        [f"`{command}`", str(page.relative_to(ROOT)), ", ".join(f"`tests/{name}`" for name in tests), "; ".join(needs)]
        for page, command, tests, needs in (*command_rows(), *other_rows())
    ]
    yield from table(["command", "page", "tests", "needs"], rows)


def literal(node: ast.expr) -> str:
    """The text of a string or f-string, "..." for what is filled in; "" for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.BinOp):
        return (literal(node.left) or "...") + (literal(node.right) or "...")
    return ""


def calls(node: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for found in ast.walk(node):
        if isinstance(found, ast.Call):
            yield getattr(found.func, "id", getattr(found.func, "attr", "")), found


def metrics() -> Iterator[str]:
    """A row for each metric of `/metrics`."""
    yield "# Metrics of the server\n\n`GET /metrics` of `outrider serve`, under vLLM's names. Read from the source."
    kinds = {"_gauge": "gauge", "_counter": "counter", "_counters": "counter", "_histogram": "histogram"}
    tree = ast.parse((SOURCE / "serving" / "metrics.py").read_text())
    rows: list[list[object]] = []
    for name, call in calls(tree):
        if name in kinds and call.args and literal(call.args[0]):
            suffix = "_total" if kinds[name] == "counter" else ""
            rows.append([f"`vllm:{literal(call.args[0])}{suffix}`", kinds[name], literal(call.args[1])])
    yield from table(["metric", "kind", "meaning"], rows)


def symptoms() -> Iterator[str]:
    """Under each check of a checkpoint, what a finding means and what to do; "..." stands for a figure."""
    yield (Path(__file__).parent / "symptoms.md").read_text()
    group = ""
    for check in CHECKS:
        if check.group != group:
            group = check.group
            yield f"\n### {group.capitalize()}\n"
        yield f"\n**{check.name}**: {(check.measure.__doc__ or '').partition(chr(10))[0]}\n"
        for rule in check.rules:
            if rule.meaning:
                texts = [re.sub(r"{[^}]*}", "...", text) for text in (rule.meaning, rule.remedy) if text]
                yield f"* {rule.status}: {' *Do:* '.join(texts)}"


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for file, lines in {
        "verbs": verbs(),
        "recipe": fields(),
        "metrics": metrics(),
        "symptoms": symptoms(),
        "commands": commands(),
    }.items():
        (out / f"{file}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
