"""Made-up results of an evaluation, whose figures agree with one another."""

from __future__ import annotations

from typing import Any

from outrider.checkpoints.describe import DrafterInfo, TrainingInfo
from outrider.evaluation.results import Results, TaskResult


def task_result(name: str, tau: float, **changes: Any) -> TaskResult:
    """Ten rounds, of which some accepted two drafts: figures that agree with one another."""
    two = round(10 * (tau - 1) / 2)
    fields: dict[str, Any] = {
        "task": name, "samples": 4, "turns": 4, "tokens": 10 + 2 * two, "rounds": 10, "accepted_length": 1 + two / 5,
        "conditional_acceptance": [two / 10, 1.0 if two else None], "acceptance_histogram": [10 - two, 0, two],
        "tokens_per_second": 20.0, "baseline_tokens_per_second": 10.0, "speedup": 2.0, "speedup_quartiles": [1, 2, 3],
        "greedy_identical": True, "greedy_ties": 0, "greedy_mismatches": 0, "draft_seconds": 0.05,
        "verify_seconds": 0.3, "other_seconds": 0.0, "baseline_seconds": 1.0, "verified_drafts": 20,
        "prompts_sha256": f"sha of {name}",
    }  # fmt: skip
    return TaskResult(**fields | changes)


def results(label: str, tau: float = 2.0, seed: int = 0, **changes: Any) -> Results:
    """Of two tasks, the second one with tau 1."""
    metadata = {"step": 100, "anchors": 2800, "training_seconds": 120.0 + 60 * seed, "samples_sha256": "data"}
    metadata |= {"samples": 7, "response_tokens": 900, "recipe": {"seed": seed, "drafter": {"algorithm": label}}}
    settings = {"target": "toy", "max_new_tokens": 12, "max_samples": 4, "policy": "FixedPolicy(length=None)"}
    settings |= {"sampling": {"temperature": 0.0, "top_k": 0}, "gamma": 2, "drafter": f"runs/{label}"}
    settings |= {"device": "cpu", "dtype": "float32"}
    info = DrafterInfo(label=label, algorithm=label, gamma=2, parameters=8_000_000, training=TrainingInfo.of(metadata))
    fields: dict[str, Any] = {
        "tasks": [task_result("math", tau), task_result("chat", 1.0)],
        "settings": settings,
        "versions": {"outrider": "0.1.0"},
        "machine": {"cpu": "a", "threads": 2},
        "drafter": info,
    }
    return Results(**fields | changes)
