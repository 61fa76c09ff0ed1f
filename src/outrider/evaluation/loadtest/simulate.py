"""A simulated load test: the engine's own scheduling over recorded drafts, on a machine that is a cost model.

    seconds of a step  =  draft(drafting requests)  +  verify(rows, requests, context)  +  other(requests)

A measured `Profile` is a machine; so are a profile scaled part by part (another processor, a larger target) and a
published table of rates.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from outrider.backends.local import NO_SPECULATION, build_variant
from outrider.decoding.acceptance import Acceptance, known_verdicts
from outrider.decoding.backoff import Backoff
from outrider.decoding.cost import Floats, Ints, Profile, SpsTable, StepCost
from outrider.decoding.policies import FixedPolicy, Policy
from outrider.decoding.prompt_lookup import Lookup, PromptLookup
from outrider.decoding.request import FinishReason, Output, Request, StepRecord
from outrider.decoding.scheduler import EngineConfig, Scheduler, StepPlan, Work
from outrider.evaluation.loadtest.load import Ask, run_load
from outrider.evaluation.loadtest.metrics import Point, PointSummary, summarise
from outrider.evaluation.loadtest.sweep import Sweep
from outrider.evaluation.loadtest.traces import Response, Traces, matching
from outrider.sampling import SamplingParams
from outrider.utils.documents import read_json, read_mapping
from outrider.utils.files import invalid_fields


class Machine(StepCost, Protocol):
    """A step cost with the parts of `seconds`, which is their sum."""

    def verify_seconds(
        self, tokens_N: Ints, requests: int, context: float, prompts: Sequence[tuple[int, int]] = ()
    ) -> Floats:
        """Seconds of target forwards of `tokens_N` rows of requests that decode, [N], and of chunks of prompts, each
        given as (tokens cached, tokens of the chunk).
        """
        ...

    def other_seconds(self, requests: int, verified_N: Ints) -> Floats:
        """Seconds [N] of sampling and bookkeeping in steps that verify so many drafts."""
        ...

    def plain(self) -> Machine:
        """The same machine serving without a drafter."""
        ...


@dataclass(frozen=True)
class Scaled:
    """A machine whose drafts and target forwards take so many times as long."""

    machine: Machine
    draft: float = 1.0
    verify: float = 1.0

    def __post_init__(self) -> None:
        for name in ("draft", "verify"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--scale-{name} {getattr(self, name)} must be above 0: it multiplies seconds.")

    def seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
        return self.verify_seconds(tokens_N, requests, context) + self.other_seconds(requests, tokens_N - requests)

    def draft_seconds(self, drafting: int, depth: int | None = None) -> float:
        return self.draft * self.machine.draft_seconds(drafting, depth)

    def verify_seconds(
        self, tokens_N: Ints, requests: int, context: float, prompts: Sequence[tuple[int, int]] = ()
    ) -> Floats:
        return self.verify * self.machine.verify_seconds(tokens_N, requests, context, prompts=prompts)

    def other_seconds(self, requests: int, verified_N: Ints) -> Floats:
        return self.machine.other_seconds(requests, verified_N)

    def plain(self) -> Scaled:
        return replace(self, machine=self.machine.plain())


class TableMachine(BaseModel):
    """A machine read from a table file: target forwards per second by rows, seconds of drafting by requests, from 1 on.

    Beyond its end a list goes on as it ended: the rate stays, and so do the seconds of one more drafting request. The
    context costs nothing.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    sps: list[float] = Field(min_length=1)
    draft: list[Annotated[float, Field(ge=0)]] = Field(default=[0.0], min_length=1, alias="draft_seconds")
    other: float = Field(default=0.0, ge=0, alias="other_seconds")

    @field_validator("sps")
    @classmethod
    def _positive(cls, sps: list[float]) -> list[float]:
        SpsTable(sps)
        return sps

    @cached_property
    def forward(self) -> SpsTable:
        """The target's forwards."""
        return SpsTable(self.sps)

    def seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
        return self.other + self.verify_seconds(tokens_N, requests, context)

    def draft_seconds(self, drafting: int, depth: int | None = None) -> float:
        seconds = [0.0, *self.draft]
        last = len(self.draft)
        if drafting <= last:
            return seconds[drafting]
        return seconds[last] + (drafting - last) * (seconds[last] - seconds[last - 1])

    def verify_seconds(
        self, tokens_N: Ints, requests: int, context: float, prompts: Sequence[tuple[int, int]] = ()
    ) -> Floats:
        return self.forward.seconds(tokens_N + sum(count for _, count in prompts), requests, context)

    def other_seconds(self, requests: int, verified_N: Ints) -> Floats:
        return np.full(verified_N.shape, self.other)

    def plain(self) -> TableMachine:
        return self


