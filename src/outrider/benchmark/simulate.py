"""Discrete events: the engine's own scheduling over recorded drafts, each step charged what the machine would take.

    plan      engine/scheduler.py     queues, blocks, chunks of prefill, preemption     the production object
    draft     gate, traces            c_1 .. c_l of position n                          recorded
    decide    history, policy         l per request                                     the production objects
    commit    min(A_n, l) + 1 tokens                                                    exact for greedy decoding
    clock  += draft(D) + verify(B, R, S) + other(R)                                     measured, or supposed

So nothing is modelled but seconds. Step for step it is what engine/engine.py does, without tensors.
Shapes: R requests that decode, K draft positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.benchmark.machines import Machine
from outrider.benchmark.traces import Response, Traces
from outrider.decoding.generate import FinishReason
from outrider.engine import EngineConfig, Output, Request, Scheduler, StepRecord
from outrider.engine.scheduler import StepPlan, Work
from outrider.scheduling import AlwaysDraft, DraftGate, FixedPolicy, History, Policy
from outrider.scheduling.view import Ints


@dataclass
class _Live:
    """A request on its way: `place` is its position in its response, `end` where it stops."""

    response: Response
    place: int
    end: int
    limited: bool  # it ends there because of max_new_tokens

    @property
    def row(self) -> int:
        """Of the traces' arrays."""
        return self.response.start + self.place

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.response.prompt) + self.place

    def commit(self, count: int) -> tuple[list[int], FinishReason | None]:
        """Up to `count` more tokens, and how the response ended if it did."""
        before, self.place = self.place, min(self.place + count, self.end)
        tokens = self.response.tokens[before : self.place]
        return tokens, None if self.place < self.end else "length" if self.limited else "stop"


class SimulatedEngine:
    """What `Engine` is, but for the models: the same calls, the same records, seconds from `machine`.

    Args:
        gamma: most drafts of a block, as recorded by default; 0 simulates plain decoding.
    """

    def __init__(
        self,
        traces: Traces,
        machine: Machine,
        policy: Policy | None = None,
        gate: DraftGate | None = None,
        config: EngineConfig | None = None,
        gamma: int | None = None,
    ) -> None:
        self.traces, self.config = traces, config or EngineConfig()
        self.policy: Policy = policy or FixedPolicy()
        self.gate: DraftGate = gate or AlwaysDraft()
        gamma = traces.gamma if gamma is None else gamma
        assert gamma <= traces.gamma, f"blocks of {gamma} asked for, {traces.gamma} recorded"
        self.machine = machine if gamma else machine.plain()
        self.scheduler, self.history = Scheduler(self.config, gamma), History(gamma)
        self.last: StepRecord | None = None
        self._live: dict[str, _Live] = {}

    @property
    def idle(self) -> bool:
        return not self._live

    @property
    def load(self) -> int:
        """Requests in it."""
        return len(self._live)

    def submit(self, request: Request) -> None:
        """Queue a request; its text is the recorded one.

        Raises:
            ValueError: its id is in use, it is not greedy, or its prompt or so long a response was not recorded.
        """
        if request.id in self._live:
            raise ValueError(f"request id {request.id!r} is in use; give every request its own.")
        if request.params.temperature > 0 or request.params.repetition_penalty != 1:
            raise ValueError(f"request {request.id!r} is sampled; traces are of greedy decoding: use temperature 0.")
        response, wanted = self.traces.find(request.prompt), request.rules.max_new_tokens
        if wanted > len(response.tokens) and not response.stopped:
            raise ValueError(
                f"request {request.id!r} asks for {wanted} tokens, its trace has {len(response.tokens)}: "
                f"record with --max-new-tokens {wanted}, or ask for fewer."
            )
        end = min(wanted, len(response.tokens))
        self.scheduler.add(request.id, len(response.prompt), wanted)
        self._live[request.id] = _Live(response, 0, end, end < len(response.tokens) or not response.stopped)

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
        context = sum(self._live[work.id].length for work in plan.work) / len(plan.work)
        counts, outputs = _Counts(), list[Output]()
        if deciding:
            counts, outputs = self._round(deciding, sum(work.prefill for work in plan.work))
        self._settle(plan, outputs)
        self.last = self._record(plan, counts, outputs, context)
        return outputs

    def _round(self, deciding: Sequence[Work], prefill: int) -> tuple[_Counts, list[Output]]:
        ids, live = [work.id for work in deciding], [self._live[work.id] for work in deciding]
        contexts, rows_R = [one.length for one in live], np.array([one.row for one in live])
        depths_R = self._depths(deciding, contexts, prefill)
        confidences_RK = self.traces.confidences_NK[rows_R].astype(np.float64)
        drafted_R = np.minimum(self.traces.drafted_N[rows_R], depths_R)
        doubted_RK = confidences_RK < self.policy.floor  # False for NaN: without confidences nothing is left out
        drafted_R = np.where(doubted_RK.any(axis=1), np.minimum(drafted_R, doubted_RK.argmax(axis=1)), drafted_R)
        view = self.history.step_view(ids, confidences_RK.tolist(), drafted_R.tolist(), contexts, prefill)
        admitted_R = self.policy.lengths(view)
        accepted_R = np.minimum(self.traces.accepted_N[rows_R], admitted_R)
        parts = [one.commit(count + 1) for one, count in zip(live, accepted_R.tolist(), strict=True)]
        self.history.record(ids, view)
        counts = _Counts(
            drafting=int((depths_R > 0).sum()),
            proposed=int(drafted_R.sum()),
            admitted=int(admitted_R.sum()),
            accepted=int(accepted_R.sum()),
            depth=int(drafted_R.max()),
        )
        return counts, [Output(id, tokens, "", finish) for id, (tokens, finish) in zip(ids, parts, strict=True)]

    def _depths(self, deciding: Sequence[Work], contexts: Sequence[int], prefill: int) -> Ints:
        """How many tokens are drafted for each at most, [R]: as many as it may use and the gate lets it."""
        able = [i for i, work in enumerate(deciding) if work.limit > 0]
        depths_R = np.zeros(len(deciding), dtype=np.int64)
        if able:
            ids = [deciding[i].id for i in able]
            view = self.history.gate_view(ids, [contexts[i] for i in able], prefill, len(deciding) - len(able))
            depths_R[able] = np.minimum(self.gate.depths(view), [deciding[i].limit for i in able])
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
        self.history.forget(id)

    def _record(self, plan: StepPlan, counts: _Counts, outputs: Sequence[Output], context: float) -> StepRecord:
        requests, prefill = len(plan.work), sum(work.prefill for work in plan.work)
        tokens = prefill + len(outputs) + counts.admitted
        draft = self.machine.draft_seconds(counts.drafting, max(counts.depth, 1))
        verify = float(self.machine.verify_seconds(np.array([tokens]), requests, context)[0])
        other = self.machine.other_seconds(requests)
        return StepRecord(
            seconds=draft + verify + other,
            draft_seconds=draft,
            verify_seconds=verify,
            other_seconds=other,
            requests=len(outputs),
            drafting=counts.drafting,
            tokens=tokens,
            prefill_tokens=prefill,
            proposed=counts.proposed,
            admitted=counts.admitted,
            accepted=counts.accepted,
            committed=sum(len(output.tokens) for output in outputs),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            used_blocks=self.scheduler.allocator.used,
        )


@dataclass(frozen=True)
class _Counts:
    """Of one step's round: drafting requests; draft tokens proposed, admitted, accepted; the longest draft."""

    drafting: int = 0
    proposed: int = 0
    admitted: int = 0
    accepted: int = 0
    depth: int = 0
