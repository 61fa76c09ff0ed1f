"""p_res = (p_t - p_d)_+ / sum (p_t - p_d)_+: what the target wants and the drafter under-served.

min(p_t, p_d) + P(reject) * p_res = p_t, which is why rejecting a draft token costs nothing in distribution
(Leviathan et al., arXiv 2211.17192, appendix A.1). Shapes: V vocab.
"""

from torch import Tensor


def residual(target_V: Tensor, draft_V: Tensor) -> Tensor:
    """The distribution of the token that replaces a rejected draft."""
    excess_V = (target_V - draft_V).clamp_(min=0)
    mass = excess_V.sum()
    # No excess means p_t = p_d, where nothing is ever rejected but by rounding: then p_t itself is the right answer.
    return excess_V / mass if mass > 0 else target_V
