"""The engine: continuous batching with one flattened target forward per step.

    plan      Scheduler: which requests decode or prefill, in which blocks     (decoding/scheduler.py)
    round     draft all -> policy -> one forward -> verify                     (decoding/round.py, decoding/batch.py)
    commit    outputs, stops, draft sessions

A request's tokens come from its own generator and its own rows, so they do not depend on who else is in the step; at
temperature 0 they are plain decoding's (up to ties of rounding, docs/architecture.md).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace

import torch

from outrider.decoding.batch import Output, Request, StepBatch, StepRecord
from outrider.decoding.drafting import Drafting, SchedulerState
from outrider.decoding.gate import DraftGate
from outrider.decoding.policies import FixedPolicy, Policy
from outrider.decoding.request import RequestState, StopRules
from outrider.decoding.round import RoundResult, attempt_round
from outrider.decoding.scheduler import EngineConfig, Scheduler
from outrider.drafters.base import Drafter, draft_slots
from outrider.sampling import Randomness
from outrider.target.model import Target
from outrider.target.paged import PagedKV

_WARM_UP_TOKENS = 16  # of the prompt, and of the response
_GPU_TOKEN_BUDGET = 4096  # rows of a step that keep a GPU busy


def default_config(target: Target) -> EngineConfig:
    """`EngineConfig`'s own on a CPU. On a GPU larger steps, and a pool in which all requests can be as long as the
    target allows, of a quarter of the free memory at most."""
    usual = EngineConfig()
    if target.device.type != "cuda":
        return usual
    per_block = sum(pool.nbytes for pair in PagedKV(target, 1, usual.block_size).pools for pool in pair) // 2
    fitting = torch.cuda.mem_get_info(target.device)[0] // 4 // max(1, per_block)
    wanted = usual.max_requests * -(-target.max_context // usual.block_size)
    return replace(usual, token_budget=_GPU_TOKEN_BUDGET, num_blocks=max(1, min(fitting, wanted)))


def config_for(requests: Sequence[Request], slots: int) -> EngineConfig:
    """Blocks for all requests at once, but no more than usual unless one alone needs them.

    Args:
        slots: `draft_slots` of their drafter.
    """
    tokens = [len(request.prompt) + request.rules.max_new_tokens + slots for request in requests]
    blocks = [-(-count // EngineConfig.block_size) for count in tokens]
    return EngineConfig(num_blocks=max(1, *blocks, min(sum(blocks), EngineConfig.num_blocks)))


class Engine:
    """Decodes many requests of one target together.

    Args:
        drafter: None for plain decoding.
        policy: how many drafts to verify; all of them by default.
        gate: which requests draft at all; every one by default.
        config: `default_config` by default.
        randomness: where random draws come from; generators of the requests' seeds by default.
        experience: what earlier requests taught, which is added to; none by default.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        policy: Policy | None = None,
        gate: DraftGate | None = None,
        config: EngineConfig | None = None,
        *,
        randomness: Randomness | None = None,
        experience: SchedulerState | None = None,
    ) -> None:
        self.target = target
        self.policy: Policy = policy or FixedPolicy()
        self.drafting = Drafting(drafter, self.policy, gate, experience=experience)
        self.config = config or default_config(target)
        self.randomness = randomness
        if drafter is not None and drafter.trees:
            target.check_trees()
        slots = draft_slots(drafter)
        self.scheduler = Scheduler(self.config, slots, drafter is not None and drafter.trees)
        self.kv = PagedKV(target, self.config.num_blocks, self.config.block_size)
        self.last: StepRecord | None = None
        self._states: dict[str, RequestState] = {}
        self._logprobs: dict[str, int] = {}  # of requests that ask for them
        self._traced: dict[str, int] = {}  # rounds of requests that ask for traces, this one included

    @property
    def idle(self) -> bool:
        return not self._states

    def warm_up(self) -> None:
        """Claim the KV pool's memory, and decode a few tokens, drafts included.

        So no request waits for what PyTorch sets up on its first use, and memory that is missing is missed now. Call it
        in the thread that runs the steps, while there are no requests. Nothing is learned from it.
        """
        self.kv.claim()
        drafting, drafter = self.drafting, self.drafting.drafter
        own = replace(SchedulerState.of(drafter), copies=None)  # copies would leave its text in the library
        self.drafting = Drafting(drafter, self.policy, experience=own)
        fitting = self.config.num_blocks * self.config.block_size
        tokens = min(_WARM_UP_TOKENS, fitting // 2, self.target.max_context // 2)
        self.submit(Request("warm-up", [0] * tokens, rules=StopRules(tokens, stop_ids=())))
        while not self.idle:
            self.step()
        self.drafting, self.last = drafting, None

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its id is in use, its prompt is empty or too long, or it could never fit into the KV pool.
        """
        if request.id in self._states:
            raise ValueError(f"request id {request.id!r} is in use; give every request its own.")
        state = RequestState(
            self.target,
            request.prompt,
            request.params,
            rules=request.rules,
            randomness=self.randomness,
            grammar=request.grammar,
        )
        self.scheduler.add(request.id, len(state.tokens), state.remaining, most_drafts=request.most_drafts)
        self._states[request.id] = state
        if request.logprobs is not None:
            self._logprobs[request.id] = request.logprobs
        if request.trace:
            self._traced[request.id] = 1

    def cancel(self, id: str) -> bool:
        """Drop a request between two steps and free all it holds; False where there is none of that id."""
        if id not in self._states:
            return False
        self._forget(id)
        return True

    def run(self, requests: Sequence[Request]) -> Generator[list[Output], None, None]:
        """Decode requests to their end: the outputs of each step. What a caller does not wait for is dropped.

        Raises:
            ValueError: as `submit`; none of them is decoded then.
        """
        submitted: list[str] = []
        try:
            for request in requests:
                self.submit(request)
                submitted.append(request.id)
            while not self.idle:
                yield self.step()
        finally:
            for id in submitted:
                self.cancel(id)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Run one step and return an output for every request that got tokens or failed.

        An exception in what is done for one request alone (its session, drawing its drafts, verifying them, its text)
        ends that request with the finish "error"; one in what is done for all together is raised.
        """
        started = time.perf_counter()
        plan = self.scheduler.plan()
        for id in plan.preempted:
            self.drafting.close(self._states[id])
            self._states[id].leave()
        failed: dict[str, Exception] = {}
        for id in plan.admitted:
            self._states[id].recurrent = self.target.new_states()
            try:
                self.drafting.open(self._states[id])
            except Exception as error:
                failed[id] = error
        if not plan.work:
            return []
        batch = StepBatch(
            self.target,
            self.kv,
            self.drafting,
            plan=plan,
            states=self._states,
            progress=self.scheduler.running,
            failed=failed,
            traced=self._traced,
        )
        results: dict[str, RoundResult] = {}
        if batch.deciding:
            for id, result in zip(batch.ids, attempt_round(batch, self.policy), strict=True):
                if isinstance(result, RoundResult):
                    results[id] = result
                else:
                    failed[id] = result
        else:
            batch.score([])
        outputs = self._commit(batch, results)
        self.last = self._record(batch, results, outputs, preempted=len(plan.preempted), started=started)
        return outputs

    def _commit(self, batch: StepBatch, results: Mapping[str, RoundResult]) -> list[Output]:
        outputs: list[Output] = []
        kept: dict[str, list[int]] = {}
        batch.look_at_paths(results)
        for work in batch.work:
            if not work.decodes and work.id not in batch.failed:
                self.scheduler.advance(work.id, work.prefill)
                kept[work.id] = list(range(work.prefill))
                continue
            output = self._output(work.id, batch, results.get(work.id))
            outputs.append(output)
            if output.finish is None:
                self.scheduler.commit(work.id, len(output.tokens))
                path = results[work.id].verdict.path
                kept[work.id] = [*range(work.prefill + 1), *(work.prefill + 1 + node for node in path)]
        batch.close(kept, results)
        for output in outputs:
            if output.finish is not None:
                self._forget(output.id)
        return outputs

    def _output(self, id: str, batch: StepBatch, result: RoundResult | None) -> Output:
        """What a step gave a request: the committed tokens of `result`, or the error that ends it."""
        state, error, count = self._states[id], batch.failed.get(id), self._logprobs.get(id)
        if result is not None and error is None:
            try:
                tokens, text, finish = state.commit(result.tokens)
                trace = None
                if id in self._traced:
                    trace = batch.trace(id, result, tokens)
                    self._traced[id] += 1
                return Output(
                    id,
                    tokens,
                    text,
                    finish=finish,
                    seed=state.seed,
                    verified=len(result.verified.tokens),
                    accepted=min(result.verdict.accepted, len(tokens)),
                    reach=result.reach(len(tokens)),
                    logprobs=None if count is None else batch.logprobs(id, result.verdict, tokens, count=count),
                    trace=trace,
                )
            except Exception as raised:
                error = raised
        return Output(id, [], "", finish="error", seed=state.seed, error=error)

    def _forget(self, id: str) -> None:
        state = self._states[id]
        self.drafting.close(state)
        del self._states[id]
        self._logprobs.pop(id, None)
        self._traced.pop(id, None)
        self.scheduler.remove(id)
        self.drafting.forget(id, state.response)

    def _record(
        self,
        batch: StepBatch,
        results: Mapping[str, RoundResult],
        outputs: list[Output],
        *,
        preempted: int,
        started: float,
    ) -> StepRecord:
        draft, verify = batch.draft_clock.take(), batch.verify_clock.take()
        seconds = time.perf_counter() - started  # behind the clocks, which wait for what a GPU has yet to do
        if self.drafting.learned_cost is not None and results and not batch.prefill_tokens:
            own = [len(result.draft.tokens) for id, result in results.items() if not self.drafting.copied(id)]
            self.drafting.learned_cost.took(
                seconds,
                len(batch.deciding),
                batch.context,
                verified=sum(len(result.verified.tokens) for result in results.values()),
                drafting=batch.drafted,
                depth=max([1, *own]),
            )
        return StepRecord(
            seconds=seconds,
            draft_seconds=draft,
            verify_seconds=verify,
            other_seconds=seconds - draft - verify,
            requests=len(batch.deciding),
            drafting=batch.drafted,
            tokens=batch.rows,
            prefill_tokens=batch.prefill_tokens,
            proposed=sum(len(result.draft.tokens) for result in results.values()),
            admitted=sum(len(result.verified.tokens) for result in results.values()),
            accepted=sum(output.accepted for output in outputs),
            committed=sum(len(output.tokens) for output in outputs),
            preempted=preempted,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            used_blocks=self.scheduler.allocator.used,
        )
