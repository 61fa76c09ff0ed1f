"""What exports state about a target, read from its files without loading the model: two tensors and config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.drafters.serving import check_embedding_scale
from outrider.formats.dialect import Parts, TargetFacts
from outrider.formats.fields import MOST_LAYERS, Fields
from outrider.formats.files import read_mapping, weight_files
from outrider.target.families import FAMILIES
from outrider.target.resolve import canonical_id, resolve_model


def target_facts(id_or_dir: str, dtype: torch.dtype) -> TargetFacts:
    """Name, architecture, depth, embedding and LM head of a target; tensors in `dtype`.

    Raises:
        ValueError: no such model, or its files lack one of these.
    """
    directory = resolve_model(id_or_dir)
    raw = read_mapping(directory / "config.json")
    inner = raw.get("text_config") or raw  # multimodal models keep the language model's fields in a section
    fields = Fields(inner, str(directory / "config.json"), "Hugging Face")
    embedding_VH = _tensor(directory, "embed_tokens.weight")
    head_VH = _tensor(directory, "lm_head.weight")
    if embedding_VH is None:
        raise ValueError(f"{directory}: no tensor is named *embed_tokens.weight; exports need the target's embedding.")
    return TargetFacts(
        name_or_path=canonical_id(id_or_dir),
        architectures=Fields(raw, fields.where, fields.dialect).texts("architectures"),
        num_layers=fields.integer("num_hidden_layers", high=MOST_LAYERS),
        embedding_VH=embedding_VH.to(dtype),
        head_VH=(embedding_VH if head_VH is None else head_VH).to(dtype),  # tied where there is none
        embedding_scale=_embedding_scale(inner, embedding_VH.dtype),
    )


def check_target(parts: Parts, target: TargetFacts) -> None:
    """The drafter was made for a target of these shapes.

    Raises:
        ValueError: it was not.
    """
    config = parts.config
    vocab, hidden = target.embedding_VH.shape
    for name, theirs in (("vocab_size", vocab), ("hidden_size", hidden), ("num_target_layers", target.num_layers)):
        if getattr(config, name) != theirs:
            raise ValueError(
                f"this drafter was made for another target: {name} is {getattr(config, name)}, "
                f"{target.name_or_path} has {theirs}; name the target it was trained on (--target)."
            )
    check_embedding_scale(parts.embedding_scale, target.embedding_scale, target.name_or_path)


def embedding_factor(id_or_dir: str) -> float:
    """By what a target multiplies its embeddings, from its config.json alone.

    Raises:
        ValueError: no such model.
    """
    raw = read_mapping(resolve_model(id_or_dir, weights=False) / "config.json")
    return _embedding_scale(raw.get("text_config") or raw, torch.float32)


def _embedding_scale(config: Mapping[str, Any], dtype: torch.dtype) -> float:
    """As `Target` has it when loaded in that type; exports do not ask for a family that can be loaded."""
    for family in FAMILIES:
        if family.model_type == config.get("model_type"):
            return family.embedding_scale(int(config["hidden_size"]), dtype)
    return 1.0


def _tensor(directory: Path, name: str) -> Tensor | None:
    """The tensor of that name, with whatever prefix; None if there is none."""
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                found = [key for key in file.keys() if key == name or key.endswith("." + name)]  # noqa: SIM118
                if found:
                    return _shortest(file, found)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file ({error}).") from error
    return None


def _shortest(file: Any, names: Sequence[str]) -> Tensor:
    tensor = file.get_tensor(min(names, key=len))
    assert isinstance(tensor, Tensor)
    return tensor
