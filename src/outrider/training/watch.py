"""Which drafter of a run is the best one, and when to stop looking for a better one.

    every decode_every steps, and at the last:  decode held-out prompts -> tau -> best? -> OUT/best
                                                                              patience spent? -> stop

Without decode checks the held-out expected accepted length takes tau's place, at every evaluation. What is due when is
a function of the step, and the memory (`state_dict`) is a few numbers that travel with the training state, so a resumed
run picks the same drafter and stops at the same step as an uninterrupted one.

A few prompts make a noisy measure, and the best of many noisy values looks better than it is: choose by it, but do
not quote it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.drafters.method import DraftModule
from outrider.training.decode_check import decode_check, first_prompts
from outrider.training.recipe import Recipe
from outrider.training.setup import Run


@dataclass(frozen=True)
class Look:
    """One check: figures of its decoding (empty without), and whether this drafter is the best so far."""

    decode: dict[str, float]
    best: bool


class Watch:
    """Follows one run. The trainer asks `due`, calls `look`, saves what was `best`, and ends when `stopped`."""

    def __init__(self, recipe: Recipe, run: Run) -> None:
        self.config, self.run = recipe.watch, run
        self.last_step = recipe.optimizer.steps
        self.metric = "decode_tau" if self.config.decode_every else "expected_length_greedy"
        self.every = self.config.decode_every or recipe.eval_every
        self.best: float | None = None
        self.best_step = 0
        self._mark = float("-inf")  # what the next check must pass by min_delta
        self._failed = 0  # checks in a row that did not
        self._started, self._spent = time.perf_counter(), 0.0

    def due(self, step: int) -> bool:
        """Whether `look` is to be called after so many steps, with fresh held-out metrics."""
        return step % self.every == 0 or step == self.last_step

    def look(self, step: int, drafter: DraftModule, held_out: Mapping[str, float]) -> Look:
        """Judge the drafter after `step` steps; decodes unless decode checks are off."""
        decode = self._decode(drafter) if self.config.decode_every else {}
        value = decode["tau"] if decode else held_out["expected_length_greedy"]
        best = self.best is None or value > self.best
        if best:
            self.best, self.best_step = value, step
        if value > self._mark + self.config.min_delta:
            self._mark, self._failed = value, 0
        else:
            self._failed += 1
        return Look(decode, best)

    def _decode(self, drafter: DraftModule) -> dict[str, float]:
        config, run = self.config, self.run
        prompts = first_prompts(run.held_out, config.decode_prompts)
        ids = run.draft_ids_Vd if run.reduced else None
        figures = decode_check(drafter, run.target, ids, prompts, config.decode_tokens, config.temperature)
        self._spent += figures["seconds"]
        return {**figures, "share_of_time": self._spent / (time.perf_counter() - self._started)}

    @property
    def stopped(self) -> bool:
        """Whether patience is spent."""
        return self.config.patience is not None and self._failed >= self.config.patience

    def summary(self) -> str:
        """One line for the end of a run; empty where nothing was checked yet."""
        if self.best is None:
            return ""
        patience = f"patience of {self.config.patience} checks spent; " if self.stopped else ""
        return f"{patience}best drafter: step {self.best_step}, {self.metric} {self.best:.2f}"

    def _measure(self) -> dict[str, Any]:
        """What makes two values comparable."""
        decoding = ("decode_prompts", "decode_tokens", "temperature") if self.config.decode_every else ()
        return {"metric": self.metric, **{name: getattr(self.config, name) for name in decoding}}

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON; empty before the first check."""
        if self.best is None:
            return {}
        memory = {"best": self.best, "best_step": self.best_step, "mark": self._mark, "failed": self._failed}
        return {"measure": self._measure(), **memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the memory of `state_dict`, unless it was measured otherwise: then the search begins anew."""
        if state.get("measure") != self._measure():
            return
        self.best, self.best_step = state["best"], state["best_step"]
        self._mark, self._failed = state["mark"], state["failed"]
