"""prompts -> blocks with raw confidences and what became of them.

    temperature > 0   decode; one labelled block per round
    temperature 0     y_1 .. y_T = the target's own text (many at once), then a block after *every* y_i:
                      accepted = the longest prefix of x_1 x_2 ... that is y_{i+1} y_{i+2} ...

At temperature 0 the text does not depend on the drafter, so a block anywhere in it has a known outcome. Decoding with
whole blocks visits some of these positions, from i to i + accepted + 1; `visited` says which.
Shapes: N rounds, K gamma, F = 2 features of an estimator (drafters/estimator.py).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.data.chat import render
from outrider.data.conversations import Conversation
from outrider.decoding import RoundStats, StopRules, generate
from outrider.decoding.lane import ModelLane
from outrider.drafters.base import DraftCall
from outrider.drafters.estimator import CertaintyEstimator, certainty
from outrider.drafters.packed import PackedDrafter
from outrider.engine import Engine, EngineConfig, Request
from outrider.evaluation.run import EvaluationConfig
from outrider.sampling import SamplingParams, SeenTokens
from outrider.scheduling import FixedPolicy
from outrider.scheduling.calibration import Rounds, sigmoid
from outrider.target import Target
from outrider.target.paged import check_pageable

_AT_ONCE = 16  # positions drafted together; more only take memory
_TOGETHER = 16  # texts decoded together


class Probe:
    """Stands where an estimator will: notes what one could read and has no opinion."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, logits_AVd: Tensor, k: int) -> Tensor:
        self.seen.append(certainty(logits_AVd))
        return logits_AVd.new_zeros(len(logits_AVd))


