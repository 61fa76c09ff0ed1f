"""Collect decode rounds for calibration: draft blocks with raw confidences and what the target accepted of them.

    temperature > 0   decode; one labelled block per round
    temperature 0     y_1 .. y_T = the target's own text (many requests at once), then a block after *every* y_i:
                      accepted = the longest prefix of x_1 x_2 ... that equals y_{i+1} y_{i+2} ...

At temperature 0 the text does not depend on the drafter, so a block at any position has a known outcome. Decoding with
whole blocks has rounds at some of these positions only: after i comes i + accepted + 1 (`fit.decoded_rounds`).
Shapes: N rounds, K gamma, F = 2 features of a `CertaintyEstimator`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from outrider.data.chat import render
from outrider.data.conversations import Conversation
from outrider.data.sources import TaskSettings, load_prompts, prompts_label
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.request import Output, Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import DraftCall, Drafter
from outrider.drafters.confidence import UNSCALED, ConfidenceScaling, certainty
from outrider.evaluation.calibration.fit import Rounds, TaskRounds
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target.model import Target
from outrider.target.paged import batches
from outrider.utils.documents import parse_json
from outrider.utils.files import write_atomically

_AT_ONCE = 16  # positions drafted together; more only take memory
_TOGETHER = 16  # texts decoded together


class FeatureRecorder:
    """Takes the place of a `CertaintyEstimator`: records its input features and returns logits of 0."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, logits_AVd: Tensor, k: int) -> Tensor:
        self.seen.append(certainty(logits_AVd))
        return logits_AVd.new_zeros(len(logits_AVd))


def collect(
    target: Target,
    drafter: Drafter,
    conversations: Sequence[Conversation],
    settings: TaskSettings,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[Rounds]]:
    """Decode conversations; returns the rounds of each turn, with features where the drafter has no confidence head."""
    assert target.tokenizer is not None
    recorder = FeatureRecorder()
    assert drafter.heads is not None
    if drafter.heads.confidence is None:
        recording = dataclasses.replace(drafter.heads, scaling=ConfidenceScaling(estimator=recorder))
        drafter = drafter.with_heads(recording)
    rounds: list[list[Rounds]] = [[] for _ in conversations]
    history: list[list[str]] = [[] for _ in conversations]
    params, rules = settings.params, StopRules(settings.max_new_tokens)
    greedy = params.temperature == 0.0
    for turn in range(max(len(conversation.turns) for conversation in conversations)):
        going = [i for i, conversation in enumerate(conversations) if turn < len(conversation.turns)]
        prompts = []
        for i in going:
            turns, tools = conversations[i].turns[: turn + 1], conversations[i].tools
            prompts.append(render(target.tokenizer, turns, history[i], tools=tools, thinking=settings.thinking))
        texts = target_texts(target, prompts, settings) if greedy else [[] for _ in going]
        for i, prompt, text in zip(going, prompts, texts, strict=True):
            if greedy:
                rounds[i].append(rounds_of_text(target, drafter, prompt, text=text, params=params, recorder=recorder))
                history[i].append(str(target.tokenizer.decode(text, skip_special_tokens=True)))
            else:
                generation = generate(target, prompt, drafter, params=params, rules=rules)
                rounds[i].append(rounds_of_decoding(generation.rounds, drafter.gamma, recorder))
                history[i].append(generation.text)
            recorder.seen.clear()
            done = sum(len(mine) == len(c.turns) for mine, c in zip(rounds, conversations, strict=True))
            on_progress(done, len(conversations))
    return rounds


def collect_tasks(
    target: Target,
    drafter: Drafter,
    tasks: Sequence[str],
    settings: TaskSettings,
    on_progress: Callable[[str, int, int], None] = lambda task, done, total: None,
) -> dict[str, list[list[Rounds]]]:
    """Collect the rounds of each task with `collect`, by what results call it (`prompts_label`).

    Raises:
        ValueError: a task file is missing or malformed, or two tasks are called the same.
    """
    assert drafter.heads is not None and drafter.heads.scaling == UNSCALED, "calibration starts from raw confidences"
    # All files are read first, so that a mistyped name fails before anything is decoded.
    prompts = {prompts_label(task): load_prompts(task, settings.max_samples) for task in tasks}
    if len(prompts) < len(tasks):
        raise ValueError(f"{', '.join(tasks)}: two of them are called the same in results; rename a file.")
    found: dict[str, list[list[Rounds]]] = {}
    for task, conversations in prompts.items():
        report = partial(on_progress, task)
        report(0, len(conversations))
        found[task] = collect(target, drafter, conversations, settings=settings, on_progress=report)
    return found


