"""Sweeps of several engines in one table: the same target, prompts and lengths, each against its own baseline.

engine        variant    load      type   tok/s   user   TTFT   gap   tau   x none
local         fixed-7       1   float32    41.2   41.9    88    51   2.31    1.62
transformers  none          1   float32    17.0   ...                       1.00

Two things are told, not refused: the type of the weights, which MLX and GGUF files choose themselves, and whether a
server rendered the prompts from messages ("chat") with the template it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.benchmark.summary import Frontier, PointSummary
from outrider.benchmark.variants import NO_SPECULATION

HEADINGS = ("engine", "variant", "load", "type", "tok/s", "user", "TTFT ms", "gap ms", "tau", "x none")
_SAME = ("target", "prompts_sha256", "max_new_tokens", "thinking", "turns", "arrivals", "device")


def side_by_side(directories: Sequence[Path]) -> list[tuple[str, ...]]:
    """Rows of all sweeps, by load, then in the order given; blank where an engine does not tell.

    Raises:
        ValueError: a sweep is missing, or two were made under different conditions (each is named).
    """
    sweeps = [Frontier.load(directory / "frontier.json") for directory in directories]
    for directory, sweep in zip(directories[1:], sweeps[1:], strict=True):
        differing = [name for name in _SAME if sweep.settings.get(name) != sweeps[0].settings.get(name)]
        if sweep.machine != sweeps[0].machine:
            differing.append("machine")
        if differing:
            raise ValueError(
                f"{directory} was not measured as {directories[0]} was: {', '.join(differing)} differ. Measure both "
                "alike, on one machine."
            )
    rows = [
        (point.level, _row(sweep, point, _baseline(sweep, point.level))) for sweep in sweeps for point in sweep.points
    ]
    return [row for _, row in sorted(rows, key=lambda entry: entry[0])]


def _baseline(sweep: Frontier, level: float) -> float | None:
    return next((p.throughput for p in sweep.points if (p.variant, p.level) == (NO_SPECULATION, level)), None)


def _row(sweep: Frontier, point: PointSummary, plain: float | None) -> tuple[str, ...]:
    def shown(figure: str, scale: float, form: str) -> str:
        found = point.median(figure)
        return "" if found is None else format(scale * found, form)

    ratio = "" if plain is None else f"{point.throughput / plain:.2f}"
    figures = shown("user_p50", 1, ".1f"), shown("ttft_p50", 1e3, ".0f"), shown("gap_p50", 1e3, ".0f")
    engine = f"{sweep.settings['backend']}{' (chat)' if sweep.settings.get('chat') else ''}"
    measured = engine, point.variant, f"{point.level:g}", sweep.settings.get("dtype") or ""
    return *measured, f"{point.throughput:.1f}", *figures, shown("tau", 1, ".2f"), ratio
