"""proposal = x_1..x_l, the exact p_k each x_k was drawn from, and c_1..c_l: what every chain drafter hands over.

The distributions must be those that were *sampled from*, warps included: acceptance min(1, p_t/p_d) is lossless for
no others (Leviathan et al., arXiv 2211.17192). Shapes: K block positions, V target vocab.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Proposal:
    tokens: list[int]
    probs_KV: Tensor  # over the target's vocabulary, whatever the drafter's own
    confidences: list[float]  # c_k, known before x_k was drawn; [] if the drafter has none

    def truncated(self, length: int) -> "Proposal":
        return Proposal(self.tokens[:length], self.probs_KV[:length], self.confidences[:length])
