"""Resolves `auto` on this machine: the faster precision of training, and memory for features.

    precision   CPU: float32 and bfloat16 matrix products are timed once, with the threads in use; CUDA: as PyTorch says
    memory      a quarter of the free memory, within the limits of this cgroup

Processors without bfloat16 products emulate them: a training step then takes more than twenty times as long.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
from pathlib import Path

import torch

from outrider.utils.documents import read_json
from outrider.utils.files import cache_dir, write_atomically
from outrider.utils.measure import machine

# A training step is not products alone: casts and float32 parts make a smaller gain no gain.
_WORTH_IT = 0.8
_ROWS, _WIDTH = 512, 1024  # of the product that is timed: about a GFLOP
_SECONDS = 0.2  # at least one product of each type, and more while there is time
# Of free memory, for each of the training and the held-out features.
_MEMORY_SHARE = 0.25


def training_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """The type in which training is faster on a device, and the reason in a few words.

    On a CPU it is measured in about a second the first time; the result is kept in the user's cache directory.
    """
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return (torch.bfloat16, "this GPU computes it") if native else (torch.float32, "this GPU lacks bfloat16")
    if device.type != "cpu":
        return torch.float32, "bfloat16 is measured on CPUs only"
    ratio = _cached_ratio()
    if ratio <= _WORTH_IT:
        return torch.bfloat16, f"{1 / ratio:.1f}x the products per second of float32 on this processor"
    return torch.float32, f"bfloat16 products take {ratio:.{0 if ratio >= 10 else 1}f}x as long on this processor"


def bfloat16_ratio() -> float:
    """Seconds of a bfloat16 matrix product over those of a float32 one, with the present number of threads."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(_ROWS, _WIDTH, generator=generator)
    right = torch.randn(_WIDTH, _WIDTH, generator=generator)
    return _seconds(left.bfloat16(), right.bfloat16()) / _seconds(left, right)


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    """Seconds of the fastest of several products; the first one sets up kernels."""
    times: list[float] = []
    began = time.perf_counter()
    with torch.no_grad():
        while len(times) < 2 or time.perf_counter() - began < _SECONDS:
            started = time.perf_counter()
            torch.nn.functional.linear(left, right)
            times.append(time.perf_counter() - started)
    return min(times)


def _cached_ratio() -> float:
    """`bfloat16_ratio`, kept in the user's cache directory by processor, threads and version of PyTorch."""
    # Environment variables can take instructions from ATen and oneDNN that the processor has.
    limits = torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    key = " | ".join(map(str, (machine()["cpu"], *limits, torch.__version__, torch.get_num_threads())))
    path = cache_dir() / "precision.json"
    stored: object = {}
    with contextlib.suppress(OSError, ValueError):
        stored = read_json(path)
    ratios = dict(stored) if isinstance(stored, dict) else {}
    ratio = ratios.get(key)
    if not isinstance(ratio, float):
        ratio = ratios[key] = bfloat16_ratio()
        with contextlib.suppress(OSError):  # a read-only home: measured again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(ratios, indent=1))
    return ratio


def feature_cache_bytes(gigabytes: float | str) -> int:
    """Bytes that features may take in memory; `auto` is a quarter of the free memory, shared with the other ranks."""
    if isinstance(gigabytes, str):
        return int(_MEMORY_SHARE * free_memory_bytes()) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return int(gigabytes * 2**30)


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can be taken without swapping: the system's, or less where a cgroup of this process allows less.

    Where the system does not say (no /proc), half of the physical memory.

    Args:
        root: of the file system that is read.
    """
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if hasattr(os, "sysconf") else 2**32
    return max(0, min([free, *_cgroup_free(root)]))


def _cgroup_free(root: Path) -> list[int]:
    """Bytes left in each cgroup, v2 or v1, that this process is in and that has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:  # "0::/a/b" in v2, "4:memory:/a/b" in v1
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = top / path.lstrip("/")
        for place in (group, *group.parents):
            if not place.is_relative_to(top):
                break
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                limit, used = (int((place / name).read_text(encoding="ascii")) for name in names)
                found.append(limit - used + _reclaimable(place))
    return found


def _reclaimable(group: Path) -> int:
    """File pages that count as used and are dropped when memory is needed."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        fields = ("inactive_file", "total_inactive_file")
        return max(int(line.split()[1]) for line in lines if line.split()[0] in fields)
    return 0


_resident = 0  # bytes that the process had when it last gave memory back


def release_free_memory(growth: int) -> None:
    """Give back memory that is free inside the heap, where the C library can (glibc): else only its end shrinks.

    Done once the process has grown by `growth` bytes since it was last done, for it has a price: heaps of huge pages
    end in small ones, and all that reads memory is then slower for the rest of the process.
    """
    global _resident
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        return
    if _resident_bytes() - _resident > growth:
        libc.malloc_trim(0)
        _resident = _resident_bytes()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
