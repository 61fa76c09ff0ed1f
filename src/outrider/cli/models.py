"""outrider models [TARGET]: the drafters on this machine, and published ones."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.formats import shipped_drafters
from outrider.formats.published import PUBLISHED, Published
from outrider.target.resolve import canonical_id

_THINKING = {True: "on", False: "off", None: "?"}


def models(
    target: Annotated[str | None, typer.Argument(help="only drafters for targets with this in their name")] = None,
) -> None:
    """Drafters by target: repository, kind, dialect, rows of a block, and whether their texts had thinking in them."""
    console = Console(highlight=False)
    wanted = (target or "").lower()
    local = [
        (made_for, directory)
        for made_for, directory in shipped_drafters()
        if wanted in made_for.lower() or (target is not None and made_for == canonical_id(target))
    ]
    entries = [entry for entry in PUBLISHED if wanted in entry.target.lower()]
    if not local and not entries:
        raise ValueError(
            f"no drafter on this machine and no published one for a target like {target!r}; outrider models lists all."
        )
    if local:
        console.print("on this machine", style="underline")
    for made_for, directory in local:
        console.print(made_for, style="bold", markup=False, soft_wrap=True)
        console.print(f"  {directory}", markup=False, soft_wrap=True)
    if entries:
        console.print("published", style="underline")
        console.print(models_table(entries))
        console.print("rows: of a block, or steps of a chain; blank: see the config. think: in the training texts.")
        console.print(
            "in brackets: not read here, and passed over by --drafter auto (pickle: weights that can run code; "
            "layers: of a kind that no drafter here has)."
        )


def models_table(entries: list[Published]) -> Table:
    """One row per checkpoint, two lines each so that 80 columns hold it; in brackets why one is not read."""
    view = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("target / drafter", "kind", "dialect", "rows", "think"):
        view.add_column(heading, justify="right" if heading == "rows" else "left", no_wrap=True)
    for number, entry in enumerate(entries):
        if number == 0 or entries[number - 1].target != entry.target:
            view.add_row(entry.target, style="bold")
        rows = "" if entry.rows is None else str(entry.rows)
        dialect = f"({entry.obstacle})" if entry.obstacle else entry.dialect
        view.add_row(f"  {entry.repo}", entry.algorithm, dialect, rows, _THINKING[entry.thinking])
    return view
