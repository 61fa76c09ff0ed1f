"""Who drafted in an evaluation, and what making it cost: outrider.json in a few comparable numbers.

steps, anchors, seconds ...   sums over all trainings behind a drafter; None as soon as one of them did not say
recipe_sha256                 of the recipe without its seed: equal for two seeds of one drafter
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from outrider.drafters import registry
from outrider.drafters.registry import method_of
from outrider.verification import lossy_note

_SUMMED = {"step": "steps", "anchors": "anchors", "training_seconds": "seconds"}
_NOT_THE_METHOD = {"seed", "threads", "log_every", "eval_every", "save_every", "feature_cache_gb"}


class TrainingInfo(BaseModel):
    """What a drafter was trained with. `response_tokens` and `samples` are those of its last data."""

    steps: int | None = None
    anchors: int | None = None  # blocks that gave a loss
    seconds: float | None = None
    samples: int | None = None
    response_tokens: int | None = None
    samples_sha256: str | None = None
    seed: int | None = None
    recipe_sha256: str | None = None

    @staticmethod
    def of(metadata: Mapping[str, Any]) -> TrainingInfo | None:
        """From outrider.json; None where it does not tell of a training."""
        if "step" not in metadata:
            return None
        fields: dict[str, Any] = {}
        for key, name in _SUMMED.items():
            parts = [run.get(key) for run in (*metadata.get("history", []), metadata)]
            fields[name] = None if None in parts else sum(parts)
        fields |= {name: metadata.get(name) for name in ("samples", "response_tokens", "samples_sha256")}
        recipe = metadata.get("recipe", {})
        method = {name: value for name, value in recipe.items() if name not in _NOT_THE_METHOD}
        method["drafter"] = _beyond_defaults(recipe.get("drafter", {}))
        digest = hashlib.sha256(json.dumps(method, sort_keys=True).encode()).hexdigest()
        return TrainingInfo(**fields, seed=recipe.get("seed"), recipe_sha256=digest)


def _beyond_defaults(section: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's drafter section without fields that say what saying nothing would; newer ones among them."""
    if section.get("algorithm") not in [method.name for method in registry.METHODS]:
        return dict(section)
    unsaid = method_of(section["algorithm"]).defaults()
    said = {name: value for name, value in section.items() if (value or None) != (unsaid.get(name) or None)}
    return {"algorithm": section["algorithm"], **said}


class DrafterInfo(BaseModel):
    """Seeds of one drafter share a label. `parameters`: its own; embedding and LM head are the target's."""

    label: str
    algorithm: str
    gamma: int
    nodes: int | None = None  # most draft tokens of one forward: more than gamma where drafts branch
    parameters: int | None = None
    training: TrainingInfo | None = None


# ----------------------------------------------------------------------------
# results.json: what one evaluation measured, with the settings, versions and machine that made it.
#
# accepted_length          mean tokens per round, bonus included (the papers' tau)
# conditional_acceptance   P(position k accepted | 1..k-1 accepted and k verified)
# acceptance_histogram     rounds by number of accepted drafts, 0..gamma
# speedup                  plain seconds / speculative seconds over the same tokens, prefill included
#
# Fields with a default came later: files without them are still read.
# ----------------------------------------------------------------------------


class TaskResult(BaseModel):
    """One task. Seconds are sums over all prompts; `speedup_quartiles` are over prompts."""

    task: str
    samples: int
    turns: int
    tokens: int
    rounds: int
    accepted_length: float
    conditional_acceptance: list[float | None]  # None: no round got that far
    acceptance_histogram: list[int]
    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: float
    speedup_quartiles: list[float]
    greedy_identical: bool | None  # ties apart, which greedy_ties counts; None: not asked at temperature > 0
    greedy_ties: int
    greedy_mismatches: int
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    baseline_seconds: float
    verified_drafts: int | None = None  # that the target judged
    prompts_sha256: str | None = None


class Results(BaseModel):
    """The whole file."""

    tasks: list[TaskResult]
    settings: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    drafter: DrafterInfo | None = None

    @property
    def lossy(self) -> str:
        """What to say wherever its figures are shown: the rule, where output need not be the target's; else nothing."""
        return lossy_note(self.settings.get("lossy"))
