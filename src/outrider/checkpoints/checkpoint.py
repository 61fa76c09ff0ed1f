"""Read and write drafters: config.json and model.safetensors in a dialect, outrider.json with training metadata.

    DIR/config.json         in one of the dialects of checkpoints/dialects/
    DIR/model.safetensors   the drafter's weights; `d2t` [Vd] (target id = i + d2t[i]) when the vocabulary is reduced
    DIR/outrider.json       our training metadata: recipe, target, steps, versions, held-out metrics; later
                            `calibration` and `candidates` (evaluation/calibration/) and `recommended`
    DIR/README.md           a model card, if given

Embedding and LM head are the target's and are not stored twice; drafters of other makers may bring their own.
`load_checkpoint` reads every dialect; `save_drafter` writes the method's dialect, atomically; `outrider export` writes
the others (backends/export.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors.torch import save_file

from outrider.checkpoints.dialects.base import Dialect, ExportedCheckpoint, Source
from outrider.checkpoints.registry import dialect_of, method_of
from outrider.drafters.base import DraftCalibration, Drafter, DrafterWeights
from outrider.drafters.confidence import UNSCALED, CertaintyEstimator, ConfidenceScaling, SampledScaling
from outrider.target.model import Target
from outrider.utils.documents import read_mapping
from outrider.utils.files import (
    atomic_directory,
    check_finite,
    invalid_fields,
    read_weights,
    refuse_archive,
    write_atomically,
)
from outrider.utils.measure import dtype_name, usable_device
from outrider.utils.packaged import packaged

METADATA = "outrider.json"
FORMAT = 1  # format number of outrider.json; raised when a field changes its name or meaning
CALIBRATION, SAMPLED_CALIBRATION = "calibration", "calibration_sampled"  # sections of outrider.json: greedy and sampled
Section = TypeVar("Section", bound=BaseModel)
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


@dataclass(frozen=True)
class Checkpoint:
    """A drafter as stored on disk: its weights, and the contents of outrider.json."""

    weights: DrafterWeights
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        """Config of the drafter."""
        return self.weights.config

    @property
    def algorithm(self) -> str:
        """Name of the method."""
        return self.weights.algorithm

    @property
    def calibration(self) -> DraftCalibration:
        """Calibration of confidences and candidates, from outrider.json.

        Raises:
            ValueError: a field is missing or invalid; the message names it.
        """
        greedy = _section(self.metadata, CALIBRATION, _Calibration)
        sampled = _section(self.metadata, SAMPLED_CALIBRATION, _SampledCalibration)
        candidates = _section(self.metadata, "candidates", _Candidates)
        accuracy = None if candidates is None else candidates.accuracy
        if sampled is None or greedy is None:  # a single calibration serves all requests
            only = sampled or greedy
            return DraftCalibration(UNSCALED if only is None else only.scaling(), accuracy=accuracy)
        other = SampledScaling(sampled.sampling.temperature, sampled.scaling())
        return DraftCalibration(greedy.scaling(), other, accuracy=accuracy)

    def serve(self, target: Target) -> Drafter:
        """Make a drafter for `target` with the stored calibration; `weights.serve` ignores it.

        Raises:
            ValueError: the drafter was made for another target, or its calibration does not fit it.
        """
        return self.weights.serve(target, self.calibration)


def save_drafter(
    checkpoint: Checkpoint, directory: Path, dtype: torch.dtype = torch.float32, card: str | None = None
) -> None:
    """Write a drafter atomically, in the dialect of its algorithm.

    Args:
        dtype: type of the weights on disk; serving converts them to float32.
        card: text of README.md.

    Raises:
        OSError: the disk is full; no partial files remain.
    """
    written = method_of(checkpoint.algorithm).saved_in.write(checkpoint.weights.folded(dtype), None)
    with atomic_directory(directory) as staging:
        write_files(staging, written, dtype, metadata=checkpoint.metadata, card=card)


def write_files(
    directory: Path, written: ExportedCheckpoint, dtype: torch.dtype, metadata: Mapping[str, Any], card: str | None
) -> None:
    """Write the files of a checkpoint into an existing directory."""
    config = {**written.config, "dtype": dtype_name(dtype)}
    tensors = {name: tensor.contiguous() for name, tensor in written.tensors.items()}
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
    # safetensors refuses tensors that share memory, as embedding and LM head of a tied target do.
    tensors = {name: t if names[t.data_ptr()] == name else t.clone() for name, t in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / METADATA).write_text(_metadata_text(metadata))
    if card is not None:
        (directory / "README.md").write_text(card, encoding="utf-8")


def _metadata_text(metadata: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, **metadata}, indent=2) + "\n"


def read_metadata(directory: Path) -> dict[str, Any]:
    """Read outrider.json without its format number; {} if the drafter has none (other makers).

    Raises:
        ValueError: it is no JSON mapping, has another format, or a field has the wrong type.
    """
    path = directory / METADATA
    if not os.path.lexists(path):
        return {}
    metadata = read_mapping(path)
    number = metadata.pop("format", None)
    if type(number) is not int or number != FORMAT:
        raise ValueError(
            f"{path}: format is {number!r}; this version reads format {FORMAT}. Train or package the drafter again, or "
            "delete the file to serve the weights without calibration."
        )
    try:
        _Metadata.model_validate(metadata)
    except ValidationError as error:
        raise ValueError(f"{path}: {invalid_fields(error)[0]}; correct it, or delete the file.") from error
    return metadata


def add_metadata(directory: Path, **fields: object) -> None:
    """Set fields of outrider.json, atomically."""
    write_atomically(directory / METADATA, _metadata_text({**read_metadata(directory), **fields}))


def load_checkpoint(
    directory: str | Path, device: str | torch.device = "cpu", num_target_layers: int | None = None
) -> Checkpoint:
    """Read a drafter in any known dialect, from its directory or, if it is packaged, by its name.

    Args:
        num_target_layers: layers of the target, for dialects that do not state them.

    Raises:
        ValueError: it is no drafter, its dialect is unknown, or a tensor is missing, unknown, not finite, or has the
            wrong shape or type; the message names the file and the field or tensor.
    """
    directory = packaged(directory, "models")
    weights = load_weights(directory, num_target_layers).folded(torch.float32, usable_device(device))
    return Checkpoint(weights, read_metadata(directory))


def load_drafter(directory: str | Path, target: Target) -> Drafter:
    """Load a drafter by its directory or name and make it draft for `target`, calibrated if it has a calibration.

    Raises:
        ValueError: see `load_checkpoint`; or the drafter was made for another target.
    """
    return load_checkpoint(directory, target.device, target.num_layers).serve(target)


def load_weights(directory: Path, num_target_layers: int | None = None) -> DrafterWeights:
    """Read a drafter's weights and config, tensors in their type on disk.

    Raises:
        ValueError: see `load_checkpoint`.
    """
    raw, dialect = read_config(directory)
    tensors = read_weights(directory, dialect.prefix)
    scaled = {name.removesuffix("scale") + "weight" for name in tensors if name.endswith(".scale")}
    for name, tensor in tensors.items():
        if name.endswith(("weight", "bias")) and name not in scaled and not tensor.is_floating_point():
            raise ValueError(
                f"{directory}: {name} is of type {dtype_name(tensor.dtype)}: quantised drafters are not supported: "
                "give the drafter before quantisation."
            )
    check_finite(directory, tensors)
    return dialect.read(raw, tensors, Source(str(directory / "config.json"), num_target_layers))


def read_config(directory: Path) -> tuple[dict[str, Any], Dialect]:
    """Read config.json and recognise its dialect.

    Raises:
        ValueError: the file is missing or no mapping, or its dialect is unknown.
    """
    refuse_archive(directory)
    path = directory / "config.json"
    if not directory.exists():
        raise ValueError(
            f"there is no directory {directory}: give a drafter directory (outrider train writes one) or a name that "
            "outrider models lists."
        )
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json: give a drafter directory (outrider train writes one).")
    raw = read_mapping(path)
    return raw, dialect_of(raw, path)


class _Recommended(BaseModel):
    """Fields of `recommended` that serving reads."""

    confidence_threshold: Annotated[Number, Field(ge=0, le=1)] | None = None


class _Training(BaseModel):
    """Fields of one training that are read."""

    model_config = ConfigDict(strict=True)

    target: str | None = None
    step: Annotated[int, Field(ge=0)] | None = None
    samples: int | None = None
    response_tokens: int | None = None
    anchors: int | None = None
    training_seconds: Number | None = None


class _Metadata(_Training):
    """Fields of outrider.json that are read; `calibration` and `candidates` are checked at their use."""

    samples_sha256: str | None = None
    history: list[_Training] = []
    recipe: dict[str, Any] = {}
    held_out: dict[str, Any] = {}
    responses: dict[str, Any] = {}
    recommended: _Recommended = _Recommended()


class _Estimator(BaseModel):
    """Fields of a `CertaintyEstimator`."""

    model_config = ConfigDict(extra="forbid")

    weights: list[Number]
    biases: list[Number]


class _Calibration(BaseModel):
    """Fields of `calibration` that serving reads; the rest is a report (evaluation/calibration/fit.py)."""

    temperatures: list[Number]
    offsets: list[Number]
    estimator: _Estimator | None = None

    @model_validator(mode="after")
    def _complete(self) -> _Calibration:
        if self.estimator is not None and len(self.estimator.biases) != len(self.temperatures):
            raise ValueError(
                f"the estimator has {len(self.estimator.biases)} biases for {len(self.temperatures)} positions"
            )
        return self

    def scaling(self) -> ConfidenceScaling:
        fitted = self.estimator
        estimator = None if fitted is None else CertaintyEstimator(fitted.weights, fitted.biases)
        return ConfidenceScaling(self.temperatures, self.offsets, estimator)


class _Sampling(BaseModel):
    temperature: Annotated[Number, Field(gt=0)]


class _SampledCalibration(_Calibration):
    """Fields of `calibration_sampled` that serving reads."""

    sampling: _Sampling


class _Candidates(BaseModel):
    """Fields of `candidates` that serving reads; the rest is a report (evaluation/calibration/candidates.py)."""

    accuracy: list[list[Number]]


def _section(metadata: Mapping[str, Any], name: str, model: type[Section]) -> Section | None:
    """Validate a section of outrider.json; None if the section is absent.

    Raises:
        ValueError: a field is missing or invalid; the message names it.
    """
    if name not in metadata:
        return None
    try:
        return model.model_validate(metadata[name])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, (name, *first["loc"])))
        raise ValueError(f"{METADATA}: {where}: {first['msg']}; run outrider calibrate again.") from error


def with_block_size(checkpoint: Checkpoint, block_size: int) -> Checkpoint:
    """Change the block size of a block drafter: same weights, more or fewer mask rows (DFlash, arXiv 2602.06036).

    The calibration is dropped, because it belongs to the positions of the trained size.

    Raises:
        ValueError: it is no block drafter, or its weights belong to the trained size.
    """
    drafter = checkpoint.weights.module
    if not hasattr(drafter.config, "block_size"):
        raise ValueError(f"block_size {block_size}: a {drafter.algorithm} drafter has no blocks; leave it out.")
    resized = type(drafter)(replace(drafter.config, block_size=block_size))
    try:
        resized.load_state_dict(drafter.state_dict())
    except RuntimeError as error:
        raise ValueError(
            f"block_size {block_size}: a {drafter.algorithm} drafter has weights for each block position; leave it out."
        ) from error
    fitted = (CALIBRATION, SAMPLED_CALIBRATION)
    metadata = {name: value for name, value in checkpoint.metadata.items() if name not in fitted}
    weights = replace(checkpoint.weights, module=resized.eval().requires_grad_(False))
    return Checkpoint(weights, metadata)
