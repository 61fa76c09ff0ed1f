"""`outrider report`: one HTML page of what the other verbs have measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.common import check_outputs, show_paths
from outrider.cli.options import FILES, option
from outrider.utils.terminal import Terminal


def report_command(
    places: Annotated[list[Path], typer.Argument(help="directories that other verbs wrote, or single files")],
    *,
    out: Annotated[Path, option(FILES, "HTML file")] = Path("report.html"),
    title: Annotated[str, option(FILES, "of the page")] = "Outrider report",
) -> None:
    """Write one HTML page of what was measured: verdicts, pictures, traces, settings."""
    from outrider.report.page import render
    from outrider.report.sources import find_sources
    from outrider.utils.files import write_atomically

    check_outputs(files=[out])
    sources = find_sources(places)
    page = render(sources, title)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    console = Terminal()
    count = len(sources)
    console.print(f"{count} file{'s' * (count > 1)}, {len(page.encode()) / 1e6:.1f} MB", highlight=False)
    show_paths(console, out)
