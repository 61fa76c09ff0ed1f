"""Recorded drafts at every position n of a response: c_1 .. c_K, and A_n, how many equal the text that follows.

    position    0    1    2    3                l drafts admitted at position n  ->  min(A_n, l) + 1 tokens,
    text        The  cat  sat  .                                                     never past the end of the text
    draft at 0  The  cat  on        A_0 = 2
    draft at 1       cat  sat  .    A_1 = 3

Greedy and coupled text does not depend on how it is decoded, so one decode that drafts everywhere and verifies nothing
tells what every policy would have committed: replaying a trace is exact, not a model of acceptance. Other sampled text
is decoded plainly, and its drafts are drawn after it from their distribution given the text (`DraftsGivenText`): a
replay then has the distribution of decoding. Position n is the number of response tokens committed; its anchor is the
token before. Shapes: N positions of all responses, K draft positions, C tokens that a row of p_d is about, V vocab.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.decoding.cost import Ints
from outrider.decoding.generate import generate
from outrider.decoding.policies import FixedPolicy
from outrider.decoding.request import RequestState, StopRules
from outrider.drafters.base import DraftCall, Drafter, WrappedDrafter
from outrider.drafters.draft import Draft
from outrider.drafters.ngram import NgramConfig
from outrider.evaluation.loadtest.load import Ask
from outrider.sampling import (
    PositionNoise,
    RandomSource,
    SamplingParams,
    at_least_float32,
    residual,
    warp,
)
from outrider.target.model import Target
from outrider.utils.documents import parse_json
from outrider.utils.files import write_atomically

_ARRAYS = ("confidences_NK", "drafted_N", "accepted_N", "prompts", "prompt_ends", "responses", "ends", "stopped")


@dataclass(frozen=True)
class Response:
    """One recorded response. Its positions are rows `start .. start + len(tokens) - 1` of the traces' arrays.

    `stopped`: it ended by itself, not at the limit of the recording. `params`: what it was sampled with.
    """

    prompt: tuple[int, ...]
    tokens: list[int]
    stopped: bool
    start: int
    params: SamplingParams = field(default_factory=SamplingParams)


class Traces:
    """Recorded responses and the drafts at each of their positions.

    Attributes:
        confidences_NK: float32; as the drafter hands them over (calibrated), 0 behind `drafted_N`; NaN without a head.
        drafted_N: block lengths. accepted_N: A_n <= drafted_N.
        about: what they were recorded with (target, drafter, ...).
        lookup: how prompt lookup searches beside the drafter; None: not at all. Its drafts follow from the text, so
            they are not recorded: of one-hot drafts those are accepted that equal the text, sampled or not.
    """

    def __init__(
        self,
        responses: Sequence[Response],
        confidences_NK: NDArray[np.float32],
        drafted_N: Ints,
        accepted_N: Ints,
        about: dict[str, Any],
    ) -> None:
        self.responses = list(responses)
        self.confidences_NK, self.drafted_N, self.accepted_N, self.about = confidences_NK, drafted_N, accepted_N, about
        self.lookup = None if about.get("copies") is None else NgramConfig(**about["copies"])
        self._by_prompt = {response.prompt: response for response in self.responses}

    @property
    def gamma(self) -> int:
        """Most drafts of a recorded block."""
        return int(self.confidences_NK.shape[1])

    @property
    def slots(self) -> int:
        """Most drafts of a round, prompt lookup included."""
        return self.gamma if self.lookup is None else max(self.gamma, self.lookup.gamma)

    def find(self, prompt: Sequence[int]) -> Response:
        """The response recorded for these prompt tokens.

        Raises:
            ValueError: there is none.
        """
        found = self._by_prompt.get(tuple(prompt))
        if found is None:
            raise ValueError(
                f"no trace of a prompt of {len(prompt)} tokens among {len(self.responses)}: record the prompts you "
                "simulate (same tasks, same target)."
            )
        return found

    def save(self, path: Path) -> None:
        """Write one compressed .npz; a reader finds it complete or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        prompts = [response.prompt for response in self.responses]
        arrays: dict[str, Any] = {
            "confidences_NK": self.confidences_NK,
            "drafted_N": self.drafted_N.astype(np.uint8),
            "accepted_N": self.accepted_N.astype(np.uint8),
            "prompts": np.concatenate([np.asarray(prompt, dtype=np.int32) for prompt in prompts]),
            "prompt_ends": np.cumsum([len(prompt) for prompt in prompts]),
            "responses": np.concatenate([np.asarray(r.tokens, dtype=np.int32) for r in self.responses]),
            "ends": np.cumsum([len(r.tokens) for r in self.responses]),
            "stopped": np.array([r.stopped for r in self.responses]),
            "sampling": np.array(json.dumps([asdict(r.params) for r in self.responses])),
            "about": np.array(json.dumps(self.about)),
        }
        write_atomically(path, lambda file: np.savez_compressed(file, **arrays))

    @staticmethod
    def load(path: Path) -> Traces:
        """Read what `save` wrote.

        Raises:
            ValueError: missing, damaged, or not such a file.
        """
        if not path.is_file():
            raise ValueError(f"no traces at {path}: record them (outrider simulate --record {path}).")
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in _ARRAYS}
                about = parse_json(str(file["about"]))
                params = [SamplingParams(**fields) for fields in parse_json(str(file["sampling"]))]
            if not isinstance(about, dict) or not _consistent(arrays) or len(params) != len(arrays["ends"]):
                raise ValueError("arrays that do not fit one another")
            if about.get("copies") is not None:
                NgramConfig(**about["copies"])
        except (BadZipFile, KeyError, ValueError, TypeError, EOFError) as error:
            raise ValueError(
                f"{path} holds no traces, or damaged ones; record them again (--record {path})."
            ) from error
        prompts = np.split(arrays["prompts"], arrays["prompt_ends"][:-1])
        texts = np.split(arrays["responses"], arrays["ends"][:-1])
        starts = [0, *arrays["ends"][:-1].tolist()]
        responses = [
            Response(tuple(prompt.tolist()), text.tolist(), bool(stopped), start=start, params=sampled)
            for prompt, text, stopped, start, sampled in zip(
                prompts, texts, arrays["stopped"], starts, params, strict=True
            )
        ]
        counts = arrays["drafted_N"].astype(np.int64), arrays["accepted_N"].astype(np.int64)
        return Traces(responses, arrays["confidences_NK"], *counts, about)


