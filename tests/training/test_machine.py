"""What `auto` becomes: precision by measurement, threads from the environment, memory within the cgroup."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider.training import machine
from outrider.utils.measure import set_up, usable_device

CPU = torch.device("cpu")


def output_of(code: str, **environment: str) -> str:
    """What a new process prints."""
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("ratio", "dtype", "reason"),
    [
        (22.0, torch.float32, "take 22x as long"),
        (1.04, torch.float32, "take 1.0x as long"),
        (0.5, torch.bfloat16, "2.0x the products per second"),
    ],
)
def test_the_faster_precision_is_taken(
    monkeypatch: pytest.MonkeyPatch, ratio: float, dtype: torch.dtype, reason: str
) -> None:
    monkeypatch.setattr(machine, "bfloat16_ratio", lambda: ratio)
    found, why = machine.training_dtype(CPU)
    assert found == dtype and reason in why


def test_a_measurement_is_kept_by_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(machine, "bfloat16_ratio", lambda: calls.append(torch.get_num_threads()) or 3.0)
    for threads in (1, 1, 2, 1):
        torch.set_num_threads(threads)
        machine.training_dtype(CPU)
    assert calls == [1, 2]


@pytest.mark.parametrize("content", ["{not json", "[]", '{"a": "b"}'])
def test_a_damaged_or_unwritable_cache_is_no_error(monkeypatch: pytest.MonkeyPatch, cache: Path, content: str) -> None:
    monkeypatch.setattr(machine, "bfloat16_ratio", lambda: 3.0)
    cache.mkdir()
    (cache / "precision.json").write_text(content)
    assert machine.training_dtype(CPU)[0] == torch.float32
    monkeypatch.setenv("OUTRIDER_CACHE", str(cache / "precision.json" / "no directory"))
    assert machine.training_dtype(CPU)[0] == torch.float32


def test_a_processor_without_bfloat16_products_trains_in_float32(cache: Path) -> None:
    code = "import torch; from outrider.training.machine import *; print(*training_dtype(torch.device('cpu')))"
    said = output_of(code, ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2", OUTRIDER_CACHE=str(cache))
    assert said.startswith("torch.float32 bfloat16 products take "), said


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3,1"}, 3),
        ({"OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "2"}, 3),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, 4),  # torchrun's own default
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "many"}, 8),
        ({}, 8),
    ],
)
def test_threads_are_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], threads: int
) -> None:
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    set_up(None)
    set_up(5)
    assert chosen == [threads, 5]


def test_automatic_device_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert usable_device("auto").type == kind


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("0::/", {}, 8000),
        ("0::/", {"memory.max": "max", "memory.current": "5"}, 8000),
        ("0::/", {"memory.max": "5000", "memory.current": "4000", "memory.stat": "anon 9\ninactive_file 300"}, 1300),
        ("0::/a/b", {"memory.max": "7000", "a/memory.max": "3000", "a/memory.current": "1000"}, 2000),
        ("0::/", {"memory.max": "5000", "memory.current": "6000"}, 0),
        (
            "4:cpu,memory:/x\n0::/",
            {"memory/x/memory.limit_in_bytes": "900", "memory/x/memory.usage_in_bytes": "200"},
            700,
        ),
    ],
)
def test_free_memory_respects_the_cgroups_limit(tmp_path: Path, groups: str, files: dict[str, str], free: int) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert machine.free_memory_bytes(tmp_path) == (free * 1024 if free == 8000 else free)


def test_features_take_a_quarter_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 8000)
    assert machine.feature_cache_bytes("auto") == 2000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.feature_cache_bytes("auto") == 500
    assert machine.feature_cache_bytes(0.5) == 2**29


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the C library has no malloc_trim")
def test_memory_that_is_free_between_what_is_kept_is_given_back() -> None:
    code = """
import torch
from outrider.training.machine import release_free_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
before = resident()
blocks = [torch.ones(2**14) for _ in range(3200)]  # 64 KiB each, which come from the heap
kept = blocks[::32]
del blocks
grown = resident() - before
release_free_memory(2**40)
untouched = resident() - before
release_free_memory(2**20)
print(grown, untouched, resident() - before)
"""
    grown, untouched, left = map(float, output_of(code).split())
    assert grown > 150 and left < 50, "200 MiB were used, 6 are kept"
    assert untouched > 150, "a process that grew by less keeps its huge pages"
