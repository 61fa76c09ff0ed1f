"""A drafter on disk: config.json and model.safetensors in its dialect, outrider.json with how it was made.

    DIR/config.json         in one of the dialects of checkpoints/dialects/
    DIR/model.safetensors   the drafter's weights; `d2t` [Vd] (target id = i + d2t[i]) when the vocabulary is reduced
    DIR/outrider.json       our training metadata: recipe, target, steps, versions, held-out metrics; later
                            `calibration` (calibration/collect.py), `candidates` (calibration/candidates.py) and
                            `recommended`
    DIR/README.md           a model card, where one was given

Embedding and LM head are the target's and are not stored twice; drafters of other makers may bring their own. Any
dialect is read (`load_checkpoint`), the method's own one is written (`save_drafter`, atomically); `outrider export`
writes the others (backends/export.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.checkpoints.dialects import dialect_for, dialect_of
from outrider.checkpoints.dialects.base import Dialect, DrafterWeights, ExportedCheckpoint, Source
from outrider.drafters.base import Drafter, DraftModule, Serving
from outrider.drafters.heads import CertaintyEstimator
from outrider.drafters.registry import method_of
from outrider.target.model import Target
from outrider.utils.files import (
    atomic_directory,
    check_tensors,
    read_mapping,
    read_weights,
    refuse_archive,
    write_atomically,
)
from outrider.utils.measure import dtype_name

METADATA = "outrider.json"


@dataclass(frozen=True)
class Checkpoint:
    """A drafter with its vocabulary and metadata.

    Attributes:
        draft_ids_Vd: the target's id of every draft token; None: the draft vocabulary is the target's.
        head: the drafter's own LM head, [Vd, H], or [M, Vd, H] with one for each of its M heads; None: the target's.
        embedding_VH: its own token embedding; None: the target's.
        embedding_scale: what embeddings are multiplied by, where the checkpoint says so; None: what the target does.
    """

    drafter: DraftModule
    draft_ids_Vd: Tensor | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    head: Tensor | None = None
    embedding_VH: Tensor | None = None
    embedding_scale: float | None = None

    def packed(self, target: Target, calibrated: bool = True) -> Drafter:
        """Ready to serve `target`; as `calibrated`, if it has been, confidences and candidates alike.

        Raises:
            ValueError: made for another target, or a calibration that does not fit the block.
        """
        serving = self.serving(calibrated).for_target(target)
        return self.drafter.serve(target, serving)

    def serving(self, calibrated: bool = True) -> Serving:
        """What it is served with besides its weights."""
        stored = _calibration(self.metadata) if calibrated else (None, None, None)
        accuracy = _accuracy(self.metadata) if calibrated else None
        return Serving(self.draft_ids_Vd, *stored, accuracy, self.head, self.embedding_VH, self.embedding_scale)

    def parts(self, dtype: torch.dtype = torch.float32) -> DrafterWeights:
        """The drafter as plain data, for a dialect to write; weights in `dtype`, taking raw aux hidden states."""
        tensors = {name: _cast(tensor, dtype) for name, tensor in self.drafter.folded_state_dict().items()}
        head, embedding_VH = (None if own is None else _cast(own, dtype) for own in (self.head, self.embedding_VH))
        config = self.drafter.config
        return DrafterWeights(config, tensors, self.draft_ids_Vd, head, embedding_VH, self.embedding_scale)


def save_drafter(
    checkpoint: Checkpoint, directory: Path, dtype: torch.dtype = torch.float32, card: str | None = None
) -> None:
    """Write a drafter atomically, in the dialect of its algorithm.

    Args:
        dtype: of the weights on disk; they are served in float32 whatever it is.
        card: text of README.md.

    Raises:
        OSError: the disk is full; nothing half-written is left.
    """
    written = dialect_for(method_of(checkpoint.drafter.algorithm)).write(checkpoint.parts(dtype), None)
    with atomic_directory(directory) as staging:
        write_files(staging, written, dtype, checkpoint.metadata, card)


def write_files(
    directory: Path, written: ExportedCheckpoint, dtype: torch.dtype, metadata: Mapping[str, Any], card: str | None
) -> None:
    """The files of a checkpoint, into a directory that is there."""
    config = {**written.config, "dtype": dtype_name(dtype)}
    tensors = {name: tensor.contiguous() for name, tensor in written.tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")
    if card is not None:
        (directory / "README.md").write_text(card, encoding="utf-8")


def read_metadata(directory: Path) -> dict[str, Any]:
    """outrider.json; {} where a drafter of another maker has none.

    Raises:
        ValueError: not a JSON mapping.
    """
    path = directory / METADATA
    return read_mapping(path) if path.is_file() else {}


def add_metadata(directory: Path, **fields: object) -> None:
    """Set fields of outrider.json: the old file or the new one is there at any moment, never half of one."""
    text = json.dumps({**read_metadata(directory), **fields}, indent=2) + "\n"
    write_atomically(directory / METADATA, text)


def load_checkpoint(
    directory: str | Path, device: str | torch.device = "cpu", num_target_layers: int | None = None
) -> Checkpoint:
    """Read a drafter in any dialect we know.

    Args:
        num_target_layers: of the target it will serve; some dialects do not state it.

    Raises:
        ValueError: not a drafter, another dialect, missing or unknown tensors, wrong shapes; the message names the
            file and the field or tensor.
    """
    directory = Path(directory)
    parts = read_parts(directory, num_target_layers)
    drafter = empty_module(parts, directory).to_empty(device=device)
    drafter.aux_scale_L.fill_(1)
    drafter.load_state_dict({name: _cast(tensor, torch.float32) for name, tensor in parts.tensors.items()})
    ids, head, embedding = (
        None if tensor is None else _cast(tensor, torch.float32).to(device)
        for tensor in (parts.draft_ids_Vd, parts.head, parts.embedding_VH)
    )
    drafter = drafter.eval().requires_grad_(False)
    return Checkpoint(drafter, ids, read_metadata(directory), head, embedding, parts.embedding_scale)


def load_drafter(directory: str | Path, target: Target) -> Drafter:
    """A drafter from its directory, ready to draft for `target`; its calibration is used if it has one.

    Raises:
        ValueError: see `load_checkpoint`, or it was made for another target.
    """
    return load_checkpoint(directory, target.device, target.num_layers).packed(target)


def read_parts(directory: Path, num_target_layers: int | None = None) -> DrafterWeights:
    """What config.json and the weights say, in our terms.

    Raises:
        ValueError: as `load_checkpoint`, but for the module's own tensors, which are not compared yet.
    """
    raw, dialect = read_config(directory)
    found = read_weights(directory)
    return dialect.read(raw, found, Source(str(directory / "config.json"), num_target_layers))


def empty_module(parts: DrafterWeights, directory: Path) -> DraftModule:
    """The module without memory, once the file's tensors are known to be its own.

    Raises:
        ValueError: tensors are missing, unknown, or of another shape than config.json implies.
    """
    with torch.device("meta"):
        drafter = parts.method.module(parts.config)
    check_tensors(directory, parts.tensors, drafter.state_dict())
    return drafter


def read_config(directory: Path) -> tuple[dict[str, Any], Dialect]:
    """config.json and the dialect it is written in.

    Raises:
        ValueError: there is none, it is not a mapping, or in no dialect we read.
    """
    refuse_archive(directory)
    path = directory / "config.json"
    if not directory.exists():
        raise ValueError(
            f"there is no directory {directory}: give a drafter directory (outrider train writes one), the name of a "
            "drafter that outrider models lists, or what else --drafter takes."
        )
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json: give a drafter directory (outrider train writes one).")
    raw = read_mapping(path)
    return raw, dialect_of(raw, path)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights in another type; what is not a weight (an index, a mask) as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _calibration(
    metadata: Mapping[str, Any],
) -> tuple[list[float] | None, list[float] | None, CertaintyEstimator | None]:
    """Temperatures, offsets and estimator; calibrations of old have temperatures only."""
    if "calibration" not in metadata:
        return None, None, None
    try:
        stored = metadata["calibration"]
        temperatures = [float(temperature) for temperature in stored["temperatures"]]
        offsets = [float(offset) for offset in stored.get("offsets") or []] or None
        estimator = None if stored.get("estimator") is None else CertaintyEstimator(**stored["estimator"])
        if estimator is not None and len(estimator.biases) != len(temperatures):
            raise ValueError(f"{len(estimator.biases)} biases for {len(temperatures)} positions")
        return temperatures, offsets, estimator
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{METADATA}: calibration has no list of temperatures, or offsets or an estimator of another kind "
            f"({error!r}); run outrider calibrate again."
        ) from error


def _accuracy(metadata: Mapping[str, Any]) -> list[list[float]] | None:
    """How often each candidate of each head is right; None where that was not measured."""
    if "candidates" not in metadata:
        return None
    try:
        return [[float(share) for share in row] for row in metadata["candidates"]["accuracy"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{METADATA}: candidates has no table of accuracies ({error!r}); run outrider calibrate again."
        ) from error
