"""Sampling parameters, warping, random sources and coupled noise.

    logits -> constraint -> penalties -> temperature -> top-k -> top-p -> min-p -> the distribution to draw from

The defaults are greedy decoding. Speculative decoding is lossless with respect to the *warped* target distribution
(Leviathan et al., arXiv 2211.17192, section 2.2), so target and drafter share one `SamplingParams`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.utils.measure import on_device

# Below it two logits of float32 near 10 that differ in their last bit are as good as infinitely far apart.
_LEAST_TEMPERATURE = 1e-6
_MOST_TEMPERATURE = 1e30  # every finite logit is 0 from here on, and it is still a float32
_LEAST_PENALTY, _MOST_PENALTY = 0.01, 100.0
_MOST_SUBTRACTED = 2.0  # by the presence penalty, and by the frequency penalty for each occurrence


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are drawn from the target's logits. A temperature below 1e-6 is greedy decoding: 0.

    Raises:
        ValueError: a parameter is outside its range.
    """

    temperature: float = 0.0  # 0: argmax
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off; relative to the most likely token
    repetition_penalty: float = 1.0  # 1: off; over prompt and output, as in Hugging Face
    seed: int | None = None  # None: every request draws one of its own and reports it
    coupled: bool = False  # tokens depend on the seed and the target alone, not on drafts (`PositionNoise`)
    presence_penalty: float = 0.0  # subtracted from the logits of tokens of the output, as in OpenAI's API
    frequency_penalty: float = 0.0  # subtracted once for each of their occurrences

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} must be finite and >= 0; use 0 for greedy decoding")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed} must be from 0 to 2^64 - 1")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be >= 0; use 0 to keep every token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; use 1 to keep every token")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be in [0, 1]; use 0 to keep every token")
        if not _LEAST_PENALTY <= self.repetition_penalty <= _MOST_PENALTY:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty} must be from {_LEAST_PENALTY:g} to {_MOST_PENALTY:g}; "
                "use 1 for none"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -_MOST_SUBTRACTED <= getattr(self, name) <= _MOST_SUBTRACTED:
                raise ValueError(f"{name}={getattr(self, name)} must be from -2 to 2; use 0 for none")
        if self.temperature < _LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def fixed_text(self) -> bool:
        """Whether one text alone can come out, plain decoding's, whatever is drafted."""
        return self.temperature == 0.0 or self.coupled

    @property
    def penalised(self) -> bool:
        """Whether the tokens so far change the next one's distribution."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def request_seed(self) -> int:
        """The seed of one request: the given one, else 0 at temperature 0, where nothing is drawn, else 32 random
        bits, as many as PyTorch's CPU generator uses.
        """
        if self.seed is not None:
            return self.seed
        return secrets.randbits(32) if self.temperature > 0 else 0


# ----------------------------------------------------------------------------
# logits --penalties--> --/T--> --top-k--> --softmax--> --top-p--> --min-p--> --normalise--> probs
#
# Semantics are those of Hugging Face's logits processors, in their order; of n_v occurrences in the output, the
# presence and frequency penalties subtract presence [n_v > 0] + frequency n_v (OpenAI's API reference). What is kept
# never depends on how ties are broken: top-k and top-p keep every token as likely as the last one kept. At temperature
# 0 the answer is one-hot at `torch.argmax`, the lowest index on ties. Shapes: K rows (any leading dimensions), V vocab.
# ----------------------------------------------------------------------------


# A nucleus rarely holds more tokens than this; looking for it here first avoids sorting the vocabulary.
_NUCLEUS_GUESS = 512
_ROWS_IN_CACHE = 4


def warp(logits_KV: Tensor, params: SamplingParams, seen_KV: Tensor | None = None) -> Tensor:
    """Warp logits into the distribution(s) that tokens are drawn from; float32 or float64, as the logits.

    Args:
        seen_KV: the tokens so far, which penalties need (`SeenTokens.with_tokens`).
    """
    assert logits_KV.dtype in (torch.float32, torch.float64), f"warp needs float32 or float64, not {logits_KV.dtype}"
    if params.penalised:
        assert seen_KV is not None, "penalties need the tokens so far"
        logits_KV = _penalised(logits_KV, params, seen_KV)
    if params.temperature == 0.0:
        return torch.zeros_like(logits_KV).scatter_(-1, logits_KV.argmax(-1, keepdim=True), 1.0)
    # The maximum goes first: at a tiny temperature logits / T overflows, (logits - max) / T does not.
    logits_KV = (logits_KV - logits_KV.amax(-1, keepdim=True)) / min(params.temperature, _MOST_TEMPERATURE)
    if 0 < params.top_k < logits_KV.shape[-1]:
        last_kept_K1 = logits_KV.topk(params.top_k, dim=-1).values[..., -1:]
        logits_KV = logits_KV.masked_fill(logits_KV < last_kept_K1, -torch.inf)
    probs_KV = logits_KV.softmax(-1)
    if params.top_p == 1.0 and params.min_p == 0.0:
        return probs_KV
    if params.top_p < 1.0:
        probs_KV = probs_KV.masked_fill(probs_KV < _nucleus_floor(probs_KV, params.top_p), 0.0)
    if params.min_p > 0.0:
        probs_KV = probs_KV.masked_fill(probs_KV < params.min_p * probs_KV.amax(-1, keepdim=True), 0.0)
    return probs_KV / probs_KV.sum(-1, keepdim=True)


def _penalised(logits_KV: Tensor, params: SamplingParams, seen_KV: Tensor) -> Tensor:
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        penalised_KV = torch.where(logits_KV < 0, logits_KV * penalty, logits_KV / penalty)
        logits_KV = torch.where(seen_KV > 0, penalised_KV, logits_KV)
    written_KV = seen_KV // IN_OUTPUT
    return logits_KV - params.frequency_penalty * written_KV - params.presence_penalty * (written_KV > 0)


def rows_at_once(logits_NV: Tensor) -> int:
    """How many rows of logits to reduce at a time: a few on a CPU, so that what is computed of them stays in its cache
    (a log-sum-exp is then several times as fast), elsewhere all.
    """
    return _ROWS_IN_CACHE if logits_NV.device.type == "cpu" else max(1, len(logits_NV))


def likeliest(logits_NV: Tensor) -> list[int]:
    """The most likely token of each row, the lowest on ties. On a CPU NumPy looks for it: `torch.argmax` takes several
    times as long for the few rows of a step.
    """
    if logits_NV.device.type == "cpu" and logits_NV.dtype in (torch.float32, torch.float64):
        found: list[int] = logits_NV.numpy().argmax(-1).tolist()
        return found
    return [int(token) for token in logits_NV.argmax(-1).tolist()]


def at_least_float32(logits: Tensor) -> Tensor:
    """Logits in a type that `warp` takes: float64 stays, everything else becomes float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _nucleus_floor(probs_KV: Tensor, top_p: float) -> Tensor:
    """The smallest probability top-p keeps: a token stays while the mass of the likelier ones is < top_p."""
    vocab = probs_KV.shape[-1]
    # On a GPU the whole vocabulary is sorted at once: the host would have to wait to learn that the guess was enough.
    guess = vocab if probs_KV.is_cuda else min(_NUCLEUS_GUESS, vocab)
    for size in (guess, vocab):
        sorted_KS = probs_KV.topk(size, dim=-1).values
        before_KS = sorted_KS.cumsum(-1) - sorted_KS
        if size == vocab or bool((before_KS[..., -1] >= top_p).all()):
            break
    # The likeliest stays in any case: a tiny top_p is 0 in float32.
    kept_K1 = (before_KS < top_p).sum(-1, keepdim=True).clamp(min=1)
    return sorted_KS.gather(-1, kept_K1 - 1)


