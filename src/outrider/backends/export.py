"""Writes a drafter for an engine: its checkpoint in the engine's dialect, a model card, and the commands that serve it.

What an export states about the target is read from the target's files without loading it: two tensors and config.json.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.backends.base import ExternalEngine
from outrider.backends.config import ExportConfig
from outrider.backends.registry import engine_of, exporters
from outrider.checkpoints.checkpoint import (
    CALIBRATION,
    SAMPLED_CALIBRATION,
    Checkpoint,
    load_checkpoint,
    read_config,
    read_metadata,
    write_files,
)
from outrider.checkpoints.describe import named_target, spoken
from outrider.checkpoints.dialects.base import MOST_LAYERS, ExportedCheckpoint, Fields, TargetFacts
from outrider.drafters.base import DrafterWeights, check_embedding_scale
from outrider.target.hub import loadable_name, resolve_model
from outrider.target.model import FAMILIES
from outrider.utils.documents import read_mapping
from outrider.utils.files import atomic_directory, weight_files
from outrider.utils.measure import dtype_name
from outrider.utils.packaged import packaged


def target_facts(id_or_dir: str, dtype: torch.dtype) -> TargetFacts:
    """Read name, architecture, depth, embedding and LM head of a target; tensors in `dtype`.

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
        raise ValueError(
            f"{directory}: no tensor is named *embed_tokens.weight; save the target by transformers' save_pretrained."
        )
    return TargetFacts(
        name_or_path=loadable_name(id_or_dir),
        architectures=Fields(raw, fields.where, fields.dialect).texts("architectures"),
        num_layers=fields.integer("num_hidden_layers", high=MOST_LAYERS),
        embedding_VH=embedding_VH.to(dtype),
        head_VH=(embedding_VH if head_VH is None else head_VH).to(dtype),  # tied if there is none
        embedding_scale=_embedding_scale(inner, embedding_VH.dtype),
    )


def check_target(parts: DrafterWeights, target: TargetFacts) -> None:
    """Refuse a target of other shapes than the drafter was made for."""
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
    """The factor by which a target multiplies its embeddings, from its config.json alone."""
    raw = read_mapping(resolve_model(id_or_dir, weights=False) / "config.json")
    return _embedding_scale(raw.get("text_config") or raw, torch.float32)


def _embedding_scale(config: Mapping[str, Any], dtype: torch.dtype) -> float:
    """The factor as a `Target` loaded in that type has it; 1 for families that cannot be loaded here."""
    for family in FAMILIES:
        if family.model_type == config.get("model_type"):
            return family.embedding_scale(int(config["hidden_size"]), dtype)
    return 1.0


def _tensor(directory: Path, name: str) -> Tensor | None:
    """The tensor of that name, with whatever prefix; None if there is none."""
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                names = [key for key in file.keys() if key == name or key.endswith("." + name)]  # noqa: SIM118
                if names:
                    tensor: Tensor = file.get_tensor(min(names, key=len))
                    return tensor
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file ({error}).") from error
    return None


# ----------------------------------------------------------------------------
# A drafter written for an engine: its dialect, a card that says what it is, and the command that serves it.
#
# OUT/config.json, OUT/model.safetensors   what the engine loads (backends/base.py)
# OUT/README.md                            model card: the drafter, what was left out, how to serve it
# OUT/outrider.json                        our metadata, so that every verb here reads OUT as it read the source
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """An exported checkpoint and the commands that serve it."""

    written: ExportedCheckpoint
    commands: list[str]


def export_drafter(
    checkpoint: Checkpoint, engine: ExternalEngine, out: Path, target: TargetFacts, dtype: torch.dtype = torch.float32
) -> Exported:
    """Write a drafter for an engine, atomically.

    Raises:
        ValueError: `out` exists, the target is another one, or the engine cannot serve this drafter.
        OSError: the disk is full; nothing half-written is left.
    """
    if out.exists():
        raise ValueError(f"{out} exists: export to a new directory.")
    parts = to_export(checkpoint, target, dtype)
    try:
        written = engine.write(parts, target)
    except ValueError as error:
        able = [name for name, reason in refusals(parts, target).items() if reason is None]
        named = f"export it --to {', '.join(able)}, or serve it with Outrider" if able else "Outrider alone serves it"
        raise ValueError(f"{error} As it is, {named}.") from error
    written.fallbacks.extend(_unread(checkpoint.metadata, engine, parts.algorithm))
    *before, last = engine.serve(parts, str(out), target.name_or_path)
    commands = [*before, " ".join([last, *map(shlex.quote, engine.family_flags(target.architectures))])]
    card = model_card(out.resolve().name, parts, written, engine=engine, target=target, commands=commands, dtype=dtype)
    with atomic_directory(out) as staging:
        write_files(staging, written, dtype, metadata=checkpoint.metadata, card=card)
    return Exported(written, commands)


