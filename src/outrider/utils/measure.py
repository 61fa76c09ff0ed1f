"""Measure time and quartiles, and describe and set up the device, threads, machine and package versions."""

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

if TYPE_CHECKING:  # PyTorch takes seconds to import; --help and option errors do not need it
    import mlx.core as mx
    import torch


class Clock:
    """Sums the seconds spent inside `with clock:` blocks.

    On a GPU it records events; only `take` waits for the last of them.

    Args:
        now: clock in seconds, used on a CPU.
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
        """Return the seconds so far and reset to zero."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(start.elapsed_time(end) for start, end in self._events) / 1000
            self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


Quartiles = tuple[float, float, float]


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return (lower quartile, median, upper quartile) of at least one value, interpolated, ends included."""
    if len(values) == 1:
        return (values[0],) * 3
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def machine() -> dict[str, Any]:
    """Describe the machine: processor, cores, threads, memory; no host names."""
    import torch

    cpu = platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            cpu = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    facts: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if hasattr(os, "sysconf"):
        facts["memory_gb"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    return {name: importlib.metadata.version(name) for name in ("outrider", "torch", "transformers")}


def today() -> str:
    """Return the date of a measurement, as 2026-11-22."""
    return datetime.date.today().isoformat()


def usable_device(name: str | torch.device) -> torch.device:
    """Return the device of this name; `auto` is CUDA if available, else the CPU.

    Raises:
        ValueError: PyTorch does not know the device, or this machine has none.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is unknown to PyTorch; use auto, cpu, cuda or cuda:1.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(name)!r}: PyTorch sees no CUDA device; use cpu.")
    if device.type == "cuda":  # no test tensor: it would take memory of the first GPU in every rank
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
    """Copy host values to a device; to a GPU through pinned memory, so that the host does not wait.

    Args:
        dtype: type for a sequence; None: PyTorch's choice. A tensor keeps its type.
    """
    import torch

    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def pinned_bytes(size: int) -> int:
    """Return the pinned memory that a tensor of `size` bytes takes: the next power of two.

    Source: PyTorch's CachingHostAllocator.h. The allocator keeps freed memory for tensors of the same power.
    """
    return 1 << (size - 1).bit_length() if size else 0


def to_host(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy GPU tensors to pinned memory with one wait; host tensors are returned unchanged."""
    import torch

    on_gpu = [value for value in values if value.is_cuda]
    if not on_gpu:
        return list(values)
    copies = [torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda) for value in values]
    for copy, value in zip(copies, values, strict=True):
        copy.copy_(value, non_blocking=True)
    torch.cuda.current_stream(on_gpu[0].device).synchronize()
    return copies


def dtype_name(dtype: torch.dtype | mx.Dtype) -> str:
    """Return the name of a PyTorch or MLX type in results, config.json and engines, such as bfloat16."""
    return str(dtype).rpartition(".")[2]


def default_dtype(device: str | torch.device) -> torch.dtype:
    """Return float32 for a CPU (most emulate bf16), bfloat16 otherwise."""
    import torch

    return torch.float32 if usable_device(device).type == "cpu" else torch.bfloat16


# glibc's mallopt parameters (malloc.h)
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def _default_threads() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    # torchrun sets it to 1 for several ranks if it is unset, which leaves cores idle.
    if threads.isdigit() and int(threads) and not (ranks > 1 and threads == "1"):
        return int(threads)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def set_up(threads: int | None) -> None:
    """Set the number of threads, quiet transformers, and tune oneDNN and malloc.

    `threads` None: $OMP_NUM_THREADS, else this rank's share of the cores that the process may use.
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
    """Raise TimeoutError inside a block that takes longer; a running call into C ends first.

    Raises:
        TimeoutError: the block took longer.
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
