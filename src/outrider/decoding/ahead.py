"""Launching ahead: on a GPU a step that only decodes is launched before the tokens of the step before are read.

    host      launch t + 1 | read t: commit, stream, learn | launch t + 2 | read t + 1 ..
    device    .. step t ......................| step t + 1 .......................| step t + 2 ..

What step t + 1 needs of step t stays on the device: the anchor, the number of cached tokens and the number of random
draws of each request (`_Device.state_M3`). Positions, slots, the plan of attention, which drafts are verified and which
are accepted are computed there. The host gives what it knew before (`_Given`): pages for as many tokens as there may
be, how deep each request drafts, how many drafts are verified in all, and the next uniform numbers of each request. A
step is two graphs:

    draft     block and chain of each request                      -> tokens, p_d, logits of confidences
    verify    anchors and drafts -> target -> acceptance, next tokens; the drafter reads the rows of the target

Rejected rows are not cleared: target and drafter overwrite them before they read them.

**What is verified.** A policy that would read the confidences of this step gives a number of drafts instead
(`Policy.budget`), chosen from the steps that have been read, and the device spends it in order of survival, which it
computes with the acceptance estimates of those steps: DSpark's asynchronous rule, whatever causal policy is set.

A request that ends has one step more under way, whose result is dropped. Its blocks and pages are free at once, because
the device writes in the order of launches. A step is launched as usual (decoding/engine.py) where a prompt is read, a
request enters, blocks run out or the policy gives no number; where requests have unequal sampling parameters,
penalties, coupled noise, constraints, traces or log-probabilities; and with trees, prompt lookup, typical acceptance,
or a drafter whose blocks and chains are not graphs.

Randomness is the usual step's: a request draws from its own generator, in the same order.

Shapes: M requests of an engine, R of a step, padded to a power of two, K draft positions, J = K + 1 rows of a request,
T rows of all, U uniform numbers, P pages, X numbers that are read, V vocab, Vd draft vocab.
Source: DSpark, arXiv 2607.05147, section 5.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from outrider.decoding.acceptance import CLIP, logit
from outrider.decoding.backoff import Pause
from outrider.decoding.cost import Floats
from outrider.decoding.drafting import Drafted, DraftTurn, Proposal
from outrider.decoding.policies import LAST, STEPS
from outrider.decoding.request import Output, Request, RequestState
from outrider.decoding.scheduler import StepPlan, Work
from outrider.decoding.scoring import Scores
from outrider.decoding.verification import RoundResult, Verdict
from outrider.drafters.base import DeviceDrafter
from outrider.drafters.chain_gpu import draw_alike
from outrider.drafters.draft import Draft, DraftRow
from outrider.sampling import (
    SamplingParams,
    SeededSource,
    at_least_float32,
    choose_rows,
    not_finite,
    residual,
    warp,
)
from outrider.target.graphs import FEWEST_PAGES, StepGraphs, computed_rows, power_of_two
from outrider.target.model import Target
from outrider.target.paged import PagedKV
from outrider.target.paged_attention import Division, Tables, divide, most_items
from outrider.utils.measure import Clock

if TYPE_CHECKING:
    from outrider.decoding.engine import Engine

_MOST_GRAPHS = 256
_FIELDS = 7  # of a request in the numbers of the host
_READ = 6  # of a request before its drafts


class _Layout(NamedTuple):
    """Sizes of the numbers that the host gives a step."""

    requests: int
    positions: int
    uniforms: int
    pages: int
    table: int

    def given(self, numbers: Tensor) -> _Given:
        """The parts of the numbers, on the device."""
        R, K, U, P, _ = self
        head, *parts = numbers.split([R * _FIELDS, 1, 2 * K, 2 * R * K, R * U, P, self.table])
        budget_1, scales, terms, uniforms, pages_P, table = parts
        row_R, real_R, depth_R, longest_R, capacity_R, drawn_R, first_page_R = head.view(_FIELDS, R).long().unbind(0)
        return _Given(
            row_R,
            real_R,
            depth_R,
            longest_R=longest_R,
            capacity_R=capacity_R,
            drawn_R=drawn_R,
            first_page_R=first_page_R,
            budget_1=budget_1,
            scales_2K=scales.view(2, K),
            terms_2RK=terms.view(2, R, K),
            uniforms_RU=uniforms.view(R, U),
            pages_P=pages_P.long(),
            table=table.long(),
        )


class _Given(NamedTuple):
    """What the host gives a step.

    Attributes:
        row_R: where the step before has the request in `_Device.state_M3`.
        real_R: 1, or 0 for padding.
        depth_R: most draft tokens, of which `longest_R` are verified at most.
        capacity_R: most committed tokens.
        drawn_R: numbers that were drawn before the first of `uniforms_RU`.
        first_page_R, pages_P: of the target's keys.
        budget_1: most drafts verified in all.
        scales_2K: slopes and offsets of the logits of confidences; `terms_2RK`: of the logits of estimates from these.
        table: of the drafter's sessions (`DraftPool.table`).
    """

    row_R: Tensor
    real_R: Tensor
    depth_R: Tensor
    longest_R: Tensor
    capacity_R: Tensor
    drawn_R: Tensor
    first_page_R: Tensor
    budget_1: Tensor
    scales_2K: Tensor
    terms_2RK: Tensor
    uniforms_RU: Tensor
    pages_P: Tensor
    table: Tensor

    def uniforms(self, places_RK: Tensor) -> Tensor:
        """The uniform numbers in these places of a request's draws, [R, K]."""
        within_RK = (places_RK - self.drawn_R[:, None]).clamp(0, self.uniforms_RU.shape[1] - 1)  # of padding: any
        return self.uniforms_RU.gather(1, within_RK)


