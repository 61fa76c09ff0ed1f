"""Paged attention: its kernels in Triton's interpreter, compiled for GPUs and on one; and how its work is divided."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.target.attention import Branches
from outrider.target.paged_attention import Reader, bits_of, most_items, plan, tile_rows

CASES = Path(__file__).parents[1] / "toys" / "paged_cases.py"
ROOT = Path(__file__).parents[2]
SHARED_MEMORY = 99 * 1024  # bytes of a block on the smallest of GPUs since 2020
COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from outrider.target.paged_attention_triton import _attend, _combine

def signature(kernel, kind, constants):
    types = {"q": kind, "keys": kind, "values": kind, "out": kind, "sinks": "fp32", "sums": "fp32", "stats": "fp32"}
    names = [name for name in kernel.arg_names if name not in constants]
    found = {name: "*" + types.get(name[:-4], "i64") if name.endswith("_ptr") else "i32" for name in names}
    found |= {name: "fp32" for name in ("scale", "softcap") if name in found}
    return found | dict.fromkeys(constants, "constexpr")

shapes = {"GROUPS": 5, "DIM": 128, "SINKS": True, "ROWS": 64, "DIMS": 128}
options = dict.fromkeys(("WINDOW", "CAPPED"), True) | {"DRAFTS": False, "WIDEN": False, "PAGE": 16, "KEYS": 64}
for kernel, constants in ((_attend, shapes | options), (_combine, shapes | {"QUERIES": 8})):
    source = ASTSource(fn=kernel, signature=signature(kernel, "bf16", constants), constexprs=constants)
    for capability in (80, 90, 100):
        made = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_stages": 2})
        assert made.asm["cubin"] and f"sm_{capability}" in made.asm["ptx"]
        assert made.metadata.shared <= int(sys.argv[1]), (kernel, capability, made.metadata.shared)
"""


def run(*arguments: str, **environment: str) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]


def test_the_interpreted_kernels_equal_dense_attention() -> None:
    pytest.importorskip("triton", reason="Triton has packages for Linux only")
    run(str(CASES), "cpu", TRITON_INTERPRET="1")


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """A100, H100 and B200."""
    pytest.importorskip("triton", reason="Triton has packages for Linux only")
    run("-c", COMPILE, str(SHARED_MEMORY), TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_equal_dense_attention_on_a_gpu() -> None:
    run(str(CASES), "cuda")


@pytest.mark.parametrize("groups", [1, 3, 4, 8, 16])
def test_each_key_is_read_once(groups: int) -> None:
    """By requests of as many rows as a tile holds; a longer one reads them once a tile."""
    tokens = tile_rows(groups) // groups
    shapes = [(0, 1), (5000, 1), (255, 2), (256, min(8, tokens)), (70, tokens), (1000, 2 * tokens)]
    readers = [Reader(past, range(past, past + rows), range(400)) for past, rows in shapes]
    items = plan(readers, groups, 16)
    start, end = items.sizes.lengths[0] + items.sizes.lengths[1], sum(items.sizes.lengths[:3])
    items_W4 = items.numbers[start:end].reshape(-1, 4)
    read = np.bincount(items_W4[:, 0], weights=items_W4[:, 3] - items_W4[:, 2])
    tiles = [1, 1, 1, 1, 1, 2]
    assert read.tolist() == [tile * reader.end for tile, reader in zip(tiles, readers, strict=True)]
    assert items.split and (items_W4[:, 3] > items_W4[:, 2]).all()


def test_many_requests_have_no_more_items_than_their_rows_and_chunks_allow() -> None:
    readers = [Reader(past, [past], range(7000)) for past in range(100, 100_000, 999)]
    host = plan(readers, 4, 16)
    assert len(readers) < host.sizes.items <= most_items(len(readers))


def test_bits_of_a_tree_of_64_rows() -> None:
    parents = [-1, *range(63)]
    assert bits_of(Branches.of(parents)).view(np.uint64).tolist() == [2 ** (row + 1) - 1 for row in range(64)]
