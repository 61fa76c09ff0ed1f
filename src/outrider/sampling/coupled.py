"""pick(p, n) = argmin_v E_{n,v} / p_v,   E_{n,v} ~ Exp(1) a function of (seed, position n, token v) alone

An exponential race: `pick` is distributed as p. Because the noise belongs to the position and not to the order of
questions, the token at position n is a function of the target's row and the seed, whatever was drafted, admitted or
batched with it: the same request gives the same tokens with any drafter, policy and company, or without any. A drafter
that races with the same noise agrees with the target at least (1 - d) / (1 + d) of the time at total variation d;
rejection sampling reaches 1 - d, so this costs some acceptance.

Source: Daliri, Musco and Suresh, arXiv 2408.07978 (drafter-invariant speculative decoding). Shapes: V vocab.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_KEPT = 32  # positions whose noise is remembered: drafter and target ask for the same ones


class PositionNoise:
    """The noise of one request."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.seed, self.vocab_size = seed, vocab_size
        self._rows: dict[int, Tensor] = {}

    def row(self, position: int) -> Tensor:
        """E_n [V] of an absolute position, float32 on the CPU."""
        if position not in self._rows:
            while len(self._rows) >= _KEPT:
                del self._rows[next(iter(self._rows))]
            # Hashed: two requests with other seeds must not share noise at shifted positions. PyTorch uses 32 bits.
            digest = hashlib.blake2b(f"{self.seed} {position}".encode(), digest_size=4).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            self._rows[position] = torch.empty(self.vocab_size).exponential_(generator=generator)
        return self._rows[position]

    def pick(self, probs: Tensor, position: int, ids: Tensor | None = None) -> int:
        """An index into `probs`, which covers the whole vocabulary or, in its order, the tokens `ids`."""
        return int(self._race(probs, position, ids).argmax())

    def ranking(self, probs: Tensor, position: int, count: int, ids: Tensor | None = None) -> list[int]:
        """The first `count` of the race, the `pick` first; impossible ones are left out."""
        race = self._race(probs, position, ids)
        found: list[int] = race.topk(min(count, int((probs > 0).sum()))).indices.tolist()
        return found

    def _race(self, probs: Tensor, position: int, ids: Tensor | None) -> Tensor:
        noise = self.row(position).to(probs.device)
        return probs / (noise if ids is None else noise[ids])
