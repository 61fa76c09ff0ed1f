"""The engine: continuous batching with one target forward per step; a stream is an engine with one request.

    begin      which requests decode or prefill, in which blocks                  decoding/scheduler.py
    draft      x_1 .. x_K of each request, with p_d and confidences               decoding/drafting.py
    schedule   how many of them are verified: sees confidences, never tokens      decoding/policies.py
    score      the target's distributions after the anchor and each draft         decoding/scoring.py
    verify     the accepted path and one more token                               decoding/verification.py
    commit     text, stops, KV blocks, what the drafter reads, what is learned    decoding/request.py

A request's tokens come from its own generator and its own rows, so they do not depend on who else is in the step; at
temperature 0 they are plain decoding's (up to ties of rounding, docs/architecture.md). Before a step all committed
tokens of a request but the last, the anchor, are in the target's cache. On a GPU steps that only decode are launched
before the one before is read, where that is possible (decoding/ahead.py).
Source: Leviathan et al., arXiv 2211.17192; DSpark, arXiv 2607.05147. Shapes: R requests, K draft positions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.decoding.ahead import Ahead
from outrider.decoding.drafting import Drafted, Drafting, DraftTurn, SchedulerState
from outrider.decoding.policies import FixedPolicy, Policy, StepView
from outrider.decoding.prefix_cache import add_keys
from outrider.decoding.reports import report
from outrider.decoding.request import FinishReason, Output, Request, RequestState, StepRecord, StopRules
from outrider.decoding.scheduler import EngineConfig, Scheduler, StepPlan, Work
from outrider.decoding.scoring import Scores, score
from outrider.decoding.verification import RoundResult, TypicalAcceptance, verify_all
from outrider.drafters.base import Drafter, draft_slots
from outrider.drafters.draft import Draft
from outrider.sampling import Randomness
from outrider.target.graphs import MOST_PROMPT_ROWS
from outrider.target.model import DecodingTarget, KVPool
from outrider.utils.measure import Clock

_WARM_UP_TOKENS = 16  # of the prompt, and of the response
_GPU_TOKEN_BUDGET = 4096  # rows of a step that keep a GPU busy


def default_config(
    target: DecodingTarget, max_requests: int = EngineConfig.max_requests, kept_aux: int = 0
) -> EngineConfig:
    """`EngineConfig()` for so many requests on a CPU. On a GPU steps are larger, prompts are read in pieces beside
    requests that decode, and the KV pool holds `max_requests` full contexts, or what a quarter of the free memory holds
    if that is less.

    Args:
        kept_aux: aux hidden states that are kept of every token (`Target.new_kv`).
    """
    usual = EngineConfig(max_requests, max(EngineConfig.token_budget, max_requests))
    if target.device.type != "cuda":
        return usual
    block_bytes = target.new_kv(1, usual.block_size, kept_aux).block_bytes
    fitting = torch.cuda.mem_get_info(target.device)[0] // 4 // max(1, block_bytes)
    wanted = usual.max_requests * -(-target.max_context // usual.block_size)
    budget = max(_GPU_TOKEN_BUDGET, max_requests)
    blocks = max(1, min(fitting, wanted))
    return replace(usual, token_budget=budget, num_blocks=blocks, prompt_rows=MOST_PROMPT_ROWS)


def config_for(requests: Sequence[Request], slots: int) -> EngineConfig:
    """Blocks for all requests at once, but no more than usual unless one alone needs them.

    Args:
        slots: `draft_slots` of their drafter.
    """
    tokens = [len(request.prompt) + request.rules.max_new_tokens + slots for request in requests]
    blocks = [-(-count // EngineConfig.block_size) for count in tokens]
    return EngineConfig(num_blocks=max(1, *blocks, min(sum(blocks), EngineConfig.num_blocks)))


def config_alone(target: DecodingTarget, request: Request, slots: int) -> EngineConfig:
    """An engine of one request, whose first round drafts already.

    Args:
        slots: `draft_slots` of its drafter.
    """
    tokens = min(len(request.prompt) + request.rules.max_new_tokens, target.max_context) + slots + 1
    budget = EngineConfig.token_budget if target.device.type != "cuda" else _GPU_TOKEN_BUDGET
    return EngineConfig(1, max(budget, slots + 1), num_blocks=-(-tokens // EngineConfig.block_size), prompt_apart=True)


@dataclass
class Step:
    """A step under way.

    Attributes:
        turns: the requests that decode, in the order of the plan.
        failed: requests that end with this step, and why.
        prefill_tokens: rows that read prompts.
        context: mean tokens of the requests that decode, before the step.
        drafted: their drafts, and how they came about.
        ahead: whether it was launched ahead: its chains' rows stay where they are, and the drafter has read them.
    """

    started: float
    plan: StepPlan
    turns: list[DraftTurn]
    failed: dict[str, Exception]
    prefill_tokens: int
    context: float
    draft_clock: Clock
    verify_clock: Clock
    drafted: Drafted = field(default_factory=lambda: Drafted([]))
    ahead: bool = False


class Engine:
    """Decodes requests of one target together.

    Args:
        drafter: None for plain decoding.
        policy: who drafts, and how many drafts are verified; everybody, and all of them, by default.
        config: `default_config` by default.
        typical: a lossy rule that accepts more; the output is then not distributed as the target's.
        randomness: where random draws come from; generators of the requests' seeds by default.
        scheduler_state: acceptance estimates of earlier requests, which are updated; none by default.
        kv: a pool of at least the config's blocks; the target's own by default.
        clock: seconds since some moment.

    Raises:
        ValueError: a drafter of trees for a target that cannot verify them, a target whose requests cannot be decoded
            together, or a prefix cache for one whose prefixes are not in the KV blocks alone.
    """

    def __init__(
        self,
        target: DecodingTarget,
        drafter: Drafter | None = None,
        policy: Policy | None = None,
        config: EngineConfig | None = None,
        *,
        typical: TypicalAcceptance | None = None,
        randomness: Randomness | None = None,
        scheduler_state: SchedulerState | None = None,
        kv: KVPool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target, self.typical, self.randomness = target, typical, randomness
        self.policy: Policy = policy or FixedPolicy()
        self.drafting = Drafting(drafter, self.policy, scheduler_state)
        self.config = config or default_config(target)
        self.clock = clock
        self.aux_layers = () if drafter is None else drafter.aux_layers
        if drafter is not None and drafter.trees:
            target.check_trees()
        if self.config.max_requests > 1:
            target.check_batches()
        if self.config.prefix_cache:
            target.check_prefixes()
        self.scheduler = Scheduler(self.config, draft_slots(drafter), drafter is not None and drafter.trees)
        kept = len(self.aux_layers) if self.config.prefix_cache else 0
        self.kv = target.new_kv(self.config.num_blocks, self.config.block_size, kept) if kv is None else kv
        self.last: StepRecord | None = None
        self._states: dict[str, RequestState] = {}
        self._requests: dict[str, Request] = {}
        self.ahead = Ahead.of(self, self._states, self._requests) if target.device.type == "cuda" else None

    @property
    def idle(self) -> bool:
        return not self._states

    def warm_up(self) -> None:
        """Claim the KV pool's memory, and decode a few tokens, drafts included.

        The first request then does not wait for PyTorch's set-up, and too little memory raises here. Call it
        in the thread that runs the steps, while there are no requests. Nothing is learned from it.
        """
        self.kv.claim()
        drafting, drafter = self.drafting, self.drafting.drafter
        state = replace(SchedulerState.of(drafter), lookup=None)  # prompt lookup would leave its text in the library
        self.drafting = Drafting(drafter, FixedPolicy(), state)
        fitting = self.config.num_blocks * self.config.block_size
        tokens = min(_WARM_UP_TOKENS, fitting // 2, self.target.max_context // 2)
        self.submit(Request("warm-up", [0] * tokens, rules=StopRules(tokens, stop_ids=())))
        while not self.idle:
            self.step()
        self.drafting, self.last = drafting, None

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its id is in use, its prompt is empty or too long, it could never fit into the KV pool, or it
                asks for coupled sampling under a lossy rule.
        """
        if request.id in self._states:
            raise ValueError(f"request id {request.id!r} is in use; give every request its own.")
        if self.typical is not None and request.params.coupled:
            raise ValueError(
                "typical acceptance lets drafts change tokens, coupled sampling does not: choose one of them."
            )
        state = RequestState(
            self.target,
            request.prompt,
            request.params,
            rules=request.rules,
            randomness=self.randomness,
            grammar=request.grammar,
        )
        keys: list[bytes] = []
        if self.config.prefix_cache:
            add_keys(keys, state.tokens, self.config.block_size, salt=request.cache_salt)
        self.scheduler.add(request.id, len(state.tokens), state.remaining, most_drafts=request.most_drafts, keys=keys)
        self._states[request.id], self._requests[request.id] = state, request

    def cancel(self, id: str) -> bool:
        """Drop a request between two steps and free all it holds; False if there is none of that id."""
        if id not in self._states:
            return False
        self._forget(id)
        return True

    def run(self, requests: Sequence[Request]) -> Generator[list[Output], None, None]:
        """Decode the requests and yield each step's outputs; closing the generator cancels unfinished requests.

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
        if self.ahead is not None and (ahead := self.ahead.step()) is not None:
            return ahead
        step = self.begin()
        if not step.plan.work:
            return []
        drafts = self.draft(step)
        view, verified = self.schedule(step, drafts)
        scores = self.score(step, verified)
        results = self.verify(step, drafts, verified, scores=scores)
        outputs = self.commit(step, view, scores, results=results)
        return self.record(step, scores, results, outputs=outputs)

    def begin(self) -> Step:
        """Plan a step; sessions of the requests that enter it begin."""
        started, plan = self.clock(), self.scheduler.plan()
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
            else:
                self._give_cached(id)
        return self.new_step(started, plan, failed)

    def new_step(self, started: float, plan: StepPlan, failed: dict[str, Exception] | None = None) -> Step:
        """A step of this plan; `failed`: requests that do not decode any more."""
        failed = {} if failed is None else failed
        turns = [
            DraftTurn(work.id, self._states[work.id], 0 if work.id in failed else work.limit)
            for work in plan.work
            if work.decodes
        ]
        context = sum(len(turn.state.tokens) for turn in turns) / max(1, len(turns))
        prefill_tokens = sum(work.prefill for work in plan.work)
        return Step(
            started,
            plan,
            turns,
            failed=failed,
            prefill_tokens=prefill_tokens,
            context=context,
            draft_clock=Clock(self.target.device, self.clock),
            verify_clock=Clock(self.target.device, self.clock),
        )

    def _give_cached(self, id: str) -> None:
        """Give the drafter the tokens of a cached prefix, no more of them at once than of a prompt."""
        at, state = self.scheduler.running[id], self._states[id]
        for start in range(0, at.cached, self.config.token_budget):
            end = min(at.cached, start + self.config.token_budget)
            aux_TLD = self.kv.aux(at.blocks, start, end) if self.aux_layers else None
            self.drafting.read([state])  # all but the last part; that waits for the rest of the prompt
            self.drafting.committed(state, state.tokens[start:end], aux_TLD)

    def draft(self, step: Step) -> list[Draft]:
        """A draft of each request that decodes; positions from the first confidence below the policy's minimum on may
        be left out."""
        with step.draft_clock:
            step.drafted = self.drafting.draft(step.turns, self.policy.min_confidence, other_tokens=step.prefill_tokens)
        step.failed.update(step.drafted.failed)
        return step.drafted.drafts

    def schedule(self, step: Step, drafts: Sequence[Draft]) -> tuple[StepView | None, Sequence[Draft]]:
        """What the policy was shown (None: nothing was drafted), and the part of each draft that it has verified."""
        if not any(draft.tokens for draft in drafts):
            return None, drafts
        view = self.drafting.view(step.turns, step.drafted, other_tokens=step.prefill_tokens)
        lengths = self.policy.lengths(view).tolist()
        return view, [draft.truncated(length) for draft, length in zip(drafts, lengths, strict=True)]

    def score(self, step: Step, verified: Sequence[Draft]) -> Scores:
        """Run one target forward over each request's [anchor, *draft] and chunks of prompts."""
        drafts = {turn.id: draft for turn, draft in zip(step.turns, verified, strict=True)}
        with step.verify_clock:
            return score(
                self.target,
                self.kv,
                step.plan.work,
                states=self._states,
                progress=self.scheduler.running,
                drafts=drafts,
                aux_layers=self.aux_layers,
                watched={id for id in drafts if self._requests[id].trace},
            )

    def verify(
        self, step: Step, drafts: Sequence[Draft], verified: Sequence[Draft], scores: Scores
    ) -> dict[str, RoundResult]:
        """Verify all drafts; the results by request id. An exception of one request goes into `step.failed`."""
        sources = [turn.state.source for turn in step.turns]
        verdicts = verify_all(verified, scores.rows, sources, typical=self.typical)
        results: dict[str, RoundResult] = {}
        for turn, draft, part, verdict in zip(step.turns, drafts, verified, verdicts, strict=True):
            if isinstance(verdict, Exception):
                step.failed.setdefault(turn.id, verdict)
            else:
                results[turn.id] = RoundResult(draft, part, verdict)
        return results

    def commit(
        self, step: Step, view: StepView | None, scores: Scores, results: Mapping[str, RoundResult]
    ) -> list[Output]:
        """Commit the tokens, keep the caches of what stays, and learn from the round."""
        outputs = self._outputs(step, view, scores, results=results)
        kept: dict[str, list[int]] = {}  # rows that stay of each request, counted from its first
        for work in step.plan.work:
            output = outputs.get(work.id)
            if output is None:
                self.scheduler.advance(work.id, work.prefill)
                kept[work.id] = list(range(work.prefill))
            elif output.finish is None:
                self.scheduler.commit(work.id, len(output.tokens))
                path = results[work.id].verdict.path
                kept[work.id] = [*range(work.prefill + 1), *(work.prefill + 1 + node for node in path)]
        at = self.scheduler.running
        if step.turns:
            self.drafting.observe(step.turns, step.drafted, view, results=[results.get(turn.id) for turn in step.turns])
        if not step.ahead:
            with step.verify_clock:
                self.kv.keep_paths([(at[id].blocks, at[id].cached - len(rows), rows) for id, rows in kept.items()])
            self._read(step, scores, kept)
        if self.config.prefix_cache:
            for id in kept:
                salt = self._requests[id].cache_salt
                add_keys(at[id].keys, self._states[id].tokens, self.config.block_size, salt=salt)
                self.scheduler.keep(id)
        for output in outputs.values():
            if output.finish is not None:
                self._forget(output.id)
        return list(outputs.values())

    def _outputs(
        self, step: Step, view: StepView | None, scores: Scores, results: Mapping[str, RoundResult]
    ) -> dict[str, Output]:
        """What the step gave each request that decodes, and the error of each that failed."""
        committed: dict[str, tuple[list[int], str, FinishReason | None]] = {}
        for id, result in results.items():
            if id not in step.failed:
                try:
                    committed[id] = self._states[id].commit(result.tokens)
                except Exception as error:
                    step.failed[id] = error
        reports = report(
            {id: (self._requests[id], tokens) for id, (tokens, _, _) in committed.items()},
            self.drafting,
            scores,
            turns=step.turns,
            drafted=step.drafted,
            unasked={work.id: self._why_unasked(work) for work in step.plan.work if work.decodes},
            view=view,
            results=results,
        )
        outputs: dict[str, Output] = {}
        for id in (work.id for work in step.plan.work if work.decodes or work.id in step.failed):
            seed = self._states[id].seed
            if id not in committed:
                outputs[id] = Output(id, [], "", finish="error", seed=seed, error=step.failed[id])
                continue
            (tokens, text, finish), result = committed[id], results[id]
            outputs[id] = Output(
                id,
                tokens,
                text,
                finish=finish,
                seed=seed,
                proposed=len(result.draft.tokens),
                verified=len(result.verified.tokens),
                accepted=min(result.verdict.accepted, len(tokens)),
                reach=result.reach(len(tokens)),
                confidences=result.draft.confidences if result.draft.is_chain else (),
                origins=result.origins[: len(tokens)],
                cached_tokens=self.scheduler.running[id].found or 0,
                **reports.get(id, {}),
            )
        return outputs

    def _why_unasked(self, work: Work) -> str:
        """Why the drafter was not asked for a draft of this request; "" if it was. Call it after the commit."""
        state = self._states[work.id]
        if work.limit > 0 or self.drafting.drafter is None:
            return ""
        if self.scheduler.running[work.id].most_drafts == 0:
            return "the request asked for no drafts"
        if work.prefill or (state.rounds == 1 and not self.config.prompt_apart):
            return "the prompt was read in this step, and drafts begin behind its first token"
        if not state.remaining:
            return "only one more token could come"
        return "the step had no rows or KV blocks left for drafts"

    def _read(self, step: Step, scores: Scores, kept: Mapping[str, list[int]]) -> None:
        """Note the rows that stay, for the drafter."""
        if self.drafting.drafter is None:
            return
        states, at = [self._states[id] for id in kept], self.scheduler.running
        if len(kept) == scores.count:  # plain decoding of all, in this order
            aux = scores.aux_TLD
            self.drafting.committed_one_each(states, [at[id].cached - 1 for id in kept], aux)
        else:
            aux = scores.aux_of(kept)
            counts = [len(rows) for rows in kept.values()]
            parts: Sequence[Tensor | None] = [None] * len(kept) if aux is None else aux.split(counts)
            if step.drafted.drafting < len(kept):
                # A tensor of its own each: with views, a request that does not draft would keep the rows of all.
                parts = [None if part is None else part.clone() for part in parts]
            for id, count, aux_TLD in zip(kept, counts, parts, strict=True):
                state, cached = self._states[id], at[id].cached
                self.drafting.committed(state, state.tokens[cached - count : cached], aux_TLD)
        if self.config.prefix_cache and aux is not None:
            self.kv.keep_aux([(at[id].blocks, at[id].cached, len(rows)) for id, rows in kept.items()], aux)
        with step.draft_clock:
            self.drafting.read_overdue(states)

    def _forget(self, id: str) -> None:
        state = self._states.pop(id)
        del self._requests[id]
        self.drafting.close(state)
        self.scheduler.remove(id)
        self.drafting.forget(id, state.response)

    def record(
        self, step: Step, scores: Scores, results: Mapping[str, RoundResult], outputs: Sequence[Output]
    ) -> list[Output]:
        """The outputs with their share of the step's seconds; `last` is its record."""
        draft, verify = step.draft_clock.take(), step.verify_clock.take()
        seconds = self.clock() - step.started  # after the clocks, which wait for what a GPU has yet to do
        if results and not step.prefill_tokens:
            verified = sum(len(result.verified.tokens) for result in results.values())
            self.drafting.observe_cost(step.drafted, seconds, step.context, verified=verified, draft_seconds=draft)
        other = seconds - draft - verify
        self.last = StepRecord(
            seconds=seconds,
            draft_seconds=draft,
            verify_seconds=verify,
            other_seconds=other,
            requests=len(step.turns),
            drafting=step.drafted.drafting,
            tokens=scores.count,
            prefill_tokens=step.prefill_tokens,
            proposed=sum(len(result.draft.tokens) for result in results.values()),
            admitted=sum(len(result.verified.tokens) for result in results.values()),
            accepted=sum(output.accepted for output in outputs),
            committed=sum(len(output.tokens) for output in outputs),
            preempted=len(step.plan.preempted),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            used_blocks=self.scheduler.allocator.used,
        )
        share = 1 / max(1, len(outputs))
        return [
            replace(output, draft_seconds=draft * share, verify_seconds=verify * share, other_seconds=other * share)
            for output in outputs
        ]
