"""The table of cells {task x temperature} x users: a variant's throughput over that of plain decoding and of the best
static variant.

    python -m benchmarks.cells prompts DIR                   three kinds of text that no packaged drafter was trained on
    outrider bench --tasks FILE --temperature T ... --out RUNS/TASK-T        one sweep per task and temperature
    python -m benchmarks.cells table RUNS/* [--variant look-ahead+skip]

A cell passes where the variant is at least as fast as plain decoding (1.00) and within 3 % of the best static variant
of that cell in hindsight; plain decoding is one of those. Cells that do not are named.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from itertools import cycle, islice, product
from pathlib import Path
from typing import Annotated

import typer

from outrider.backends.local import NO_SPECULATION, drafter_of, is_adaptive
from outrider.loadtest.metrics import Frontier, speedups
from outrider.utils.terminal import markdown_table

LEAST, BEHIND, COUNT = 1.0, 0.03, 32
app = typer.Typer(add_completion=False)

_PLACES = ["Lisbon", "Kyoto", "Tromso", "Nairobi", "Quito", "Gdansk", "Hobart", "Izmir"]
_NAMES = ["Amara Osei", "Jonas Lind", "Mei Tanaka", "Ravi Patel", "Sofia Costa", "Tomas Novak", "Zahra Amini"]
_THINGS = ["a lighthouse", "an old bicycle", "the first snow", "a night train", "a bakery at dawn", "a lost glove"]
_FORMS = [
    "a poem of eight lines",
    "a story of five sentences",
    "a letter from a sailor",
    "a dialogue of two neighbours",
]
_SENTENCES = [
    "The ferry leaves from the northern pier at a quarter past six.",
    "My grandmother planted this pear tree in the year I was born.",
    "If it rains tomorrow, the concert will be held in the town hall.",
    "She has forgotten her umbrella on the train again.",
    "Nobody knew who had painted the small picture behind the door.",
]
_LANGUAGES = ["French", "Spanish", "German", "Italian"]


def kinds() -> dict[str, list[str]]:
    """Prompts by kind: translation, records to be written as JSON, and free writing."""

    def take(*parts: Sequence[str]) -> list[tuple[str, ...]]:
        return list(islice(cycle(product(*parts)), COUNT))

    days = range(1, COUNT + 1)
    return {
        "translation": [
            f"Translate into {language}, then explain the grammar of your translation: {sentence}"
            for sentence, language in take(_SENTENCES, _LANGUAGES)
        ],
        "json": [
            f"Write the bookings as a JSON list with the keys name, city, day and nights: {name} stays in {place} from "
            f"May {1 + day % 28} for {1 + day % 6} nights, and {other} in {elsewhere} from June {1 + day % 30} for two."
            for day, (name, place), (elsewhere, other) in zip(
                days, take(_NAMES, _PLACES), take(_PLACES[::-1], _NAMES[::-1]), strict=True
            )
        ],
        "writing": [f"Write {form} about {thing}." for thing, form in take(_THINGS, _FORMS)],
    }


@app.command()
def prompts(directory: Path) -> None:
    """Write translation.jsonl, json.jsonl and writing.jsonl."""
    directory.mkdir(parents=True, exist_ok=True)
    for kind, texts in kinds().items():
        lines = [json.dumps({"id": f"{kind}-{i:02}", "turns": [text]}) for i, text in enumerate(texts, start=1)]
        (directory / f"{kind}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@app.command()
def table(
    runs: list[Path],
    variant: Annotated[str, typer.Option(help="the one that is judged")] = "look-ahead+skip",
    out: Annotated[Path | None, typer.Option(help="Markdown file")] = None,
) -> None:
    """Print the table, its mean, and the cells that do not pass."""
    lines = report({run.name: Frontier.load(run / "frontier.json") for run in runs}, variant)
    print("\n".join(lines))
    if out is not None:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def report(frontiers: dict[str, Frontier], variant: str) -> list[str]:
    """Lines of Markdown: ratio to plain decoding (quartiles) / to the best static variant of the cell.

    Raises:
        ValueError: the variant was not measured wherever plain decoding was.
    """
    levels = sorted({point.level for frontier in frontiers.values() for point in frontier.points})
    rows, ratios, failed = [], list[float](), list[str]()
    for name, frontier in frontiers.items():
        found = speedups(frontier)
        if variant not in found:
            raise ValueError(f"{name}: {variant} was not measured wherever {NO_SPECULATION} was.")
        cells = {point.level: point.throughput for point in frontier.points if point.variant == variant}
        mine = dict(zip(sorted(cells), found[variant], strict=True))
        row = [name]
        for level in levels:
            if level not in mine:
                row.append("")
                continue
            static, best = max(
                (point.throughput, point.variant)
                for point in frontier.points
                if point.level == level and not is_adaptive(point.variant)
                and drafter_of(point.variant) in ("", drafter_of(variant))
            )  # fmt: skip
            one, hindsight = mine[level], cells[level] / static
            ratios.append(one.ratio)
            row.append(f"{one.ratio:.2f} ({one.low:.2f}-{one.high:.2f}) / {hindsight:.2f}")
            if one.ratio < LEAST or hindsight < 1 - BEHIND:
                failed.append(f"{name} at {level:g}: {one.ratio:.3f} of plain, {hindsight:.3f} of {best}")
        rows.append(row)
    passed = f"{len(ratios) - len(failed)} of {len(ratios)} cells pass, mean {statistics.mean(ratios):.3f} of plain"
    headings = ["task and temperature", *(f"{level:g}" for level in levels)]
    return [*markdown_table(headings, rows, text=headings[:1]), "", passed, *(f"* {line}" for line in failed)]


if __name__ == "__main__":
    app()