def target_texts(target: Target, prompts: Sequence[list[int]], settings: TaskSettings) -> list[list[int]]:
    """The target's own responses, decoded in one batch where its family can be batched."""
    rules, longest = StopRules(settings.max_new_tokens), max(map(len, prompts)) + settings.max_new_tokens
    if not batches(target.config):
        return [generate(target, prompt, params=settings.params, rules=rules).tokens for prompt in prompts]
    together = EngineConfig(_TOGETHER, num_blocks=_TOGETHER * -(-longest // EngineConfig.block_size))
    engine = Engine(target, config=together)
    requests = [Request(str(i), prompt, settings.params, rules=rules) for i, prompt in enumerate(prompts)]
    texts: list[list[int]] = [[] for _ in prompts]
    for output in chain.from_iterable(engine.run(requests)):
        if output.error is not None:
            raise output.error
        texts[int(output.id)] += output.tokens
    return texts


def rounds_of_decoding(outputs: Sequence[Output], gamma: int, recorder: FeatureRecorder | None = None) -> Rounds:
    """The rounds of a generation in which drafts were verified; unverified positions hold NaN."""
    judged = [r for r in outputs if r.reach]
    confidences_NK = np.full((len(judged), gamma), np.nan)
    for row_K, r in zip(confidences_NK, judged, strict=True):
        row_K[: r.reach] = r.confidences[: r.reach]
    features = None
    if recorder is not None and recorder.seen:
        features = np.full((len(judged), gamma, 2), np.nan)
        read = iter(recorder.seen)  # one row per drawn position, round after round
        drafts = [[next(read)[0].numpy(force=True) for _ in range(r.proposed)] for r in outputs]
        for row_KF, found in zip(features, [d for d, r in zip(drafts, outputs, strict=True) if r.reach], strict=True):
            row_KF[: len(found)] = found
    counts = np.array([(r.accepted, r.reach) for r in judged], dtype=np.int64).reshape(-1, 2)
    return Rounds(confidences_NK, counts[:, 0], counts[:, 1], features_NKF=features)


@torch.inference_mode()
def rounds_of_text(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    text: Sequence[int],
    params: SamplingParams,
    recorder: FeatureRecorder | None = None,
) -> Rounds:
    """Rounds of blocks drafted after the prompt and after each token of `text` but the last.

    Args:
        text: what the target generated at temperature 0. A block that agrees with all that is left of it counts as
            verified that far.
    """
    tokens, gamma = [*prompt, *text], drafter.gamma
    session, read = drafter.new_session(len(tokens)), tokens[:-2]  # all committed tokens but the last anchor
    if read:
        (aux_TLD,), _ = target.prefill_packed([read], drafter.aux_layers)
        drafter.extend([session], [read], aux_TLD)
    source = SeededSource(params.request_seed())
    ends = range(len(tokens) - 1, len(prompt) - 1, -1)
    confidences, accepted, admitted = list[list[float]](), list[int](), list[int]()
    # From the last position to the first, as `session_at` asks.
    for start in range(0, len(ends), _AT_ONCE):
        calls = []
        for end in ends[start : start + _AT_ONCE]:
            at = drafter.session_at(session, end - 1)
            seen = SeenTokens(target.vocab_size, params, prompt, output=tokens[len(prompt) : end], device=target.device)
            calls.append(DraftCall(at, tokens[end - 1], params, seen=seen, source=source))
        for end, proposal in zip(ends[start : start + _AT_ONCE], drafter.propose(calls), strict=True):
            left = tokens[end:][:gamma]
            agreed = [x == y for x, y in zip(proposal.tokens, left, strict=False)]
            right = agreed.index(False) if False in agreed else len(agreed)
            confidences.append(proposal.confidences)
            accepted.append(right)
            admitted.append(gamma if right < len(left) else len(left))
    confidences_NK = np.array(confidences)
    confidences_NK[np.arange(gamma) >= np.array(admitted)[:, None]] = np.nan
    features = None
    if recorder is not None and recorder.seen:  # gamma entries per call of propose
        blocks = [torch.stack(recorder.seen[i : i + gamma], dim=1) for i in range(0, len(recorder.seen), gamma)]
        features = torch.cat(blocks).double().numpy(force=True)[::-1]
    return Rounds(confidences_NK[::-1], np.array(accepted)[::-1], np.array(admitted)[::-1], features_NKF=features)


# ----------------------------------------------------------------------------
# FILE.npz keeps collected rounds, so that fits and sweeps can be repeated without decoding.
#
#     about            JSON: what they were collected with; load_rounds refuses the rounds of another drafter
#     task, conversation, turn   [N]     accepted, admitted   [N]     confidences   [N, K]     features   [N, K, 2]
# ----------------------------------------------------------------------------


def save_rounds(path: Path, tasks: TaskRounds, about: Mapping[str, Any]) -> None:
    """Write the rounds of all `tasks`; `about` must be JSON data."""
    places = [
        (task, conversation, turn, rounds)
        for task, conversations in enumerate(tasks.values())
        for conversation, turns in enumerate(conversations)
        for turn, rounds in enumerate(turns)
    ]
    joined = Rounds.joined([rounds for *_, rounds in places])
    counts = [len(rounds.accepted_N) for *_, rounds in places]
    arrays: dict[str, Any] = {
        name: np.repeat([place[column] for place in places], counts)
        for column, name in enumerate(("task", "conversation", "turn"))
    }
    arrays |= {"accepted": joined.accepted_N, "admitted": joined.admitted_N, "confidences": joined.confidences_NK}
    if joined.features_NKF is not None:
        arrays["features"] = joined.features_NKF
    path.parent.mkdir(parents=True, exist_ok=True)
    described = json.dumps({**about, "names": list(tasks)})
    write_atomically(path, lambda file: np.savez_compressed(file, about=described, **arrays))


def load_rounds(path: Path, about: Mapping[str, Any]) -> dict[str, list[list[Rounds]]]:
    """Read the rounds that `save_rounds` wrote, by task.

    Raises:
        ValueError: not such a file, or collected with something else than `about`.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no file.")
    try:
        with np.load(path, allow_pickle=False) as file:
            found = parse_json(str(file["about"]))
            arrays = {name: file[name] for name in file.files if name != "about"}
        everything = Rounds(
            arrays["confidences"], arrays["accepted"], arrays["admitted"], features_NKF=arrays.get("features")
        )
        keys = np.stack([arrays[name] for name in ("task", "conversation", "turn")], axis=1)
        tasks: list[str] = found["names"]
        whole = np.issubdtype(keys.dtype, np.integer) and len(keys) == len(everything.accepted_N)
        if not whole or keys.min(initial=0) < 0:
            raise ValueError("rounds without their places")
        if keys[:, 0].max(initial=-1) >= len(tasks):
            raise ValueError("a round of a task that is not named")
    except (OSError, KeyError, ValueError, TypeError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path}: not a file of rounds ({error}); remove it to collect again.") from error
    for name, wanted in json.loads(json.dumps(dict(about))).items():
        if found.get(name) != wanted:
            raise ValueError(
                f"{path} was collected with {name} {found.get(name)!r}, not {wanted!r}: remove it to collect again, "
                "or name another file (--rounds)."
            )
    result: dict[str, list[list[Rounds]]] = {task: [] for task in tasks}
    places, starts = np.unique(keys, axis=0, return_index=True)  # sorted as they were written
    for (task, conversation, _), part in zip(places, np.split(np.arange(len(keys)), starts[1:]), strict=True):
        conversations = result[tasks[task]]
        conversations += [[] for _ in range(conversation + 1 - len(conversations))]
        conversations[conversation].append(everything.chosen(part))
    return result
