"""Clocks, quartiles, and what a process runs on: device, threads, machine, versions."""

from __future__ import annotations

import ctypes
import datetime
import importlib.metadata
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # PyTorch takes seconds to import; help and misspelt options do without
    import mlx.core as mx
    import torch


class Clock:
    """Seconds spent inside `with clock:` blocks. On a GPU its events tell them, and `take` waits for the last one: the
    blocks themselves wait for nothing.

    Args:
        now: seconds since some moment, on a CPU.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.now = device, now
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def _event(self) -> torch.cuda.Event:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def __enter__(self) -> None:
        self._started: Any = self._event() if self.device.type == "cuda" else self.now()

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self._events.append((self._started, self._event()))
        else:
            self._seconds += self.now() - self._started

    def take(self) -> float:
        """The seconds so far; starts again from zero."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(start.elapsed_time(end) for start, end in self._events) / 1000
            self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


Quartiles = tuple[float, float, float]


def quartiles(values: Sequence[float]) -> Quartiles:
    """(lower quartile, median, upper quartile) of at least one value, interpolated between values, ends included."""
    if len(values) == 1:
        return (values[0],) * 3
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def machine() -> dict[str, Any]:
    """Description of the machine: processor, cores, threads, memory; no host names."""
    import torch

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


def today() -> str:
    """The date, as 2026-11-22, by which results and pictures say when they were measured."""
    return datetime.date.today().isoformat()


def usable_device(name: str | torch.device) -> torch.device:
    """The device of that name; `auto` is CUDA where there is one, else the CPU.

    Raises:
        ValueError: PyTorch knows none of that name, or this machine has none.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is none that PyTorch knows; use auto, cpu, cuda or cuda:1.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(name)!r}: PyTorch sees no CUDA device; use cpu.")
    if device.type == "cuda":  # a tensor there would take memory of the first GPU in every rank
        if (device.index or 0) >= (count := torch.cuda.device_count()):
            raise ValueError(f"device {str(name)!r}: PyTorch sees {count} CUDA devices, counted from cuda:0.")
        return device
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:  # not here, or not built in
        raise ValueError(f"device {str(name)!r} cannot be used on this machine; use auto, cpu or cuda.") from error
    return device


def on_device(
    values: Sequence[Any] | torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor of these values of the host, by way of pinned memory where the device is a GPU: the host does not wait.

    Args:
        dtype: of a sequence's values; None: PyTorch's choice. A tensor keeps its own.
    """
    import torch

    made = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def pinned_bytes(size: int) -> int:
    """What a tensor of that many bytes takes in pinned memory: the next power of two.

    Source: PyTorch's CachingHostAllocator.h. Freed memory stays with the allocator, for tensors of the same power.
    """
    return 1 << (size - 1).bit_length() if size else 0


def to_host(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors on a GPU in pinned memory, which are waited for once; tensors on the host as they are."""
    import torch

    there = [value for value in values if value.is_cuda]
    if not there:
        return list(values)
    made = [torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda) for value in values]
    for copy, value in zip(made, values, strict=True):
        copy.copy_(value, non_blocking=True)
    torch.cuda.current_stream(there[0].device).synchronize()
    return made


def dtype_name(dtype: torch.dtype | mx.Dtype) -> str:
    """A type of PyTorch's or MLX's as results, config.json and engines call it: bfloat16."""
    return str(dtype).rpartition(".")[2]


def default_dtype(device: str | torch.device) -> torch.dtype:
    """float32 on a CPU (most emulate bf16), bfloat16 elsewhere."""
    import torch

    return torch.float32 if usable_device(device).type == "cpu" else torch.bfloat16


# glibc's mallopt parameters (malloc.h)
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def _default_threads() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    # torchrun sets it to 1 for several ranks when nobody did, which leaves cores idle.
    if asked.isdigit() and int(asked) and not (ranks > 1 and asked == "1"):
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def set_up(threads: int | None) -> None:
    """Set the number of threads, quiet transformers, and tune oneDNN and malloc.

    `threads` None: $OMP_NUM_THREADS, else every core this process may use, shared with the machine's other ranks.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(threads or _default_threads())
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums of bfloat16 products in float32
    # One kernel per matrix shape and row count: a busy engine meets more than the 1,024 that oneDNN keeps.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")
    if platform.libc_ver()[0] == "glibc":
        # Keep large temporaries in the heap: fresh pages from mmap would fault again on every step.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End a block, in any thread, that takes longer; a call into C ends first.

    Raises:
        TimeoutError: it took longer.
    """
    thread, lock, over = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False

    def end() -> None:
        with lock:
            if not over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeoutError))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except TimeoutError as error:
        raise TimeoutError(f"longer than {seconds:g} seconds") from error
    finally:
        with lock:
            over = True
        timer.cancel()