def load_machine(path: Path, recorded: Mapping[str, Any], draft: float = 1.0, verify: float = 1.0) -> Machine:
    """Read a machine from a profile or a table file, and scale it.

    Args:
        recorded: the setting of the traces; a profile must be of the same target and drafter.

    Raises:
        ValueError: missing, neither of the two, or of something else.
    """
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"no profile at {path}: measure one (outrider profile --out {path}).") from None
    found: Machine
    if isinstance(content, dict) and "sps" in content:
        try:
            found = TableMachine.model_validate(content)
        except ValidationError as error:
            wrong = invalid_fields(error)[0].rstrip(".")
            raise ValueError(f"{path}: {wrong}.") from None
    else:
        found = profile = Profile.load(path)
        for name in ("target", "drafter"):
            mine, theirs = getattr(profile.setting, name), recorded.get(name)
            if mine != theirs:
                raise ValueError(f"{path}: {name} is {mine}, the traces are of {theirs}: record and profile the same.")
    return found if draft == verify == 1.0 else Scaled(found, draft, verify)


# ----------------------------------------------------------------------------
# Discrete events: the engine's own scheduling over recorded drafts, each step charged what the machine would take.
#
#     plan      decoding/scheduler.py     queues, blocks, chunks of prefill, preemption     the production object
#     draft     policy, traces          c_1 .. c_l of position n                          recorded, or looked up
#     decide    acceptance, policy      l per request                                     the production objects
#     commit    min(A_n, l) + 1 tokens                                                    exact, see traces.py
#     clock  += draft(D) + verify(B, R, S) + other(R, m)                                  measured, or supposed
#
# Only seconds are modelled. Step for step it is what decoding/engine.py does, without tensors.
# Shapes: R requests that decode, K draft positions.
# ----------------------------------------------------------------------------


@dataclass
class _Live:
    """A request under way: `place` is its position in its response, `end` where it stops."""

    response: Response
    place: int
    end: int
    limited: bool  # it ends there because of max_new_tokens

    @property
    def row(self) -> int:
        """Its row in the traces' arrays."""
        return self.response.start + self.place

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.response.prompt) + self.place

    @property
    def sampled(self) -> bool:
        """Whether its tokens are drawn at a temperature above 0."""
        return self.response.params.temperature > 0

    def commit(self, count: int) -> tuple[list[int], FinishReason | None]:
        """Up to `count` more tokens, and how the response ended if it did."""
        before, self.place = self.place, min(self.place + count, self.end)
        tokens = self.response.tokens[before : self.place]
        return tokens, None if self.place < self.end else "length" if self.limited else "stop"


