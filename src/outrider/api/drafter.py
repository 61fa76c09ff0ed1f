"""Choose and open the drafter of `--drafter CHOICE` and `outrider.load(MODEL, CHOICE)`.

auto                      a drafter for the target, or else for its base model (outrider models): see `drafters_for`
none                      plain decoding
DIR                       a trained drafter (write ./NAME for a directory with one of these names), or a packaged one
MAKER/NAME                a published drafter from `outrider models`, downloaded
ngram[@GAMMA]             prompt lookup in the text so far, without training
hybrid[:DIR_OR_NAME]      a trained drafter, by default that of auto, or prompt lookup: each round uses the one with
                          the higher acceptance estimate
lm:ID_OR_DIR[@GAMMA]      a smaller language model with the target's tokenizer

A choice is parsed before the target is loaded, so that errors come early, and opened after it. The functions at the end
of this file open it for `--backend mlx`; only they import MLX.
"""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outrider.utils.packaged import name_of, packaged
from outrider.utils.terminal import Terminal

if TYPE_CHECKING:
    from outrider.backends.base import ExternalEngine, Speculation
    from outrider.backends.mlx.target import MLXTarget
    from outrider.checkpoints.describe import DrafterInfo
    from outrider.checkpoints.published import Published
    from outrider.drafters.base import Drafter, DraftModule
    from outrider.drafters.draft import TreeSize
    from outrider.drafters.ngram import Library
    from outrider.target.model import Target

AUTO, NONE, HYBRID = "auto", "none", "hybrid"
HOW_TO_TRAIN = "train one: outrider init --target MODEL --prompts FILE says how"
_UNTRAINED = re.compile(r"(?:(?P<ngram>ngram)|lm:(?P<model>[^@].*?))(?:@(?P<gamma>\d+))?")


@dataclass(frozen=True)
class OpenedDrafter:
    """A drafter ready to serve, with its name in results.

    `parameters` excludes the target's; `metadata` is outrider.json, {} if there is none. `tree`: size of its draft
    trees, None if it drafts chains.
    """

    drafter: Drafter
    name: str
    algorithm: str
    parameters: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tree: TreeSize | None = None

    def info(self, label: str | None = None) -> DrafterInfo:
        """Describe the drafter for results, under `label` or its algorithm and tree shape."""
        from outrider.checkpoints.describe import DrafterInfo, TrainingInfo
        from outrider.drafters.base import draft_slots

        training = TrainingInfo.of(self.metadata)
        shape = f" {self.tree}" if self.tree is not None and self.tree.shaped else ""
        name = label or f"{self.algorithm}{shape}"
        return DrafterInfo(
            label=name,
            algorithm=self.algorithm,
            gamma=self.drafter.gamma,
            nodes=draft_slots(self.drafter),
            parameters=self.parameters,
            training=training,
        )

    @property
    def recommended_threshold(self) -> float | None:
        """Confidence threshold with which it serves best, if `outrider package` stored one."""
        threshold: float | None = self.metadata.get("recommended", {}).get("confidence_threshold")
        return threshold


