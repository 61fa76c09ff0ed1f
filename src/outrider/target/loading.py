"""Load the weights of a target, and refuse files that would load as another model.

    config.json --check_config--> config --outline--> module without weights
                                                         | names and shapes against the safetensors headers
                                                         v
                                    transformers' from_pretrained --> no tensor is missing, all are finite

transformers fills missing tensors with random numbers, omits tensors of layers that config.json does not count, and
converts integers to floats. All three give a model with wrong outputs; here they are errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
)
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import Mxfp4Config

from outrider.utils.documents import read_mapping
from outrider.utils.files import StoredTensor, check_finite, stored_tensors

# Bounds far above any model, far below anything that overflows a shape or never ends.
_WIDEST = 2**20
_LARGEST = {
    "num_hidden_layers": 2**10,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**40,
    "sliding_window": 2**40,
}
_POSITIVE = (
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_SIZE = re.compile(r"^(num|n|top_k)_|_(size|dim|rank|heads|layers|experts)$")
_FLOATS = ("F64", "F32", "BF16", "F16")
_DECODER_LAYER = re.compile(r"^(model\.|language_model\.)*layers\.\d+\.")
_MOST_NAMED = 3


def check_config(fields: Mapping[str, Any], path: Path) -> None:
    """Check the fields of a language model's config that determine its shapes and arithmetic.

    Args:
        fields: fields of config.json, or with transformers' defaults; a multimodal config is checked in `text_config`.
        path: path of config.json, for messages.

    Raises:
        ValueError: a field is out of range, has the wrong type, or contradicts another; the message names it.
    """

    def refuse(name: str, value: object, wanted: str) -> ValueError:
        return ValueError(f"{path}: {name} is {value!r}; it must be {wanted}.")

    section = fields.get("text_config")
    fields = section if isinstance(section, Mapping) else fields
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise refuse(name, value, "a finite number")
        low, high = int(name in _POSITIVE), _LARGEST.get(name, _WIDEST)
        sized = name in _POSITIVE or (type(value) is int and (name in _LARGEST or _SIZE.search(name)))
        if sized and value is not None and (type(value) is not int or not low <= value <= high):
            raise refuse(name, value, f"an integer from {low} to {high}")
    heads, shared, width = map(fields.get, ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if heads and shared and heads % shared:
        raise refuse("num_key_value_heads", shared, f"a divisor of num_attention_heads, {heads}")
    if width and width % 2:
        raise refuse("head_dim", width, "even: rotary embeddings turn pairs")
    for name in ("hidden_act", "hidden_activation"):
        activation = fields.get(name)
        if activation is not None and (not isinstance(activation, str) or activation not in ACT2FN):
            raise refuse(name, activation, "an activation that transformers knows, such as silu")
    eps = fields.get("rms_norm_eps")
    if eps is not None and (not isinstance(eps, int | float) or eps < 0):
        raise refuse("rms_norm_eps", eps, "a number of at least 0")
    for rope in _ropes(fields.get("rope_parameters")):
        kind = rope.get("rope_type", "default")
        if not isinstance(kind, str) or kind not in ("default", *ROPE_INIT_FUNCTIONS):
            raise refuse("rope_type", kind, f"one of default, {', '.join(ROPE_INIT_FUNCTIONS)}")
        for name in ("rope_theta", "factor"):
            value = rope.get(name)
            if value is not None and (not isinstance(value, int | float) or not 0 < value < math.inf):
                raise refuse(f"rope_parameters.{name}", value, "a number above 0")
    end_tokens(fields.get("eos_token_id"), path)


def end_tokens(value: object, path: Path) -> frozenset[int]:
    """Parse `eos_token_id`: null, an id or a list of ids.

    Raises:
        ValueError: it is something else.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise ValueError(f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them.")
    return frozenset(ids)


def generation_config(directory: Path) -> GenerationConfig:
    """Read generation_config.json of a model's directory; transformers' defaults if it is absent.

    Raises:
        ValueError: the file is damaged.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return GenerationConfig()
    read_mapping(path)
    try:
        config: GenerationConfig = GenerationConfig.from_pretrained(directory)
    except Exception as error:  # ValueError, TypeError, and what validates its fields
        raise ValueError(f"{path} is no generation config that transformers knows: {_reason(error)}") from error
    end_tokens(config.eos_token_id, path)
    return config


def _ropes(parameters: object) -> Iterable[Mapping[str, Any]]:
    """Yield the RoPE parameters of every layer type; they are nested if types differ."""
    if isinstance(parameters, Mapping):
        nested = [value for value in parameters.values() if isinstance(value, Mapping)]
        yield from nested or [parameters]


def auto_class(config: PretrainedConfig) -> Any:
    """transformers' class that makes models of this config; some multimodal ones, as Kimi-K2.5, have no causal LM."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def outline_model(config: PretrainedConfig, directory: Path) -> Any:
    """Build transformers' model on the meta device: names and shapes of its tensors, without memory.

    Raises:
        ValueError: transformers cannot build it; the message has the reason.
    """
    try:
        with torch.device("meta"):
            return auto_class(config).from_config(config, trust_remote_code=False)
    except Exception as error:  # its modules raise KeyError, TypeError, RuntimeError, ...
        raise ValueError(f"{directory / 'config.json'}: transformers cannot build it: {_reason(error)}") from error


def load_model(config: PretrainedConfig, directory: Path, dtype: torch.dtype | str) -> Any:
    """Load transformers' causal LM from a model directory to the CPU; MXFP4 weights are dequantised.

    Args:
        dtype: type of the weights; "auto": the type on disk.

    Raises:
        ValueError: the weights are not readable safetensors, do not match config.json, have an unsupported
            quantisation, or are not finite; the message names the file and the tensor.
    """
    method = _quantisation(config, directory)
    stored = stored_tensors(directory)
    _check_stored(outline_model(config, directory), directory, stored=stored, quantised=method is not None)
    # gpt-oss is published in MXFP4, whose kernels round differently for other numbers of rows.
    plain = {"quantization_config": Mxfp4Config(dequantize=True)} if method == "mxfp4" else {}
    progress, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # its report of mismatches becomes our error
    try:
        loaded = auto_class(config).from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are reported below; otherwise only a log names them
            output_loading_info=True,
            **plain,
        )
    except Exception as error:  # ImportError if the library of a quantisation is missing, and many others
        how = f"{method} weights" if method else "weights"
        raise ValueError(f"{directory}: transformers cannot load its {how}: {_reason(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        if progress:
            transformers_logging.enable_progress_bar()
    model, report = loaded
    _check_report(report, directory, method is not None)
    check_finite(directory, {**dict(model.named_parameters()), **dict(model.named_buffers())})
    return model


def _check_stored(outline: Any, directory: Path, stored: Mapping[str, StoredTensor], quantised: bool) -> None:
    """Check the headers of weight files against a model's outline, before memory is allocated.

    Names that transformers renames are skipped here; missing tensors are detected after loading.

    Raises:
        ValueError: a tensor has another shape or is no float, or the files hold too few parameters.
    """
    implied: dict[str, Tensor] = outline.state_dict()
    for name, tensor in implied.items():
        header = stored.get(name)
        if header is None or quantised:
            continue
        if header.shape != list(tensor.shape):
            raise ValueError(
                f"{header.path}: {name} has shape {header.shape}, config.json implies {list(tensor.shape)}."
            )
        if tensor.is_floating_point() and header.kind not in _FLOATS:
            raise ValueError(
                f"{header.path}: {name} is of type {header.kind}, and config.json has no quantization_config: fetch "
                "the model's files again, or a model that is not quantised."
            )
    implied_size = sum(parameter.numel() for parameter in outline.parameters())
    stored_size = sum(math.prod(header.shape) for header in stored.values())
    # One int32 holds 16 weights of two bits. Without quantisation loading names the missing tensors, up to half.
    if implied_size > stored_size * (16 if quantised else 2):
        raise ValueError(
            f"{directory}: config.json implies {implied_size:,} parameters, far more than the {stored_size:,} elements "
            "of its weight files: they belong to different models. Fetch both again."
        )


def _check_report(report: Mapping[str, Any], directory: Path, quantised: bool) -> None:
    """Check transformers' report of loading: no tensor was initialised, and no layer was omitted.

    Raises:
        ValueError: a tensor is missing, unused or mismatched; the message names it.
    """
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        raise ValueError(f"{directory}: {name} has shape {list(stored)}, config.json implies {list(wanted)}.")
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{directory} lacks {_named(missing)}: the checkpoint is incomplete or does not match its config.json. "
            "Fetch or save it again."
        )
    # Vision towers, heads of other tasks and draft modules may be there; layers of this decoder may not.
    left_out = sorted(name for name in report["unexpected_keys"] if _DECODER_LAYER.match(name))
    if left_out and not quantised:
        raise ValueError(
            f"{directory} has {_named(left_out)}, which its config.json has no place for. Fetch the config.json that "
            "belongs to the weights."
        )


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {', '.join(names[:_MOST_NAMED])}{more}"


def _quantisation(config: PretrainedConfig, directory: Path) -> str | None:
    """Return `quant_method` of a quantised model; None if it is not quantised.

    Raises:
        ValueError: transformers does not know the method, and would read the stored numbers as plain weights.
    """
    sections = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))
    section: Any = next(filter(None, sections), None)
    if section is None:
        return None
    fields = section if isinstance(section, Mapping) else {"quant_method": section}
    if fields.get("load_in_4bit") or fields.get("load_in_8bit"):
        return "bitsandbytes"
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        known = ", ".join(name for name in AUTO_QUANTIZATION_CONFIG_MAPPING if not name.startswith("bitsandbytes"))
        raise ValueError(
            f"{directory / 'config.json'}: quantization_config.quant_method is {method!r}; it must be one of {known}, "
            "or bitsandbytes with load_in_4bit or load_in_8bit. Or give a model that is not quantised."
        )
    return method


def _reason(error: Exception) -> str:
    """Shorten an error of transformers to one line."""
    text = " ".join(str(error).split())
    return text[:300] if text else type(error).__name__
