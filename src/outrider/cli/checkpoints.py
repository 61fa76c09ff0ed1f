"""`outrider export` (a drafter as an engine loads it), `package` (a drafter to ship), `push` (it goes to the hub)."""

from __future__ import annotations

from functools import partial

from rich.box import SIMPLE_HEAD

from outrider.backends.config import ExportConfig
from outrider.cli.common import show_lines
from outrider.evaluation.config import PackageConfig, PushConfig
from outrider.utils.terminal import Terminal, terminal_table


def export(config: ExportConfig) -> None:
    """Write a drafter for an engine, with the command that serves it.

    Without --to and --out, show which engines take which drafters, and whether they take this one.
    """
    from outrider.backends.export import offers, run_export
    from outrider.backends.registry import MARKS, export_table

    console = Terminal(highlight=False, soft_wrap=True)
    say = partial(console.print, markup=False)
    if config.out is None:
        headings, *rows = export_table()
        console.print(terminal_table(headings, rows, text=headings, box=SIMPLE_HEAD, padding=(0, 1, 0, 0)))
        console.print(f"{MARKS}\n")
        for sentence in offers(config).values():
            say(sentence)
        return
    exported = run_export(config)
    size = sum(file.stat().st_size for file in config.out.iterdir()) / 1e6
    say(f"{config.out}: {size:.1f} MB, {len(exported.written.tensors)} tensors")
    for sentence in exported.written.fallbacks:
        say(f"left out: {sentence}")
    for command in exported.commands:
        say(command)


def package(config: PackageConfig) -> None:
    """Write a drafter to ship, with a model card made from measurements.

    --target names the target anew, as where it was trained from a directory and is on the hub now.
    """
    from outrider.evaluation.package import package_drafter

    size = package_drafter(config) / 1e6
    show_lines(Terminal(), f"{config.out}: {size:.1f} MB, model card in README.md")


def push(config: PushConfig) -> None:
    """Put a packaged drafter on the Hugging Face hub, with its model card."""
    from outrider.evaluation.package import push_drafter

    address, size = push_drafter(config)
    show_lines(Terminal(), f"{address}: {size / 1e6:.1f} MB, {'for everyone' if config.public else 'private'}")
