"""The table of cells: ratios, which cells fail and why, and prompts of kinds that no drafter was trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cells import kinds, prompts, report
from outrider.data.sources import load_prompts
from outrider.loadtest.metrics import Frontier, Metrics, Point

FIGURES = dict.fromkeys(Metrics.model_fields, 1.0) | {"tokens": 1, "requests": 1, "steps": 1}


def frontier(rates: dict[str, tuple[float, ...]]) -> Frontier:
    """Throughput of variants at 1, 2, 4 .. users."""
    points = [
        Point(
            variant=variant, level=2.0**place, repeat=0, same=1, ties=0, mismatches=0,
            metrics=Metrics(**FIGURES | {"tokens_per_second": rate}),
        )
        for variant, found in rates.items()
        for place, rate in enumerate(found)
    ]  # fmt: skip
    return Frontier.of("closed", points, {})


def test_cells_that_fail_are_named() -> None:
    greedy = frontier({"none": (10, 20, 30), "fixed-3": (15, 22, 20), "look-ahead+skip": (15, 21, 29.7)})
    sampled = frontier({"none": (10, 20), "look-ahead+skip": (12, 20)})
    lines = report({"gsm8k-0": greedy, "gsm8k-1": sampled}, "look-ahead+skip")
    assert lines[2].split(" | ")[1:] == [
        "1.50 (1.50-1.50) / 1.00", "1.05 (1.05-1.05) / 0.95", "0.99 (0.99-0.99) / 0.99 |",
    ]  # fmt: skip
    assert lines[3].endswith("1.20 (1.20-1.20) / 1.20 | 1.00 (1.00-1.00) / 1.00 |  |")
    assert lines[5] == "3 of 5 cells pass, mean 1.148 of plain"
    assert lines[6:] == [
        "* gsm8k-0 at 2: 1.050 of plain, 0.955 of fixed-3",
        "* gsm8k-0 at 4: 0.990 of plain, 0.990 of none",
    ]
    with pytest.raises(ValueError, match="gsm8k-0: prefix was not measured wherever none was"):
        report({"gsm8k-0": greedy}, "prefix")


def test_prompts_of_three_kinds(tmp_path: Path) -> None:
    prompts(tmp_path)
    for kind, texts in kinds().items():
        found = load_prompts(str(tmp_path / f"{kind}.jsonl"))
        assert [conversation.turns[0] for conversation in found] == texts
        assert len(texts) == 32 and len(set(texts)) > 8
        assert json.loads((tmp_path / f"{kind}.jsonl").read_text().splitlines()[0])["id"] == f"{kind}-01"
