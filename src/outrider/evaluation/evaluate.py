"""Evaluate a drafter: plain and speculative decoding of the same prompts in one run.

Each turn is decoded both ways, one directly after the other, and the order alternates from turn to turn, so that drift
of the machine affects both alike. With a concurrency the turns of so many prompts are decoded together, by the engine.
A warm-up is decoded first and not counted. At temperature 0 both ways must give the same tokens; a difference counts as
a tie only where plain decoding's top two logits are closer than `tie_gap`.
Where costs decide what is drafted and no draft can change a token, what a turn taught about acceptance is known in the
next one of its task, as in a `Model`. Where tokens are sampled every turn begins anew: they follow from the seed alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.checkpoints.describe import DrafterInfo
from outrider.data.chat import render
from outrider.data.conversations import Conversation
from outrider.data.sources import TaskSettings, load_tasks
from outrider.decoding.drafting import SchedulerState
from outrider.decoding.engine import Engine, config_for
from outrider.decoding.generate import Generation, acceptance, generate, generation_of
from outrider.decoding.policies import FixedPolicy, Policy
from outrider.decoding.request import Output, Request, StopRules, check_prompt
from outrider.decoding.verification import TypicalAcceptance
from outrider.drafters.base import Drafter, draft_slots
from outrider.evaluation.results import Results, TaskResult
from outrider.sampling import PositionNoise, SamplingParams, at_least_float32, warp
from outrider.target.model import Target
from outrider.training.parallel import ALONE, Ranks
from outrider.utils.measure import dtype_name, machine, quartiles, today

if TYPE_CHECKING:
    import mlx.core as mx

TIE_GAP = 1e-3  # logits


def tie_gap(dtype: torch.dtype | mx.Dtype) -> float:
    """Logits that are closer are a tie: TIE_GAP, or two steps of the type between 16 and 32 where those are wider.

    In bfloat16 that is 0.25: a row alone and the same row beside drafts may differ by as much.
    """
    return max(TIE_GAP, 32 * torch.finfo(getattr(torch, dtype_name(dtype))).eps)


_WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class DecodedTurn:
    """One turn decoded both ways. `verdict`: same, tie or mismatch (temperature 0), None otherwise."""

    plain: Generation
    speculative: Generation
    verdict: str | None


def evaluate(
    target: Target,
    drafter: Drafter,
    tasks: Sequence[str],
    settings: TaskSettings,
    drafter_info: DrafterInfo,
    *,
    policy: Policy | None = None,
    recorded: Mapping[str, object] | None = None,
    versions: dict[str, str] | None = None,
    on_progress: Callable[[str, int, int], None] = lambda task, done, total: None,
    typical: TypicalAcceptance | None = None,
    concurrency: int = 1,
    ranks: Ranks = ALONE,
) -> Results:
    """Measure a drafter on task files (JSONL with `turns`), shipped prompt sets or tasks by name.

    Several ranks share the conversations of each task; all of them return the results of all. Tokens, rounds and
    verdicts are those of one rank (with a policy that weighs costs, rounds depend on which turns came before on the
    same rank), and seconds are summed, so rates are those of one process.

    Args:
        policy: in which rounds it drafts, and how many drafts are verified; in all, and all of them, by default. With a
            seed on which tokens depend it decides by costs that no clock corrects.
        recorded: further settings for the results, such as the drafter's directory; they replace those of their name.
        typical: lossy acceptance, which may change the output; the results say so.
        concurrency: prompts decoded together.

    Raises:
        ValueError: a task file is missing or malformed, has the name of another, or a prompt that does not fit; or what
        the engine cannot do.
    """
    policy, together = policy or FixedPolicy(), concurrency > 1
    if settings.params.reproducible:
        policy = policy.reproducible()
    decode = partial(decode_turns, target, drafter, policy=policy, typical=typical, together=together)
    loaded = load_tasks(tasks, settings.max_samples)
    _check_lengths(loaded, target, settings.thinking)
    warm_up = replace(settings, max_new_tokens=min(_WARM_UP_TOKENS, settings.max_new_tokens))
    for flip in (False, True):
        decode(loaded[0][1][:concurrency], settings=warm_up, flip=flip)
    results = []
    for name, prompts in loaded:
        decoded: dict[int, list[list[DecodedTurn]]] = {}
        learns = policy.step_cost is not None and settings.params.fixed_text
        scheduler_state = SchedulerState.of(drafter) if learns else None
        groups = [prompts[first : first + concurrency] for first in range(0, len(prompts), concurrency)]
        for number in range(len(groups))[ranks.rank :: ranks.world]:
            on_progress(name, number * concurrency, len(prompts))
            flip = bool(number % 2)
            try:
                decoded[number] = decode(groups[number], settings=settings, flip=flip, scheduler_state=scheduler_state)
            except ValueError as error:
                ids = ", ".join(prompt.id for prompt in groups[number])
                raise ValueError(f"{name}, prompt {ids}: {error}") from error
        on_progress(name, len(prompts), len(prompts))
        merged = {number: found for part in ranks.gather(decoded) for number, found in part.items()}
        by_prompt = [turns for number in range(len(groups)) for turns in merged[number]]
        results.append(_task_result(name, prompts, by_prompt, gamma=drafter.gamma))
    described = {
        "temperature": settings.params.temperature,
        "policy": repr(policy),
        "target": target.name,
        "max_new_tokens": settings.max_new_tokens,
        "max_samples": settings.max_samples,
        "device": target.device.type,
        "dtype": dtype_name(target.dtype),
        "thinking": settings.thinking,
        "concurrency": concurrency,
        "world": ranks.world,
        "sampling": asdict(settings.params),
        "gamma": drafter.gamma,
        "slots": drafter.slots,
        **(recorded or {}),
        "lossy": None if typical is None else typical.settings,
    }
    return Results(tasks=results, settings=described, versions=versions or {}, machine=machine(), drafter=drafter_info,
                   date=today())  # fmt: skip


def _prompts_digest(prompts: Sequence[Conversation]) -> str:
    """SHA-256 of the prompts' contents; the name of their file does not count."""
    return hashlib.sha256(json.dumps([asdict(prompt) for prompt in prompts], sort_keys=True).encode()).hexdigest()


