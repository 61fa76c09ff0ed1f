"""Processes started by tests: torchrun, and waiting until a process has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import outrider

ROOT = Path(__file__).parents[2]


def gone(process: int) -> bool:
    """It has ended; zombies count, for nobody here is their parent."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def processes(path: Path) -> list[int]:
    return [int(word) for line in path.read_text().splitlines() for word in line.split()]


def wait_until_gone(ids: Sequence[int]) -> bool:
    for _ in range(1200):
        if all(gone(process) for process in ids):
            return True
        time.sleep(0.05)
    return False


def torchrun(*args: object, seconds: int = 1200) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc-per-node 2 ARGS` on this machine."""
    paths = [str(Path(outrider.__file__).parents[1]), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, args)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