class SimulatedEngine:
    """`Engine` without models: the same calls and step records, with recorded drafts and seconds from `machine`.

    Args:
        slots: most drafts of a round, as recorded by default; 0 simulates plain decoding.
    """

    def __init__(
        self,
        traces: Traces,
        machine: Machine,
        policy: Policy | None = None,
        config: EngineConfig | None = None,
        slots: int | None = None,
    ) -> None:
        self.traces, self.config = traces, config or EngineConfig()
        self.policy: Policy = policy or FixedPolicy()
        self.backoff = Backoff(self.policy)
        slots = traces.slots if slots is None else slots
        assert slots <= traces.slots, f"drafts of {slots} asked for, {traces.slots} recorded"
        self.gamma = min(slots, traces.gamma)
        self.lookup: PromptLookup | None = None
        if traces.lookup is not None and slots:
            self.lookup = PromptLookup(replace(traces.lookup, gamma=min(slots, traces.lookup.gamma)))
        self.machine = machine if slots else machine.plain()
        self.scheduler, self.acceptance = Scheduler(self.config, slots), Acceptance(self.gamma)
        self.last: StepRecord | None = None
        self._live: dict[str, _Live] = {}

    @property
    def idle(self) -> bool:
        return not self._live

    @property
    def load(self) -> int:
        """How many requests it has."""
        return len(self._live)

    def submit(self, request: Request) -> None:
        """Queue a request; its text is the recorded one.

        Raises:
            ValueError: its id is in use, or its prompt, its sampling or so long a response was not recorded.
        """
        if request.id in self._live:
            raise ValueError(f"request id {request.id!r} is in use; give every request its own.")
        response, wanted = self.traces.find(request.prompt), request.rules.max_new_tokens
        asked, recorded = (_without_free_seed(params) for params in (request.params, response.params))
        if asked != recorded:
            raise ValueError(
                f"request {request.id!r} asks for {asked}, its trace has {recorded}: record what is asked."
            )
        if wanted > len(response.tokens) and not response.stopped:
            raise ValueError(
                f"request {request.id!r} asks for {wanted} tokens, its trace has {len(response.tokens)}: "
                f"record with --max-new-tokens {wanted}, or ask for fewer."
            )
        end = min(wanted, len(response.tokens))
        self.scheduler.add(request.id, len(response.prompt), wanted)
        self._live[request.id] = _Live(response, 0, end, limited=end < len(response.tokens) or not response.stopped)

    def cancel(self, id: str) -> bool:
        """Forget a request and free all it holds; False where there is none of that id."""
        if self._live.pop(id, None) is None:
            return False
        self._forget(id)
        return True

    def step(self) -> list[Output]:
        """One step, as long as `last.seconds` says; an output for every request that got tokens."""
        plan = self.scheduler.plan()
        if not plan.work:
            return []
        deciding = [work for work in plan.work if work.decodes]
        lengths = [self._live[work.id].length for work in deciding]
        prompts = [(self.scheduler.running[work.id].cached, work.prefill) for work in plan.work if work.prefill]
        counts, outputs = Counter[str](), list[Output]()
        if deciding:
            counts, outputs = self._round(deciding, sum(work.prefill for work in plan.work))
        self._settle(plan, outputs)
        self.last = self._record(plan, counts, outputs, lengths=lengths, prompts=prompts)
        return outputs

    def _round(self, deciding: Sequence[Work], prefill: int) -> tuple[Counter[str], list[Output]]:
        """Draft, decide and commit; the outputs, and how many requests drafted (`drafting`), how many draft tokens were
        `proposed`, `admitted` and `accepted`, and the length of the longest draft (`depth`)."""
        ids, live = [work.id for work in deciding], [self._live[work.id] for work in deciding]
        rows_R = np.array([one.row for one in live])
        able = [work.id for work in deciding if work.limit > 0]
        pause = self.backoff.pause(able, len(deciding), prefill) if able else None
        pausing = pause is not None or not able
        lookups: dict[str, Lookup] = {}
        shortest = 1 if pause is None else pause.shortest_suffix
        if self.lookup is not None and shortest:
            lookups = self.lookup.find(
                self._texts(able),
                sampled={id for id in able if self._live[id].sampled},
                shortest=shortest,
            )
        depths_R = np.zeros(len(deciding), dtype=np.int64)
        if not pausing:
            depths_R = self._depths(deciding, prefill, lookups)
        confidences_RK = self.traces.confidences_NK[rows_R].astype(np.float64)
        drafted_R = np.minimum(self.traces.drafted_N[rows_R], depths_R)
        doubted_RK = confidences_RK < self.policy.min_confidence  # False for NaN: without confidences all are kept
        drafted_R = np.where(doubted_RK.any(axis=1), np.minimum(drafted_R, doubted_RK.argmax(axis=1)), drafted_R)
        depth = int(drafted_R.max())
        confidences, right_R, looked_up = confidences_RK.tolist(), self.traces.accepted_N[rows_R], [False] * len(ids)
        for i, work in enumerate(deciding):
            if work.limit > 0 and not depths_R[i] and work.id in lookups:
                draft = lookups[work.id].draft(work.limit, self.policy.min_confidence)
                confidences[i], looked_up[i], drafted_R[i] = draft.confidences, True, len(draft.tokens)
                right_R[i] = matching(draft.tokens, live[i].response.tokens[live[i].place :])
        view, admitted_R = None, drafted_R
        if drafted_R.any():
            view = self.acceptance.step_view(
                ids,
                confidences,
                drafted_R.tolist(),
                contexts=[one.length for one in live],
                other_tokens=prefill,
                looked_up=None if self.lookup is None else looked_up,
                sampled=[one.sampled for one in live],
            )
            admitted_R = self.policy.lengths(view)
        accepted_R = np.minimum(right_R, admitted_R)
        parts = [one.commit(count + 1) for one, count in zip(live, accepted_R.tolist(), strict=True)]
        committed_R = np.array([len(tokens) for tokens, _ in parts])
        verified_R, known_R = known_verdicts(admitted_R, accepted_R, committed_R)
        if admitted_R.any() or not pausing:
            self.backoff.observe(able, bool(admitted_R.any()))
            if self.lookup is not None:
                self.lookup.observe(lookups, self._texts(lookups))
        if view is None:
            self.acceptance.skip(len(ids))
        else:
            self.acceptance.observe(ids, view, verified_R=verified_R, accepted_R=known_R)
        counts = Counter(
            drafting=int((depths_R > 0).sum()),
            proposed=int(drafted_R.sum()),
            admitted=int(admitted_R.sum()),
            accepted=int(accepted_R.sum()),
            depth=depth,
        )
        return counts, [Output(id, tokens, "", finish=finish) for id, (tokens, finish) in zip(ids, parts, strict=True)]

    def _texts(self, ids: Iterable[str]) -> dict[str, list[int]]:
        """What is committed of these requests, by id."""
        live = {id: self._live[id] for id in ids}
        return {id: [*one.response.prompt, *one.response.tokens[: one.place]] for id, one in live.items()}

    def _depths(self, deciding: Sequence[Work], prefill: int, lookups: Mapping[str, Lookup]) -> Ints:
        """Most tokens drafted for each request, [R]: as many as it can use and the policy allows, none for a lookup."""
        able = [i for i, work in enumerate(deciding) if work.limit > 0]
        ids = [deciding[i].id for i in able]
        view = self.acceptance.plan_view(
            ids,
            [self._live[id].length for id in ids],
            prefill,
            other_requests=len(deciding) - len(able),
            lookup_RK=None if self.lookup is None else self.lookup.expected_RK(lookups, ids),
            sampled=[self._live[id].sampled for id in ids],
        )
        depths_R = np.zeros(len(deciding), dtype=np.int64)
        depths_R[able] = np.minimum(self.policy.depths(view), [deciding[i].limit for i in able])
        return depths_R

    def _settle(self, plan: StepPlan, outputs: Sequence[Output]) -> None:
        for work in plan.work:
            if not work.decodes:
                self.scheduler.advance(work.id, work.prefill)
        for output in outputs:
            if output.finish is None:
                self.scheduler.commit(output.id, len(output.tokens))
            else:
                del self._live[output.id]
                self._forget(output.id)

    def _forget(self, id: str) -> None:
        self.scheduler.remove(id)
        self.acceptance.forget(id)
        self.backoff.forget(id)
        if self.lookup is not None:
            self.lookup.forget(id)

    def _record(
        self,
        plan: StepPlan,
        counts: Counter[str],
        outputs: Sequence[Output],
        *,
        lengths: Sequence[int],
        prompts: Sequence[tuple[int, int]],
    ) -> StepRecord:
        """What the step was; `lengths`: committed tokens of the requests that decode."""
        rows, prefill = len(outputs) + counts["admitted"], sum(count for _, count in prompts)
        draft = self.machine.draft_seconds(counts["drafting"], max(counts["depth"], 1))
        context = sum(lengths) / len(lengths) if lengths else 0.0
        verify_N = self.machine.verify_seconds(np.array([rows]), max(len(lengths), 1), context, prompts=prompts)
        other_N = self.machine.other_seconds(len(plan.work), np.array([counts["admitted"]]))
        verify, other = float(verify_N[0]), float(other_N[0])
        return StepRecord(
            seconds=draft + verify + other,
            draft_seconds=draft,
            verify_seconds=verify,
            other_seconds=other,
            requests=len(outputs),
            drafting=counts["drafting"],
            tokens=prefill + rows,
            prefill_tokens=prefill,
            proposed=counts["proposed"],
            admitted=counts["admitted"],
            accepted=counts["accepted"],
            committed=sum(len(output.tokens) for output in outputs),
            preempted=len(plan.preempted),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            used_blocks=self.scheduler.allocator.used,
        )