def _consistent(arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Whether the arrays of a file are of the shapes that `Traces.save` writes."""
    if [array.ndim for array in arrays.values()] != [2] + [1] * (len(_ARRAYS) - 1):
        return False
    rows = len(arrays["responses"])
    parts = all(
        len(ends) and ends[-1] == len(arrays[what]) and ends[0] >= 0 and (np.diff(ends) >= 0).all()
        for what, ends in (("prompts", arrays["prompt_ends"]), ("responses", arrays["ends"]))
    )
    alike = len(arrays["prompt_ends"]) == len(arrays["ends"]) == len(arrays["stopped"])
    return parts and alike and all(len(arrays[name]) == rows for name in _ARRAYS[:3])


class RecordingDrafter(WrappedDrafter):
    """A drafter whose drafts for its one request are kept in `recorded`; it drafts alone, without prompt lookup."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter.sources.drafter)
        self.recorded: list[Draft] = []

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        found: list[Draft] = []
        for draft in super().propose(calls, min_confidence):
            if not draft.is_chain:
                raise ValueError("drafts that branch cannot be recorded: traces hold one chain per position.")
            found.append(draft)
        self.recorded += found
        return found


# ----------------------------------------------------------------------------
# Drafts x_1, x_2, .. drawn after the text y_1, y_2, .. that speculative sampling committed:
#
#     x_k = y_k                with probability min(1, p_d(y_k) / p_t(y_k)): it was accepted
#     x_k ~ norm (p_d - p_t)_+ otherwise: it was rejected, and y_k drawn from the residual
#     x_k ~ p_d                behind the first rejection, where no text follows the drafts
#
# Verification gives P(x_k = y_k = v) = min(p_d(v), p_t(v)) and y_k ~ p_t, so this is Bayes' rule: text and drafts have
# the same joint distribution whichever comes first (checked by enumeration). Recording the *probability* of acceptance
# would not do for policies that read confidences: c_{k+1} follows the token that was drafted, not the one committed.
# ----------------------------------------------------------------------------


class DraftsGivenText(PositionNoise):
    """What the drafts of a sampled response are drawn with, in the place of coupled noise, when its text is known.

    Args:
        tokens: the text y.
        first: absolute position of its first token.
        target_NV: p_t of each of them, warps included.
    """

    races = False

    def __init__(self, tokens: Sequence[int], first: int, target_NV: Tensor, source: RandomSource) -> None:
        super().__init__(0, target_NV.shape[-1])
        self.tokens, self.first, self.target_NV, self.source = list(tokens), first, target_NV, source
        self.agrees = True

    def start(self) -> None:
        """Begin a new draft."""
        self.agrees = True

    def pick(self, probs: Tensor, position: int, ids: Tensor | None = None) -> int:
        """An index into `probs` [C], which covers the whole vocabulary or the tokens `ids`."""
        place = position - self.first
        if not self.agrees or place >= len(self.tokens):
            return self.source.choose(probs)
        token, target_C = self.tokens[place], self.target_NV[place]
        found = [token]
        if ids is not None:
            target_C, found = target_C[ids], (ids == token).nonzero().flatten().tolist()
        if found and self.source.accept((probs[found[0]] / target_C[found[0]]).item()):
            return int(found[0])
        self.agrees = False
        return self.source.choose(residual(probs, target_C))


@torch.inference_mode()
def drafts_given_text(
    target: Target, drafter: Drafter, ask: Ask, tokens: Sequence[int], rules: StopRules
) -> list[Draft]:
    """A draft at each position of a sampled response, drawn from its distribution given the response.

    Raises:
        ValueError: a draft that branches.
    """
    text = [*ask.prompt, *tokens]
    count, read = len(tokens), len(ask.prompt) - 1
    block = torch.tensor([text[:-1]], device=target.device)
    output = target.forward(block, target.new_cache(len(text)), drafter.aux_layers, logits=count)
    assert output.logits_BTV is not None
    aux_TLD = None if output.aux_BTLD is None else output.aux_BTLD[0]
    state = RequestState(target, ask.prompt, ask.params, rules=rules)
    target_NV = warp(at_least_float32(output.logits_BTV[0]), ask.params)
    given = DraftsGivenText(tokens, read + 1, target_NV, source=state.source)
    state.noise = given
    recorder = RecordingDrafter(drafter)
    state.session = recorder.new_session(state.capacity)
    try:
        recorder.extend([state.session], [text[:read]], None if aux_TLD is None else aux_TLD[:read])
        for place in range(read, read + count):
            if state.remaining >= 2:  # nothing of a draft at the last position could be used
                given.start()
                recorder.propose([state.draft_call()])
            own = slice(place, place + 1)
            recorder.extend([state.session], [text[own]], None if aux_TLD is None else aux_TLD[own])
            state.commit([text[place + 1]])
    finally:
        recorder.end(state.session)
    return recorder.recorded


def record(
    target: Target,
    drafter: Drafter,
    asks: Sequence[Ask],
    rules: StopRules,
    about: dict[str, Any],
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Traces:
    """Record traces: decode prompts plainly, with one draft at every position and none verified.

    Args:
        asks: prompts and how they are sampled; a prompt that comes again is recorded as it came first.

    Raises:
        ValueError: no prompts, or one that does not fit the target; or drafts that branch.
    """
    if not asks:
        raise ValueError("no prompts to record: give task files or shipped sets.")
    responses: list[Response] = []
    blocks: list[tuple[Draft, int]] = []
    distinct: dict[tuple[int, ...], Ask] = {}
    for ask in asks:
        distinct.setdefault(tuple(ask.prompt), ask)
    for number, (prompt, ask) in enumerate(distinct.items()):
        on_progress("traces", number, len(distinct))
        recorder = RecordingDrafter(drafter) if ask.comparable else None
        generation = generate(target, prompt, recorder, params=ask.params, rules=rules, policy=FixedPolicy(0))
        tokens = generation.tokens
        recorded = (
            drafts_given_text(target, drafter, ask, tokens=tokens, rules=rules)
            if recorder is None
            else recorder.recorded
        )
        # The last position of a response that ends by length is not drafted: nothing of a block could be used.
        drafts = [*recorded, Draft.empty()][: len(tokens)]
        assert len(drafts) == len(tokens), "a position without its proposal"
        responses.append(Response(prompt, tokens, generation.finish == "stop", start=len(blocks), params=ask.params))
        blocks += [(proposal, matching(proposal.tokens, tokens[n:])) for n, proposal in enumerate(drafts)]
    on_progress("traces", len(distinct), len(distinct))
    confidences_NK = np.zeros((len(blocks), drafter.sources.drafter.gamma), dtype=np.float32)
    for row_K, (proposal, _) in zip(confidences_NK, blocks, strict=True):
        row_K[: len(proposal.tokens)] = proposal.confidences[: len(proposal.tokens)] or np.nan
    drafted_N = np.array([len(proposal.tokens) for proposal, _ in blocks])
    lookup = None if drafter.sources.lookup is None else asdict(drafter.sources.lookup)
    accepted_N = np.array([count for _, count in blocks])
    return Traces(responses, confidences_NK, drafted_N, accepted_N=accepted_N, about=about | {"copies": lookup})


def matching(draft: Sequence[int], text: Sequence[int]) -> int:
    """How many tokens of a draft equal the text, from the first on."""
    count = 0
    while count < min(len(draft), len(text)) and draft[count] == text[count]:
        count += 1
    return count
