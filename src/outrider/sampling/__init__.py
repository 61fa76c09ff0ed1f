"""logits -> warp -> choose: distributions that are exact, and the only places where randomness enters."""

from outrider.sampling.coupled import PositionNoise
from outrider.sampling.params import SamplingParams
from outrider.sampling.residual import residual
from outrider.sampling.source import RandomSource, SeededSource
from outrider.sampling.warp import SeenTokens, warp

__all__ = ["PositionNoise", "RandomSource", "SamplingParams", "SeededSource", "SeenTokens", "residual", "warp"]
