"""(lower quartile, median, upper quartile): the spread that every measured figure is given with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch


class Clock:
    """Seconds spent inside `with clock:` blocks; waits for the GPU where there is one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __enter__(self) -> None:
        self._started = self._now()

    def __exit__(self, *_: object) -> None:
        self.seconds += self._now() - self._started

    def take(self) -> float:
        """The seconds so far; starts again from zero."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


Quartiles = tuple[float, float, float]


def quartiles(values: Sequence[float]) -> Quartiles:
    """Of at least one value, ends included: quartiles of few values lie between them. Of one, that value thrice."""
    if len(values) == 1:
        return (values[0],) * 3
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def machine() -> dict[str, Any]:
    """What ran: processor, cores, threads, memory; no host names."""
    cpu = platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            cpu = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    found: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if hasattr(os, "sysconf"):
        found["memory_gb"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def versions() -> dict[str, str]:
    """Versions of the packages results depend on."""
    return {name: importlib.metadata.version(name) for name in ("outrider", "torch", "transformers")}
