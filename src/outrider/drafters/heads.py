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

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from outrider.target.linear import Packable


class SequentialHead(Protocol):
    """The head that the sampling chain calls: it computes the latent l_k of one position after the other."""

    def initial_state(self, batch: int) -> Any:
        """What `step` takes at the first position, of so many requests; None without a state."""
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


def build_sequential_head(
    kind: str, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int
) -> VanillaMarkov:
    """A fresh head of this kind (`markov_head_type`)."""
    heads = {head.kind: head for head in (VanillaMarkov, GatedMarkov, RNNMarkov)}
    return heads[kind](vocab_size, draft_vocab_size, hidden_size, rank)
