"""Sampling parameters, warping, random sources and coupled noise.

    logits -> constraint -> penalties -> temperature -> top-k -> top-p -> min-p -> the distribution to draw from

The defaults are greedy decoding. Speculative decoding is lossless with respect to the *warped* target distribution
(Leviathan et al., arXiv 2211.17192, section 2.2), so target and drafter share one `SamplingParams`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.utils.measure import on_device

# Below this temperature two float32 logits near 10 that differ in their last bit give probabilities 1 and 0.
_LEAST_TEMPERATURE = 1e-6
_MOST_TEMPERATURE = 1e30  # fits in float32; from here on logits / T is 0


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request. A temperature below 1e-6 becomes 0, greedy decoding.

    Raises:
        ValueError: a parameter is outside its range.
    """

    temperature: float = 0.0  # 0: argmax
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off; relative to the most likely token
    repetition_penalty: float = 1.0  # 1: off; applies to tokens of prompt and output, as in Hugging Face
    seed: int | None = None  # None: every request draws a seed and reports it
    coupled: bool = False  # tokens depend on the seed and the target alone, not on drafts (`PositionNoise`)
    presence_penalty: float = 0.0  # subtracted from the logit of every token in the output, as in OpenAI's API
    frequency_penalty: float = 0.0  # subtracted once for each occurrence in the output

    def __post_init__(self) -> None:
        for name, valid, allowed in (
            ("temperature", 0 <= self.temperature < math.inf, "finite and >= 0; use 0 for greedy decoding"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "from 0 to 2^64 - 1"),
            ("top_k", self.top_k >= 0, ">= 0; use 0 to keep every token"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]; use 1 to keep every token"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]; use 0 to keep every token"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "from 0.01 to 100; use 1 for none"),
            ("presence_penalty", abs(self.presence_penalty) <= 2, "from -2 to 2; use 0 for none"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 2, "from -2 to 2; use 0 for none"),
        ):
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)} must be {allowed}")
        if self.temperature < _LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def fixed_text(self) -> bool:
        """Whether the seed and the target alone decide the text, whatever is drafted."""
        return self.temperature == 0.0 or self.coupled

    @property
    def reproducible(self) -> bool:
        """Whether a seed was given whose tokens depend on what is drafted: then no clock may decide what is."""
        return self.seed is not None and not self.fixed_text

    @property
    def penalised(self) -> bool:
        """Whether a penalty is set, so that the tokens so far change the next distribution."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def request_seed(self) -> int:
        """Return the given seed; else 0 at temperature 0, which draws nothing; else 32 random bits, as many as
        PyTorch's CPU generator uses.
        """
        if self.seed is not None:
            return self.seed
        return secrets.randbits(32) if self.temperature > 0 else 0


# ----------------------------------------------------------------------------
# logits --penalties--> --/T--> --top-k--> --softmax--> --top-p--> --min-p--> --normalise--> probs
#
# Semantics and order are those of Hugging Face's logits processors. A token with n_v occurrences in the output loses
# presence [n_v > 0] + frequency n_v (OpenAI's API reference). The result does not depend on how ties are broken: top-k
# and top-p keep every token as likely as the last one kept. At temperature 0 the distribution is one-hot at
# `torch.argmax`, the lowest index on ties. Shapes: K rows (any leading dimensions), V vocab.
# ----------------------------------------------------------------------------


# A nucleus rarely holds more tokens than this; trying these first avoids sorting the vocabulary.
_NUCLEUS_GUESS = 512
_ROWS_IN_CACHE = 4


def warp(logits_KV: Tensor, params: SamplingParams, seen_KV: Tensor | None = None) -> Tensor:
    """Warp logits into the distributions that tokens are drawn from, in the type of the logits (float32 or float64).

    Args:
        seen_KV: counts of the tokens so far (`SeenTokens.with_tokens`); required with penalties.
    """
    assert logits_KV.dtype in (torch.float32, torch.float64), f"warp needs float32 or float64, not {logits_KV.dtype}"
    if params.penalised:
        assert seen_KV is not None, "penalties need the tokens so far"
        logits_KV = _penalised(logits_KV, params, seen_KV)
    if params.temperature == 0.0:
        return torch.zeros_like(logits_KV).scatter_(-1, logits_KV.argmax(-1, keepdim=True), 1.0)
    # Subtract the maximum first: at a tiny temperature logits / T overflows, (logits - max) / T does not.
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
    counts_KV = seen_KV // IN_OUTPUT
    return logits_KV - params.frequency_penalty * counts_KV - params.presence_penalty * (counts_KV > 0)


def alike(params: Sequence[SamplingParams]) -> dict[SamplingParams, list[int]]:
    """Group requests that are warped alike: their places, by parameters without a seed."""
    groups: dict[SamplingParams, list[int]] = {}
    for place, own in enumerate(params):
        groups.setdefault(replace(own, seed=None), []).append(place)
    return groups


def rows_at_once(logits_NV: Tensor) -> int:
    """Return how many rows of logits to reduce at a time: all, but a few on a CPU, so that intermediate results stay in
    its cache (a log-sum-exp is then several times as fast).
    """
    return _ROWS_IN_CACHE if logits_NV.device.type == "cpu" else max(1, len(logits_NV))


def likeliest(logits_NV: Tensor) -> list[int]:
    """Return the most likely token of each row, the lowest id on ties. CPU rows use NumPy: for the few rows of a step
    `torch.argmax` takes several times as long.
    """
    if logits_NV.device.type == "cpu" and logits_NV.dtype in (torch.float32, torch.float64):
        tokens: list[int] = logits_NV.numpy().argmax(-1).tolist()
        return tokens
    return [int(token) for token in logits_NV.argmax(-1).tolist()]


def at_least_float32(logits: Tensor) -> Tensor:
    """Convert logits to a type that `warp` takes: float64 stays, everything else becomes float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _nucleus_floor(probs_KV: Tensor, top_p: float) -> Tensor:
    """Return the smallest probability that top-p keeps: a token stays if the mass of all likelier tokens is < top_p."""
    vocab = probs_KV.shape[-1]
    # A GPU sorts the whole vocabulary at once: checking whether the guess was enough would make the host wait.
    guess = vocab if probs_KV.is_cuda else min(_NUCLEUS_GUESS, vocab)
    for size in (guess, vocab):
        sorted_KS = probs_KV.topk(size, dim=-1).values
        before_KS = sorted_KS.cumsum(-1) - sorted_KS
        if size == vocab or bool((before_KS[..., -1] >= top_p).all()):
            break
    # Always keep the most likely token: a tiny top_p is 0 in float32.
    kept_K1 = (before_KS < top_p).sum(-1, keepdim=True).clamp(min=1)
    return sorted_KS.gather(-1, kept_K1 - 1)


