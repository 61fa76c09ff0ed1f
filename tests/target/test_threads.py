"""Two threads beside other work: OpenMP's threads must not spin on the core that the other one needs."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

import outrider

_PRODUCTS = """
import time, {module}, torch
torch.set_num_threads({threads})
a = torch.randn(8, 576)
b = torch.randn(576, 1536)
for _ in range(50): a @ b
ends, count = time.perf_counter() + 4, 0
while time.perf_counter() < ends:
    a @ b
    count += 1
print(count)
"""


def products(module: str, threads: int) -> int:
    """Small matrix products in four seconds, as a step of decoding has them."""
    environment = {name: value for name, value in os.environ.items() if name != outrider.SPIN}
    command = [sys.executable, "-c", _PRODUCTS.format(module=module, threads=threads)]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.timed
@pytest.mark.skipif((os.cpu_count() or 1) > 4, reason="a few busy processes leave cores free here")
def test_two_threads_beside_busy_processes_are_no_slower_than_one() -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * (os.cpu_count() or 1))]
    try:
        time.sleep(1)
        ours, one, spinning = products("outrider", 2), products("outrider", 1), products("sys", 2)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"two threads {ours}, one {one}, two that spin {spinning}")
    assert ours > 0.4 * one and ours > 1.5 * spinning
