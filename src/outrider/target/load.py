"""From an id or a directory to a `Target`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import Mxfp4Config

from outrider.target.families import family_of
from outrider.target.model import Target
from outrider.target.resolve import resolve_model, usable_device


def count_layers(id_or_dir: str) -> int:
    """Decoder layers of a model, read from its config alone.

    Raises:
        ValueError: the model cannot be found.
    """
    return int(AutoConfig.from_pretrained(resolve_model(id_or_dir, weights=False)).get_text_config().num_hidden_layers)


def load_target(
    id_or_dir: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    place: Callable[[Any], None] = lambda model: None,
) -> Target:
    """Load a Hugging Face causal LM as a frozen target; MXFP4 weights are dequantised.

    Args:
        id_or_dir: a local directory, a hub id, or "SmolLM2-135M-Instruct" (see target/resolve.py).
        dtype: float32 on a CPU (most emulate bf16, see linear.py); bfloat16 is usual on a GPU.
        place: called with the model before it moves to `device`, to shard its layers.

    Raises:
        ValueError: the model or the device cannot be found, or its family is not supported.
    """
    device = usable_device(device)
    path = resolve_model(str(id_or_dir))
    config = AutoConfig.from_pretrained(path)
    family_of(config.get_text_config())  # refuse before reading gigabytes
    quantized = getattr(config, "quantization_config", None) or {}
    # gpt-oss is published in MXFP4; its kernels would round otherwise for other numbers of rows.
    plain = {"quantization_config": Mxfp4Config(dequantize=True)} if quantized.get("quant_method") == "mxfp4" else {}
    progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **plain)
        place(model)
        model.to(device)
    finally:
        if progress:
            transformers_logging.enable_progress_bar()
    return Target(model, AutoTokenizer.from_pretrained(path), name=str(id_or_dir))