def _check_lengths(loaded: Sequence[tuple[str, Sequence[Conversation]]], target: Target, thinking: bool) -> None:
    """Whether the first turn of every prompt fits the target, before anything is decoded.

    Raises:
        ValueError: naming the prompt by its place among the prompts of its task.
    """
    assert target.tokenizer is not None
    for name, prompts in loaded:
        for number, prompt in enumerate(prompts, start=1):
            try:
                turns = prompt.turns[:1]
                check_prompt(target, render(target.tokenizer, turns, [], tools=prompt.tools, thinking=thinking))
            except ValueError as error:
                raise ValueError(f"{name}, prompt {number} ({prompt.id}): {error}") from error


def decode_turns(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Conversation],
    settings: TaskSettings,
    *,
    policy: Policy,
    flip: bool,
    typical: TypicalAcceptance | None = None,
    scheduler_state: SchedulerState | None = None,
    together: bool = False,
) -> list[list[DecodedTurn]]:
    """Decode the turns of each conversation both ways, those that come first in all of them before the next ones; the
    plain responses form the history.

    Args:
        flip: the first turns are decoded speculatively first.
        scheduler_state: acceptance estimates of earlier turns, which are updated.
        together: by an engine, all at once; else one after another.
    """
    assert target.tokenizer is not None
    decode = _decode_together if together else _decode_each
    drafted: dict[str, Any] = {"policy": policy, "typical": typical, "scheduler_state": scheduler_state}
    ways: dict[bool, tuple[Drafter | None, dict[str, Any]]] = {False: (None, {}), True: (drafter, drafted)}
    decoded: list[list[DecodedTurn]] = [[] for _ in prompts]
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        going = [number for number, prompt in enumerate(prompts) if turn < len(prompt.turns)]
        rendered = []
        for number in going:
            prompt, history = prompts[number], [earlier.plain.text for earlier in decoded[number]]
            turns = prompt.turns[: turn + 1]
            rendered.append(render(target.tokenizer, turns, history, tools=prompt.tools, thinking=settings.thinking))
        both = {}
        for way in (flip, not flip):
            drafting, options = ways[way]
            both[way] = decode(target, rendered, settings, drafter=drafting, **options)
        for number, tokens, plain, speculative in zip(going, rendered, both[False], both[True], strict=True):
            verdict = None
            if settings.params.temperature == 0:
                verdict = compare_greedy(target, tokens, plain.tokens, speculative=speculative.tokens)
            decoded[number].append(DecodedTurn(plain, speculative, verdict))
        flip = not flip
    return decoded


def _decode_each(
    target: Target, prompts: Sequence[list[int]], settings: TaskSettings, drafter: Drafter | None, **options: Any
) -> list[Generation]:
    """Without a drafter decoding is plain. `options`: of `generate` (see `stream`): who drafts how much."""
    rules = StopRules(settings.max_new_tokens)
    return [generate(target, prompt, drafter, params=settings.params, rules=rules, **options) for prompt in prompts]