@dataclass(frozen=True)
class DrafterChoice:
    """A parsed `--drafter`. `where`: directory or model, "" for ngram; `gamma` None: the drafter's default.

    `hybrid`: whether prompt lookup complements the directory's drafter. `repo`: repository that the directory was
    downloaded from; `base`: model that it was made for, if that is not the target.
    """

    kind: Literal["directory", "ngram", "lm"]
    where: str
    gamma: int | None = None
    hybrid: bool = False
    repo: str | None = None
    base: str | None = None

    @property
    def knows_thinking(self) -> bool | None:
        """Whether its training texts contained thinking; None if unknown or not trained."""
        from outrider.checkpoints.checkpoint import read_metadata
        from outrider.checkpoints.published import published_by

        if self.directory is None:
            return None
        if self.repo is not None and (entry := published_by(self.repo)) is not None:
            return entry.thinking
        data = read_metadata(self.directory).get("recipe", {}).get("data")
        return None if data is None else bool(data.get("thinking", False))

    @property
    def directory(self) -> Path | None:
        """Directory of a trained drafter; None for other kinds."""
        return Path(self.where) if self.kind == "directory" else None

    def open(
        self,
        target: Target,
        block_size: int | None = None,
        tree: TreeSize | None = None,
        library: Library | None = None,
    ) -> OpenedDrafter:
        """Open the drafter for `target`.

        Args:
            block_size: block size of a block drafter; None: as trained.
            tree: size of draft trees; None: chains.
            library: texts for prompt lookup by a hybrid, besides the request's text.

        Raises:
            ValueError: the drafter does not exist, does not fit the target, or does not support the block size, trees
                or lookup.
        """
        from outrider.checkpoints.checkpoint import load_checkpoint, with_block_size
        from outrider.drafters.language_model import StandaloneConfig, StandaloneDrafter
        from outrider.drafters.ngram import HybridDrafter
        from outrider.target.model import load_target

        if library is not None and not self.hybrid:
            raise ValueError("lookup in other texts needs a hybrid drafter: choose hybrid, or hybrid:DIR_OR_NAME.")
        if self.kind == "directory":
            checkpoint = load_checkpoint(self.where, num_target_layers=target.num_layers)
            if block_size is not None:
                checkpoint = with_block_size(checkpoint, block_size)
            module = checkpoint.weights.module
            parameters = sum(parameter.numel() for parameter in module.parameters())
            served, name = checkpoint.serve(target), name_of(Path(self.where))
            if tree is not None:
                shape = f"tree of {tree}" + (", measured accuracies" if "candidates" in checkpoint.metadata else "")
                served, name = _branched(module, served, tree), f"{name} ({shape})"
            algorithm = module.algorithm
            if self.hybrid:
                served, name, algorithm = (
                    HybridDrafter(served, library=library),
                    f"{HYBRID}:{name}",
                    f"{HYBRID} {algorithm}",
                )
            return OpenedDrafter(
                served, name, algorithm, parameters=parameters, metadata=checkpoint.metadata, tree=tree
            )
        if block_size is not None or tree is not None:
            raise ValueError(f"a drafter of kind {self.kind} has neither blocks nor trees: leave both options out.")
        if self.kind == "ngram":
            return self.open_ngram()
        gamma = StandaloneConfig.gamma if self.gamma is None else self.gamma
        try:
            model = load_target(self.where, target.dtype, target.device)
            small = StandaloneDrafter(model, target, gamma)
        except ValueError as error:  # otherwise the message would seem to be about the target
            raise ValueError(f"--drafter lm:{self.where}: {error}") from error
        parameters = sum(parameter.numel() for parameter in model.model.parameters())
        return OpenedDrafter(small, f"lm:{self.where}@{gamma}", "lm", parameters=parameters)

    def open_ngram(self) -> OpenedDrafter:
        """Open prompt lookup in the text so far, for any target."""
        from outrider.drafters.ngram import NgramConfig, NgramDrafter

        config = NgramConfig() if self.gamma is None else NgramConfig(self.gamma)
        return OpenedDrafter(NgramDrafter(config), f"ngram@{config.gamma}", "ngram", parameters=0)

    def speculation(self, engine: ExternalEngine, target: str, file: str | None = None) -> Speculation:
        """Describe the drafter and its draft length for an external engine.

        Args:
            target: provides the number of layers if the drafter's config.json does not.
            file: file to give to the engine instead of the drafter's directory.

        Raises:
            ValueError: it is no drafter, or the engine cannot load it without export.
        """
        from outrider.backends.base import Speculation
        from outrider.backends.export import embedding_factor
        from outrider.checkpoints.checkpoint import load_weights, read_config
        from outrider.drafters.language_model import StandaloneConfig
        from outrider.drafters.ngram import NgramConfig
        from outrider.target.hub import resolve_model
        from outrider.target.model import count_layers

        if self.hybrid:
            raise ValueError(
                f"{engine.name} has no hybrid drafters: give the trained drafter ({self.where}), or ngram."
            )
        if self.kind == "ngram":
            return Speculation("ngram", self.gamma or NgramConfig.gamma)
        if self.directory is None:
            file = file or (self.where if engine.gguf else str(resolve_model(self.where)))
            return Speculation(self.kind, self.gamma or StandaloneConfig.gamma, file)
        parts = load_weights(self.directory, count_layers(target))
        try:
            if file is None and not engine.gguf:
                engine.check_loads(parts, read_config(self.directory)[1], embedding_factor(target))
            elif parts.algorithm in engine.exports():  # --engine-drafter names an export of it
                engine.limits(parts, embedding_factor(target))
        except ValueError as error:
            raise ValueError(f"--launch with the drafter {self.directory}: {engine.name}: {error}") from error
        return Speculation.of(parts, file or str(self.directory))