class _State(NamedTuple):
    """What is known of the requests of a step on the device alone: see `_Device.state_M3`."""

    anchor_R: Tensor
    cached_R: Tensor
    drawn_R: Tensor


class _Drafts(NamedTuple):
    """Drafts on the device, `drafted_R` of each request.

    `firsts_RK`, `probs_KRVd`: the probability that each was drawn with, and what it was drawn from; greedy drafts have
    none of the latter. `logits_RK`: of their confidences, before calibration; None without a confidence head.
    """

    tokens_RK: Tensor
    firsts_RK: Tensor
    logits_RK: Tensor | None
    probs_KRVd: Tensor | None
    drafted_R: Tensor


class _Outcome(NamedTuple):
    """Accepted drafts, the token after them, the random draws of the step, and the sum of the probabilities that the
    token was drawn from: if it is not above 0, the request has failed.
    """

    accepted_R: Tensor
    next_R: Tensor
    draws_R: Tensor
    total_R: Tensor


class _Verified(NamedTuple):
    """`_Device.state_M3` of the step's requests behind it, and what the host reads: the outcome, verified and drafted
    tokens, then the drafts and logits of their confidences.
    """

    state_R3: Tensor
    read_RX: Tensor


class _Device:
    """The graphs of a pool of keys and a drafter, and the memory that they read.

    Attributes:
        state_M3: anchor, cached tokens and random draws of the requests of the latest step, in its order.
        failed: whether a capture has failed.
    """

    def __init__(self, graphs: StepGraphs, requests: int, device: torch.device) -> None:
        self.graphs, self.failed = graphs, False
        self.state_M3 = torch.zeros(requests, 3, dtype=torch.long, device=device)
        self._numbers: dict[_Layout, Tensor] = {}
        self._captured: dict[Any, tuple[Any, Any]] = {}
        self._memory: list[Tensor] = []

    def check(self, memory: list[Tensor]) -> None:
        """Drop all graphs if they read other memory than this besides, or if they are too many."""
        same = len(memory) == len(self._memory) and all(a is b for a, b in zip(memory, self._memory, strict=True))
        if not same or len(self._captured) > _MOST_GRAPHS:
            self._captured.clear()
        self._memory = memory

    def give(self, layout: _Layout, numbers: Floats) -> Tensor:
        """The numbers on the device; the next ones of this layout overwrite them."""
        buffer = self._numbers.get(layout)
        if buffer is None:
            buffer = torch.empty(numbers.shape, dtype=torch.float64, device=self.state_M3.device)
            self._numbers[layout] = buffer
        buffer.copy_(torch.from_numpy(numbers).pin_memory(), non_blocking=True)
        return buffer

    def run(self, key: Any, run: Callable[[], Any]) -> Any:
        """What `run` returns, which does the same to the same memory for a key; the next call overwrites it."""
        if self.failed:
            return run()
        found = self._captured.get(key)
        if found is None:
            found = self.graphs.capture(run, "steps launched ahead")
            if found[1] is None:
                self.failed = True
                return found[0]
            self._captured[key] = found
        found[1].replay()
        return found[0]


