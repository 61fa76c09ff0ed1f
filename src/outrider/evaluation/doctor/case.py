"""What is examined: a target, a drafter and data, any of which may be absent, and what several checks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.data.conversations import Conversation
from outrider.data.responses import read_responses
from outrider.data.samples import Reply, Sample, join_turns
from outrider.drafters import DFlash
from outrider.drafters.method import DraftModule, check_fits
from outrider.evaluation.doctor.finding import Finding, Need, fault
from outrider.evaluation.doctor.probe import Probe
from outrider.formats import Checkpoint, load_drafter
from outrider.formats.dialects.extras import UnknownDepth
from outrider.formats.files import read_weights
from outrider.target import Target


@dataclass
class Case:
    """Everything the checks look at.

    `stored` are the tensors of the drafter's files as they are on disk; `thinking` is the mode it is to serve in;
    `samples` and `max_new_tokens` bound what the model-based checks read and decode.
    """

    loaded_target: Target | None = None
    loaded_checkpoint: Checkpoint | None = None
    stored: dict[str, Tensor] = field(default_factory=dict)
    replies: list[Reply] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    eval_prompts: list[Conversation] = field(default_factory=list)
    thinking: bool = False
    samples: int = 8
    max_new_tokens: int = 48

    @property
    def target(self) -> Target:
        assert self.loaded_target is not None
        return self.loaded_target

    @property
    def checkpoint(self) -> Checkpoint:
        assert self.loaded_checkpoint is not None
        return self.loaded_checkpoint

    @property
    def drafter(self) -> DraftModule:
        return self.checkpoint.drafter

    @property
    def block_drafter(self) -> DFlash:
        """For checks that look at blocks, mask tokens and positions."""
        assert isinstance(self.drafter, DFlash)
        return self.drafter

    @cached_property
    def draft_ids_Vd(self) -> Tensor:
        """Target ids of the draft vocabulary, the whole vocabulary where it is not reduced."""
        ids = self.checkpoint.draft_ids_Vd
        return torch.arange(self.drafter.config.vocab_size) if ids is None else ids

    @cached_property
    def conversations(self) -> list[Sample]:
        return join_turns(self.replies)

    @cached_property
    def chosen(self) -> list[Sample]:
        """The samples that are run through the models: evenly spread over the file, the longest among them."""
        fits = [
            s
            for s in self.conversations
            if len(s.tokens) <= self.target.max_context and max(s.tokens) < self.target.vocab_size
        ]
        longest = max(fits, key=lambda s: len(s.tokens), default=None)
        if longest is None:
            raise ValueError("no conversation of the data fits the target's vocabulary and context.")
        rest = [s for s in fits if s is not longest]
        count = min(self.samples - 1, len(rest))
        return [longest, *(rest[i * len(rest) // count] for i in range(count))]

    @cached_property
    def probe(self) -> Probe:
        return Probe(self.target, self.drafter, self.draft_ids_Vd, self.chosen)

    def missing(self, need: Need) -> str | None:
        """Why `need` is not met; None where it is."""
        if need == "tokenizer":
            absent = self.loaded_target is None or self.loaded_target.tokenizer is None
            return "no tokenizer was given" if absent else None
        if need == "working":
            return self._unusable
        if need == "block":
            return (
                None if isinstance(self.drafter, DFlash) else f"nothing to check in {self.drafter.algorithm} drafters"
            )
        options: dict[str, tuple[object, str]] = {
            "target": (self.loaded_target, "no target was given (--target)"),
            "drafter": (self.loaded_checkpoint, "no drafter was given (--drafter), or it could not be read"),
            "data": (self.replies, "no data was given (--data), or it could not be read"),
            "eval": (self.eval_prompts, "no evaluation prompts were given (--eval)"),
        }
        there, reason = options[need]
        return None if there else reason

    @cached_property
    def _unusable(self) -> str | None:
        try:
            check_fits(self.drafter.config, self.target, self.drafter.final_tap)
        except ValueError:
            return "the drafter does not fit the target"
        if not getattr(self.drafter.config, "plain_logits", True):
            return "its logits are multiplied or capped, which training here does not know"
        if not all(p.isfinite().all() for p in self.drafter.parameters()):
            return "the drafter has weights that are not finite"
        return None


def read_drafter(case: Case, directory: Path, device: str = "cpu") -> Finding | None:
    """Put a drafter into the case; a finding where it cannot be read.

    Raises:
        UnknownDepth: it does not say how deep its target is, and no target was given.
    """
    try:
        depth = None if case.loaded_target is None else case.loaded_target.num_layers
        case.loaded_checkpoint = load_drafter(directory, device, depth)
        case.stored = read_weights(directory)
    except UnknownDepth:
        raise
    except (ValueError, KeyError, OSError) as error:
        remedy = "Save the drafter again with the tool that trained it, or correct the named field of its config.json."
        return Finding(
            "checkpoint", "readable", fault(str(error), "No engine that checks what it loads will serve it.", remedy)
        )
    return None


def read_data(case: Case, path: Path) -> Finding | None:
    """Put a responses file into the case; a finding where it cannot be read."""
    try:
        case.settings, case.replies = read_responses(path)
    except (ValueError, OSError) as error:
        remedy = "Give the responses file that `outrider prepare` or `outrider train` wrote."
        return Finding("data", "readable", fault(str(error), "Training would stop at the same place.", remedy))
    if not case.replies:
        meaning = "There is nothing to train on, and nothing to check a drafter with."
        return Finding("data", "readable", fault("no responses in the file", meaning, "Look at what prepare reported."))
    return None