IN_OUTPUT = 2  # added to a token's entry of `SeenTokens` for each occurrence in the output


class SeenTokens:
    """Token counts of a request so far, for penalties; None if `params` has no penalty.

    One int32 tensor [V] holds 2 x the occurrences in the output, + 1 if the prompt has the token. An entry above 0
    means that the token has been seen; entry // 2 is its count in the output.
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
        """Count one more token of the output."""
        if self._seen_V is not None:
            self._seen_V[token].add_(IN_OUTPUT)

    def with_tokens(self, tokens: Sequence[int] = ()) -> Tensor | None:
        """Return a new tensor that also counts `tokens` as output; None without penalties."""
        if self._seen_V is None:
            return None
        seen_V = self._seen_V.clone()
        for token in tokens:
            seen_V[token] += IN_OUTPUT
        return seen_V

    @staticmethod
    def together(seen: Sequence[SeenTokens], tokens: Sequence[Sequence[int]]) -> Tensor | None:
        """`with_tokens` of N requests, [N, V]; on a GPU many take as many launches as one. None without penalties."""
        counts = [one._seen_V for one in seen if one._seen_V is not None]
        if len(counts) < len(seen):
            return None
        seen_NV = torch.stack(counts)
        V = seen_NV.shape[1]
        if places := [n * V + token for n, own in enumerate(tokens) for token in own]:
            places_P = on_device(places, seen_NV.device)
            seen_NV.view(-1).index_add_(0, places_P, seen_NV.new_full((len(places),), IN_OUTPUT))
        return seen_NV


# ----------------------------------------------------------------------------
# Constrained responses: a forbidden token has the logit -inf before anything else is warped.
# ----------------------------------------------------------------------------


class Constraint(Protocol):
    """A constraint on the tokens of one response; its state follows the committed tokens (decoding/structured.py)."""

    def allowed(self, drafts: Sequence[int] = ()) -> Tensor | None:
        """Return the mask of tokens allowed after `drafts`, bool [V], at least one True.

        None allows every token: after a stop token or a forbidden draft, later tokens are dropped anyway.
        """
        ...

    def commit(self, token: int) -> None:
        """Advance by one token of the response."""
        ...


def constrained(logits_C: Tensor, allowed_C: Tensor | None) -> Tensor:
    """Set the logits of forbidden tokens to -inf; None allows every token."""
    return logits_C if allowed_C is None else logits_C.masked_fill(~allowed_C, -torch.inf)


# ----------------------------------------------------------------------------
# p_res = (p_t - p_d)_+ / sum (p_t - p_d)_+
#
# min(p_t, p_d) + P(reject) * p_res = p_t, so accepting or replacing a draft token yields exactly p_t
# (Leviathan et al., arXiv 2211.17192, appendix A.1). Shapes: V vocab.
# ----------------------------------------------------------------------------


def residual(target_V: Tensor, draft_V: Tensor) -> Tensor:
    """Return (p_t - p_d)_+ / sum, the residual distribution that replaces a rejected draft; of [A, V] row by row."""
    excess_V = (target_V - draft_V).clamp_(min=0)
    mass = excess_V.sum(-1, keepdim=True)
    # No excess means p_t = p_d: only rounding can reject a draft then, and p_t is the correct distribution.
    return torch.where(mass > 0, excess_V / mass, target_V)


# ----------------------------------------------------------------------------
# u ~ U[0, 1):   accept(p) = [u < p]     choose(p_V) = min { v : u < p_0 + ... + p_v }
#
# All randomness of decoding passes through these two methods. `SeededSource` implements them with a generator; the
# enumeration proof runs every possible outcome (tests/proof/enumeration.py). Shapes: V vocab.
# ----------------------------------------------------------------------------


class RandomSource(Protocol):
    """A source of the random decisions of decoding."""

    def accept(self, probability: float) -> bool:
        """Return True with this probability: always if it is >= 1, never if it is 0."""
        ...

    def choose(self, probs_V: Tensor) -> int:
        """Draw an index from the distribution; never one of probability 0."""
        ...

    def uniform(self) -> float:
        """Draw a number from [0, 1), for a choice on a GPU (`choose_rows`)."""
        ...


class SeededSource:
    """Random source with its own generator, so that a request's tokens do not depend on its batch."""

    def __init__(self, seed: int) -> None:
        # PyTorch's CPU generator reads 32 bits of a seed: hash a longer one to 32 bits (multiplicative hashing).
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
        if not total > 0.0:  # NaN, too
            raise not_finite(total)
        # right=True skips tokens of probability 0: they share their predecessor's cumulative sum.
        return int(torch.searchsorted(cumulative_V, self.uniform() * total, right=True))

    def uniform(self) -> float:
        return torch.rand((), generator=self._generator, dtype=torch.float64).item()

    def ahead(self, count: int) -> list[float]:
        """The next numbers of `uniform`, which stay its next ones (decoding/ahead.py)."""
        state = self._generator.get_state()
        numbers: list[float] = torch.rand(count, generator=self._generator, dtype=torch.float64).tolist()
        self._generator.set_state(state)
        return numbers

    def skip(self, count: int) -> None:
        """Leave out the next numbers."""
        torch.rand(count, generator=self._generator, dtype=torch.float64)


