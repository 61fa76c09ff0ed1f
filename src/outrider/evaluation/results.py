"""results.json: what one evaluation measured, with its drafter, settings, versions and machine.

accepted_length          mean tokens per round, bonus included (the papers' tau)
conditional_acceptance   P(position k accepted | 1..k-1 accepted and k verified)
acceptance_histogram     rounds by number of accepted drafts, 0..gamma
speedup                  plain seconds / speculative seconds over the same tokens, prefill included
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, field_validator

from outrider.checkpoints.describe import DrafterInfo
from outrider.decoding.policies import FixedPolicy
from outrider.decoding.verification import lossy_note
from outrider.utils.files import invalid_fields

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
WHOLE = "whole block"  # `Results.verified` of drafts that are verified to their end


class TaskResult(BaseModel):
    """The figures of one task. Seconds are sums over all prompts; `speedup_quartiles` are over prompts."""

    task: str
    samples: int = Field(ge=0)
    turns: int = Field(ge=0)
    tokens: int = Field(ge=0)
    rounds: int = Field(ge=0)
    accepted_length: Amount
    conditional_acceptance: list[Amount | None]  # None: no round verified this position
    acceptance_histogram: list[Annotated[int, Field(ge=0)]]
    tokens_per_second: Annotated[Amount, Field(gt=0)]
    # mlx-lm's name and way: all tokens / the seconds behind the first round of a response, which has the prefill.
    generation_tps: Amount | None = None
    baseline_tokens_per_second: Annotated[Amount, Field(gt=0)]
    speedup: Amount
    speedup_quartiles: list[Amount] = Field(min_length=3, max_length=3)
    greedy_identical: bool | None  # apart from ties, which greedy_ties counts; None at temperature > 0
    greedy_ties: int
    greedy_mismatches: int
    draft_seconds: Amount
    verify_seconds: Amount
    other_seconds: Amount
    baseline_seconds: Amount
    verified_drafts: int | None  # drafts the target verified; None: not recorded
    prompts_sha256: str | None  # None: not recorded
    # Tokens and rounds of each prompt, all of its turns together; None: not recorded.
    by_prompt: list[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]] | None = None

    @property
    def reached(self) -> list[int]:
        """By draft position, the rounds in which it was verified after all before it were accepted.

        Where none of them was accepted, the count was not recorded: an upper bound.
        """
        histogram, conditional = self.acceptance_histogram, self.conditional_acceptance
        at_least = [sum(histogram[k:]) for k in range(len(histogram))]  # rounds with k accepted drafts or more
        return [
            0 if c is None else round(at_least[k] / c) if c else at_least[k - 1]
            for k, c in enumerate(conditional, start=1)
        ]


class Results(BaseModel):
    """The contents of results.json."""

    tasks: list[TaskResult]
    settings: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    drafter: DrafterInfo
    date: str | None = None  # of the evaluation; None: not recorded

    @field_validator("settings")
    @classmethod
    def _sampling_is_a_mapping(cls, settings: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(settings.get("sampling", {}), dict):
            raise ValueError("sampling is no mapping")
        return settings

    @property
    def lossy(self) -> str:
        """The lossy acceptance rule, to be named wherever the figures are shown; "" where output is the target's."""
        return lossy_note(self.settings.get("lossy"))

    @property
    def verified(self) -> str:
        """The part of each draft that was verified, in words."""
        settings = self.settings
        threshold, length, tree = (settings.get(name) for name in ("confidence_threshold", "draft_length", "tree"))
        if settings.get("step_costs"):
            return f"by cost ({settings['policy']})"
        whole = length is None or length >= settings.get("slots", math.inf)
        if threshold is not None:
            return f"while c >= {threshold}"
        if tree is not None:
            return f"tree of {tree}" if whole else f"{length} nodes of a tree of {tree}"
        if not whole:
            return f"{length} drafts"
        return WHOLE if length is not None or settings["policy"] == repr(FixedPolicy()) else str(settings["policy"])

    @staticmethod
    def load(path: Path) -> Results:
        """Read a results.json.

        Raises:
            ValueError: it is missing, lacks a field (the message names it), or has no tasks.
        """
        if not path.is_file():
            raise ValueError(f"no {path}; give results.json files that outrider eval wrote.")
        try:
            found = Results.model_validate_json(path.read_bytes())
        except ValidationError as error:
            reason = invalid_fields(error, "the file")[0]
            raise ValueError(
                f"{path} is not a results.json that this version reads: {reason}. Evaluate again with outrider eval."
            ) from error
        if not found.tasks:
            raise ValueError(f"{path} has no tasks: run outrider eval again.")
        return found


def listed(fields: Mapping[str, Any]) -> str:
    """`name value, name value`, without None values."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in fields.items() if value is not None)
