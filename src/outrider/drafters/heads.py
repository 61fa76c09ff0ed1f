"""logits_k = U_k + W2 l_k: one cheap sequential step that lets x_k see x_{k-1} after a parallel draft.

    vanilla   l_k = W1[x_{k-1}]
    gated     l_k = sigmoid(W [h_k; W1[x_{k-1}]] + b) * W1[x_{k-1}]
    rnn       z_k = [s_{k-1}; W1[x_{k-1}]; h_k],  g = sigmoid(W_g z)
              s_k = g * s_{k-1} + (1 - g) * tanh(W_c z),  l_k = tanh(W_o z),  s_0 = 0
    confidence  c_k = sigmoid(w^T [h_k; W1[x_{k-1}]] + b), trained towards 1 - ||p_d - p_t||_1 / 2

Source: DSpark, arXiv 2607.05147. Parameter names are those of DeepSpec checkpoints.
Shapes: N blocks, K block positions, V vocab, Vd draft vocab, H draft hidden, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from outrider.target.linear import Packable
from outrider.utils.measure import on_device


class SequentialHead(Protocol):
    """What the sampling chain asks of a head: the latent l_k of one position after the other."""

    def initial_state(self, batch: int) -> Any:
        """What `step` takes at the first position, of so many requests; None where there is nothing to remember."""
        ...

    def step(self, prev_tokens_N: Tensor, hidden_NH: Tensor, state: Any) -> tuple[Tensor | None, Tensor | None, Any]:
        """l_k [N, r] (None: no correction), what the confidence head reads [N, r] (None: nothing), the next state."""
        ...

    def bias(self, latent_Nr: Tensor) -> Tensor:
        """W2 l_k [N, Vd], to be added to the drafter's own logits."""
        ...


