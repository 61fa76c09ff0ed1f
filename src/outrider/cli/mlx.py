"""`--backend mlx`: target and drafter on mlx-lm. MLX is imported when it is asked for, not before."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from outrider.backends.mlx import require_mlx
from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.cli.common import DrafterChoice, OpenedDrafter
from outrider.drafters.draft import TreeSize
from outrider.drafters.ngram import NgramConfig, NgramDrafter

if TYPE_CHECKING:
    from outrider.backends.mlx.target import MLXTarget


def load_for_mlx(target: str) -> MLXTarget:
    """The target, on MLX's default device.

    Raises:
        ValueError: MLX is not installed, or it cannot load this model.
    """
    require_mlx()
    from outrider.backends.mlx.target import load_mlx_target

    return load_mlx_target(target)


def open_for_mlx(
    choice: DrafterChoice, target: MLXTarget, block_size: int | None = None, tree: TreeSize | None = None
) -> OpenedDrafter:
    """What `--drafter` says, drafting for a target of MLX.

    Raises:
        ValueError: a drafter that MLX does not run, or one made for another target.
    """
    from outrider.backends.mlx.drafter import MLXDrafter

    if block_size is not None or tree is not None:
        raise ValueError("--backend mlx drafts chains of the trained block size: leave --block-size and --tree out.")
    if choice.kind == "directory":
        checkpoint = load_checkpoint(choice.where, num_target_layers=target.num_layers)
        module = checkpoint.drafter
        parameters = sum(parameter.numel() for parameter in module.parameters())
        drafter = MLXDrafter(checkpoint, target)
        return OpenedDrafter(drafter, choice.where, module.algorithm, parameters, checkpoint.metadata)
    if choice.kind == "ngram":
        config = NgramConfig() if choice.gamma is None else NgramConfig(choice.gamma)
        return OpenedDrafter(NgramDrafter(config), f"ngram@{config.gamma}", "ngram", 0)
    raise ValueError(
        f"--backend mlx drafts with a DFlash or DSpark directory or with ngram, not with {choice.kind}:{choice.where}."
    )


def mlx_versions() -> dict[str, str]:
    """Versions of the packages that results of this backend depend on besides our own."""
    return {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}
