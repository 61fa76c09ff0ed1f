"""Our own engine as `outrider bench` measures it: drafter, variants and the files that decide."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.benchmark.backends.sources import LocalSource
from outrider.benchmark.local import local_engines
from outrider.benchmark.variants import NO_SPECULATION, Variant, build_variant, default_variants
from outrider.cli.backends import Chosen
from outrider.cli.drafters import DrafterChoice
from outrider.drafters.base import Drafter, draft_slots
from outrider.drafters.tree_size import TreeSize
from outrider.engine import EngineConfig
from outrider.evaluation.profile import setting_of
from outrider.scheduling.profile import Profile
from outrider.target import Target
from outrider.target.linear import warm_up
from outrider.target.resolve import dtype_name

_OF_A_DRAFTER = {".json", ".safetensors"}


def choose_local(
    choice: DrafterChoice,
    target: Target,
    names: list[str] | None,
    threshold: float | None,
    profile: Path | None,
    config_at: Callable[[float], EngineConfig],
    users: int,
    tree: TreeSize | None,
    token_budget: int,
) -> Chosen:
    """Our engine, with its kernels built for so many users.

    Args:
        names: variants; all that the drafter allows by default.
        threshold: of variant threshold; the drafter's recommended one by default.
        profile: what adaptive variants decide by.
        tree: draft trees of that size.
        token_budget: most rows of one forward.

    Raises:
        ValueError: no such drafter or variant, or a variant needs what is not there.
    """
    opened = choice.open(target, tree=tree)
    threshold = opened.recommended_threshold if threshold is None else threshold
    allowed = default_variants(opened.drafter.gamma, threshold, opened.confident)
    if tree is not None:  # its nodes have survivals, if anything; no threshold was recommended for those
        threshold, allowed = None, [NO_SPECULATION, f"fixed-{tree.nodes}"]
    names = names or allowed
    built = _variants(names, target, opened.drafter, threshold, profile)
    files = [] if choice.directory is None else sorted(choice.directory.iterdir())
    settings: dict[str, Any] = {"threshold": threshold, "profile_sha256": _digest(profile)}
    settings |= {"dtype": dtype_name(target.dtype)}
    settings |= {"drafter_sha256": _digest(*(path for path in files if path.suffix in _OF_A_DRAFTER))}
    warm_up(min(users * (draft_slots(opened.drafter) + 1), max(token_budget, users)))
    engines = local_engines(target, opened.drafter, built, config_at)
    return Chosen(LocalSource(target, engines), [variant.name for variant in built], settings=settings)


def _variants(
    names: list[str], target: Target, drafter: Drafter, threshold: float | None, profile: Path | None
) -> list[Variant]:
    """All of them, the one without speculation in any case; a profile of something else is refused."""
    cost = None
    if profile is not None:
        cost = Profile.load(profile)
        cost.check(setting_of(target, drafter))
    slots = draft_slots(drafter)
    return [build_variant(name, slots, threshold, cost) for name in dict.fromkeys([NO_SPECULATION, *names])]


def _digest(*paths: Path | None) -> str | None:
    """Of files that decide: a profile measured anew, a drafter trained or calibrated again."""
    content = [path.read_bytes() for path in paths if path is not None]
    return hashlib.sha256(b"".join(content)).hexdigest() if content else None