IN_OUTPUT = 2  # what an occurrence in the output adds to a token's entry of `SeenTokens`


class SeenTokens:
    """The tokens of a request so far, as penalties read them; empty where `params` has none.

    They are one int32 tensor [V]: for each token 2 x its occurrences in the output, + 1 if the prompt has it. Above 0
    it has been seen; half of it, rounded down, is how often it was written.
    """

    def __init__(
        self,
        vocab_size: int,
        params: SamplingParams | None = None,
        prompt: Iterable[int] = (),
        output: Iterable[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        self._seen_V: Tensor | None = None
        if params is not None and params.penalised:
            self._seen_V = torch.zeros(vocab_size, dtype=torch.int32, device=device)
            self._seen_V[torch.tensor(list(prompt), dtype=torch.long, device=device)] = 1
            for token in output:
                self.add(token)

    def add(self, token: int) -> None:
        """One more token of the output."""
        if self._seen_V is not None:
            self._seen_V[token] += IN_OUTPUT

    def with_tokens(self, tokens: Sequence[int] = ()) -> Tensor | None:
        """A new tensor of the tokens so far and `tokens` of the output, or None without penalties."""
        if self._seen_V is None:
            return None
        seen_V = self._seen_V.clone()
        for token in tokens:
            seen_V[token] += IN_OUTPUT
        return seen_V


# ----------------------------------------------------------------------------
# Constrained responses: a token that may not come next has the logit -inf, before everything else of the warp.
# ----------------------------------------------------------------------------


class Constraint(Protocol):
    """What the tokens of one response must follow, as of its committed tokens (decoding/structured.py)."""

    def allowed(self, drafts: Sequence[int] = ()) -> Tensor | None:
        """Tokens that may come behind `drafts`, bool [V], at least one; None: any, because nothing that comes there is
        kept. That is so behind a stop token, and behind a draft that was not allowed itself.
        """
        ...

    def commit(self, token: int) -> None:
        """One more token of the response."""
        ...


def constrained(logits_C: Tensor, allowed_C: Tensor | None) -> Tensor:
    """Logits of any tokens, -inf where they are not allowed; None: all are."""
    return logits_C if allowed_C is None else logits_C.masked_fill(~allowed_C, -torch.inf)


# ----------------------------------------------------------------------------
# p_res = (p_t - p_d)_+ / sum (p_t - p_d)_+: what the target wants and the drafter under-served.
#
# min(p_t, p_d) + P(reject) * p_res = p_t, which is why rejecting a draft token costs nothing in distribution
# (Leviathan et al., arXiv 2211.17192, appendix A.1). Shapes: V vocab.
# ----------------------------------------------------------------------------


def residual(target_V: Tensor, draft_V: Tensor) -> Tensor:
    """The residual distribution (p_t - p_d)_+ / sum, from which the token that replaces a rejected draft is drawn."""
    excess_V = (target_V - draft_V).clamp_(min=0)
    mass = excess_V.sum()
    # No excess means p_t = p_d, where nothing is ever rejected but by rounding: then p_t itself is the right answer.
    return torch.where(mass > 0, excess_V / mass, target_V)


# ----------------------------------------------------------------------------
# u ~ U[0, 1):   accept(p) = [u < p]     choose(p_V) = min { v : u < p_0 + ... + p_v }
#
# All randomness of decoding passes through these two questions. A `SeededSource` answers them with a generator; the
# proof tool answers them in every possible way (tests/proof/enumeration.py). Shapes: V vocab.
# ----------------------------------------------------------------------------


class RandomSource(Protocol):
    """What the random decisions of decoding are asked of."""

    def accept(self, probability: float) -> bool:
        """True with the given probability; always from 1 on, never at 0."""
        ...

    def choose(self, probs_V: Tensor) -> int:
        """An index with its probability; never one of probability 0."""
        ...

    def uniform(self) -> float:
        """A number from [0, 1), for a choice that is made on a GPU (`choose_rows`)."""
        ...


class SeededSource:
    """Draws from a generator of its own: a request's tokens do not depend on who else is in the batch."""

    def __init__(self, seed: int) -> None:
        # PyTorch's CPU generator reads 32 bits of a seed: a longer one is hashed to that many (multiplicative hashing).
        short = seed if seed < 2**32 else seed * 0x9E3779B97F4A7C15 % 2**64 >> 32
        self._generator = torch.Generator().manual_seed(short)

    def accept(self, probability: float) -> bool:
        if probability >= 1.0:
            return True
        if probability <= 0.0:
            return False
        return self.uniform() < probability

    def choose(self, probs_V: Tensor) -> int:
        top, index = probs_V.max(dim=-1)
        if top.item() >= 1.0:  # one-hot (to rounding): greedy decoding draws nothing and sums nothing
            return int(index)
        cumulative_V = probs_V.cumsum(-1, dtype=torch.float64)
        total = cumulative_V[-1].item()
        if not total > 0.0:  # also where it is no number
            raise not_finite(total)
        # right=True skips tokens of probability 0: they share their predecessor's cumulative sum.
        return int(torch.searchsorted(cumulative_V, self.uniform() * total, right=True))

    def uniform(self) -> float:
        return torch.rand((), generator=self._generator, dtype=torch.float64).item()


def not_finite(total: float) -> ValueError:
    """The error of probabilities that cannot be drawn from, as they sum to `total`."""
    return ValueError(
        f"the probabilities to draw from sum to {total}: the model's logits are not finite. Load it in float32, or "
        "check its weights."
    )


def choose_rows(probs_NV: Tensor, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the index that `choose` gives for this uniform number, and the row's sum, [N] each; nothing waits
    for a GPU. Rows whose sum is not above 0 give an index that means nothing (`not_finite`).

    One number is taken per row, also where a row is one-hot and `choose` takes none.
    """
    cumulative_NV = probs_NV.cumsum(-1, dtype=torch.float64)
    total_N = cumulative_NV[:, -1]
    index_N1 = torch.searchsorted(cumulative_NV, (uniforms_N * total_N)[:, None], side="right")
    return index_N1[:, 0].clamp_(max=probs_NV.shape[1] - 1), total_N


def choose_together(probs: Sequence[Tensor], sources: Sequence[RandomSource]) -> list[int | Exception]:
    """The index that each source chooses from its distribution [V], or what is wrong with it; a GPU is read once."""
    if not any(probs_V.is_cuda for probs_V in probs):
        return [_chosen(probs_V, source) for probs_V, source in zip(probs, sources, strict=True)]
    uniforms_N = on_device([source.uniform() for source in sources], probs[0].device, torch.float64)
    indices, totals = torch.stack([x_N.double() for x_N in choose_rows(torch.stack(list(probs)), uniforms_N)]).tolist()
    return [int(i) if total > 0 else not_finite(total) for i, total in zip(indices, totals, strict=True)]


def _chosen(probs_V: Tensor, source: RandomSource) -> int | Exception:
    try:
        return source.choose(probs_V)
    except Exception as error:
        return error


# ----------------------------------------------------------------------------
# pick(p, n) = argmin_v E_{n,v} / p_v,   E_{n,v} ~ Exp(1) a function of (seed, position n, token v) alone
#
# An exponential race: `pick` is distributed as p. Because the noise belongs to the position and not to the order of
# questions, the token at position n is a function of the target's row and the seed, whatever was drafted, admitted or
# batched with it: the same request gives the same tokens with any drafter, policy and company, or without any. A
# drafter that races with the same noise agrees with the target at least (1 - d) / (1 + d) of the time at total
# variation d; rejection sampling reaches 1 - d, so this costs some acceptance.
#
# Sources: Daliri, Musco and Suresh, arXiv 2408.07978 (drafter-invariant speculative decoding); Philox: Salmon et al.,
# SC 2011. Shapes: V vocab.
# ----------------------------------------------------------------------------


_KEPT = 32  # positions whose noise is remembered: drafter and target ask for the same ones


class PositionNoise:
    """Coupled noise of one request: a function of seed and position."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.seed, self.vocab_size = seed, vocab_size
        self._rows: dict[int, Tensor] = {}

    def row(self, position: int) -> Tensor:
        """E_n [V] of an absolute position, float32 on the CPU."""
        if position not in self._rows:
            while len(self._rows) >= _KEPT:
                del self._rows[next(iter(self._rows))]
            # Philox has a key of 128 bits, a half for each, so no two pairs share a row; PyTorch's generator uses 32.
            generator = np.random.Generator(np.random.Philox(key=self.seed + (position << 64)))
            # Drawn in float64: in float32 one number in 2^23 is 0, and 0 / 0 would win the race.
            row = torch.from_numpy(generator.standard_exponential(self.vocab_size)).float()
            self._rows[position] = row.clamp_(min=torch.finfo(torch.float32).tiny)
        return self._rows[position]

    def pick(self, probs: Tensor, position: int, ids: Tensor | None = None) -> int:
        """An index into `probs`, which covers the whole vocabulary or, in its order, the tokens `ids`."""
        return int(self.pick_tensor(probs, position, ids))

    def pick_tensor(self, probs: Tensor, position: int, ids: Tensor | None = None) -> Tensor:
        """`pick` as a tensor [] on the device of `probs`; the host does not wait for it."""
        return self._race(probs, position, ids).argmax()

    def ranking(self, probs: Tensor, position: int, count: int, ids: Tensor | None = None) -> list[int]:
        """The first `count` indices in the order of the race, `pick` first; those of probability 0 are left out."""
        race = self._race(probs, position, ids)
        found: list[int] = race.topk(min(count, int((probs > 0).sum()))).indices.tolist()
        return found

    def _race(self, probs: Tensor, position: int, ids: Tensor | None) -> Tensor:
        noise = on_device(self.row(position), probs.device)
        return probs / (noise if ids is None else noise[ids])


# ----------------------------------------------------------------------------
# What a request draws with.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Randomness:
    """How requests get their random draws: `source(seed)`, and `noise(seed, vocab_size)` where they are coupled.

    Decoding takes it as an argument, because the proof runs the engine with its own (tests/proof/enumeration.py).
    """

    source: Callable[[int], RandomSource] = SeededSource
    noise: Callable[[int, int], PositionNoise] = PositionNoise