def _without_free_seed(params: SamplingParams) -> SamplingParams:
    """Without the seed, unless the noise is coupled: a recorded response stands for every seed."""
    return params if params.coupled else replace(params, seed=None)


# ----------------------------------------------------------------------------
# Replicas side by side on one clock: each starts its next step when its last one ended and it has work.
#
#     replica 0   |--step--|----step----|      |-step-|
#     replica 1   |------step------|--step--|
#     step()               ^       ^    ^   ^      ^     gives the outputs of the step that ends next, at its end
#
# One replica is the simulation of one engine. A submission is seen between two of these events, as by an engine between
# two of its steps.
# ----------------------------------------------------------------------------


Routing = Literal["round-robin", "least-loaded"]


class Cluster:
    """Simulated engines behind a router: one `Backend`, and the `Clock` of its load.

    Attributes:
        last: the step whose outputs came last.
    """

    def __init__(self, replicas: Sequence[SimulatedEngine], routing: Routing = "least-loaded") -> None:
        if not replicas:
            raise ValueError("a cluster needs at least one replica.")
        self.replicas, self.routing = list(replicas), routing
        self._now = 0.0
        self.last: StepRecord | None = None
        self._routed = 0
        self._flying: list[tuple[float, int, StepRecord, list[Output]]] = []  # a heap by end, then by replica
        self._resting = set(range(len(self.replicas)))

    @property
    def idle(self) -> bool:
        return not self._flying and all(replica.idle for replica in self.replicas)

    def now(self) -> float:
        """Simulated seconds."""
        return self._now

    def stepped(self, last: StepRecord | None) -> None:
        """`step` moves the time itself."""

    def wait_until(self, moment: float) -> None:
        """Move the time to that moment; the cluster is idle."""
        assert self.idle, "time passes by steps while there is work"
        self._now = max(self._now, moment)

    def submit(self, request: Request) -> None:
        """Send a request to the next replica, or to the one with the fewest requests."""
        if self.routing == "round-robin":
            chosen = self.replicas[self._routed % len(self.replicas)]
        else:
            chosen = min(self.replicas, key=lambda replica: replica.load)
        self._routed += 1
        chosen.submit(request)

    def cancel(self, id: str) -> bool:
        """Forget a request; False where no replica has it. What its step in flight gives still comes out."""
        return any(replica.cancel(id) for replica in self.replicas)

    def step(self) -> list[Output]:
        """Move to the end of the step that ends next; its outputs."""
        for number in sorted(self._resting):
            replica = self.replicas[number]
            if not replica.idle:
                outputs = replica.step()
                assert replica.last is not None
                heapq.heappush(self._flying, (self._now + replica.last.seconds, number, replica.last, outputs))
                self._resting.remove(number)
        if not self._flying:
            return []
        self._now, number, self.last, outputs = heapq.heappop(self._flying)
        self._resting.add(number)
        return outputs


