"""The two JSON files that SGLang's DSpark scheduler reads.

    --speculative-dspark-confidence-sts-path
        {"temperatures": [T_1 .. T_gamma], "dataset", "num_samples", "ece_before": [..], "ece_after": [..]}
    --speculative-dspark-sps-table-path
        {"sample_batch_tokens": [..], "sample_steps_per_sec": [..], "max_batch_tokens"}

Its calibration is sigmoid(logit(c_k) / T_k): it has no place for offsets. The format is that of SGLang 0.5.23.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

CALIBRATION_FILE, TABLE_FILE = "confidence_sts.json", "sps_table.json"


def write_confidence_sts(
    path: Path,
    temperatures: Sequence[float],
    offsets: Sequence[float],
    dataset: str,
    num_samples: int,
    ece_before: Sequence[float],
    ece_after: Sequence[float],
) -> None:
    """Write the calibration file.

    Args:
        offsets: must all be 0; fit temperatures alone for this file (calibration/fit.py).
        ece_before: of the raw survival per position; `ece_after` with these temperatures.

    Raises:
        ValueError: an offset, or a temperature that is not above 0.
    """
    if any(offsets):
        raise ValueError(
            f"offsets {list(offsets)} cannot be expressed for SGLang, which knows temperatures only: "
            "fit temperatures alone for it (outrider calibrate --export-sglang does)."
        )
    if not temperatures or min(temperatures) <= 0:
        raise ValueError(f"temperatures {list(temperatures)} must be numbers above 0, one per draft position.")
    fields = {
        "temperatures": list(temperatures),
        "dataset": dataset,
        "num_samples": num_samples,
        "ece_before": list(ece_before),
        "ece_after": list(ece_after),
    }
    _write(path, fields)


def write_sps_table(path: Path, curve: Sequence[tuple[int, float]]) -> None:
    """Write the cost table.

    Args:
        curve: (tokens in a target forward, seconds it takes), tokens strictly increasing from 1 or more.

    Raises:
        ValueError: empty, not increasing, or seconds that are not above 0.
    """
    tokens, seconds = [n for n, _ in curve], [s for _, s in curve]
    if not curve or tokens[0] < 1 or any(b <= a for a, b in pairwise(tokens)):
        raise ValueError(f"tokens {tokens} must be strictly increasing and at least 1.")
    if not all(s > 0 and math.isfinite(s) for s in seconds):
        raise ValueError(f"seconds {seconds} must be finite numbers above 0.")
    rates = [1 / s for s in seconds]
    _write(path, {"sample_batch_tokens": tokens, "sample_steps_per_sec": rates, "max_batch_tokens": tokens[-1]})


def _write(path: Path, fields: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