class VanillaMarkov(Packable):
    """A first-order Markov correction of rank r. The other heads compute the latent l_k differently, nothing else."""

    kind: ClassVar[str] = "vanilla"
    groups: tuple[tuple[str, ...], ...] = (("markov_w2",),)

    def __init__(self, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        nn.init.zeros_(self.markov_w2.weight)  # training starts from the parallel drafter, uncorrected

    def initial_state(self, batch: int) -> Tensor | None:
        return None

    def step(
        self, prev_tokens_N: Tensor, hidden_NH: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One position: the latent l_k, the embedding W1[x_{k-1}] (the confidence head reads it), the next state."""
        embedding_Nr = self.markov_w1(prev_tokens_N)
        return embedding_Nr, embedding_Nr, state

    def unroll(self, prev_tokens_NK: Tensor, hidden_NKH: Tensor) -> tuple[Tensor, Tensor]:
        """All positions at once, teacher-forced: latents and embeddings, equal to repeated `step`."""
        embedding_NKr = self.markov_w1(prev_tokens_NK)
        return embedding_NKr, embedding_NKr

    def bias(self, latent_Nr: Tensor) -> Tensor:
        """[..., r] -> [..., Vd], to be added to the drafter's own logits."""
        return self.markov_w2(latent_Nr)


class GatedMarkov(VanillaMarkov):
    """The block's hidden state decides, per latent dimension, how much the previous token matters."""

    kind: ClassVar[str] = "gated"
    groups = (("markov_w2",), ("gate_proj",))

    def __init__(self, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__(vocab_size, draft_vocab_size, hidden_size, rank=rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(
        self, prev_tokens_N: Tensor, hidden_NH: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        latent_Nr, embedding_Nr = self.unroll(prev_tokens_N, hidden_NH)  # no state: any leading shape will do
        return latent_Nr, embedding_Nr, state

    def unroll(self, prev_tokens_NK: Tensor, hidden_NKH: Tensor) -> tuple[Tensor, Tensor]:
        embedding_NKr = self.markov_w1(prev_tokens_NK)
        gate_NKr = torch.sigmoid(self.gate_proj(torch.cat([hidden_NKH, embedding_NKr], dim=-1)))
        return gate_NKr * embedding_NKr, embedding_NKr


class RNNMarkov(VanillaMarkov):
    """A gated recurrence over the whole drafted prefix."""

    kind: ClassVar[str] = "rnn"
    groups = (("markov_w2",), ("joint_proj",))

    def __init__(self, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__(vocab_size, draft_vocab_size, hidden_size, rank=rank)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)  # rows: gate, candidate, output

    def initial_state(self, batch: int) -> Tensor:
        return self.markov_w1.weight.new_zeros(batch, self.rank)

    def step(
        self, prev_tokens_N: Tensor, hidden_NH: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        assert state is not None, "RNNMarkov.step needs initial_state() or the last step's state"
        embedding_Nr = self.markov_w1(prev_tokens_N)
        latent_Nr, state = self._recur(state, embedding_Nr, hidden_NH)
        return latent_Nr, embedding_Nr, state

    def unroll(self, prev_tokens_NK: Tensor, hidden_NKH: Tensor) -> tuple[Tensor, Tensor]:
        embedding_NKr = self.markov_w1(prev_tokens_NK)
        state = self.initial_state(prev_tokens_NK.shape[0])
        latents = []
        for embedding_Nr, hidden_NH in zip(embedding_NKr.unbind(1), hidden_NKH.unbind(1), strict=True):
            latent_Nr, state = self._recur(state, embedding_Nr, hidden_NH)
            latents.append(latent_Nr)
        return torch.stack(latents, dim=1), embedding_NKr

    def _recur(self, state_Nr: Tensor, embedding_Nr: Tensor, hidden_NH: Tensor) -> tuple[Tensor, Tensor]:
        joint = self.joint_proj(torch.cat([state_Nr, embedding_Nr, hidden_NH], dim=-1))
        gate_Nr, candidate_Nr, output_Nr = joint.chunk(3, dim=-1)
        gate_Nr = torch.sigmoid(gate_Nr)
        return torch.tanh(output_Nr), gate_Nr * state_Nr + (1 - gate_Nr) * torch.tanh(candidate_Nr)


class ConfidenceHead(nn.Module):
    """The logit of c_k, the chance that x_k will be accepted if it is reached; known before x_k is drawn."""

    def __init__(self, hidden_size: int, rank: int, with_markov: bool) -> None:
        super().__init__()
        self.with_markov = with_markov
        self.proj = nn.Linear(hidden_size + (rank if with_markov else 0), 1)

    def forward(self, hidden: Tensor, embedding: Tensor | None) -> Tensor:
        """[..., H], [..., r] -> [...]"""
        if self.with_markov:
            if embedding is None:
                raise ValueError(
                    "confidence_head_with_markov=True needs the embedding of a sequential head, and this drafter has "
                    "none (markov_rank=0); set confidence_head_with_markov=False or add a sequential head"
                )
            hidden = torch.cat([hidden, embedding], dim=-1)
        return self.proj(hidden).squeeze(-1)


SEQUENTIAL_HEADS: tuple[type[VanillaMarkov], ...] = (VanillaMarkov, GatedMarkov, RNNMarkov)


def build_sequential_head(
    kind: str, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int
) -> VanillaMarkov:
    for head in SEQUENTIAL_HEADS:
        if head.kind == kind:
            return head(vocab_size, draft_vocab_size, hidden_size, rank)
    known = ", ".join(head.kind for head in SEQUENTIAL_HEADS)
    raise ValueError(f"unknown sequential head {kind!r}; choose one of: {known}")


# ----------------------------------------------------------------------------
# c_k = sigmoid(w_1 logit(max p_k) + w_2 H(p_k) + b_k),   p_k = softmax of the draft logits, as they are
#
# The confidence of a drafter that has no confidence head: a logistic regression on how sure p_k is (maximum
# probability, entropy in nats) and on the position. All of it is known before x_k is drawn. The drawn token's own
# probability says more, and must not be used: admission would then depend on x_k, and the output would no longer be the
# target's (the stopping rule of DSpark, arXiv 2607.05147). Shapes: A requests, Vd draft vocab, F = 2 features.
# ----------------------------------------------------------------------------


_LOGIT_LIMIT = 20.0  # float32 puts 1 - max p_k at 0 beyond; p_k is one-hot for every purpose


class Estimator(Protocol):
    """What a walk asks for the logit of c_k."""

    def __call__(self, logits_AVd: Tensor, k: int) -> Tensor:
        """Logits [A] of the confidences at position k, counted from 0, from the draft logits before the warp."""
        ...


@dataclass(frozen=True)
class CertaintyEstimator:
    """Fitted by `outrider calibrate`: two weights for all positions, one bias per position."""

    weights: Sequence[float]
    biases: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.weights) != 2:
            raise ValueError(f"estimator weights {list(self.weights)} must be 2 numbers; run outrider calibrate again.")

    def __call__(self, logits_AVd: Tensor, k: int) -> Tensor:
        features_AF = certainty(logits_AVd)
        return features_AF @ on_device(self.weights, features_AF.device, features_AF.dtype) + self.biases[k]


def certainty(logits_AVd: Tensor) -> Tensor:
    """(logit of the largest probability, entropy in nats) of each row, [A, 2], at temperature 1."""
    log_probs_AVd = logits_AVd.log_softmax(-1)
    top_A, place_A = log_probs_AVd.max(-1)
    others_AVd = log_probs_AVd.scatter(-1, place_A[:, None], -torch.inf)  # 1 - p from the rest: no cancellation
    logit_A = (top_A - others_AVd.logsumexp(-1)).clamp(-_LOGIT_LIMIT, _LOGIT_LIMIT)
    entropy_A = torch.special.entr(log_probs_AVd.exp()).sum(-1)
    return torch.stack((logit_A, entropy_A), dim=-1)


# ----------------------------------------------------------------------------
# From logits s_k to calibrated confidences c_k, for a request at temperature t:
#
#     logit c_k = (1 - w) (s_k / T_k + b_k) + w (s_k / T'_k + b'_k),      w = min(1, t / t')
#
# T, b were fitted to greedy text, T', b' at temperature t'. What is drawn agrees less often than what is likeliest, so
# sampled text has a fit of its own. t is the request's, so c_k is known before x_k is drawn.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfidenceScaling:
    """`temperatures` T_k and `offsets` b_k per position (None: all 1, all 0), for the logits s_k of the confidence head
    or, where there is none, of an `estimator`.
    """

    temperatures: Sequence[float] | None = None
    offsets: Sequence[float] | None = None
    estimator: Estimator | None = None

    def at(self, k: int) -> tuple[float, float]:
        """1 / T_k and b_k at position k, counted from 0."""
        slope = 1.0 if self.temperatures is None else 1 / self.temperatures[k]
        return slope, 0.0 if self.offsets is None else self.offsets[k]


UNSCALED = ConfidenceScaling()


@dataclass(frozen=True)
class SampledScaling:
    """A scaling that was fitted at a `temperature` above 0."""

    temperature: float
    scaling: ConfidenceScaling


@dataclass(frozen=True)
class ChainHeads:
    """What a walk reads besides hidden states.

    `draft_ids_Vd` maps a reduced draft vocabulary into the target's (None: the same). Confidences come from the
    `confidence` head or from estimators. `sampled`: None where nothing else was fitted for sampled requests.
    """

    vocab_size: int
    sequential: SequentialHead | None = None
    confidence: ConfidenceHead | None = None
    draft_ids_Vd: Tensor | None = None
    scaling: ConfidenceScaling = UNSCALED
    sampled: SampledScaling | None = None

    @property
    def confident(self) -> bool:
        """Whether proposals come with confidences."""
        return self.confidence is not None or self.estimates

    @property
    def estimates(self) -> bool:
        """Whether confidences come from estimators."""
        return self.confidence is None and self.scaling.estimator is not None

    def calibrated(self, logit_N: Tensor, k: int, temperatures: Sequence[float]) -> Tensor:
        """c_k [N] at position k, counted from 0, for requests at these temperatures."""

        def scaled(scaling: ConfidenceScaling) -> Tensor:
            slope, offset = scaling.at(k)
            return slope * logit_N + offset

        return self._mixed(scaled, temperatures, logit_N.device).sigmoid()

    def estimated(self, logits_NVd: Tensor, k: int, temperatures: Sequence[float]) -> Tensor:
        """c_k [N] at position k, counted from 0, from the draft logits before the warp."""

        def scaled(scaling: ConfidenceScaling) -> Tensor:
            assert scaling.estimator is not None, "estimators are fitted at every temperature or at none"
            slope, offset = scaling.at(k)
            return slope * scaling.estimator(logits_NVd, k) + offset

        return self._mixed(scaled, temperatures, logits_NVd.device).sigmoid()

    def calibrated_block(self, logits_RK: Tensor, temperatures: Sequence[float]) -> Tensor:
        """c_k [R, K] at positions 0 .. K - 1, for requests at these temperatures."""

        def scaled(scaling: ConfidenceScaling) -> Tensor:
            both_2K = zip(*map(scaling.at, range(logits_RK.shape[1])), strict=True)
            slope_K, offset_K = (on_device(one, logits_RK.device, logits_RK.dtype) for one in both_2K)
            return slope_K * logits_RK + offset_K

        return self._mixed(scaled, temperatures, logits_RK.device).sigmoid()

    def uncalibrated(self, confidence: float, k: int, temperature: float) -> float:
        """The confidence at position k, counted from 0, that `calibrated` made `confidence` of."""
        slope, offset = self.scaling.at(k)
        if self.sampled is not None:
            (share,), (other_slope, other_offset) = self._shares([temperature]), self.sampled.scaling.at(k)
            slope, offset = slope + share * (other_slope - slope), offset + share * (other_offset - offset)
        inside = min(max(confidence, 1e-9), 1 - 1e-9)  # float32 sigmoids reach 0 and 1
        logit = math.log(inside) - math.log1p(-inside)
        return 0.5 + 0.5 * math.tanh(0.5 * (logit - offset) / slope)

    def _shares(self, temperatures: Sequence[float]) -> list[float]:
        """w of each request."""
        if self.sampled is None:
            return [0.0] * len(temperatures)
        return [min(1.0, one / self.sampled.temperature) for one in temperatures]

    def _mixed(
        self, scaled: Callable[[ConfidenceScaling], Tensor], temperatures: Sequence[float], device: torch.device
    ) -> Tensor:
        """What both scalings give, [N, ...], row n by w of request n; of one alone where w is all 0 or all 1."""
        shares = set(own := self._shares(temperatures))
        if self.sampled is None or shares == {0.0}:
            return scaled(self.scaling)
        if shares == {1.0}:
            return scaled(self.sampled.scaling)
        greedy = scaled(self.scaling)
        share_N = on_device(own, device, greedy.dtype)
        return torch.lerp(greedy, scaled(self.sampled.scaling), share_N.view(-1, *[1] * (greedy.dim() - 1)))