def to_export(checkpoint: Checkpoint, target: TargetFacts, dtype: torch.dtype = torch.float32) -> DrafterWeights:
    """A drafter's weights in `dtype`, without what is only a copy of the target's tensors."""
    parts = checkpoint.weights.folded(dtype)
    check_target(parts, target)
    return parts.without_copies(target.head_VH, target.embedding_VH)


def refusals(parts: DrafterWeights, target: TargetFacts) -> dict[str, str | None]:
    """By engine, why `parts` cannot be exported for it; None: they can."""
    reasons: dict[str, str | None] = {}
    for engine in exporters():
        try:
            engine.write(parts, target)
            reasons[engine.name] = None
        except ValueError as error:
            reasons[engine.name] = str(error)
    return reasons


def _unread(metadata: Mapping[str, Any], engine: ExternalEngine, method: str) -> list[str]:
    """Settings of outrider.json that the engine does not read, a sentence each."""
    sentences = []
    if any(metadata.get(name) is not None for name in (CALIBRATION, SAMPLED_CALIBRATION)):
        does = engine.calibration if method == "dspark" else f"computes none for {method}"
        sentences.append(f"The calibration of confidences stays in outrider.json; {engine.name} {does}.")
    if (recommended := metadata.get("recommended")) is not None:
        sentences.append(
            f"What is recommended ({spoken(recommended)}) stays in outrider.json, where {engine.name} does not look."
        )
    return sentences


def model_card(
    name: str,
    parts: DrafterWeights,
    written: ExportedCheckpoint,
    engine: ExternalEngine,
    target: TargetFacts,
    commands: list[str],
    dtype: torch.dtype,
) -> str:
    """Text of the export's README.md, with the front matter that the hub reads."""
    config = parts.config
    front: dict[str, Any] = {} if Path(target.name_or_path).is_dir() else {"base_model": target.name_or_path}
    front |= {"pipeline_tag": "text-generation", "tags": ["speculative-decoding", "draft-model", parts.algorithm]}
    parameters = sum(tensor.numel() for tensor in written.tensors.values() if tensor.is_floating_point())
    rows = [
        ("method", parts.algorithm),
        ("dialect", engine.exports()[parts.algorithm].dialect.name),
        ("parameters in the file", f"{parameters / 1e6:.1f} million, {dtype_name(dtype)}"),
        ("drafts per round", str(config.gamma)),
        ("aux layers (outputs, from 0)", ", ".join(map(str, config.target_layer_ids))),
        ("the same as hidden states", ", ".join(str(aux_layer + 1) for aux_layer in config.target_layer_ids)),
        ("draft vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"),
    ]
    lines = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {name}",
        f"A draft model for speculative decoding of **{target.name_or_path}**, written by Outrider for {engine.name}.\n"
        "The output of a lossless engine is the target's own, whatever a drafter proposes.",
        "\n".join(["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)]),
        "## Serve\n\n```\n" + "\n".join(commands) + "\n```",
    ]
    if written.fallbacks:
        lines.append("## Left out\n\n" + "\n".join(f"* {sentence}" for sentence in written.fallbacks))
    return "\n\n".join(lines) + "\n"


# ----------------------------------------------------------------------------
# outrider export
# ----------------------------------------------------------------------------


def _read(config: ExportConfig) -> tuple[Checkpoint, TargetFacts, torch.dtype]:
    """The drafter, what an export states about its target, and the type that both are written in."""
    drafter, dtype = packaged(config.drafter, "models"), getattr(torch, config.dtype)
    raw, _ = read_config(drafter)
    name = config.target or named_target(raw, read_metadata(drafter))
    if name is None:
        raise ValueError(f"{drafter} does not say which target it is for: name it with --target.")
    try:
        target = target_facts(name, dtype)
    except ValueError as error:
        hint = "" if config.target else f" {drafter} names this target: give another with --target."
        raise ValueError(f"{error}{hint}") from error
    return load_checkpoint(drafter, num_target_layers=target.num_layers), target, dtype


def run_export(config: ExportConfig) -> Exported:
    assert config.to is not None and config.out is not None
    engine, (checkpoint, target, dtype) = engine_of(config.to), _read(config)
    return export_drafter(checkpoint, engine, config.out, target=target, dtype=dtype)


def offers(config: ExportConfig) -> dict[str, str]:
    """By engine, the options that export the drafter for it, or why it cannot be."""
    checkpoint, target, dtype = _read(config)
    directory = packaged(config.drafter, "models")
    reasons = refusals(to_export(checkpoint, target, dtype), target)
    return {name: reason or f"--to {name} --out OUT writes {directory} for it." for name, reason in reasons.items()}