# Graphs outlive their engine: `stream` makes one for each request, on the pool of the last (decoding/generate.py).
_kept: WeakKeyDictionary[PagedKV, WeakKeyDictionary[object, _Device]] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Plan:
    """What a step does, as the host plans it.

    Attributes:
        considered, pause: see `Drafting.ahead`.
        positions: of the chains that are drawn; those near the end of a response are longer than they need to be, so
            that few graphs serve all.
        depths: most drafts of each turn, of which `longest` are verified at most, and `budget` of all.
        params: of all requests; None: greedy decoding.
    """

    started: float
    turns: list[DraftTurn]
    considered: list[str]
    pause: Pause | None
    positions: int
    depths: list[int]
    longest: list[int]
    budget: int
    params: SamplingParams | None


@dataclass(frozen=True)
class _Flight:
    """A step that was launched and not read. `read_RX` is on the host once `done`."""

    plan: _Plan
    draft_clock: Clock
    verify_clock: Clock
    read_RX: Tensor
    done: torch.cuda.Event

    @property
    def most(self) -> dict[str, int]:
        """Tokens that it may give each request, at most."""
        return {turn.id: 1 + count for turn, count in zip(self.plan.turns, self.plan.longest, strict=True)}


class Ahead:
    """Runs steps of an engine one read behind.

    Args:
        states, requests: of the engine, by id.
    """

    def __init__(
        self, engine: Engine, target: Target, *, states: Mapping[str, RequestState], requests: Mapping[str, Request]
    ) -> None:
        assert target.graphs is not None and isinstance(engine.kv, PagedKV)
        self.engine, self.target, self.states, self.requests = engine, target, states, requests
        self.graphs, self.kv = target.graphs, engine.kv
        self._flight: _Flight | None = None
        self._drawn: dict[str, int] = {}  # random draws of steps that were read, since `state_M3` was filled
        self._read_at = 0.0

    @staticmethod
    def of(engine: Engine, states: Mapping[str, RequestState], requests: Mapping[str, Request]) -> Ahead | None:
        """None if no step of this engine can be launched ahead."""
        target = engine.target
        if not isinstance(target, Target) or target.graphs is None or engine.typical is not None:
            return None
        return Ahead(engine, target, states=states, requests=requests) if isinstance(engine.kv, PagedKV) else None

    def step(self) -> list[Output] | None:
        """Launch a step if possible and read the one before; None: nothing is under way, the step is a usual one."""
        flight, self._flight = self._flight, None
        if flight is None or not self._live(flight):
            flight = self._launch(None)
        if flight is None:
            return None
        self._flight = self._launch(flight)
        return self._read(flight)

    def _live(self, flight: _Flight) -> list[int]:
        """Places of its requests that have not ended since."""
        return [i for i, turn in enumerate(flight.plan.turns) if self.states.get(turn.id) is turn.state]

    @property
    def _drafter(self) -> DeviceDrafter | None:
        drafter = self.engine.drafting.drafter
        return None if drafter is None else drafter.ahead()

    def _launch(self, before: _Flight | None) -> _Flight | None:
        """Launch a step while `before`, if any, is under way; None: the next step has to be a usual one."""
        drafting, scheduler = self.engine.drafting, self.engine.scheduler
        drafts = drafting.drafter is not None
        if not self.graphs.captures or drafting.lookup is not None:
            return None
        if drafts and (self._drafter is None or not drafting.policy.budgets):
            return None
        kinds = {self._kind(id) for id in scheduler.running}
        device = self._device()
        if len(kinds) != 1 or "usual" in kinds or device.failed:
            return None
        limits = scheduler.ahead({} if before is None else before.most)
        if not limits:
            return None
        turns = [DraftTurn(id, self.states[id], limit) for id, limit in limits.items()]
        started, (considered, pause, wanted) = self.engine.clock(), drafting.ahead(turns)
        depths = [min(turn.limit, depth) for turn, depth in zip(turns, wanted, strict=True)]
        most = drafting.policy.longest
        longest = depths if most is None else [min(depth, most) for depth in depths]
        (params,) = kinds
        assert not isinstance(params, str)
        plan = _Plan(
            started,
            turns,
            considered,
            pause=pause,
            positions=max(wanted),
            depths=depths,
            longest=longest,
            budget=min(drafting.budget(turns, longest), sum(longest)) if any(longest) else 0,
            params=params,
        )
        if before is None:
            self._fill(device, turns)
        return self._launched(plan, before, device)

    def _kind(self, id: str) -> SamplingParams | Literal["usual"] | None:
        """Parameters without a seed; None: greedy decoding; "usual": steps with it are launched as usual."""
        request, state = self.requests[id], self.states[id]
        apart = request.trace or request.logprobs is not None or state.params.penalised
        if apart or any(part is not None for part in (state.noise, state.constraint, state.recurrent)):
            return "usual"
        if state.params.temperature == 0.0:
            return None
        return replace(state.params, seed=None) if isinstance(state.source, SeededSource) else "usual"

    def _device(self) -> _Device:
        of_pool = _kept.setdefault(self.kv, WeakKeyDictionary())
        key: object = self._drafter or self.graphs
        requests = power_of_two(self.engine.config.max_requests)
        if key not in of_pool or len(of_pool[key].state_M3) < requests:
            of_pool[key] = _Device(self.graphs, requests, self.target.device)
        return of_pool[key]

    def _fill(self, device: _Device, turns: Sequence[DraftTurn]) -> None:
        """Begin with what the host knows."""
        self.engine.drafting.read([turn.state for turn in turns])
        state_R3 = torch.tensor([(turn.state.anchor, len(turn.state.tokens) - 1, 0) for turn in turns])
        device.state_M3[: len(turns)].copy_(state_R3.pin_memory(), non_blocking=True)
        self._drawn = {turn.id: 0 for turn in turns}

    def _launched(self, plan: _Plan, before: _Flight | None, device: _Device) -> _Flight:
        """Give the device its numbers, run the graphs, and have the results copied."""
        drafter, params = self._drafter, plan.params
        layout, numbers = self._numbers(plan, before)
        if drafter is None:
            device.check([])
        else:
            device.check(drafter.memory(max(turn.state.capacity for turn in plan.turns)))
        buffer = device.give(layout, numbers)
        draft_clock, verify_clock = (Clock(self.target.device, self.engine.clock) for _ in range(2))
        drafts: _Drafts | None = None
        if layout.positions:
            with draft_clock:
                drafts = device.run((layout, params), lambda: self._draft(layout.given(buffer), device, params))
        rows = computed_rows(len(plan.turns) + plan.budget)
        with verify_clock:
            verified: _Verified = device.run(
                (layout, params, rows),
                lambda: self._verify(layout.given(buffer), device, params, rows=rows, drafts=drafts),
            )
        device.state_M3[: layout.requests].copy_(verified.state_R3)
        read_RX = torch.empty(verified.read_RX.shape, dtype=torch.float64, pin_memory=True)
        read_RX.copy_(verified.read_RX, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.target.device))
        return _Flight(plan, draft_clock, verify_clock, read_RX=read_RX, done=done)

    def _numbers(self, plan: _Plan, before: _Flight | None) -> tuple[_Layout, Floats]:
        """What the host gives a step; the order is that of `_Layout.given`."""
        turns, drafting, drafter = plan.turns, self.engine.drafting, self._drafter
        R, K, count = power_of_two(len(turns)), plan.positions, len(turns)
        places = {turn.id: i for i, turn in enumerate(turns if before is None else before.plan.turns)}
        blocks = [self.engine.scheduler.running[turn.id].blocks for turn in turns]
        head_FR = np.zeros((_FIELDS, R))
        head_FR[:, :count] = (
            [places[turn.id] for turn in turns],
            [1] * count,
            plan.depths,
            plan.longest,
            [turn.state.capacity for turn in turns],
            [self._drawn[turn.id] for turn in turns],
            np.cumsum([0, *map(len, blocks)])[:-1],
        )
        table, scales_2K, terms_2RK = np.zeros(0), np.zeros((2, K)), np.zeros((2, R, K))
        if drafter is not None:
            table = drafter.table([turn.state.session for turn in turns], R).astype(np.float64)
            if K:
                temperature = turns[0].state.params.temperature
                scales_2K[:] = np.array([drafter.heads.scale(k, temperature) for k in range(K)]).T
                terms_2RK[:, :count] = drafting.acceptance.terms(
                    [turn.id for turn in turns], K, sampled=plan.params is not None, confident=drafter.heads.confident
                )
        # Of the step under way and of this one: for each draft, for its verdict, and for the token after them.
        uniforms_RU = np.zeros((R, 0 if plan.params is None else 2 * (2 * drafting.gamma + 1)))
        if plan.params is not None:
            for row_U, turn in zip(uniforms_RU, turns, strict=False):
                assert isinstance(turn.state.source, SeededSource)
                row_U[:] = turn.state.source.ahead(len(row_U))
        pages_P = np.zeros(max(FEWEST_PAGES, power_of_two(sum(map(len, blocks)))))
        pages_P[: sum(map(len, blocks))] = np.concatenate(blocks)
        parts = (head_FR, np.array([plan.budget]), scales_2K, terms_2RK, uniforms_RU, pages_P, table)
        layout = _Layout(R, K, uniforms_RU.shape[1], pages=len(pages_P), table=len(table))
        return layout, np.concatenate([part.reshape(-1) for part in parts])

    def _draft(self, given: _Given, device: _Device, params: SamplingParams | None) -> _Drafts:
        """The drafts of all requests, on the device."""
        drafter, state = self._drafter, _state(given, device)
        assert drafter is not None
        R, K = given.terms_2RK.shape[1:]
        left_R = given.capacity_R - state.cached_R - 2  # what may be committed besides the target's own token
        hidden_RKH = drafter.block_at(state.anchor_R, state.cached_R, given.real_R, table=given.table)[:, :K]
        uniforms_RK = given.budget_1.new_zeros(R, K)
        if params is not None:
            uniforms_RK = given.uniforms(state.drawn_R[:, None] + torch.arange(K, device=state.drawn_R.device))
        heads = drafter.heads
        drawn = draw_alike(
            drafter.head, hidden_RKH, state.anchor_R, uniforms_RK=uniforms_RK, heads=heads, params=params
        )
        probs_KRVd = drawn.probs[0] if drawn.probs else None
        assert probs_KRVd is None or isinstance(probs_KRVd, Tensor)
        return _Drafts(
            drawn.tokens_RK,
            drawn.firsts_RK,
            None if heads.confidence is None else heads.confidence(hidden_RKH, drawn.embedding_RKr),
            probs_KRVd=probs_KRVd,
            drafted_R=torch.minimum(given.depth_R, left_R).clamp(min=0) * given.real_R,
        )

    def _verify(
        self, given: _Given, device: _Device, params: SamplingParams | None, *, rows: int, drafts: _Drafts | None
    ) -> _Verified:
        """Score anchors and drafts, accept, and let the drafter read the rows, on the device."""
        state, kv, drafter = _state(given, device), self.kv, self._drafter
        lengths_R = torch.zeros_like(state.anchor_R) if drafts is None else _lengths(given, drafts)
        counts_R = (1 + lengths_R) * given.real_R
        tables = Tables(given.first_page_R, given.pages_P, kv.block_size)
        made = divide(
            counts_R,
            state.cached_R,
            tables,
            groups=self.graphs.decoder.groups,
            rows=rows,
            items=most_items(rows),
            spare_slot=kv.spare_slot,
        )
        tokens_T = state.anchor_R[made.request_T]
        if drafts is not None:
            draft_T = drafts.tokens_RK[made.request_T, (made.within_T - 1).clamp(min=0)]
            tokens_T = torch.where(made.within_T > 0, draft_T, tokens_T)
        hidden_TD, aux_TLD = self.graphs.packed(
            tokens_T, made.slots_T, made.plan(tables), kv=kv, aux_layers=self.engine.aux_layers
        )
        logits_TV = self.target.logits(hidden_TD)
        first_R, place_J = counts_R.cumsum(0) - counts_R, torch.arange(1 + given.scales_2K.shape[1], device=kv.device)
        row_RJ = (first_R[:, None] + torch.minimum(place_J, lengths_R[:, None])).clamp(max=rows - 1)
        if params is None:
            outcome = _greedy(logits_TV, row_RJ, lengths_R, drafts=drafts)
        else:
            probs_TV = warp(at_least_float32(logits_TV), params)
            ids_Vd = None if drafter is None else drafter.heads.draft_ids_Vd
            outcome = _sampled(
                probs_TV, row_RJ, lengths_R, given=given, drawn_R=state.drawn_R, drafts=drafts, ids_Vd=ids_Vd
            )
        if drafter is not None and aux_TLD is not None:
            self._extend(drafter, aux_TLD, made, given=given, state=state)
        drafted_R = lengths_R if drafts is None else drafts.drafted_R
        read = [x_R.double()[:, None] for x_R in (*outcome, lengths_R, drafted_R)]
        if drafts is not None:
            read += [x_RK.double() for x_RK in (drafts.tokens_RK, drafts.logits_RK) if x_RK is not None]
        state_R3 = torch.stack(
            [outcome.next_R, state.cached_R + outcome.accepted_R + 1, state.drawn_R + outcome.draws_R], dim=1
        )
        return _Verified(state_R3, torch.cat(read, dim=1))

    def _extend(self, drafter: DeviceDrafter, aux_TLD: Tensor, made: Division, *, given: _Given, state: _State) -> None:
        """Let the drafter read all rows, and keep what it read where prefixes are shared."""
        positions_T = (state.cached_R[made.request_T] + made.within_T).masked_fill(made.padding_T, 0)
        drafter.extend_at(aux_TLD, positions_T, made, table=given.table)
        if self.kv.aux_SLD.shape[1]:
            self.kv.aux_SLD.index_copy_(0, made.slots_T, aux_TLD)

    def _read(self, flight: _Flight) -> list[Output]:
        """Wait for a step, and commit what it gave the requests that have not ended since."""
        engine, drafting, plan = self.engine, self.engine.drafting, flight.plan
        flight.done.synchronize()
        live, read_RX = self._live(flight), flight.read_RX.numpy()
        work = [Work(plan.turns[i].id, 0, True, limit=plan.turns[i].limit) for i in live]
        step = engine.new_step(max(plan.started, self._read_at), StepPlan(work, [], []))
        step.ahead, step.draft_clock, step.verify_clock = True, flight.draft_clock, flight.verify_clock
        K = plan.positions
        confidences = self._confidences(read_RX[:, _READ + K :], plan)
        proposals, results = list[Proposal](), dict[str, RoundResult]()
        for i, turn in zip(live, step.turns, strict=True):
            accepted, token, draws, total, verified, drafted = read_RX[i, :_READ].tolist()
            tokens = [int(token) for token in read_RX[i, _READ:][: int(drafted)]]
            draft = Draft.chain(tokens, confidences=confidences[i][: len(tokens)])
            proposals.append(Proposal(draft, "drafter" if tokens else None, ""))
            if not total > 0.0:  # also where it is no number
                step.failed[turn.id] = not_finite(total)
                continue
            verdict = Verdict(list(range(int(accepted))), int(token))
            results[turn.id] = RoundResult(draft, draft.truncated(int(verified)), verdict)
            if isinstance(turn.state.source, SeededSource):
                turn.state.source.skip(int(draws))
            self._drawn[turn.id] += int(draws)
        ids = {turn.id for turn in step.turns}
        step.drafted = Drafted(
            proposals,
            [id for id in plan.considered if id in ids],
            sum(plan.depths[i] > 0 for i in live),
            pause=plan.pause,
        )
        drafted = any(proposal.draft.tokens for proposal in proposals)
        view = drafting.view(step.turns, step.drafted) if drafted else None
        parts = [result.verified for result in results.values()]
        rows = len(parts) + sum(len(part.tokens) for part in parts)
        scores = Scores(parts, [], None, logit_rows={}, first_row={}, count=rows, aux_TLD=None, compared={})
        outputs = engine.commit(step, view, scores, results=results)
        for turn in step.turns:
            if turn.id in self.states and turn.state.session is not None:
                turn.state.session.length = engine.scheduler.running[turn.id].cached
        self._read_at = engine.clock()
        return engine.record(step, scores, results, outputs=outputs)

    def _confidences(self, logits_RK: Floats, plan: _Plan) -> list[list[float]]:
        """Of all drafts, as the usual step calibrates them; [] without a confidence head."""
        if not logits_RK.shape[1]:
            return [[] for _ in plan.turns]
        drafter = self._drafter
        assert drafter is not None
        temperatures = [turn.state.params.temperature for turn in plan.turns]
        logits = torch.from_numpy(logits_RK[: len(plan.turns)]).float()
        found: list[list[float]] = drafter.heads.calibrated_block(logits, temperatures).double().tolist()
        return found


