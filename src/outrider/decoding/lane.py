"""One request on real models: the state between rounds, and what a round does to it.

    committed x_0 .. x_{n-1};  target cache and draft cache hold x_0 .. x_{n-2};  anchor = x_{n-1}
    draft()   one block after the anchor
    score()   target forward on [anchor, d_1..d_l], rows warped when read
    commit()  roll the target cache back to n - 1 + accepted + 1 and give the drafter the taps of what stayed

Plain decoding is the same lane without a drafter: every proposal is empty, every token is a bonus token.
See docs/architecture.md, The decode round. Shapes: B = 1, T tokens, L taps, V vocab.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.decoding.round import RoundResult
from outrider.drafters.base import Drafter, Proposal
from outrider.sampling import SamplingParams, SeededSource, SeenTokens, warp
from outrider.target import Target

_PREFILL_CHUNK = 512  # tokens; bounds the attention mask of a long prompt


class Clock:
    """Seconds spent inside `with clock:` blocks; waits for the GPU where there is one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __enter__(self) -> None:
        self._started = self._now()

    def __exit__(self, *_: object) -> None:
        self.seconds += self._now() - self._started

    def take(self) -> float:
        """The seconds so far; starts again from zero."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class ModelLane:
    """A `Lane` (decoding/round.py) over a target and, unless decoding is plain, a drafter.

    Args:
        prompt: prompt tokens, at least one.
        capacity: most committed tokens, prompt included.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        prompt: Sequence[int],
        params: SamplingParams,
        capacity: int,
    ) -> None:
        self.target, self.params = target, params
        self.taps = () if drafter is None else drafter.taps
        block = 0 if drafter is None else drafter.block_size
        self.cache = target.new_cache(capacity + block + 1)
        self.state = None if drafter is None else drafter.new_state(capacity)
        self.source = SeededSource(params.seed)
        self.seen = SeenTokens(target.vocab_size, params.repetition_penalty, prompt, target.device)
        self.remaining = capacity - len(prompt)
        self.draft_clock, self.verify_clock = Clock(target.device), Clock(target.device)
        self._taps_TLD: Tensor | None = None
        self.anchor = prompt[-1]
        self._prefill(prompt[:-1])

    def _prefill(self, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), _PREFILL_CHUNK):
            chunk = torch.tensor([tokens[start : start + _PREFILL_CHUNK]], device=self.target.device)
            output = self.target.forward(chunk, self.cache, self.taps, logits=0)
            if self.state is not None:
                assert output.taps_BTLD is not None
                self.state.extend(output.taps_BTLD[0])

    def draft(self, floor: float) -> Proposal:
        """A block after the anchor, never longer than what may still be committed besides the target's own token."""
        limit = self.remaining - 1
        if self.state is None or limit < 1:
            return Proposal([], torch.empty(0), [])
        with self.draft_clock:
            return self.state.propose(self.anchor, self.params, self.seen, self.source, limit, floor)

    def score(self, tokens: list[int]) -> Callable[[int], Tensor]:
        """One forward on [anchor, *tokens]; row k is the warped target distribution after `tokens[:k]`."""
        with self.verify_clock:
            block = torch.tensor([[self.anchor, *tokens]], device=self.target.device)
            output = self.target.forward(block, self.cache, self.taps, logits=None)
        assert output.logits_BTV is not None
        self._taps_TLD = None if output.taps_BTLD is None else output.taps_BTLD[0]
        logits_TV = output.logits_BTV[0]

        def row(k: int) -> Tensor:
            logits_V = logits_TV[k].float()
            return warp(logits_V, self.params, self.seen.with_tokens(tokens[:k]))

        return row

    def commit(self, result: RoundResult) -> None:
        """Keep the accepted drafts and make the target's own token the next anchor."""
        kept = result.verdict.accepted + 1  # the old anchor and the accepted drafts
        self.cache.rollback(self.cache.length - (result.admitted + 1) + kept)
        if self.state is not None:
            assert self._taps_TLD is not None
            with self.draft_clock:
                self.state.extend(self._taps_TLD[:kept])
        for token in result.tokens:
            self.seen.add(token)
        self.anchor = result.verdict.next_token
        self.remaining -= len(result.tokens)