def _decode_together(
    target: Target, prompts: Sequence[list[int]], settings: TaskSettings, drafter: Drafter | None, **options: Any
) -> list[Generation]:
    """As the engine decodes them, in equal shares of its seconds; arguments as of `_decode_each`.

    The first token of a response comes with its prompt, without drafts: it counts for no round, and its seconds are
    those of the next.
    """
    started = time.perf_counter()
    rules, slots = StopRules(settings.max_new_tokens), draft_slots(drafter)
    requests = [Request(str(n), prompt, settings.params, rules=rules) for n, prompt in enumerate(prompts)]
    config = config_for(requests, slots)
    rows = 2 * len(requests) * (1 + slots)  # whole drafts of all, beside the quarter that is kept for prompts
    config = replace(config, max_requests=len(requests), token_budget=max(config.token_budget, rows))
    engine = Engine(target, drafter, config=config, **options)
    outputs: list[list[Output]] = [[] for _ in prompts]
    waiting = [0.0] * len(prompts)  # seconds of steps that gave a request no round yet
    with closing(engine.run(requests)) as steps:
        for given in steps:
            for output in given:
                if output.error is not None:
                    raise output.error
                number = int(output.id)
                outputs[number].append(replace(output, other_seconds=output.other_seconds + waiting[number]))
                waiting[number] = output.seconds if len(outputs[number]) == 1 else 0.0
    seconds = (time.perf_counter() - started) / len(prompts)
    whole = [generation_of(given, seconds) for given in outputs]
    return [replace(generation, rounds=generation.rounds[1:]) for generation in whole]


def compare_greedy(target: Target, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int]) -> str:
    """Compare greedy outputs: same, tie (plain decoding's top-2 gap where they differ is < `tie_gap`) or mismatch."""
    return compare_by(partial(_last_logits, target), prompt, plain, other=speculative, gap=tie_gap(target.dtype))


def _last_logits(target: Target, tokens: Sequence[int]) -> Tensor:
    """The logits [V] after some tokens, in float32 or wider: rounding would make ties of its own."""
    tokens_BT = torch.tensor([tokens], device=target.device)
    hidden_D = target.forward(tokens_BT, target.new_cache(len(tokens)), logits=0).hidden_BTD[0, -1]
    return target.logits(at_least_float32(hidden_D))


def compare_coupled(
    target: Target, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], params: SamplingParams
) -> str:
    """`compare_greedy` of coupled responses: logits plus the noise of their position, T log(p_v / E_v), take the place
    of logits."""
    assert params.coupled and params.seed is not None
    noise = PositionNoise(params.seed, target.vocab_size)

    def last_scores(tokens: Sequence[int]) -> Tensor:
        probs_V = warp(at_least_float32(_last_logits(target, tokens)), params)
        return params.temperature * (probs_V.log().cpu() - noise.row(len(tokens)).log())

    return compare_by(last_scores, prompt, plain, other=other, gap=tie_gap(target.dtype))


def compare_by(
    last_logits: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    gap: float = TIE_GAP,
) -> str:
    """`compare_greedy` with `last_logits(tokens)` for the logits [V] after some tokens."""
    if list(plain) == list(other):
        return "same"
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if at is None:
        return "mismatch"  # one is a prefix of the other: a stop was missed
    first, second = last_logits([*prompt, *plain[:at]]).topk(2).values.tolist()
    return "tie" if first - second < gap else "mismatch"


def _task_result(
    name: str, prompts: Sequence[Conversation], by_prompt: Sequence[Sequence[DecodedTurn]], gamma: int
) -> TaskResult:
    """The figures of one task from the decoded turns of each prompt."""
    turns = [turn for mine in by_prompt for turn in mine]
    rounds_of = [[r for turn in mine for r in turn.speculative.rounds] for mine in by_prompt]
    rounds = [r for mine in rounds_of for r in mine]
    length, conditional, histogram = acceptance(rounds, gamma)
    plain_seconds = sum(turn.plain.seconds for turn in turns)
    tokens = sum(len(turn.speculative.tokens) for turn in turns)
    rate = tokens / sum(turn.speculative.seconds for turn in turns)
    plain_rate = sum(len(turn.plain.tokens) for turn in turns) / plain_seconds
    after_prefill = sum(r.seconds for turn in turns for r in turn.speculative.rounds[1:])
    verdicts = [turn.verdict for turn in turns]
    return TaskResult(
        task=name,
        samples=len(prompts),
        turns=len(turns),
        tokens=tokens,
        rounds=len(rounds),
        accepted_length=length,
        conditional_acceptance=conditional,
        acceptance_histogram=histogram,
        tokens_per_second=rate,
        generation_tps=tokens / after_prefill if after_prefill else None,
        baseline_tokens_per_second=plain_rate,
        speedup=rate / plain_rate,
        speedup_quartiles=list(quartiles([_rate(turn.speculative) / _rate(turn.plain) for turn in turns])),
        greedy_identical=None if None in verdicts else "mismatch" not in verdicts,
        greedy_ties=verdicts.count("tie"),
        greedy_mismatches=verdicts.count("mismatch"),
        draft_seconds=sum(r.draft_seconds for r in rounds),
        verify_seconds=sum(r.verify_seconds for r in rounds),
        other_seconds=sum(r.other_seconds for r in rounds),
        baseline_seconds=plain_seconds,
        verified_drafts=sum(r.verified for r in rounds),
        prompts_sha256=_prompts_digest(prompts),
        by_prompt=[(sum(len(r.tokens) for r in mine), len(mine)) for mine in rounds_of],
    )


def _rate(generation: Generation) -> float:
    return len(generation.tokens) / generation.seconds