# ----------------------------------------------------------------------------
# What the device decides. The host reads only the shapes of arguments.
# ----------------------------------------------------------------------------


def _state(given: _Given, device: _Device) -> _State:
    """Of the step's requests; 0 for padding."""
    return _State(*(device.state_M3[given.row_R] * given.real_R[:, None]).unbind(1))


def _lengths(given: _Given, drafts: _Drafts) -> Tensor:
    """How many drafts of each request are verified, [R]: the budget in order of survival, as `causal_order`."""
    R, K = drafts.tokens_RK.shape
    logit_RK = given.terms_2RK[1]
    if drafts.logits_RK is not None:
        slope_K, offset_K = given.scales_2K
        most = float(logit(np.array(1.0), CLIP))
        own_RK = (slope_K * drafts.logits_RK.double() + offset_K).clamp(-most, most)
        logit_RK = given.terms_2RK[0] * own_RK + logit_RK
    survival_KR = logit_RK.sigmoid().cumprod(1).T
    places_K = torch.arange(K, device=survival_KR.device)
    most_R = torch.minimum(drafts.drafted_R, given.longest_R)
    drafted_KR = places_K[:, None] < most_R
    keys_KR = (STEPS + 0.5 - survival_KR * STEPS).long().masked_fill(~drafted_KR, LAST)
    order_N = keys_KR.reshape(-1).argsort(stable=True)
    rank_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(R * K, device=order_N.device))
    admitted_KR = (rank_N.view(K, R) < given.budget_1) & drafted_KR
    return admitted_KR.sum(0)


