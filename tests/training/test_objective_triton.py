"""The Triton kernel against the torch row reduction: in Triton's interpreter, compiled for a GPU, and on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider.drafters.fused_loss import reduce_rows, row_reducer

CASES = Path(__file__).parents[1] / "toys" / "triton_cases.py"
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from outrider.drafters.fused_loss_triton import _rows

scalars = "lse:*fp32 label:*i64 argmax:*i64 ce_weight:*fp32 l1_weight:*fp32 kl_weight:*fp32 soft_weight:*fp32 "
scalars += "ce:*fp32 distance:*fp32 kl:*fp32 soft:*fp32 agreement:*i8"
for kind in ("fp32", "bf16"):
    types = dict(pair.split(":") for pair in f"z:*{kind} t:*{kind} shift:*{kind} {scalars}".split())
    signature = {f"{name}_ptr": kind for name, kind in types.items()} | {"V": "i32", "softcap": "fp32"}
    constants = {"CAPPED": True, "DIVERGENCE": True, "SOFT": True, "NEEDS_GRAD": True, "BLOCK": 4096}
    source = ASTSource(fn=_rows, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    for capability in (80, 90, 100):
        made = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
        assert made.asm["cubin"] and f"sm_{capability}" in made.asm["ptx"]
"""


def run(*arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_interpreted_kernel_equals_the_reference() -> None:
    pytest.importorskip("triton", reason="Triton has packages for Linux only")
    run(str(CASES), "cpu", TRITON_INTERPRET="1")


@pytest.mark.slow
def test_the_kernel_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """A100, H100 and B200."""
    pytest.importorskip("triton", reason="Triton has packages for Linux only")
    run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_equals_the_reference_on_a_gpu() -> None:
    assert row_reducer(torch.empty(1, 1, device="cuda")) is not reduce_rows
    run(str(CASES), "cuda")


def test_the_cpu_takes_the_reference() -> None:
    assert row_reducer(torch.empty(1, 1)) is reduce_rows
