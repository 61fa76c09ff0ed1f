"""Settings of the measurement of a profile. Read by `--help`, so nothing here imports PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Annotated

from outrider.config import Config, option

if TYPE_CHECKING:
    from outrider.sampling import SamplingParams

_STEPS = "Steps"


@dataclass(frozen=True)
class ProfileConfig(Config):
    """The shapes that a profile measures, and how often (decoding/profile.py).

    Args:
        repeats: sweeps over all jobs; fewer, at least three, if more would exceed `seconds`.
        temperatures: of the requests, which take turns with them; a sampled row takes longer than a greedy one.
        sparse: few shapes, see `grid`; of requests, one and the most.

    Raises:
        ValueError: a field out of its range.
    """

    max_requests: Annotated[int, option(_STEPS, "in one step", min=1)] = 32
    max_tokens: Annotated[int, option(_STEPS, "of one forward", min=1)] = 256
    contexts: Annotated[tuple[int, ...], option(_STEPS, "cached tokens per request", min=1)] = (64, 256, 768)
    temperatures: Annotated[
        tuple[float, ...],
        option(_STEPS, "of requests, as 0, or 0,1: they take turns", "--temperature", min=0.0),
    ] = (0.0,)
    repeats: Annotated[int, option(_STEPS, "of every measurement", min=1)] = 7
    seconds: Annotated[float, option(_STEPS, "fewer repeats, but three, rather than longer", min=0)] = 120.0
    sparse: bool = False

    def check(self) -> None:
        if self.max_tokens < self.max_requests:
            raise ValueError(
                f"--max-tokens {self.max_tokens} is below --max-requests {self.max_requests}: each takes a token of a "
                "step."
            )
        if not self.contexts or len(set(self.contexts)) < len(self.contexts):
            raise ValueError(f"--contexts {list(self.contexts)} must be different numbers of tokens, one at least.")
        if not self.temperatures:
            raise ValueError("--temperature: give one at least; 0 is greedy decoding.")

    @property
    def middle(self) -> int:
        """The middle one of the contexts, at which drafts are timed."""
        return sorted(self.contexts)[len(self.contexts) // 2]

    def params(self, requests: int) -> list[SamplingParams]:
        """How so many requests are sampled."""
        from outrider.sampling import SamplingParams

        return [SamplingParams(temperature=t) for t, _ in zip(cycle(self.temperatures), range(requests), strict=False)]

    @property
    def requests(self) -> list[int]:
        """The numbers of requests to measure: 1, 2, 4, ... and the most; of a sparse profile the ends."""
        most = self.max_requests
        return sorted({1, most} if self.sparse else {1 << i for i in range(most.bit_length())} | {most})