# ----------------------------------------------------------------------------
# The sweep of a load test on simulated machines, and how far it is from the real one.
#
#     error = predicted / measured - 1     of aggregate tokens per second, per variant and level
#
# Load generator, numbers, verdicts and plots are those of real runs (load.py, metrics.py, plots.py): only
# engine and clock are simulated.
# ----------------------------------------------------------------------------


_SAME = ("arrivals", "max_new_tokens", "requests", "seed", "token_budget", "traffic")


class PointError(BaseModel):
    """Aggregate tokens per second of one point, simulated and measured; errors in per cent.

    `ratio_error` is that of the ratio to plain decoding at the same level, which says whether choices between variants
    are right though the machine was faster or slower than its profile; None where plain decoding is not in both.
    """

    variant: str
    level: float
    measured: float
    predicted: float
    error: float
    ratio_error: float | None = None


def serve(
    name: str,
    traces: Traces,
    machine: Machine,
    engine: EngineConfig,
    threshold: float | None,
    replicas: int = 1,
    routing: Routing = "least-loaded",
) -> Cluster:
    """Simulated replicas that serve by the variant of that name (backends/local.py).

    Raises:
        ValueError: no such variant, or it needs what is not there.
    """
    variant = build_variant(name, traces.slots, threshold, cost=machine)
    parts = (traces, machine, variant.policy, engine, variant.drafts)
    return Cluster([SimulatedEngine(*parts) for _ in range(replicas)], routing)


