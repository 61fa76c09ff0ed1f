"""`outrider recipe`: the packaged recipes, what each field means, and the JSON schema for editors."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from outrider.cli.options import FILES, GENERAL, option
from outrider.utils.packaged import PACKAGE
from outrider.utils.terminal import Terminal


def recipes_directory() -> Path:
    """The directory of the packaged recipes."""
    return PACKAGE / "recipes"


def packaged_recipes() -> dict[str, Path]:
    """{name: file}; a name is the path below the recipes' directory, without its suffix."""
    top = recipes_directory()
    return {file.relative_to(top).with_suffix("").as_posix(): file for file in sorted(top.rglob("*.yaml"))}


def recipe_command(
    name: Annotated[str | None, typer.Argument(help="a packaged recipe, printed; with --explain: a field")] = None,
    *,
    copy: Annotated[Path | None, option(FILES, "write the recipe to this file, to be changed")] = None,
    explain: Annotated[bool, option(GENERAL, "type, default and meaning of each field, or of one")] = False,
    schema: Annotated[bool, option(GENERAL, "print the JSON schema of recipes, for editors")] = False,
) -> None:
    """List the packaged recipes, copy one, or explain the fields."""
    if (copy is not None) + explain + schema > 1:
        raise ValueError("--copy, --explain and --schema: give one of them.")
    console = Terminal(highlight=False, soft_wrap=True)
    if schema:
        from outrider.training.recipe import recipe_schema  # here: it imports PyTorch

        print(json.dumps(recipe_schema(), indent=2))
    elif explain:
        _explain(name, console)
    elif name is not None:
        text = _packaged(name).read_text(encoding="utf-8")
        if copy is None:
            print(text, end="")
            return
        if copy.exists():
            raise ValueError(f"--copy {copy} exists: name a new file.")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
        console.print(f"{copy}: set target, out and data.prompts in it, then: outrider train {copy}", markup=False)
    elif copy is not None:
        raise ValueError(f"--copy {copy}: name the recipe to copy, as outrider recipe demo --copy {copy}.")
    else:
        found = packaged_recipes()
        width = max(map(len, found))
        for known, file in found.items():
            first = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
            console.print(f"[bold]{known:{width}}[/bold]  {escape(first)}")


def _packaged(name: str) -> Path:
    found = packaged_recipes()
    if name not in found:
        near = get_close_matches(name, found, 1)
        raise ValueError(f"no packaged recipe {name!r}; {f'did you mean {near[0]}?' if near else ', '.join(found)}")
    return found[name]


def _explain(wanted: str | None, console: Console) -> None:
    from outrider.training.recipe import nearest_field, recipe_fields

    fields = recipe_fields()
    shown = [field for field in fields if wanted in (None, field.name) or field.name.startswith(f"{wanted}.")]
    if not shown:
        near = nearest_field(str(wanted), [field.name for field in fields])
        raise ValueError(f"recipes have no field {wanted!r}; {f'did you mean {near}?' if near else 'see --explain'}")
    for field in shown:
        default = "required" if field.required else f"default {json.dumps(field.default)}"
        if "section" in field.kind and not field.required:
            default = "see its fields"
        only = f", of {field.only}" if field.only else ""
        console.print(f"[bold]{field.name}[/bold]  [dim]{escape(f'{field.kind}, {default}{only}')}[/dim]")
        if field.meaning:
            console.print(f"    {escape(field.meaning)}")
