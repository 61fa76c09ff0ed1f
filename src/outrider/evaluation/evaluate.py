"""Plain and speculative decoding of the same prompts in one run.

Every turn is decoded both ways, one right after the other, and the order alternates from turn to turn, so drift of the
machine falls on both. A warm-up prompt is decoded first and not counted. At temperature 0 the two must be the same
tokens; a difference is a tie only where plain decoding's own top two logits are closer than TIE_GAP.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.data.chat import render
from outrider.data.conversations import Conversation
from outrider.data.sources import load_prompts
from outrider.decoding.generate import Generation, acceptance, generate
from outrider.decoding.request import StopRules
from outrider.drafters.base import Drafter
from outrider.evaluation.results import DrafterInfo, Results, TaskResult
from outrider.sampling import SamplingParams
from outrider.scheduling.policies import FixedPolicy, Policy
from outrider.target.model import Target
from outrider.utils.device import dtype_name
from outrider.utils.distributed import ALONE, Ranks
from outrider.utils.measure import machine, quartiles
from outrider.verification import TypicalAcceptance

TIE_GAP = 1e-3  # logits


@dataclass(frozen=True)
class EvaluationConfig:
    """What to decode. `max_samples` None: whole files."""

    max_samples: int | None = None
    max_new_tokens: int = 256
    params: SamplingParams = field(default_factory=SamplingParams)
    warmup_tokens: int = 32
    thinking: bool = False  # asked of the chat template


@dataclass(frozen=True)
class Pair:
    """One turn decoded both ways. `verdict`: same, tie or mismatch (temperature 0), None otherwise."""

    plain: Generation
    speculative: Generation
    verdict: str | None


def evaluate(
    target: Target,
    drafter: Drafter,
    tasks: Sequence[str],
    config: EvaluationConfig,
    policy: Policy | None = None,
    settings: dict[str, object] | None = None,
    versions: dict[str, str] | None = None,
    on_progress: Callable[[str, int, int], None] = lambda task, done, total: None,
    drafter_info: DrafterInfo | None = None,
    lossy: TypicalAcceptance | None = None,
    ranks: Ranks = ALONE,
) -> Results:
    """Measure a drafter on task files (JSONL with `turns`), shipped prompt sets or tasks by name.

    Several ranks share the conversations of each task; all of them return the results of all. Tokens, rounds and
    verdicts are those of one rank, and seconds are summed, so rates are those of one process.

    Args:
        lossy: a rule that may change the output; the results say so.

    Raises:
        ValueError: a task file is missing or malformed, or has the name of another.
    """
    policy = policy or FixedPolicy()
    loaded = load_tasks(tasks, config.max_samples)
    warm = replace(config, max_new_tokens=min(config.warmup_tokens, config.max_new_tokens))
    for flip in (False, True):
        decode_turns(target, drafter, loaded[0][1][0], warm, policy, flip, lossy)
    results = []
    for name, prompts in loaded:
        found: dict[int, list[Pair]] = {}
        for number in range(len(prompts))[ranks.rank :: ranks.world]:
            on_progress(name, number, len(prompts))
            prompt = prompts[number]
            try:
                found[number] = decode_turns(target, drafter, prompt, config, policy, bool(number % 2), lossy)
            except ValueError as error:
                raise ValueError(f"{name}, prompt {prompt.id}: {error}") from error
        on_progress(name, len(prompts), len(prompts))
        merged = {number: turns for part in ranks.gather(found) for number, turns in part.items()}
        pairs = [pair for number in range(len(prompts)) for pair in merged[number]]
        task = summarise(name, len(prompts), pairs, drafter.gamma)
        results.append(task.model_copy(update={"prompts_sha256": prompts_digest(prompts)}))
    described = {"temperature": config.params.temperature, "policy": repr(policy), "target": target.name}
    described |= {"max_new_tokens": config.max_new_tokens, "max_samples": config.max_samples}
    described |= {"device": target.device.type, "dtype": dtype_name(target.dtype)}
    described |= {"thinking": config.thinking, "world": ranks.world}
    described |= {"sampling": asdict(config.params), "gamma": drafter.gamma, **(settings or {})}
    described["lossy"] = None if lossy is None else lossy.settings
    return Results(tasks=results, settings=described, versions=versions or {}, machine=machine(), drafter=drafter_info)


def load_tasks(tasks: Sequence[str], max_samples: int | None = None) -> list[tuple[str, list[Conversation]]]:
    """The prompts of every task, under the name that its results go by.

    Raises:
        ValueError: a task file is missing or malformed, or has the name of another.
    """
    names = [Path(task).stem for task in tasks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two task files are called {', '.join(twice)}, and results go by that name: rename one.")
    return [(name, load_prompts(task, max_samples)) for name, task in zip(names, tasks, strict=True)]


def prompts_digest(prompts: Sequence[Conversation]) -> str:
    """SHA-256 of what is decoded: two results with the same one had the same prompts, whatever the file was called."""
    return hashlib.sha256(json.dumps([asdict(prompt) for prompt in prompts], sort_keys=True).encode()).hexdigest()


def decode_turns(
    target: Target,
    drafter: Drafter,
    prompt: Conversation,
    config: EvaluationConfig,
    policy: Policy,
    flip: bool,
    lossy: TypicalAcceptance | None = None,
) -> list[Pair]:
    """All turns of one conversation, each both ways; the plain responses form the history."""
    assert target.tokenizer is not None
    rules = StopRules(config.max_new_tokens)
    history: list[str] = []
    pairs: list[Pair] = []
    for turn in range(len(prompt.turns)):
        tokens = render(target.tokenizer, prompt.turns[: turn + 1], history, prompt.tools, config.thinking)
        both: dict[bool, Generation] = {}
        for speculative in (flip, not flip):
            chosen = drafter if speculative else None
            both[speculative] = generate(target, tokens, chosen, config.params, rules, policy, lossy)
        verdict = None
        if config.params.temperature == 0:
            verdict = compare_greedy(target, tokens, both[False].tokens, both[True].tokens)
        pairs.append(Pair(both[False], both[True], verdict))
        history.append(both[False].text)
        flip = not flip
    return pairs


def compare_greedy(target: Target, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int]) -> str:
    """same, tie (plain decoding's own top-2 gap at the first difference is below TIE_GAP) or mismatch."""

    def last_logits(tokens: Sequence[int]) -> Tensor:
        tokens_BT = torch.tensor([tokens], device=target.device)
        logits_BTV = target.forward(tokens_BT, target.new_cache(len(tokens))).logits_BTV
        assert logits_BTV is not None
        return logits_BTV[0, -1]

    return compare_by(last_logits, prompt, plain, speculative)


def compare_by(
    last_logits: Callable[[Sequence[int]], Tensor], prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> str:
    """`compare_greedy` by any model's logits [V] after some tokens."""
    if list(plain) == list(other):
        return "same"
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if at is None:
        return "mismatch"  # one is a beginning of the other: a stop was missed
    first, second = last_logits([*prompt, *plain[:at]]).topk(2).values.tolist()
    return "tie" if first - second < TIE_GAP else "mismatch"


def summarise(task: str, samples: int, pairs: Sequence[Pair], gamma: int) -> TaskResult:
    """The figures of one task from its decoded turns."""
    rounds = [r for pair in pairs for r in pair.speculative.rounds]
    length, conditional, histogram = acceptance(rounds, gamma)
    speculative = sum(p.speculative.seconds for p in pairs)
    plain = sum(p.plain.seconds for p in pairs)
    tokens = sum(len(p.speculative.tokens) for p in pairs)
    plain_tokens = sum(len(p.plain.tokens) for p in pairs)
    rates = [_rate(p.speculative) / _rate(p.plain) for p in pairs]
    verdicts = [p.verdict for p in pairs]
    return TaskResult(
        task=task,
        samples=samples,
        turns=len(pairs),
        tokens=tokens,
        rounds=len(rounds),
        accepted_length=length,
        conditional_acceptance=conditional,
        acceptance_histogram=histogram,
        tokens_per_second=tokens / speculative,
        baseline_tokens_per_second=plain_tokens / plain,
        speedup=(tokens / speculative) / (plain_tokens / plain),
        speedup_quartiles=list(quartiles(rates)),
        greedy_identical=None if None in verdicts else "mismatch" not in verdicts,
        greedy_ties=verdicts.count("tie"),
        greedy_mismatches=verdicts.count("mismatch"),
        draft_seconds=sum(r.draft_seconds for r in rounds),
        verify_seconds=sum(r.verify_seconds for r in rounds),
        other_seconds=sum(r.other_seconds for r in rounds),
        baseline_seconds=plain,
        verified_drafts=sum(r.admitted for r in rounds),
    )


def _rate(generation: Generation) -> float:
    return len(generation.tokens) / generation.seconds