def collect(
    target: Target,
    drafter: PackedDrafter,
    conversations: Sequence[Conversation],
    config: EvaluationConfig,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[list[Rounds]]:
    """The rounds of each turn of each conversation; with features where the drafter has no confidence head."""
    assert target.tokenizer is not None
    probe = Probe()
    if drafter.heads.confidence is None:
        drafter = copy.copy(drafter)
        drafter.heads = dataclasses.replace(drafter.heads, estimator=probe)
    found: list[list[Rounds]] = [[] for _ in conversations]
    history: list[list[str]] = [[] for _ in conversations]
    for turn in range(max(len(conversation.turns) for conversation in conversations)):
        going = [i for i, conversation in enumerate(conversations) if turn < len(conversation.turns)]
        prompts = [
            render(
                target.tokenizer,
                conversations[i].turns[: turn + 1],
                history[i],
                conversations[i].tools,
                config.thinking,
            )
            for i in going
        ]
        greedy = config.params.temperature == 0.0
        texts = target_texts(target, prompts, config) if greedy else [[] for _ in going]
        for i, prompt, text in zip(going, prompts, texts, strict=True):
            if greedy:
                found[i].append(everywhere(target, drafter, prompt, text, config.params, probe))
                history[i].append(str(target.tokenizer.decode(text, skip_special_tokens=True)))
            else:
                rules = StopRules(config.max_new_tokens)
                generation = generate(target, prompt, drafter, config.params, rules, FixedPolicy())
                found[i].append(as_rounds(generation.rounds, drafter.gamma, probe))
                history[i].append(generation.text)
            probe.seen.clear()
            on_progress(sum(len(turns) == len(c.turns) for turns, c in zip(found, conversations, strict=True)))
    return found


def target_texts(target: Target, prompts: Sequence[list[int]], config: EvaluationConfig) -> list[list[int]]:
    """The target's own responses, decoded together where its family allows that."""
    rules, longest = StopRules(config.max_new_tokens), max(map(len, prompts)) + config.max_new_tokens
    try:
        check_pageable(target.config)
    except ValueError:
        return [generate(target, prompt, params=config.params, rules=rules).tokens for prompt in prompts]
    together = EngineConfig(_TOGETHER, num_blocks=_TOGETHER * -(-longest // EngineConfig.block_size))
    engine = Engine(target, config=together)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(str(i), prompt, config.params, rules))
    texts: list[list[int]] = [[] for _ in prompts]
    while not engine.idle:
        for output in engine.step():
            texts[int(output.id)] += output.tokens
    return texts


def as_rounds(stats: Sequence[RoundStats], gamma: int, probe: Probe | None = None) -> Rounds:
    """The judged rounds among `stats`, whose drafts `probe` has seen; unjudged positions hold NaN."""
    judged = [r for r in stats if r.admitted]
    confidences_NK = np.full((len(judged), gamma), np.nan)
    for row_K, r in zip(confidences_NK, judged, strict=True):
        row_K[: r.admitted] = r.confidences[: r.admitted]
    features = None
    if probe is not None and probe.seen:
        features = np.full((len(judged), gamma, 2), np.nan)
        read = iter(probe.seen)  # one row per drawn position, round after round
        drafts = [[next(read)[0].numpy(force=True) for _ in range(r.proposed)] for r in stats]
        for row_KF, found in zip(features, [d for d, r in zip(drafts, stats, strict=True) if r.admitted], strict=True):
            row_KF[: len(found)] = found
    counts = np.array([(r.accepted, r.admitted) for r in judged], dtype=np.int64).reshape(-1, 2)
    return Rounds(confidences_NK, counts[:, 0], counts[:, 1], features)


@torch.inference_mode()
def everywhere(
    target: Target,
    drafter: PackedDrafter,
    prompt: Sequence[int],
    text: Sequence[int],
    params: SamplingParams,
    probe: Probe | None = None,
) -> Rounds:
    """A block after the prompt and after every token of `text` but the last, which the target wrote at temperature 0.

    A block that agrees with all that is left of the text is judged that far only.
    """
    tokens, gamma = [*prompt, *text], drafter.gamma
    lane = ModelLane(target, drafter, tokens[:-1], params, len(tokens))
    ends = range(len(tokens) - 1, len(prompt) - 1, -1)
    confidences, accepted, admitted = list[list[float]](), list[int](), list[int]()
    # All share one draft cache, from the last position to the first: a block overwrites only what lies behind it.
    for start in range(0, len(ends), _AT_ONCE):
        calls = []
        for end in ends[start : start + _AT_ONCE]:
            session = copy.copy(lane.session)
            assert session is not None
            session.length = end - 1
            seen = SeenTokens(target.vocab_size, params.repetition_penalty, tokens[:end], target.device)
            calls.append(DraftCall(session, tokens[end - 1], params, seen, lane.source))
        for call, proposal in zip(calls, drafter.propose(calls), strict=True):
            left = tokens[call.session.length + 1 :][:gamma]
            agreed = [x == y for x, y in zip(proposal.tokens, left, strict=False)]
            right = agreed.index(False) if False in agreed else len(agreed)
            confidences.append(proposal.confidences)
            accepted.append(right)
            admitted.append(gamma if right < len(left) else len(left))
    confidences_NK = np.array(confidences)
    confidences_NK[np.arange(gamma) >= np.array(admitted)[:, None]] = np.nan
    features = None
    if probe is not None and probe.seen:  # gamma entries per call of propose
        blocks = [torch.stack(probe.seen[i : i + gamma], dim=1) for i in range(0, len(probe.seen), gamma)]
        features = torch.cat(blocks).double().numpy(force=True)[::-1]
    return Rounds(confidences_NK[::-1], np.array(accepted)[::-1], np.array(admitted)[::-1], features)


def visited(rounds: Rounds) -> Rounds:
    """Of the rounds `everywhere` in one text, those that decoding with whole blocks plays."""
    places, place = list[int](), 0
    while place < len(rounds.accepted_N):
        places.append(place)
        place += int(rounds.accepted_N[place]) + 1
    return rounds.chosen(np.array(places, dtype=np.int64))


def with_estimates(rounds: Rounds, estimator: CertaintyEstimator) -> Rounds:
    """The same rounds with the raw confidences that `estimator` gives."""
    assert rounds.features_NKF is not None
    raw_NK = sigmoid(rounds.features_NKF @ np.array(estimator.weights) + np.array(estimator.biases))
    return dataclasses.replace(rounds, confidences_NK=raw_NK)
