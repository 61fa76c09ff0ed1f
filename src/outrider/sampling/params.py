"""penalty -> temperature -> top-k -> top-p -> min-p: the knobs of one request, in the order they are applied.

The defaults are greedy decoding. Speculative decoding is lossless with respect to the *warped* target distribution
(Leviathan et al., arXiv 2211.17192, section 2.2), so target and drafter share one `SamplingParams`.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    temperature: float = 0.0  # 0: argmax
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off; relative to the most likely token
    repetition_penalty: float = 1.0  # 1: off; over prompt and output, as in Hugging Face
    seed: int = 0
    coupled: bool = False  # tokens depend on the seed and the target alone, not on drafts (sampling/coupled.py)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} must be finite and >= 0; use 0 for greedy decoding")
        if not 0 <= self.seed < 2**64:
            raise ValueError(
                f"seed={self.seed} must be from 0 to 2^64 - 1 (PyTorch's CPU generator uses the low 32 bits)"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be >= 0; use 0 to keep every token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; use 1 to keep every token")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be in [0, 1]; use 0 to keep every token")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be finite and > 0; use 1 for none")
