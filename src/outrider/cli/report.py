"""`outrider report`: one HTML page of what the other verbs have measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.cli.common import check_outputs, show_lines
from outrider.cli.options import FILES, option
from outrider.utils.terminal import Terminal


def report_command(
    places: Annotated[list[Path], typer.Argument(help="directories that other verbs wrote, or single files")],
    *,
    out: Annotated[Path, option(FILES, "HTML file")] = Path("report.html"),
    title: Annotated[str, option(FILES, "of the page")] = "Outrider report",
) -> None:
    """Write one HTML page of what was measured: verdicts, pictures, traces, settings."""
    check_outputs(files=[out])
    write_page(places, out, title, console=Terminal())


def write_page(places: Sequence[Path], out: Path, title: str, *, console: Console) -> None:
    """Write the report of what is at these places, and say where a browser finds it.

    Raises:
        ValueError: see `find_sources` and `render`.
    """
    from outrider.report.page import render
    from outrider.report.sources import find_sources
    from outrider.utils.files import write_atomically

    sources = find_sources(places)
    page = render(sources, title)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    count = len(sources)
    show_lines(
        console,
        f"report of {count} file{'s' * (count > 1)}, {len(page.encode()) / 1e3:.0f} kB; open it in a browser:",
        f"  {out.resolve().as_uri()}",
    )