def not_finite(total: float) -> ValueError:
    """Make the error for probabilities that sum to `total` and so cannot be drawn from."""
    return ValueError(
        f"the sampling probabilities sum to {total}: the model's logits are not finite. Load it in float32, or check "
        "its weights."
    )


def choose_rows(probs_NV: Tensor, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """Choose an index from each row with the given uniform numbers; return indices and row sums, [N] each.

    The host does not wait for a GPU. If a row's sum is not above 0, its index is meaningless (`not_finite`). One-hot
    rows use a number too, which `choose` does not.
    """
    cumulative_NV = probs_NV.cumsum(-1, dtype=torch.float64)
    total_N = cumulative_NV[:, -1]
    index_N1 = torch.searchsorted(cumulative_NV, (uniforms_N * total_N)[:, None], side="right")
    return index_N1[:, 0].clamp_(max=probs_NV.shape[1] - 1), total_N


def choose_together(probs: Sequence[Tensor], sources: Sequence[RandomSource]) -> list[int | Exception]:
    """Let each source choose from its distribution [V]; return indices or errors, with one copy from a GPU."""
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
# An exponential race: `pick` is distributed as p. The noise depends on the position and not on the order of draws, so
# the token at position n is a function of the target's row and the seed: the same request gives the same tokens with
# any drafter, policy or batch, or with plain decoding. A drafter that uses the same noise agrees with the target with
# probability at least (1 - d) / (1 + d) at total variation d; rejection sampling reaches 1 - d, so this costs some
# acceptance.
#
# Sources: Daliri, Musco and Suresh, arXiv 2408.07978 (drafter-invariant speculative decoding); Philox: Salmon et al.,
# SC 2011. Shapes: V vocab.
# ----------------------------------------------------------------------------


_KEPT = 32  # positions whose noise is cached: drafter and target use the same ones


class PositionNoise:
    """Coupled noise of one request: a function of seed and position.

    `races`: whether `pick` is the race over `row`; else a subclass has its own `pick`.
    """

    races: ClassVar[bool] = True

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.seed, self.vocab_size = seed, vocab_size
        self._rows: dict[int, Tensor] = {}

    def row(self, position: int) -> Tensor:
        """Return E_n [V] of an absolute position, float32 on the CPU."""
        if position not in self._rows:
            while len(self._rows) >= _KEPT:
                del self._rows[next(iter(self._rows))]
            # Philox has a key of 128 bits: 64 for the seed, 64 for the position. PyTorch's generator uses only 32.
            generator = np.random.Generator(np.random.Philox(key=self.seed + (position << 64)))
            # Drawn in float64: in float32 one number in 2^23 is 0, and 0 / 0 would win the race.
            row = torch.from_numpy(generator.standard_exponential(self.vocab_size)).float()
            self._rows[position] = row.clamp_(min=torch.finfo(torch.float32).tiny)
        return self._rows[position]

    def pick(self, probs: Tensor, position: int, ids: Tensor | None = None) -> int:
        """Pick an index of `probs`, which covers the whole vocabulary or, in this order, the tokens `ids`."""
        return int(self._race(probs, position, ids).argmax())

    def ranking(self, probs: Tensor, position: int, count: int, ids: Tensor | None = None) -> list[int]:
        """Return the first `count` indices in the order of the race, `pick` first, without those of probability 0."""
        race = self._race(probs, position, ids)
        indices: list[int] = race.topk(min(count, int((probs > 0).sum()))).indices.tolist()
        return indices

    def _race(self, probs: Tensor, position: int, ids: Tensor | None) -> Tensor:
        noise = on_device(self.row(position), probs.device)
        return probs / (noise if ids is None else noise[ids])


def pick_together(
    probs_NV: Tensor, noises: Sequence[PositionNoise], positions: Sequence[int], ids_V: Tensor | None = None
) -> Tensor:
    """Let each noise pick from its row as `PositionNoise.pick` does; return indices [N] on the device of the rows.

    The host does not wait for a GPU, unless a noise does not race.
    """
    if not all(noise.races for noise in noises):
        rows = zip(noises, probs_NV, positions, strict=True)
        return on_device([noise.pick(probs_V, n, ids_V) for noise, probs_V, n in rows], probs_NV.device)
    rows_NV = torch.stack([noise.row(n) for noise, n in zip(noises, positions, strict=True)])
    noise_NV = on_device(rows_NV, probs_NV.device)
    return (probs_NV / (noise_NV if ids_V is None else noise_NV[:, ids_V])).argmax(-1)


# ----------------------------------------------------------------------------
# Random source and noise of a request.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Randomness:
    """Factories of a request's randomness: `source(seed)`, and `noise(seed, vocab_size)` if it is coupled.

    Decoding takes it as an argument so that the enumeration proof can replace it (tests/proof/enumeration.py).
    """

    source: Callable[[int], RandomSource] = SeededSource
    noise: Callable[[int, int], PositionNoise] = PositionNoise
