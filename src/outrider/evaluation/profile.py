"""What steps cost here: target forwards over a grid, drafts, and the rest of an engine step -> a `Profile`.

R requests     1, 2, 4, ... and the most
B tokens       R, 2 R, ... (drafts + 1) R, of large trees not every count; for R = 1 every count up to 32, where matrix
               kernels have their cliffs, and then chunks of prefill, which have logits only at their end
S context      cached tokens per request
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from hashlib import sha256

import torch

from outrider.drafters.base import Drafter, TreeDrafter, draft_slots
from outrider.evaluation.profile_jobs import DENSE, Key, Shape, draft_jobs, forward_jobs, other_seconds, sweep
from outrider.evaluation.quartiles import quartiles
from outrider.evaluation.results import machine
from outrider.formats import versions
from outrider.scheduling.additive import Additive, Cell
from outrider.scheduling.profile import Curve, Profile, Setting
from outrider.target import Target
from outrider.target.resolve import dtype_name

_PLAIN_WIDTH = 8  # rows per request where no drafter says how many
_EVERY = 16  # rows per request up to which every count is measured; beyond it, every eighth


@dataclass(frozen=True)
class ProfileConfig:
    """What is measured, and for how long.

    Args:
        max_tokens: of one forward.
        repeats: sweeps over everything; fewer, but three, where they would take more than `seconds`.
    """

    max_requests: int = 32
    max_tokens: int = 256
    contexts: tuple[int, ...] = (64, 256, 768)
    repeats: int = 7
    seconds: float = 120.0

    def __post_init__(self) -> None:
        if self.max_requests < 1 or self.repeats < 1:
            raise ValueError(f"max_requests={self.max_requests} and repeats={self.repeats} must be at least 1.")
        if self.max_tokens < self.max_requests:
            raise ValueError(
                f"max_tokens={self.max_tokens} is below max_requests={self.max_requests}: each takes a token of a step."
            )
        if not self.contexts or min(self.contexts) < 1 or len(set(self.contexts)) < len(self.contexts):
            raise ValueError(f"contexts {list(self.contexts)} must be different numbers of tokens, at least 1.")

    @property
    def middle(self) -> int:
        """The context that drafts are timed at."""
        return sorted(self.contexts)[len(self.contexts) // 2]


def setting_of(target: Target, drafter: Drafter | None) -> Setting:
    """What a profile made now is of, and what it is used with must be. Costs follow shapes, so weights do not count."""
    on_cpu = target.device.type == "cpu"
    return Setting(
        target=f"{target.name.rstrip('/').split('/')[-1]} ({target.num_layers} x {target.hidden_size})",
        dtype=dtype_name(target.dtype),
        processor=machine()["cpu" if on_cpu else "gpu"],
        threads=torch.get_num_threads() if on_cpu else None,
        drafter=None if drafter is None else _shape_name(drafter),
    )


def _shape_name(drafter: Drafter) -> str:
    config, tree = getattr(drafter, "config", None), getattr(drafter, "shape", None)  # how its trees grow, if they do
    length = f"gamma {drafter.gamma}"
    if isinstance(drafter, TreeDrafter):
        length = f"tree of {drafter.nodes}, depth {drafter.gamma}"
    if not is_dataclass(config):
        return f"{type(drafter).__name__}, {length}"
    digest = sha256(repr(config if tree is None else (config, tree)).encode()).hexdigest()[:8]
    return f"{type(config).__name__.removesuffix('Config')}, {length}, shape {digest}"


def request_counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({1 << i for i in range(most.bit_length())} | {most})


def grid(config: ProfileConfig, width: int) -> list[Shape]:
    """Every forward to time, where a request verifies up to `width` rows."""
    shapes = []
    widths = [k for k in range(1, width + 1) if k <= _EVERY or k % 8 == 0 or k == width]
    for r in request_counts(config.max_requests):
        counts = {r * k for k in widths}
        if r == 1:
            counts |= {*range(1, DENSE + 1), *(DENSE << i for i in range(config.max_tokens.bit_length()))}
            counts.add(config.max_tokens)
        shapes += [(r, b, s) for s in config.contexts for b in sorted(counts) if b <= config.max_tokens]
    return shapes


@torch.inference_mode()
def measure_profile(
    target: Target,
    drafter: Drafter | None,
    config: ProfileConfig,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Profile:
    """Time this target and drafter on this machine, as `torch.set_num_threads` left it.

    Raises:
        ValueError: the contexts do not fit the target, or its family cannot be batched.
    """
    width = _PLAIN_WIDTH if drafter is None else draft_slots(drafter) + 1
    shapes = grid(config, width)
    longest = max(s + -(-b // r) for r, b, s in shapes)
    if longest > target.max_context:
        raise ValueError(
            f"contexts {list(config.contexts)} with up to {config.max_tokens} new tokens need {longest} positions, "
            f"{target.name} has {target.max_context}; lower --contexts or --max-tokens."
        )
    counts = request_counts(config.max_requests)
    branching = isinstance(drafter, TreeDrafter)
    jobs = forward_jobs(target, () if drafter is None else drafter.taps, shapes, width, branching)
    if drafter is not None:
        jobs |= draft_jobs(target, drafter, counts, config.middle)
    timed = sweep(jobs, config.repeats, config.seconds, on_progress)
    cells = []
    for r, b, s in shapes:
        low, median, high = quartiles(timed["forward", (r, b, s)])
        cells.append(Cell(requests=r, tokens=b, context=s, low=low, median=median, high=high))
    repeats = len(timed["forward", shapes[0]])  # as many as there was time for
    others = [other_seconds(target, drafter, n, repeats) for n in counts]
    return Profile(
        setting=setting_of(target, drafter),
        cells=cells,
        fit=Additive.fit(cells),
        gamma=0 if drafter is None else drafter.gamma,
        draft=_curve("draft", timed),
        draft_one=_curve("draft_one", timed),
        extend=_curve("extend", timed),
        other=Curve(requests=counts, seconds=[quartiles(seconds) for seconds in others]),
        repeats=repeats,
        machine=machine(),
        versions=versions(),
    )


def _curve(name: str, timed: dict[Key, list[float]]) -> Curve | None:
    found = sorted((shape[0], quartiles(seconds)) for (what, shape), seconds in timed.items() if what == name)
    return Curve(requests=[n for n, _ in found], seconds=[q for _, q in found]) if found else None