def _branched(module: DraftModule, served: Any, size: TreeSize) -> Drafter:
    from outrider.checkpoints.registry import tree_methods

    if not module.drafts_trees():
        raise ValueError(f"--tree {size}: {module.algorithm} drafts chains; trees are for {', '.join(tree_methods())}.")
    drafter: Drafter = served.with_trees(size)
    return drafter


def choose_drafter(choice: str, target: str, thinking: bool = False) -> DrafterChoice | None:
    """Parse `--drafter` for a target's id or directory; None: plain decoding.

    Args:
        thinking: whether responses will think; `auto` then avoids drafters trained without thinking.

    Raises:
        ValueError: the choice is incomplete (`lm:` without a model), or a published drafter cannot be downloaded.
    """
    from outrider.checkpoints.published import published_by

    if choice == NONE:
        return None
    if choice == AUTO:
        return _best_offer(target, thinking)
    if choice == HYBRID or choice.startswith(f"{HYBRID}:"):
        return _beside_copies(choice, target, thinking)
    if untrained := _UNTRAINED.fullmatch(choice):
        gamma = None if untrained["gamma"] is None else int(untrained["gamma"])
        return DrafterChoice("ngram" if untrained["ngram"] else "lm", untrained["model"] or "", gamma)
    if re.match("(ngram|lm)([:@]|$)", choice):
        raise ValueError(
            f"--drafter {choice}: write ngram, ngram@8, lm:ID_OR_DIR or lm:ID_OR_DIR@4 (with a draft length); write "
            f"./{choice} for a directory of that name."
        )
    directory = packaged(choice, "models")
    if not directory.is_dir() and (entry := published_by(choice)) is not None:
        return _downloaded(entry)
    return DrafterChoice("directory", choice if directory == Path(choice) else str(directory))


def _beside_copies(choice: str, target: str, thinking: bool) -> DrafterChoice:
    """Parse `hybrid` and `hybrid:DIR_OR_NAME`."""
    trained = choose_drafter(choice.removeprefix(HYBRID).removeprefix(":") or AUTO, target, thinking)
    if trained is None:
        raise ValueError(
            f"--drafter {choice}: there is no trained drafter for {target}: use ngram, which needs none, or "
            f"{HOW_TO_TRAIN}."
        )
    if trained.directory is None or trained.hybrid:
        raise ValueError(
            f"--drafter {choice}: write hybrid, or hybrid:DIR_OR_NAME with a trained drafter; write ./{choice} for a "
            "directory of that name."
        )
    return replace(trained, hybrid=True)


def _best_offer(target: str, thinking: bool) -> DrafterChoice | None:
    """Choose the drafter of `auto`; print a line to standard error if it was made for another model."""
    from outrider.checkpoints.published import drafters_for

    say = partial(Terminal(stderr=True).print, highlight=False, markup=False, soft_wrap=True)
    reported = set()
    for offer in drafters_for(target, thinking):
        relation = offer.relation(target)
        if offer.misfit:
            if relation not in reported:
                say(relation)
            reported.add(relation)
            continue
        if isinstance(offer.drafter, Path):
            choice = DrafterChoice("directory", str(offer.drafter))
        else:
            choice = _downloaded(offer.drafter)
        if not relation:
            return choice
        say(f"{relation}: drafter {choice.repo or choice.where}")
        return replace(choice, base=offer.made_for)
    return None


def _downloaded(entry: Published) -> DrafterChoice:
    from outrider.checkpoints.published import fetch

    return DrafterChoice("directory", str(fetch(entry)), repo=entry.repo)


def require_drafter(choice: str, target: str, thinking: bool = False) -> DrafterChoice:
    """Call `choose_drafter` and require a drafter.

    Raises:
        ValueError: there is no drafter, or the target does not exist.
    """
    from outrider.target.hub import check_id

    drafter = choose_drafter(choice, target, thinking)
    if drafter is None:
        check_id(target)
        raise ValueError(
            f"--drafter {choice}: no drafter for {target}. Give its directory, put it into models/, use ngram or "
            f"lm:SMALLER_MODEL, or {HOW_TO_TRAIN}."
        )
    return drafter


