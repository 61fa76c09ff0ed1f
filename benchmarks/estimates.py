"""Compare estimators of acceptance on recorded drafts while the task changes: calibration, log loss, tokens per second.

    outrider simulate --record TASK.npz --tasks TASK.jsonl ...
    python -m benchmarks.estimates A.npz B.npz C.npz --profile PROFILE.json --out FILE.json

Traffic is one task for so many rounds, then the next (A, B, C, A), and at a change all requests are new. A round is one
request's. What is verified is decided by look-ahead over the profile from each estimator's own estimates, as in the
engine; estimates are then compared with all outcomes of the drafts, verified or not, which traces know.

    own        the drafter's confidences as they were recorded, its stored calibration included
    average    per position, an exponentially weighted mean of what was accepted (adaptive lengths of several engines)
    refit      logistic in the drafter's confidence, one slope and a constant per position, one damped Newton step every
               100 steps from these alone (vLLM's online acceptance estimator, its pull request 52228)
    estimates  decoding/acceptance.py

Each is run with confidences and, but for `own`, without. Shapes: R requests, K positions, N rounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Protocol

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from outrider.decoding.acceptance import Acceptance, LogisticEstimates, known_verdicts, logit, sigmoid
from outrider.decoding.cost import Floats, Ints, Profile, StepCost
from outrider.decoding.policies import LookAhead
from outrider.evaluation.calibration.fit import ece, ece_noise, log_loss
from outrider.evaluation.loadtest.traces import Response, Traces
from outrider.utils.measure import machine, versions


class Estimator(Protocol):
    """What `Acceptance` asks of its estimates."""

    def expected(self, ids: Sequence[Hashable], groups_R: Ints | None, confidences_RK: Floats) -> Floats: ...

    def observe(
        self,
        ids: Sequence[Hashable],
        verified_R: Ints,
        accepted_R: Ints,
        *,
        groups_R: Ints | None,
        confidences_RK: Floats,
    ) -> None: ...

    def forget(self, id: Hashable) -> None: ...


class Own:
    """The drafter's own confidences."""

    def expected(self, ids: Sequence[Hashable], groups_R: Ints | None, confidences_RK: Floats) -> Floats:
        return confidences_RK

    def observe(
        self,
        ids: Sequence[Hashable],
        verified_R: Ints,
        accepted_R: Ints,
        *,
        groups_R: Ints | None,
        confidences_RK: Floats,
    ) -> None:
        """Nothing is learned."""

    def forget(self, id: Hashable) -> None:
        """Nothing is remembered."""


class Average(Own):
    """Exponentially weighted means of acceptance per position; a step's outcomes at a position count as one."""

    def __init__(self, positions: int, weight: float = 0.1) -> None:
        self.mean_K, self.weight = np.full(positions, 0.5), weight

    def expected(self, ids: Sequence[Hashable], groups_R: Ints | None, confidences_RK: Floats) -> Floats:
        return np.tile(self.mean_K[: confidences_RK.shape[1]], (len(ids), 1))

    def observe(
        self,
        ids: Sequence[Hashable],
        verified_R: Ints,
        accepted_R: Ints,
        *,
        groups_R: Ints | None,
        confidences_RK: Floats,
    ) -> None:
        """A step further, at the positions with an outcome."""
        places_K = np.arange(len(self.mean_K))
        count_K = (places_K < np.minimum(accepted_R + 1, verified_R)[:, None]).sum(axis=0)
        share_K = (places_K < accepted_R[:, None]).sum(axis=0) / np.maximum(count_K, 1)
        self.mean_K = np.where(count_K > 0, self.mean_K + self.weight * (share_K - self.mean_K), self.mean_K)


