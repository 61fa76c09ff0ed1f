"""Describe a checkpoint for people, as (label, value) pairs.

Aux layers are shown in both conventions: as layer outputs counted from 0 (ours, z-lab, DeepSpec, SGLang), and as
hidden states, which are one higher because 0 is the embedding output (speculators, vLLM's EAGLE-3).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from torch import Tensor

from outrider.checkpoints.checkpoint import (
    CALIBRATION,
    METADATA,
    SAMPLED_CALIBRATION,
    load_weights,
    read_config,
    read_metadata,
)
from outrider.checkpoints.dialects.base import MOST_LAYERS, UnknownDepth
from outrider.drafters.base import DrafterWeights
from outrider.utils.files import read_weights, weight_files
from outrider.utils.measure import dtype_name

Facts = list[tuple[str, str]]


def describe(directory: Path, num_target_layers: int | None = None) -> Facts:
    """Describe a checkpoint in a known dialect.

    Args:
        num_target_layers: depth of the target, if known.

    Raises:
        ValueError: the dialect is unknown, or fields and tensors do not match; the message names them.
    """
    raw, dialect = read_config(directory)
    depth_known = True
    try:
        parts = load_weights(directory, num_target_layers)
    except UnknownDepth:  # describe all but the depth, and aux layers that follow from it
        parts, depth_known = load_weights(directory, MOST_LAYERS), False
    metadata = read_metadata(directory)
    return [
        ("dialect", dialect.name),
        ("method", parts.algorithm),
        ("target", named_target(raw, metadata) or "not named"),
        *_fits(parts.config, depth_known),
        *_aux_hidden_states(raw, parts, depth_known),
        *parts.config.describe(),
        *_vocabulary(parts),
        *_size(directory, parts),
        ("calibration", _calibration(metadata.get(CALIBRATION))),
        *(
            [("of sampled requests", _calibration(metadata[sampled]))]
            if (sampled := SAMPLED_CALIBRATION) in metadata
            else []
        ),
        *([("recommended", spoken(metadata["recommended"]))] if "recommended" in metadata else []),
        (METADATA, "yes" if metadata else "none: made elsewhere"),
    ]


def spoken(settings: object) -> str:
    """Write `{"confidence_threshold": 0.25}` as `confidence threshold 0.25`, and other values with `str`."""
    if not isinstance(settings, dict):
        return str(settings)
    return ", ".join(f"{str(name).replace('_', ' ')} {value}" for name, value in settings.items())


def describe_unknown(directory: Path, raw: Mapping[str, Any]) -> Facts:
    """Describe a checkpoint in an unknown dialect."""
    named = [(name, str(raw.get(name))) for name in ("architectures", "model_type")]
    try:
        tensors = read_weights(directory)
    except ValueError as error:
        return [*named, ("tensors", str(error))]
    return [
        *named,
        ("tensors", f"{len(tensors)}: {', '.join(sorted(tensors)[:6])}{' ...' if len(tensors) > 6 else ''}"),
        ("parameters", _millions(tensors)),
    ]


def tensor_rows(directory: Path) -> list[tuple[str, str, str]]:
    """List (name, shape, type) of every tensor in the files, sorted by name."""
    return [
        (name, str(list(tensor.shape)), dtype_name(tensor.dtype))
        for name, tensor in sorted(read_weights(directory).items())
    ]


def named_target(raw: Mapping[str, Any], metadata: Mapping[str, Any]) -> str | None:
    """Return the target that a checkpoint names in our metadata or, in three dialects, in config.json."""
    envelope = raw.get("speculators_config")
    verifier = envelope.get("verifier") if isinstance(envelope, Mapping) else None
    names = (
        metadata.get("target"),
        verifier.get("name_or_path") if isinstance(verifier, Mapping) else None,
        raw.get("base_model_name_or_path"),  # Medusa's releases
        raw.get("target_model_name_or_path"),  # DeepSpec
    )
    return next((name for name in names if isinstance(name, str) and name), None)


def _fits(config: Any, depth_known: bool) -> Facts:
    layers = str(config.num_target_layers) if depth_known else "an unstated number of"
    return [("fits targets with", f"{layers} layers, hidden size {config.hidden_size}, {config.vocab_size:,} tokens")]


def _aux_hidden_states(raw: Mapping[str, Any], parts: DrafterWeights, depth_known: bool) -> Facts:
    aux_layers = parts.config.target_layer_ids
    if not depth_known and max(aux_layers) >= MOST_LAYERS - 4:  # counted from the end of an unknown depth
        return [("aux layers", "the default of its method; name the target to see them (--target)")]
    return [
        ("aux layers (outputs)", ", ".join(map(str, aux_layers))),
        ("  as hidden states", ", ".join(str(aux_layer + 1) for aux_layer in aux_layers)),
    ]


def _vocabulary(parts: DrafterWeights) -> Facts:
    config = parts.config
    stored = [
        name for name, tensor in (("LM head", parts.head_VdH), ("embedding", parts.embedding_VH)) if tensor is not None
    ]
    scale = parts.embedding_scale
    return [
        ("draft vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"),
        ("stored beside the drafter", " and ".join(stored) or "nothing: embedding and LM head are the target's"),
        *([] if scale is None else [("embeddings multiplied by", f"{scale:g}")]),
    ]


def _size(directory: Path, parts: DrafterWeights) -> Facts:
    files = weight_files(directory)
    size = sum(path.stat().st_size for path in files) / 1e6
    kinds = sorted({dtype_name(tensor.dtype) for tensor in parts.tensors.values()})
    return [
        ("parameters", f"{_millions(parts.tensors)} in {len(parts.tensors)} tensors, {', '.join(kinds)}"),
        ("on disk", f"{size:.1f} MB in {', '.join(path.name for path in files)}"),
    ]


def _millions(tensors: Mapping[str, Tensor]) -> str:
    return f"{sum(tensor.numel() for tensor in tensors.values()) / 1e6:.2f} million"


def _calibration(stored: object) -> str:
    if not isinstance(stored, Mapping):
        return "none"
    temperatures = stored.get("temperatures")
    count = len(temperatures) if isinstance(temperatures, list) else "?"
    return f"temperatures for {count} positions{', offsets' if any(stored.get('offsets') or ()) else ''}"


# ----------------------------------------------------------------------------
# The drafter in results, with its training budget.
# ----------------------------------------------------------------------------

_SUMMED = {"step": "steps", "anchors": "anchors", "training_seconds": "seconds"}
_NOT_THE_METHOD = {"seed", "threads", "log_every", "eval_every", "save_every", "feature_cache_gb"}


class TrainingInfo(BaseModel):
    """The training budget and data of a drafter, from outrider.json.

    `steps`, `anchors` and `seconds` are sums over all its trainings, None if one of them did not record it. `samples`
    and `response_tokens` belong to the last training. `recipe_sha256` hashes the recipe without its seed.
    """

    steps: int | None = None
    anchors: int | None = None  # blocks with a loss
    seconds: float | None = None
    samples: int | None = None
    response_tokens: int | None = None
    samples_sha256: str | None = None
    seed: int | None = None
    recipe_sha256: str | None = None

    @staticmethod
    def of(metadata: Mapping[str, Any]) -> TrainingInfo | None:
        """Read from the contents of outrider.json; None if it records no training."""
        if "step" not in metadata:
            return None
        fields: dict[str, Any] = {}
        for key, name in _SUMMED.items():
            parts = [run.get(key) for run in (*metadata.get("history", []), metadata)]
            fields[name] = None if None in parts else sum(parts)
        fields |= {name: metadata.get(name) for name in ("samples", "response_tokens", "samples_sha256")}
        recipe = metadata.get("recipe", {})
        method = {name: value for name, value in recipe.items() if name not in _NOT_THE_METHOD}
        digest = hashlib.sha256(json.dumps(method, sort_keys=True).encode()).hexdigest()
        return TrainingInfo(**fields, seed=recipe.get("seed"), recipe_sha256=digest)


class DrafterInfo(BaseModel):
    """The drafter of an evaluation. Drafters that differ by seed share a label."""

    label: str
    algorithm: str
    gamma: int = Field(ge=0, lt=2**16)
    nodes: int | None = None  # maximum draft tokens of one round: more than gamma in trees
    parameters: int | None = None  # without the target's embedding and LM head
    training: TrainingInfo | None = None  # None: not trained by Outrider
