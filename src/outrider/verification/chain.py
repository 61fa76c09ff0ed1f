"""accept x_k with min(1, p_t(x_k) / p_d(x_k)); the first rejection draws from (p_t - p_d)_+, no rejection from p_t.

    anchor  x_1  x_2  x_3         rows of the target: row k is its distribution after anchor, x_1..x_k
    row 0   row 1  row 2  row 3   row k judges x_{k+1}; the last row gives the bonus token

Speculative sampling, Leviathan et al., arXiv 2211.17192, algorithm 1. Temperature 0 needs no case of its own: one-hot
distributions turn the ratio into "equal or not" and the residual into the target's argmax. Shapes: K, V vocab.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.drafters.base import Proposal
from outrider.sampling import RandomSource, residual


@dataclass(frozen=True)
class Verdict:
    accepted: int  # draft tokens kept
    next_token: int  # the correction or the bonus: the next anchor

    @property
    def path(self) -> list[int]:
        """The positions kept, as a `TreeVerdict` names nodes."""
        return list(range(self.accepted))


def verify_picks(tokens: Sequence[int], pick: Callable[[int], int]) -> Verdict:
    """Accept while the draft is what the target itself emits at row k.

    That is the same rule where the target's token is settled without the draft: at temperature 0 (both distributions
    one-hot), and in coupled sampling (sampling/coupled.py).
    """
    for k, token in enumerate(tokens):
        own = pick(k)
        if own != token:
            return Verdict(k, own)
    return Verdict(len(tokens), pick(len(tokens)))


def verify_chain(proposal: Proposal, target_row: Callable[[int], Tensor], source: RandomSource) -> Verdict:
    """Rows are asked for one by one, so that nothing is warped behind the first rejection."""
    for k, token in enumerate(proposal.tokens):
        target_V, drafted_with = target_row(k), proposal.drafted_with[k]
        assert drafted_with > 0.0, f"draft token {token} at position {k} has probability 0 in its own proposal"
        if not source.accept(target_V[token].item() / drafted_with):
            return Verdict(k, source.choose(residual(target_V, proposal.row(k))))
    return Verdict(len(proposal.tokens), source.choose(target_row(len(proposal.tokens))))