def simulate_sweep(
    sweep: Sweep,
    serving: Callable[[str, float], Cluster],
    asks: Sequence[Ask],
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Point]:
    """Every point of a sweep; `serving` gives an idle cluster for a variant and a level.

    Raises:
        ValueError: the traces do not answer what the load asks.
    """
    turns, points = list(sweep.turns()), list[Point]()
    for number, (variant, level, repeat) in enumerate(turns):
        on_progress(f"{variant} at {level:g}", number, len(turns))
        cluster = serving(variant, level)
        arrivals = sweep.arriving(level, repeat, cluster.now())
        window = run_load(cluster, asks, arrivals, config=sweep.load(level), clock=cluster)
        metrics, same = summarise(window, sweep.sla), len(window.requests)  # the text is the recorded one
        points.append(
            Point(variant=variant, level=level, repeat=repeat, metrics=metrics, same=same, ties=0, mismatches=0)
        )
    on_progress("done", len(turns), len(turns))
    return points


def check_comparable(simulated: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Refuse to compare a simulation with a measurement under another load.

    Raises:
        ValueError: naming each field that differs.
    """
    differing = [
        f"{name} is {measured.get(name)}, here it is {simulated[name]}"
        for name in _SAME
        if measured.get(name) != simulated[name]
    ]
    if differing:
        raise ValueError(
            f"--validate: measured under another load: {'; '.join(differing)}. Simulate what was measured."
        )


def load_validation(path: Path) -> list[PointError]:
    """Read the validation.json that `outrider simulate --validate` wrote.

    Raises:
        ValueError: something else.
    """
    try:
        return TypeAdapter(list[PointError]).validate_python(read_mapping(path).get("points"))
    except ValidationError as error:
        reason = invalid_fields(error, "points")[0]
        raise ValueError(f"{path} is no validation.json of outrider simulate ({reason}).") from error


def errors_of(compared: Sequence[PointError]) -> list[str]:
    """The worst error, and how many ratios to plain decoding are right within 10 %, as lines."""
    worst = max(compared, key=lambda one: abs(one.error))
    lines = [f"worst: {worst.variant} at {worst.level:g}, {worst.error:+.1f} %"]
    ratios = [abs(one.ratio_error) for one in compared if one.ratio_error is not None and one.variant != NO_SPECULATION]
    if ratios:
        within = sum(error <= 10 for error in ratios)
        lines.append(f"ratios to plain decoding: {within} of {len(ratios)} within 10 %, worst {max(ratios):.1f} %")
    return lines


def validation_rows(compared: Sequence[PointError]) -> list[list[str]]:
    """Headings, then a row per point."""
    found = [["variant", "level", "measured", "simulated", "error", "of ratio to none"]]
    for one in compared:
        relative = "" if one.ratio_error is None else f"{one.ratio_error:+.1f} %"
        measured, predicted = f"{one.measured:.1f}", f"{one.predicted:.1f}"
        found.append([one.variant, f"{one.level:g}", measured, predicted, f"{one.error:+.1f} %", relative])
    return found


def compare(predicted: Sequence[PointSummary], measured: Sequence[PointSummary]) -> list[PointError]:
    """Simulated and measured throughput at the points both have, in the simulation's order; medians over repeats.

    Raises:
        ValueError: they have none in common.
    """
    real = {(point.variant, point.level): point.throughput for point in measured}
    ratios = {
        (point.variant, point.level): point.throughput / real[point.variant, point.level]
        for point in predicted
        if (point.variant, point.level) in real
    }
    found = []
    for point in predicted:
        ratio = ratios.get((point.variant, point.level))
        plain = ratios.get((NO_SPECULATION, point.level))
        if ratio is not None:
            found.append(
                PointError(
                    variant=point.variant,
                    level=point.level,
                    measured=real[point.variant, point.level],
                    predicted=point.throughput,
                    error=100 * (ratio - 1),
                    ratio_error=None if plain is None else 100 * (ratio / plain - 1),
                )
            )
    if not found:
        raise ValueError("no measured point has the variant and level of a simulated one: choose the same for both.")
    return found