def _greedy(logits_TV: Tensor, row_RJ: Tensor, lengths_R: Tensor, drafts: _Drafts | None) -> _Outcome:
    """As `accept` where the target's token is settled."""
    pick_RJ = logits_TV.argmax(-1)[row_RJ]
    accepted_R = torch.zeros_like(lengths_R)
    if drafts is not None:
        K = drafts.tokens_RK.shape[1]
        judged_RK = torch.arange(K, device=row_RJ.device) < lengths_R[:, None]
        agreed_RK = (drafts.tokens_RK == pick_RJ[:, :K]) & judged_RK
        accepted_R = agreed_RK.long().cumprod(1).sum(1)
    next_R = pick_RJ.gather(1, accepted_R[:, None])[:, 0]
    return _Outcome(accepted_R, next_R, torch.zeros_like(next_R), total_R=torch.ones_like(next_R))


def _sampled(
    probs_TV: Tensor,
    row_RJ: Tensor,
    lengths_R: Tensor,
    *,
    given: _Given,
    drawn_R: Tensor,
    drafts: _Drafts | None,
    ids_Vd: Tensor | None,
) -> _Outcome:
    """As `accept` of drawn chains: u < p_t / p_d, then the residual, or p_t behind the last draft.

    Draws are those of the usual step: one for each draft, one for each verdict that is not certain, and one more.
    """
    if drafts is None:
        next_R, total_R = choose_rows(probs_TV[row_RJ[:, 0]], given.uniforms(drawn_R[:, None])[:, 0])
        return _Outcome(torch.zeros_like(lengths_R), next_R, torch.ones_like(lengths_R), total_R=total_R)
    R, K = drafts.tokens_RK.shape
    places_K, requests_R = torch.arange(K, device=row_RJ.device), torch.arange(R, device=row_RJ.device)
    judged_RK = places_K < lengths_R[:, None]
    ratio_RK = probs_TV[row_RJ[:, :K], drafts.tokens_RK].double() / drafts.firsts_RK
    uncertain_RK = (ratio_RK > 0) & (ratio_RK < 1) & judged_RK
    before_RK = uncertain_RK.cumsum(1) - uncertain_RK.long()
    own_R = drawn_R + drafts.drafted_R
    below_RK = given.uniforms(own_R[:, None] + before_RK) < ratio_RK
    kept_RK = judged_RK & torch.where(uncertain_RK, below_RK, ratio_RK >= 1)
    accepted_R = kept_RK.long().cumprod(1).sum(1)
    verdicts_R = (uncertain_RK & (places_K <= accepted_R[:, None])).sum(1)
    target_RV = probs_TV[row_RJ.gather(1, accepted_R[:, None])[:, 0]]
    assert drafts.probs_KRVd is not None
    rejected_RVd = drafts.probs_KRVd[accepted_R.clamp(max=K - 1), requests_R]
    left_RV = residual(target_RV, DraftRow(rejected_RVd, ids_Vd, probs_TV.shape[1])())
    left_RV = torch.where((accepted_R < lengths_R)[:, None], left_RV, target_RV)
    next_R, total_R = choose_rows(left_RV, given.uniforms((own_R + verdicts_R)[:, None])[:, 0])
    lost_RK = ~(drafts.firsts_RK > 0) & (places_K < drafts.drafted_R[:, None])  # drawn from what is no distribution
    total_R = total_R.masked_fill(lost_RK.any(1), torch.nan)
    return _Outcome(accepted_R, next_R, drafts.drafted_R + verdicts_R + 1, total_R=total_R)
