"""A drafter written for an engine: its dialect, a card that says what it is, and the command that serves it.

OUT/config.json, OUT/model.safetensors   what the engine loads (formats/engines.py)
OUT/README.md                            model card: the drafter, what was left out, how to serve it
OUT/outrider.json                        our metadata, so that every verb here reads OUT as it read the source
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from outrider.formats.checkpoint import Checkpoint, write_files
from outrider.formats.describe import spoken
from outrider.formats.dialect import Parts, TargetFacts, Written
from outrider.formats.engines import Engine
from outrider.formats.files import atomic_directory
from outrider.formats.target_facts import check_target
from outrider.target.resolve import dtype_name


@dataclass(frozen=True)
class Exported:
    """What was written, and the commands that serve it."""

    written: Written
    commands: list[str]


def export_drafter(
    checkpoint: Checkpoint, engine: Engine, out: Path, target: TargetFacts, dtype: torch.dtype = torch.float32
) -> Exported:
    """Write a drafter for an engine, atomically.

    Raises:
        ValueError: `out` exists, the target is another one, or the engine cannot serve this drafter.
        OSError: the disk is full; nothing half-written is left.
    """
    if out.exists():
        raise ValueError(f"{out} exists: export to a new directory.")
    parts = checkpoint.parts(dtype)
    check_target(parts, target)
    written = engine.write(parts, target)
    written.fallbacks.extend(_unread(checkpoint.metadata, engine, parts.method.name))
    commands = engine.serve(parts, str(out), target.name_or_path)
    card = model_card(out.resolve().name, parts, written, engine, target, commands, dtype)
    with atomic_directory(out) as staging:
        write_files(staging, written, dtype, checkpoint.metadata, card)
    return Exported(written, commands)


def _unread(metadata: Mapping[str, Any], engine: Engine, method: str) -> list[str]:
    """What outrider.json says of serving and the engine does not look at, a sentence each."""
    sentences = []
    if metadata.get("calibration") is not None:
        does = engine.calibration if method == "dspark" else f"computes none for {method}"
        sentences.append(f"The calibration of confidences stays in outrider.json; {engine.name} {does}.")
    if (recommended := metadata.get("recommended")) is not None:
        sentences.append(
            f"What is recommended ({spoken(recommended)}) stays in outrider.json, where {engine.name} does not look."
        )
    return sentences


def model_card(
    name: str,
    parts: Parts,
    written: Written,
    engine: Engine,
    target: TargetFacts,
    commands: list[str],
    dtype: torch.dtype,
) -> str:
    """The text of README.md, with the front matter that the hub reads."""
    config = parts.config
    front: dict[str, Any] = {} if Path(target.name_or_path).is_dir() else {"base_model": target.name_or_path}
    front |= {"pipeline_tag": "text-generation", "tags": ["speculative-decoding", "draft-model", parts.method.name]}
    parameters = sum(tensor.numel() for tensor in written.tensors.values() if tensor.is_floating_point())
    rows = [
        ("method", parts.method.name),
        ("dialect", engine.dialects[parts.method.name].name),
        ("parameters in the file", f"{parameters / 1e6:.1f} million, {dtype_name(dtype)}"),
        ("drafts per round", str(config.gamma)),
        ("tapped layers (outputs, from 0)", ", ".join(map(str, config.target_layer_ids))),
        ("the same as hidden states", ", ".join(str(tap + 1) for tap in config.target_layer_ids)),
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