def split_label(argument: str) -> tuple[str, str]:
    """Split `NAME=WHERE` into (NAME, WHERE), ("", WHERE) without a name; an existing directory may contain `=`."""
    name, sign, where = argument.partition("=")
    return (name, where) if sign and not Path(argument).is_dir() else ("", argument)


def name_drafters(arguments: Sequence[str]) -> dict[str, str]:
    """Parse arguments `NAME=CHOICE` into {name: choice}; without a name the choice is the name.

    Raises:
        ValueError: two drafters have the same name.
    """
    pairs = [(label or choice, choice) for label, choice in map(split_label, arguments)]
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two drafters have the name {', '.join(twice)}: give each its own, NAME=CHOICE.")
    return dict(pairs)


def warn_of_thinking(choice: DrafterChoice, thinking: bool) -> None:
    """Warn if responses will think and the drafter was trained without thinking."""
    if thinking and choice.knows_thinking is False:
        warnings.warn(
            f"the drafter {choice.repo or choice.where} was trained on responses without thinking, so fewer "
            "drafts will be accepted; the output stays the target's. Compare the accepted length with and without "
            "--thinking; to raise it, continue training with data.thinking=true.",
            stacklevel=2,
        )


def require_directory(choice: str, target: str) -> Path:
    """Return the directory of a trained drafter that results may be stored in.

    Raises:
        ValueError: there is no drafter, the choice has no directory, or it is the package's or another model's.
    """
    drafter = require_drafter(choice, target)
    if drafter.directory is None:
        raise ValueError(f"--drafter {choice} has no directory to store results in: give a trained drafter.")
    if drafter.hybrid:
        raise ValueError(f"--drafter {choice}: give the trained drafter itself, {drafter.where}.")
    if drafter.base is not None:
        raise ValueError(
            f"--drafter {choice} is {drafter.where}, made for {drafter.base}: copy it (cp -r {drafter.where} mine) and "
            f"give --drafter mine, because results for {target} must not be stored in it."
        )
    if name_of(drafter.directory) != str(drafter.directory):
        raise ValueError(
            f"--drafter {choice} came with the package: copy it (outrider package {choice} --out mine) and give "
            "--drafter mine, because results must not be stored in the package."
        )
    return drafter.directory


def load_for_mlx(target: str) -> MLXTarget:
    """Load the target on MLX's default device.

    Raises:
        ValueError: MLX is not installed, or it cannot load this model.
    """
    from outrider.backends.mlx import require_mlx

    require_mlx()
    from outrider.backends.mlx.target import load_mlx_target

    return load_mlx_target(target)


def open_for_mlx(
    choice: DrafterChoice, target: MLXTarget, block_size: int | None = None, tree: TreeSize | None = None
) -> OpenedDrafter:
    """Open the drafter of `--drafter` for an MLX target.

    Raises:
        ValueError: MLX does not support the drafter, or it was made for another target.
    """
    from outrider.backends.mlx.drafter import MLXDrafter
    from outrider.checkpoints.checkpoint import load_checkpoint

    if block_size is not None or tree is not None:
        raise ValueError("--backend mlx drafts chains of the trained block size: leave --block-size and --tree out.")
    if choice.hybrid:
        raise ValueError(f"--backend mlx has no hybrid drafters: give the trained drafter ({choice.where}), or ngram.")
    if choice.kind == "directory":
        checkpoint = load_checkpoint(choice.where, num_target_layers=target.num_layers)
        module = checkpoint.weights.module
        parameters = sum(parameter.numel() for parameter in module.parameters())
        drafter = MLXDrafter(checkpoint, target)
        return OpenedDrafter(
            drafter,
            name_of(Path(choice.where)),
            module.algorithm,
            parameters=parameters,
            metadata=checkpoint.metadata,
        )
    if choice.kind == "ngram":
        return choice.open_ngram()
    raise ValueError(
        f"--backend mlx drafts with a DFlash or DSpark directory or with ngram, not with {choice.kind}:{choice.where}."
    )


def mlx_versions() -> dict[str, str]:
    """Return the versions of the MLX packages that results depend on."""
    return {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}
