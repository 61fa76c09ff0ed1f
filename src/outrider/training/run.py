"""A recipe's run from its files: what is there already, the target in the right type, and the store of its features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.target.model import Target, load_target
from outrider.training import machine
from outrider.training.config import WriteFeaturesConfig
from outrider.training.dataset import check_prompt_files
from outrider.training.feature_store import (
    FeatureWindow,
    check_store_fits,
    check_store_space,
    open_features,
    recipe_plan,
)
from outrider.training.logging import check_boards
from outrider.training.parallel import ALONE, Ranks, shard_layers
from outrider.training.recipe import Recipe
from outrider.training.setup import Run, check_recipe
from outrider.training.trainer import saved_run
from outrider.training.watch import patience_spent
from outrider.utils.files import check_outputs, free_bytes
from outrider.utils.measure import dtype_name

Say = Callable[[str], None]

# Without --limit-gb the question comes above 20 GB, or a tenth of the free disk where that is less: a store below both
# surprises nobody.
_LIMIT_GB = 20.0
_FREE_SHARE = 0.1


def computing_dtype(
    precision: str, device: torch.device, say: Say, began_with: str | None = None, ranks: Ranks = ALONE
) -> torch.dtype:
    """The type that a recipe's precision means on a device; a line says what `auto` became.

    Args:
        began_with: the precision of the run that is resumed; None for a new one.
        ranks: all take the type that the main one finds; a collective if the precision is auto.
    """
    if precision != "auto":
        return getattr(torch, precision)  # type: ignore[no-any-return]
    if began_with is not None:
        dtype, reason = getattr(torch, began_with), "as the run began"
    else:
        dtype, reason = ranks.from_main(lambda: machine.training_dtype(device))
    say(f"precision: {dtype_name(dtype)} ({reason})")
    return dtype


@dataclass(frozen=True)
class SavedRun:
    """What a run has saved; `state` {} before its first checkpoint."""

    state: dict[str, Any]
    step: int
    last_step: int
    finished: bool

    @staticmethod
    def of(recipe: Recipe) -> SavedRun:
        """Read it, and check what would fail after hours: output directory, boards, prompt files."""
        check_outputs(Path(recipe.out))
        check_boards(recipe.log)
        state = saved_run(recipe)
        if not state:  # a run that has begun has its samples
            check_prompt_files(recipe.data)
        step = state.get("step", 0)
        last_step = state["settings"]["optimizer"]["steps"] if state else 1
        finished = step >= last_step or patience_spent(recipe.watch, state.get("watch", {}))
        return SavedRun(state, step, last_step, finished=finished)

    def load_target(self, recipe: Recipe, ranks: Ranks, say: Say) -> Target:
        """The target, in the type that the run began with, over the ranks if the recipe shards it.

        Raises:
            ValueError: the recipe's store of features does not fit the disk, or the target cannot be had.
        """
        if not self.state:
            check_store_fits(recipe, check_recipe(recipe))
        threads = torch.get_num_threads()
        if (before := self.state.get("threads", threads)) != threads:
            say(
                f"threads: {threads}; the run was at {before}. Its weights will differ in the last bits from an "
                f"uninterrupted run's; threads={before} avoids that."
            )
        place = partial(shard_layers, ranks=ranks) if recipe.shard_target and ranks.grouped else lambda model: None
        began_with = self.state.get("settings", {}).get("precision")
        dtype = computing_dtype(recipe.precision, ranks.device, say, began_with=began_with, ranks=ranks)
        say(f"loading {recipe.target}")
        return load_target(recipe.target, dtype, ranks.device, place=place)


# ----------------------------------------------------------------------------
# outrider features
# ----------------------------------------------------------------------------


def load_for_store(recipe: Recipe, device: torch.device, say: Say, writes: bool = False) -> Target:
    """The target whose features are stored.

    Raises:
        ValueError: the recipe cannot be trained by, or if it `writes`, the disk is too small.
    """
    drafter = check_recipe(recipe)
    if writes:
        check_store_fits(recipe, drafter)
    dtype = computing_dtype(recipe.precision, device, say)
    say(f"loading {recipe.target}")
    return load_target(recipe.target, dtype, device)


def shards_to_write(config: WriteFeaturesConfig, shards: Sequence[object]) -> list[int]:
    """The numbers of this process's shards."""
    beyond = [number for number in config.only if not 0 <= number < len(shards)]
    if beyond:
        raise ValueError(f"--only {beyond[0]}: the store has the shards 0 to {len(shards) - 1}.")
    number, count = config.process
    return list(config.only) or list(range(number, len(shards), count))


def check_store_size(config: WriteFeaturesConfig, directory: Path, needed: int) -> None:
    """Refuse a store that is larger than somebody expects."""
    check_store_space(directory, needed)
    limit = min(_LIMIT_GB * 2**30, _FREE_SHARE * free_bytes(directory))
    limit = limit if config.limit_gb is None else config.limit_gb * 2**30
    if needed > limit and not config.yes:
        raise ValueError(
            f"this writes {needed} bytes ({needed / 2**30:.2f} GB), more than {limit / 2**30:.2f} GB: add --yes, or "
            "raise --limit-gb, or choose features.dtype=int8, or bound it with --max-bytes."
        )


def fill_window(recipe: Recipe, run: Run, process: tuple[int, int]) -> FeatureWindow:
    """The rolling window of a recipe with `features.max_gb`, filled by this process of several."""
    number, count = process
    window = open_features(recipe, run, rank=number, world_size=count)
    assert isinstance(window, FeatureWindow)
    wanted = min(window.max_bytes, recipe_plan(recipe, run).bytes)
    check_store_space(window.directory, max(0, wanted - window.bytes))
    window.warm()
    return window
