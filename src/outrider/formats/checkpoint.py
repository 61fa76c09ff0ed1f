"""A drafter on disk: config.json and model.safetensors in an engine's dialect, outrider.json with how it was made.

    DIR/config.json         the dialect (formats/dialects.py)
    DIR/model.safetensors   the drafter's weights; `d2t` [Vd] (target id = i + d2t[i]) when the vocabulary is reduced
    DIR/outrider.json       our training metadata: recipe, target, steps, versions, held-out metrics

Embedding and LM head are the target's and are not stored twice. Writing is atomic.
"""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.drafters import DFlash
from outrider.formats.dialects import DIALECTS, dialect_of
from outrider.formats.files import atomic_directory, check_tensors, read_tensors

_SHARED = {"embed_tokens.weight", "lm_head.weight", "t2d"}  # engines may store these; ours come from the target


def versions() -> dict[str, str]:
    """Versions of the packages results depend on."""
    return {name: importlib.metadata.version(name) for name in ("outrider", "torch", "transformers")}


@dataclass(frozen=True)
class Checkpoint:
    """A drafter with its draft vocabulary (`draft_ids_Vd` None: the target's own) and metadata."""

    drafter: DFlash
    draft_ids_Vd: Tensor | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def save_drafter(checkpoint: Checkpoint, directory: Path) -> None:
    """Write a drafter atomically, in the dialect of its algorithm.

    Raises:
        OSError: the disk is full; nothing half-written is left.
    """
    drafter = checkpoint.drafter
    dialect = next(d for d in DIALECTS if d.drafter is type(drafter))
    tensors = drafter.folded_state_dict()
    if checkpoint.draft_ids_Vd is not None:
        ids = checkpoint.draft_ids_Vd
        tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
    with atomic_directory(directory) as staging:
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
        (staging / "config.json").write_text(json.dumps(dialect.to_config(drafter.config), indent=2) + "\n")
        (staging / "outrider.json").write_text(json.dumps(checkpoint.metadata, indent=2) + "\n")


def load_drafter(directory: str | Path, device: str | torch.device = "cpu") -> Checkpoint:
    """Read a drafter in any dialect we know.

    Raises:
        ValueError: not a drafter, another dialect, missing or unknown tensors, wrong shapes.
    """
    directory = Path(directory)
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise ValueError(f"{directory} has no config.json: give a drafter directory (outrider train writes one).")
    raw = _read_mapping(config_path)
    dialect = dialect_of(raw, config_path)
    try:
        config = dialect.from_config(raw)
    except KeyError as error:
        raise ValueError(f"{config_path}: the {dialect.name} dialect needs the field {error}.") from error
    found = read_tensors(directory / "model.safetensors")
    for name in _SHARED:
        found.pop(name, None)
    draft_ids = _draft_ids(found.pop("d2t", None), config.vocab_size, config.draft_vocab_size, directory)
    drafter = dialect.drafter(config)
    check_tensors(directory / "model.safetensors", found, drafter.state_dict())
    drafter.load_state_dict({name: tensor.float() for name, tensor in found.items()})
    metadata_path = directory / "outrider.json"
    metadata = _read_mapping(metadata_path) if metadata_path.is_file() else {}
    ids = None if draft_ids is None else draft_ids.to(device)
    return Checkpoint(drafter.to(device).eval().requires_grad_(False), ids, metadata)


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
        raise ValueError(f"{path}: not valid JSON ({error}).") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: not a JSON mapping of fields.")
    return raw


def _draft_ids(d2t_Vd: Tensor | None, vocab: int, draft_vocab: int, where: Path) -> Tensor | None:
    if d2t_Vd is None:
        if draft_vocab != vocab:
            raise ValueError(
                f"{where}: draft_vocab_size {draft_vocab} of {vocab} needs the tensor d2t, which is missing."
            )
        return None
    ids = d2t_Vd + torch.arange(len(d2t_Vd))
    if len(ids) != draft_vocab or ids.min() < 0 or ids.max() >= vocab:
        raise ValueError(
            f"{where}: d2t has {len(ids)} entries up to id {int(ids.max())}; config.json says {draft_vocab} of {vocab}."
        )
    return ids