class Refit(Own):
    """sigmoid(w x + b_k), x = logit c_k: a Newton step every `every` steps, damped by n / (n + `damping`) outcomes."""

    every, damping, ridge = 100, 50.0, 1e-3

    def __init__(self, positions: int) -> None:
        self.theta_P = np.array([0.0, *[1.5] * positions])  # w, b_1 .. b_K, from where the published one begins
        self.steps = 0
        self._clear()

    def _clear(self) -> None:
        size = len(self.theta_P)
        self.information_PP, self.gradient_P = np.zeros((size, size)), np.zeros(size)
        self.counts_K = np.zeros(size - 1)

    def expected(self, ids: Sequence[Hashable], groups_R: Ints | None, confidences_RK: Floats) -> Floats:
        logits_RK = np.where(np.isnan(confidences_RK), 0.0, logit(confidences_RK, 1e-4))
        return sigmoid(self.theta_P[0] * logits_RK + self.theta_P[1 : 1 + logits_RK.shape[1]])

    def observe(
        self,
        ids: Sequence[Hashable],
        verified_R: Ints,
        accepted_R: Ints,
        *,
        groups_R: Ints | None,
        confidences_RK: Floats,
    ) -> None:
        """Add to this window's curvature and gradient, and fit at its end."""
        expected_RK = self.expected(ids, groups_R, confidences_RK)
        r_N, k_N = np.nonzero(np.arange(expected_RK.shape[1]) < np.minimum(accepted_R + 1, verified_R)[:, None])
        given_N = confidences_RK[r_N, k_N]
        design_NP = np.zeros((len(r_N), len(self.theta_P)))
        design_NP[:, 0] = np.where(np.isnan(given_N), 0.0, logit(given_N, 1e-4))
        design_NP[np.arange(len(r_N)), 1 + k_N] = 1.0
        p_N = expected_RK[r_N, k_N]
        self.information_PP += (design_NP * (p_N * (1 - p_N))[:, None]).T @ design_NP
        self.gradient_P += ((k_N < accepted_R[r_N]) - p_N) @ design_NP
        self.counts_K += np.bincount(k_N, minlength=len(self.counts_K))
        self.steps += 1
        if self.steps % self.every == 0:
            step_P = np.linalg.solve(self.information_PP + self.ridge * np.eye(len(self.theta_P)), self.gradient_P)
            counts_P = np.array([self.counts_K.sum(), *self.counts_K])
            self.theta_P += step_P * counts_P / (counts_P + self.damping)
            self._clear()


ESTIMATORS: dict[str, Callable[[int], Estimator]] = {
    "own": lambda positions: Own(),
    "average": Average,
    "refit": Refit,
    "estimates": LogisticEstimates,
}


@dataclass
class Live:
    """A request under way."""

    id: int
    response: Response
    place: int = 0

    @property
    def row(self) -> int:
        """Its row in the traces' arrays."""
        return self.response.start + self.place


@dataclass(frozen=True)
class Replayed:
    """Rounds of one task within a replay.

    Attributes:
        task: whose rounds; `changed`: another one went before. `round_N`: rounds of it before this one.
        row_N: of the traces. `expected_NK`, `drafted_N`, `right_N`: estimates, drafts, and how many of them are right.
        tokens: committed from the first counted round on; `seconds` of these steps by the profile.
    """

    task: Traces
    changed: bool
    round_N: Ints
    row_N: Ints
    expected_NK: Floats
    drafted_N: Ints
    right_N: Ints
    tokens: int
    seconds: float


def replay(
    traffic: Sequence[Traces], rounds: int, estimator: Estimator, *, users: int, cost: StepCost, seed: int, head: bool
) -> list[Replayed]:
    """The tasks of the traffic one after the other, `rounds` each, with that many requests at a time.

    Args:
        head: False hides the drafter's confidences.
    """
    generator, gamma, number = np.random.default_rng(seed), max(task.gamma for task in traffic), 0
    history, policy = Acceptance(gamma), LookAhead(cost)
    history._estimates = estimator  # type: ignore[assignment]
    found = []
    for task in traffic:
        live: list[Live] = []
        queue: list[int] = []
        parts: list[tuple[Ints, Ints, Floats, Ints, Ints]] = []
        done = tokens = 0
        seconds = 0.0
        while done < rounds:
            while len(live) < users:
                queue = queue or generator.permutation(len(task.responses)).tolist()
                live.append(Live(number, task.responses[queue.pop()]))
                number += 1
            ids, rows_R = [one.id for one in live], np.array([one.row for one in live])
            drafted_R, right_R = task.drafted_N[rows_R], task.accepted_N[rows_R]
            given_RK = task.confidences_NK[rows_R].astype(np.float64) if head else np.full((len(live), gamma), np.nan)
            contexts = [len(one.response.prompt) + one.place for one in live]
            view = history.step_view(ids, given_RK.tolist(), drafted_R.tolist(), contexts)
            verified_R = policy.lengths(view) if drafted_R.any() else drafted_R
            accepted_R = np.minimum(right_R, verified_R)
            left_R = np.array([len(one.response.tokens) - one.place for one in live])
            committed_R = np.minimum(accepted_R + 1, left_R)
            known_R, sure_R = known_verdicts(verified_R, accepted_R, committed_R)
            history.observe(ids, view, verified_R=known_R, accepted_R=sure_R)
            expected_RK = np.ones((len(live), gamma))
            expected_RK[:, : view.confidences_RK.shape[1]] = view.confidences_RK
            parts.append((np.full(len(live), done), rows_R, expected_RK, drafted_R, right_R))
            total = np.array([len(live) + int(verified_R.sum())])
            spent = cost.seconds(total, len(live), float(np.mean(contexts)))
            spent += cost.draft_seconds(int((drafted_R > 0).sum()))
            tokens, seconds, done = tokens + int(committed_R.sum()), seconds + float(spent[0]), done + len(live)
            for one, count in zip(live, committed_R.tolist(), strict=True):
                one.place += count
            for one in [one for one in live if one.place >= len(one.response.tokens)]:
                history.forget(one.id)
                live.remove(one)
        for one in live:
            history.forget(one.id)
        joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
        found.append(Replayed(task, bool(found), *joined, tokens=tokens, seconds=seconds))  # type: ignore[arg-type]
    return found


