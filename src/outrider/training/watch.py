"""Held-out metrics, decoding of held-out prompts during training, the best drafter and early stopping.

    expected accepted length = 1 + sum_k prod_{i <= k} a_i      bonus included, averaged over anchors
    a_i: agreement of the argmaxes (temperature 0), or 1 - TV (temperature 1)

The teacher-forced product is exactly what decoding measures, because a sequential head only ever sees accepted tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from outrider.data.responses import Sample
from outrider.decoding.generate import acceptance, generate
from outrider.decoding.request import StopRules
from outrider.drafters.base import DrafterWeights, DraftModule
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from outrider.training.batches import BlockBatch, Schedule, build_batch
from outrider.training.features import FeatureCache, Features
from outrider.training.objective import BlockObjective, scatter
from outrider.training.recipe import Recipe, WatchSection
from outrider.training.setup import Run


def survival(acceptance_NK: Tensor) -> Tensor:
    """Probability that positions 1..k are all accepted: the running product."""
    return acceptance_NK.cumprod(-1)


def held_out_batches(
    samples: Sequence[Sample],
    features: Sequence[Features] | FeatureCache,
    gamma: int,
    anchors_per_sample: int,
    device: torch.device,
    padded: bool = False,
) -> Iterator[BlockBatch]:
    """One batch per sample, at the same anchors whenever it is asked for."""
    schedule = Schedule(samples, 1, anchors_per_sample, seed=0)
    for index in range(len(samples)):
        chosen = [(index, schedule.anchors(index, 0))]
        yield build_batch(chosen, samples, [features[index]], gamma=gamma, device=device, padded=padded)


@torch.no_grad()
def held_out_metrics(drafter: DraftModule, compute: BlockObjective, batches: Iterable[BlockBatch]) -> dict[str, float]:
    """Means over held-out anchors: loss, expected accepted length at temperatures 0 and 1, acceptance per position.

    `reached_k`: anchors of which the drafts before k were all accepted at temperature 0.
    """
    losses: list[float] = []
    greedy, sampled, counted = [], [], []
    for batch in batches:
        output = compute(drafter, batch)
        losses.append(output.loss.item())
        greedy.append(scatter(output.agreement_N, batch.supervised_NK)[: batch.blocks])
        sampled.append(scatter(output.acceptance_N, batch.supervised_NK)[: batch.blocks])
        counted.append(batch.supervised_NK[: batch.blocks])
    greedy_NK, sampled_NK, counted_NK = torch.cat(greedy), torch.cat(sampled), torch.cat(counted)
    result = {
        "loss": sum(losses) / len(losses),
        "expected_length_greedy": 1 + survival(greedy_NK).sum(-1).mean().item(),
        "expected_length_sampled": 1 + survival(sampled_NK).sum(-1).mean().item(),
    }
    reached_NK = counted_NK & (torch.cat((torch.ones_like(greedy_NK[:, :1]), survival(greedy_NK)[:, :-1]), 1) > 0)
    for k in range(counted_NK.shape[1]):
        reached_N = reached_NK[:, k]
        result[f"conditional_acceptance_{k + 1}"] = greedy_NK[reached_N, k].mean().item() if reached_N.any() else 0.0
        result[f"reached_{k + 1}"] = int(reached_N.sum())
    return result


# ----------------------------------------------------------------------------
# Real decoding with the drafter as it is now: what held-out metrics promise, measured.
#
#     folded weights -> serving form (`Method.serve`) -> draft, verify, commit on held-out prompts
#
# Nothing of training is touched: weights are copied, no gradient is recorded, and randomness comes from seeds of the
# prompts' own, the same at every check. At temperature 0 the output is the target's own, so no plain decoding is
# needed.
# ----------------------------------------------------------------------------


def first_prompts(samples: Sequence[Sample], count: int) -> list[list[int]]:
    """The first prompt of each of `count` conversations, as tokens."""
    firsts: dict[str, Sample] = {}
    for sample in samples:  # a conversation may come in several samples, its first turn in the first of them
        firsts.setdefault(sample.id, sample)
    return [s.tokens[: s.spans[0][0]] for s in list(firsts.values())[:count]]


_PLAIN_TOKENS = 24  # decoded without drafts, to know what a plain round costs


@torch.no_grad()
def decode_check(
    drafter: DraftModule,
    target: Target,
    draft_ids_Vd: Tensor | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
) -> dict[str, float]:
    """Decode the prompts and count.

    `tau` is tokens per round, bonus included; `break_even` the tau at which drafting is as fast as plain decoding, the
    mean seconds of a round / those of a plain one (of the first prompt); `conditional_acceptance_k` is there for
    positions that some round reached; `tokens_per_second` includes the prefills, `seconds` also the time to pack the
    weights.
    """
    started = time.perf_counter()
    served = DrafterWeights(drafter, draft_ids_Vd).serve(target)
    rules = StopRules(max_new_tokens)
    decoded = [
        generate(target, prompt, served, params=SamplingParams(temperature=temperature, seed=number), rules=rules)
        for number, prompt in enumerate(prompts)
    ]
    plain = generate(target, prompts[0], None, rules=StopRules(min(_PLAIN_TOKENS, max_new_tokens)))
    rounds = [r for generation in decoded for r in generation.rounds]
    tokens = sum(len(generation.tokens) for generation in decoded)
    tau, conditional, _ = acceptance(rounds, drafter.config.gamma)
    round_seconds, plain_seconds = (fmean(r.seconds for r in each) for each in (rounds, plain.rounds))
    figures: dict[str, float] = {
        "tau": tau,
        "rounds": len(rounds),
        "tokens": tokens,
        "tokens_per_second": tokens / sum(generation.seconds for generation in decoded),
        "break_even": max(1.0, round_seconds / plain_seconds),  # less is a noisy clock
    }
    figures |= {f"conditional_acceptance_{k}": c for k, c in enumerate(conditional, 1) if c is not None}
    return {**figures, "seconds": time.perf_counter() - started}


# ----------------------------------------------------------------------------
# Which drafter of a run is the best one, and when to stop looking for a better one.
#
#     every decode_every steps, and at the last:  decode held-out prompts -> tau -> best? -> OUT/best
#                                                                               patience spent? -> stop
#
# Without decode checks the held-out expected accepted length takes tau's place, at every evaluation. What is due when
# is a function of the step, and the memory (`state_dict`) is a few numbers that travel with the training state, so a
# resumed run picks the same drafter and stops at the same step as an uninterrupted one.
#
# A few prompts make a noisy measure, and the best of many noisy values looks better than it is: choose by it, but do
# not quote it.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """One check: figures of its decoding (empty without), and whether this drafter is the best so far."""

    decode: dict[str, float]
    best: bool


def _measure_of(config: WatchSection) -> dict[str, Any]:
    """What makes two values comparable."""
    if not config.decode_every:
        return {"metric": "expected_length_greedy"}
    decoding = {name: getattr(config, name) for name in ("decode_prompts", "decode_tokens", "temperature")}
    return {"metric": "decode_tau", **decoding}


def patience_spent(config: WatchSection, memory: Mapping[str, Any]) -> bool:
    """Whether a run with this memory (`Watch.state_dict`) stopped early; False where it was measured otherwise."""
    return (
        config.patience is not None
        and memory.get("measure") == _measure_of(config)
        and memory["failed"] >= config.patience
    )


class Watch:
    """Picks the best drafter of a run and stops early. The trainer asks `due`, calls `look` and ends when `stopped`."""

    def __init__(self, recipe: Recipe, run: Run) -> None:
        self.config, self.run = recipe.watch, run
        self.metric = _measure_of(self.config)["metric"]
        self.every = self.config.decode_every or recipe.eval_every
        self.best: float | None = None
        self.best_step = 0
        self._mark = float("-inf")  # what the next check must pass by min_delta
        self._failed = 0  # checks in a row that did not
        self._started, self._spent = time.perf_counter(), 0.0

    def due(self, step: int) -> bool:
        """Whether `look` is to be called after so many steps, with fresh held-out metrics, and not only at the end."""
        return step % self.every == 0

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
        figures = decode_check(
            drafter,
            run.target,
            ids,
            prompts=prompts,
            max_new_tokens=config.decode_tokens,
            temperature=config.temperature,
        )
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
        measured = f"{self.metric} {self.best:.2f}"
        if self.best_step == 0:
            return f"{patience}no step was better than the drafter that training began with, {measured}"
        return f"{patience}best drafter: step {self.best_step}, {measured}"

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON; empty before the first check."""
        if self.best is None:
            return {}
        memory = {"best": self.best, "best_step": self.best_step, "mark": self._mark, "failed": self._failed}
        return {"measure": _measure_of(self.config), **memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the memory of `state_dict`, unless it was measured otherwise: then the search begins anew."""
        if state.get("measure") != _measure_of(self.config):
            return
        self.best, self.best_step = state["best"], state["best_step"]
        self._mark, self._failed = state["mark"], state["failed"]
