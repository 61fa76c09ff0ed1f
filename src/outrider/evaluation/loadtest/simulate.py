"""A simulated load test: the engine over recorded drafts, on a machine that is a cost model.

    seconds of a step  =  draft(drafting requests)  +  verify(rows, requests, context)  +  other(requests)

A measured `Profile` is a machine; so are a profile scaled part by part (another processor, a larger target) and a
published table of rates.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator
from torch import Tensor

from outrider.backends.local import NO_SPECULATION, build_variant
from outrider.decoding.cost import Floats, Ints, Profile, SpsTable, StepCost
from outrider.decoding.engine import Engine, Step
from outrider.decoding.policies import Policy
from outrider.decoding.request import Output, Request, StepRecord, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.decoding.scoring import Scores
from outrider.decoding.verification import TargetRows
from outrider.drafters.base import DraftCall, Drafter
from outrider.drafters.draft import Draft
from outrider.drafters.ngram import HybridDrafter
from outrider.evaluation.loadtest.load import Ask, run_load
from outrider.evaluation.loadtest.metrics import Point, PointSummary, summarise
from outrider.evaluation.loadtest.sweep import Sweep
from outrider.evaluation.loadtest.traces import Response, Traces
from outrider.sampling import SamplingParams
from outrider.target.model import DecodingOutput
from outrider.target.paged import Span
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
# The engine itself over recorded drafts, on a clock that adds what the machine would take.
#
#     draft     the recorded draft of position n: A_n tokens of the recorded text, then one that differs
#     score     picks the recorded text, so that min(A_n, l) + 1 tokens are committed            exact, see traces.py
#     clock     += draft(D) + verify(B, R, S) + other(R, m)                                     measured, or supposed
#
# Queues, blocks, estimates, policy, backoff and prompt lookup are the engine's own. Shapes: R requests that decode.
# ----------------------------------------------------------------------------


class ReplayTarget:
    """The `DecodingTarget` of a replay: a vocabulary and no model."""

    name, tokenizer, device = "recorded traces", None, torch.device("cpu")
    hidden_size = num_layers = 0
    max_context = 2**31
    eos_ids: frozenset[int] = frozenset()

    def __init__(self, traces: Traces) -> None:
        used = (max([*response.prompt, *response.tokens]) for response in traces.responses)
        self.differs = max(used) + 1  # a token that no text has
        self.vocab_size = self.differs + 1

    def check_aux_layers(self, aux_layers: Sequence[int], final: bool = False) -> tuple[int, ...]:
        return tuple(aux_layers)

    def check_trees(self) -> None:
        raise ValueError("drafts that branch cannot be replayed: traces hold one chain per position.")

    def check_batches(self) -> None:
        """Requests are replayed together."""

    def check_prefixes(self) -> None:
        raise ValueError("traces hold no prefixes that requests could share: leave out prefix_cache.")

    def new_kv(self, num_blocks: int, block_size: int, aux_layers: int = 0) -> ReplayTarget:
        return self

    def new_states(self) -> None:
        return None

    block_bytes = 0

    def claim(self) -> None:
        """There is no memory to claim."""

    def keep_paths(self, kept: Sequence[tuple[list[int], int, Sequence[int]]]) -> None:
        """There are no keys to move."""

    def forward_ragged(self, spans: Sequence[Span], kv: Any, aux_layers: tuple[int, ...] = ()) -> DecodingOutput:
        raise AssertionError("a replay scores drafts by the recorded text")


class ReplayDrafter(Drafter):
    """Drafts as they were recorded. A session is the recorded response.

    Args:
        gamma: most tokens of a draft.
        differs: the token that a rejected draft proposes.
    """

    def __init__(self, traces: Traces, gamma: int, differs: int) -> None:
        self.traces, self.gamma, self.differs = traces, gamma, differs

    def new_session(self, capacity: int) -> None:
        return None

    def extend(self, sessions: Sequence[Any], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        """The text is known."""

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        return [self._draft(call, min_confidence) for call in calls]

    def _draft(self, call: DraftCall, min_confidence: float) -> Draft:
        response: Response = call.session
        place = call.position - len(response.prompt)
        row = response.start + place
        count = min(int(self.traces.drafted_N[row]), self.gamma if call.limit is None else call.limit)
        confidences_K = self.traces.confidences_NK[row, :count].astype(np.float64)
        below_K = confidences_K < min_confidence  # False for NaN: drafts without confidences are kept
        count = int(below_K.argmax()) if below_K.any() else count
        accepted = min(int(self.traces.accepted_N[row]), count)
        tokens = [*response.tokens[place : place + accepted], *[self.differs] * (count - accepted)]
        known = not np.isnan(confidences_K).any()
        return Draft.chain(tokens, confidences=confidences_K[:count].tolist() if known else [])


class SimulatedEngine(Engine):
    """`Engine` without models: it replays recorded drafts, and `machine` says how long each part of a step takes.

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
        slots = traces.slots if slots is None else slots
        assert slots <= traces.slots, f"drafts of {slots} asked for, {traces.slots} recorded"
        self.traces, self.replay = traces, ReplayTarget(traces)
        self.machine = machine if slots else machine.plain()
        self._now = 0.0
        self._responses: dict[str, Response] = {}
        drafter: Drafter | None = None
        if slots:
            drafter = ReplayDrafter(traces, min(slots, traces.gamma), self.replay.differs)
            if traces.lookup is not None:
                drafter = HybridDrafter(drafter, replace(traces.lookup, gamma=min(slots, traces.lookup.gamma)))
        super().__init__(
            self.replay,
            drafter,
            policy,
            config or EngineConfig(),
            clock=lambda: self._now,
        )

    @property
    def load(self) -> int:
        """How many requests it has."""
        return len(self._responses)

    def submit(self, request: Request) -> None:
        """Queue a request; its text is the recorded one.

        Raises:
            ValueError: its id is in use, or its prompt, its sampling or so long a response was not recorded.
        """
        response, wanted = self.traces.find(request.prompt), request.rules.max_new_tokens
        requested, recorded = (_without_free_seed(params) for params in (request.params, response.params))
        if requested != recorded:
            raise ValueError(
                f"request {request.id!r} asks for {requested}, its trace has {recorded}: record what is asked."
            )
        if wanted > len(response.tokens) and not response.stopped:
            raise ValueError(
                f"request {request.id!r} asks for {wanted} tokens, its trace has {len(response.tokens)}: "
                f"record with --max-new-tokens {wanted}, or ask for fewer."
            )
        # The last token of a response that stopped is in no place before.
        rules = StopRules(wanted, stop_ids=response.tokens[-1:] if response.stopped else ())
        super().submit(replace(request, rules=rules))
        self._responses[request.id] = response

    def begin(self) -> Step:
        step = super().begin()
        for id in step.plan.admitted:
            self._states[id].session = self._responses[id]
        return step

    def draft(self, step: Step) -> list[Draft]:
        with step.draft_clock:
            drafts = super().draft(step)
            drafted = step.drafted
            depths = [len(proposal.draft.tokens) for proposal in drafted.proposals if proposal.source == "drafter"]
            self._now += self.machine.draft_seconds(drafted.drafting, max([1, *depths]))
        return drafts

    def score(self, step: Step, verified: Sequence[Draft]) -> Scores:
        rows = [
            TargetRows(_no_distribution, partial(self._text, turn.id, len(turn.state.tokens))) for turn in step.turns
        ]
        prompts = [(self.scheduler.running[work.id].cached, work.prefill) for work in step.plan.work if work.prefill]
        count = len(step.turns) + sum(len(draft.tokens) for draft in verified)
        with step.verify_clock:
            self._now += float(
                self.machine.verify_seconds(np.array([count]), max(len(step.turns), 1), step.context, prompts=prompts)[
                    0
                ]
            )
        self._now += float(self.machine.other_seconds(len(step.plan.work), np.array([count - len(step.turns)]))[0])
        return Scores(
            list(verified),
            rows,
            None,
            logit_rows={},
            first_row={},
            count=step.prefill_tokens + count,
            aux_TLD=None,
            compared={},
        )

    def _text(self, id: str, length: int, row: int) -> int:
        """The recorded token after `length` committed tokens and `row` drafts."""
        response = self._responses[id]
        place = length - len(response.prompt) + row
        return response.tokens[place] if place < len(response.tokens) else self.replay.differs

    def _forget(self, id: str) -> None:
        super()._forget(id)
        del self._responses[id]


def _no_distribution(row: int) -> Tensor:
    raise AssertionError("a recorded text is picked, not drawn")


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
            Point(
                variant=variant,
                level=level,
                repeat=repeat,
                metrics=metrics,
                same=same,
                ties=0,
                mismatches=0,
                acceptance_histogram=window.histogram,
            )
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