@dataclass(frozen=True)
class Score:
    """How good the estimates of one estimator were in some rounds.

    Attributes:
        ece, worst: expected calibration error of the survival a_k in per cent: mean over positions, and the largest.
        chance: the mean that perfect estimates would show in so many different rounds.
        log_loss: of the verdicts of a whole draft, in nats per round.
    """

    ece: float
    worst: float
    chance: float
    log_loss: float


def score(parts: Sequence[tuple[Replayed, Ints]]) -> Score:
    """Of the chosen rounds of some replays."""
    expected_NK = np.concatenate([one.expected_NK[chosen] for one, chosen in parts])
    drafted_N = np.concatenate([one.drafted_N[chosen] for one, chosen in parts])
    right_N = np.concatenate([one.right_N[chosen] for one, chosen in parts])
    different = len({(id(one.task), int(row)) for one, chosen in parts for row in one.row_N[chosen]})
    survival_NK, errors, chances, loss = np.cumprod(expected_NK, axis=1), [], [], 0.0
    for k in range(expected_NK.shape[1]):
        judged_N = drafted_N > k
        predicted_N, outcome_N = survival_NK[judged_N, k], (right_N[judged_N] > k).astype(np.float64)
        errors.append(100 * ece(predicted_N, outcome_N))
        chances.append(100 * ece_noise(predicted_N) * np.sqrt(len(drafted_N) / different))
        reached_N = judged_N & (right_N >= k)
        loss += float(log_loss(expected_NK[reached_N, k], (right_N[reached_N] > k).astype(np.float64)).sum())
    return Score(float(np.mean(errors)), max(errors), float(np.mean(chances)), loss / len(drafted_N))


def main(
    traces: Annotated[list[Path], typer.Argument(help="one recording per task, in the order of the traffic")],
    profile: Annotated[Path, typer.Option(help="what steps cost")],
    users: Annotated[str, typer.Option(help="requests at a time")] = "1,8",
    rounds: Annotated[int, typer.Option(min=400, help="rounds of a task")] = 600,
    seeds: Annotated[int, typer.Option(min=1, help="replays with the prompts in another order")] = 6,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures")] = None,
) -> None:
    """Calibration, log loss and tokens per second of four estimators of acceptance."""
    tasks, cost = [Traces.load(path) for path in traces], Profile.load(profile)
    view = Table(title="rounds 200 on behind a change of task (and before 200)")
    for heading in ("users", "estimator", "reads c", "ECE %", "worst", "chance", "nats a round", "tokens/s"):
        view.add_column(heading, justify="left" if heading in ("estimator", "reads c") else "right", no_wrap=True)
    figures = []
    for count in map(int, users.split(",")):
        for head in (True, False):
            for name, make in ESTIMATORS.items():
                if name == "own" and not head:
                    continue
                runs: list[Replayed] = []
                alone: list[Replayed] = []
                for seed in range(seeds):
                    order = [tasks[(seed + i) % len(tasks)] for i in range(len(tasks) + 1)]
                    for traffic, found in ((order, runs), (tasks[:1], alone)):
                        estimator = make(tasks[0].gamma)
                        found += replay(traffic, rounds, estimator, users=count, cost=cost, seed=seed, head=head)
                changed = [one for one in runs if one.changed]
                late, early, only = (
                    score([(one, np.flatnonzero((one.round_N >= low) & (one.round_N < high))) for one in chosen])
                    for chosen, low, high in ((changed, 200, rounds), (changed, 0, 200), (alone, 200, rounds))
                )
                speed = sum(one.tokens for one in changed) / sum(one.seconds for one in changed)
                kinds = {"after_200": late, "before_200": early, "first_task_alone": only}
                figures.append(
                    {"users": count, "estimator": name, "confidences": head, "tokens_per_second": speed}
                    | {kind: asdict(of_kind) for kind, of_kind in kinds.items()}
                )
                view.add_row(
                    str(count),
                    name,
                    "yes" if head else "no",
                    f"{late.ece:.1f} ({early.ece:.1f})",
                    f"{late.worst:.1f} ({early.worst:.1f})",
                    f"{late.chance:.1f}",
                    f"{late.log_loss:.3f} ({early.log_loss:.3f})",
                    f"{speed:.1f}",
                )
    Console(width=120).print(view)
    if out is not None:
        about = {"traces": [task.about for task in tasks], "rounds": rounds, "seeds": seeds}
        about |= {"machine": machine(), "versions": versions()}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"figures": figures, **about}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
