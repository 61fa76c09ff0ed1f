"""Which drafter decodes: `--drafter CHOICE`, and `outrider.load(MODEL, CHOICE)`.

auto                      a drafter of the target, or else of its base model (outrider models): see `drafters_for`
none                      plain decoding
DIR                       a trained drafter (a directory of one of these names is ./NAME), or the packaged one
MAKER/NAME                one of those that `outrider models` lists, downloaded
ngram[@GAMMA]             copies from the text so far; nothing is trained or loaded
hybrid[:DIR_OR_NAME]      a trained drafter, by default that of auto, and copies from the text so far: in each round
                          what promises more
lm:ID_OR_DIR[@GAMMA]      a smaller language model with the target's tokenizer

A choice is read before the target is loaded, so that a mistake costs nothing, and opened afterwards; for
`--backend mlx` by the functions at the end of this file, which import MLX when it is asked for, not before.
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


def recommended_threshold(metadata: Mapping[str, Any]) -> float | None:
    """The confidence threshold a drafter was found to serve best with (`outrider package` stores it)."""
    return metadata.get("recommended", {}).get("confidence_threshold")


@dataclass(frozen=True)
class OpenedDrafter:
    """A drafter ready to serve, as results name it.

    `parameters` are its own, not the target's; `metadata` is its outrider.json, {} where there is none. `tree`: what
    was asked of its trees, None where it drafts chains.
    """

    drafter: Drafter
    name: str
    algorithm: str
    parameters: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tree: TreeSize | None = None

    def info(self, label: str | None = None) -> DrafterInfo:
        """Who drafts, for results and comparisons; called `label`, or as its algorithm and the shape of its trees."""
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
        """See the function of this name."""
        return recommended_threshold(self.metadata)


@dataclass(frozen=True)
class DrafterChoice:
    """What `--drafter` says. `where`: directory or model, "" for ngram; `gamma` None: the drafter's own.

    `hybrid`: with copies from the text so far beside the directory's drafter. `repo`: whence the directory was
    downloaded; `base`: whom it was made for, where that is not the target.
    """

    kind: Literal["directory", "ngram", "lm"]
    where: str
    gamma: int | None = None
    hybrid: bool = False
    repo: str | None = None
    base: str | None = None

    @property
    def knows_thinking(self) -> bool | None:
        """Whether the texts it was trained on had thinking in them; None: not known, or nothing was trained."""
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
        """Of a trained drafter, None for the others."""
        return Path(self.where) if self.kind == "directory" else None

    def open(
        self,
        target: Target,
        block_size: int | None = None,
        tree: TreeSize | None = None,
        library: Library | None = None,
    ) -> OpenedDrafter:
        """Ready to draft for `target`.

        Args:
            block_size: rows of a block drafter's blocks, if not as trained.
            tree: draft trees of that size.
            library: texts that a hybrid may copy from, beside the request's own.

        Raises:
            ValueError: no drafter or model there, it does not fit the target, or it has no such blocks, trees or
                copies.
        """
        from outrider.checkpoints.checkpoint import load_checkpoint, with_block_size
        from outrider.drafters.language_model import StandaloneConfig, StandaloneDrafter
        from outrider.drafters.ngram import HybridDrafter
        from outrider.target.model import load_target

        if library is not None and not self.hybrid:
            raise ValueError("other texts are copied beside a trained drafter: choose hybrid, or hybrid:DIR_OR_NAME.")
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
        except ValueError as error:  # what loading says would be taken for the target's
            raise ValueError(f"--drafter lm:{self.where}: {error}") from error
        parameters = sum(parameter.numel() for parameter in model.model.parameters())
        return OpenedDrafter(small, f"lm:{self.where}@{gamma}", "lm", parameters=parameters)

    def open_ngram(self) -> OpenedDrafter:
        """A drafter that copies from the text so far, for any target."""
        from outrider.drafters.ngram import NgramConfig, NgramDrafter

        config = NgramConfig() if self.gamma is None else NgramConfig(self.gamma)
        return OpenedDrafter(NgramDrafter(config), f"ngram@{config.gamma}", "ngram", parameters=0)

    def speculation(self, engine: ExternalEngine, target: str, file: str | None = None) -> Speculation:
        """As `engine` is told of it, with as many drafts as it makes.

        Args:
            target: says how deep it is where the drafter's config.json does not.
            file: given to the engine instead of the drafter's directory.

        Raises:
            ValueError: not a drafter, or not one that the engine loads as it is.
        """
        from outrider.backends.base import Speculation
        from outrider.backends.export import embedding_factor
        from outrider.checkpoints.checkpoint import load_weights, read_config
        from outrider.drafters.language_model import StandaloneConfig
        from outrider.drafters.ngram import NgramConfig
        from outrider.target.hub import resolve_model
        from outrider.target.model import count_layers

        if self.hybrid:
            raise ValueError(f"{engine.name} has no hybrid drafters: give the trained one ({self.where}), or ngram.")
        if self.kind == "ngram":
            return Speculation("ngram", self.gamma or NgramConfig.gamma)
        if self.directory is None:
            file = file or (self.where if engine.gguf else str(resolve_model(self.where)))
            return Speculation(self.kind, self.gamma or StandaloneConfig.gamma, file)
        parts = load_weights(self.directory, count_layers(target))
        try:
            if file is None and not engine.gguf:
                engine.check_loads(parts, read_config(self.directory)[1], embedding_factor(target))
            elif parts.algorithm in engine.exports():  # what --engine-drafter names was made of it
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
    """What `--drafter` means for a target's id or directory; None: plain decoding.

    Args:
        thinking: whether the responses will have it; `auto` then prefers a drafter that was not made without.

    Raises:
        ValueError: half a choice, as `lm:` without a model, or a published drafter that cannot be had.
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
            f"--drafter {choice}: write ngram, ngram@8, lm:ID_OR_DIR or lm:ID_OR_DIR@4, the number being the draft "
            f"length; a directory of that name is ./{choice}."
        )
    directory = packaged(choice, "models")
    if not directory.is_dir() and (entry := published_by(choice)) is not None:
        return _downloaded(entry)
    return DrafterChoice("directory", choice if directory == Path(choice) else str(directory))


def _beside_copies(choice: str, target: str, thinking: bool) -> DrafterChoice:
    """What `hybrid` and `hybrid:DIR_OR_NAME` mean."""
    trained = choose_drafter(choice.removeprefix(HYBRID).removeprefix(":") or AUTO, target, thinking)
    if trained is None:
        raise ValueError(
            f"--drafter {choice}: no trained drafter for {target} that copies could be taken beside: use ngram, which "
            f"needs none, or {HOW_TO_TRAIN}."
        )
    if trained.directory is None or trained.hybrid:
        raise ValueError(
            f"--drafter {choice}: write hybrid, or hybrid:DIR_OR_NAME with a trained drafter; a directory of that name "
            f"is ./{choice}."
        )
    return replace(trained, hybrid=True)


def _best_offer(target: str, thinking: bool) -> DrafterChoice | None:
    """What `auto` means; a line on standard error says so where the drafter was made for another model."""
    from outrider.checkpoints.published import drafters_for

    say = partial(Terminal(stderr=True).print, highlight=False, markup=False, soft_wrap=True)
    refused = set()
    for offer in drafters_for(target, thinking):
        relation = offer.relation(target)
        if offer.misfit:
            if relation not in refused:
                say(relation)
            refused.add(relation)
            continue
        if isinstance(offer.drafter, Path):
            found = DrafterChoice("directory", str(offer.drafter))
        else:
            found = _downloaded(offer.drafter)
        if not relation:
            return found
        say(f"{relation}: drafter {found.repo or found.where}")
        return replace(found, base=offer.made_for)
    return None


def _downloaded(entry: Published) -> DrafterChoice:
    from outrider.checkpoints.published import fetch

    return DrafterChoice("directory", str(fetch(entry)), repo=entry.repo)


def require_drafter(choice: str, target: str, thinking: bool = False) -> DrafterChoice:
    """`choose_drafter` where there must be one.

    Raises:
        ValueError: there is none, or no such target.
    """
    from outrider.target.hub import check_id

    found = choose_drafter(choice, target, thinking)
    if found is None:
        check_id(target)
        raise ValueError(
            f"--drafter {choice}: no drafter for {target}. Give its directory, put it into models/, use ngram or "
            f"lm:SMALLER_MODEL, or {HOW_TO_TRAIN}."
        )
    return found


def split_label(argument: str) -> tuple[str, str]:
    """`NAME=WHERE` -> (NAME, WHERE), or ("", WHERE) without a name; the name of a directory may contain a `=`."""
    name, sign, where = argument.partition("=")
    return (name, where) if sign and not Path(argument).is_dir() else ("", argument)


def name_drafters(arguments: Sequence[str]) -> dict[str, str]:
    """{name: choice} of `NAME=CHOICE`; a choice without a name is its own.

    Raises:
        ValueError: one name for two.
    """
    pairs = [(label or choice, choice) for label, choice in map(split_label, arguments)]
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two drafters are called {', '.join(twice)}; name them: NAME=CHOICE.")
    return dict(pairs)


def warn_of_thinking(choice: DrafterChoice, thinking: bool) -> None:
    """Say what it costs to think with a drafter that has never seen it."""
    if thinking and choice.knows_thinking is False:
        warnings.warn(
            f"the drafter {choice.repo or choice.where} was trained on responses without thinking, and reasoning is "
            "text unlike them: fewer drafts are accepted, while every rejected one costs its draft and its "
            "verification. Output stays the target's. Compare the accepted length with and without --thinking; to win "
            "it back, go on training with thinking: true in the recipe's data.",
            stacklevel=2,
        )


def require_directory(choice: str, target: str) -> Path:
    """The directory of a trained drafter.

    Raises:
        ValueError: there is none, this choice has none, or it is the package's own.
    """
    found = require_drafter(choice, target)
    if found.directory is None:
        raise ValueError(f"--drafter {choice} has no directory to store anything in: give a trained drafter.")
    if found.hybrid:
        raise ValueError(f"--drafter {choice}: give the trained drafter itself, {found.where}.")
    if found.base is not None:
        raise ValueError(
            f"--drafter {choice} is {found.where}, made for {found.base}: copy it (cp -r {found.where} mine) and give "
            f"--drafter mine, or what is found for {target} would be stored in it."
        )
    if name_of(found.directory) != str(found.directory):
        raise ValueError(
            f"--drafter {choice} came with the package: copy it (outrider package {choice} --out mine) and give "
            "--drafter mine, or what is found would be stored in the package."
        )
    return found.directory


def load_for_mlx(target: str) -> MLXTarget:
    """The target, on MLX's default device.

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
    """What `--drafter` says, drafting for a target of MLX.

    Raises:
        ValueError: a drafter that MLX does not run, or one made for another target.
    """
    from outrider.backends.mlx.drafter import MLXDrafter
    from outrider.checkpoints.checkpoint import load_checkpoint

    if block_size is not None or tree is not None:
        raise ValueError("--backend mlx drafts chains of the trained block size: leave --block-size and --tree out.")
    if choice.hybrid:
        raise ValueError(f"--backend mlx has no hybrid drafters: give the trained one ({choice.where}), or ngram.")
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
    """Versions of the packages that results of this backend depend on besides our own."""
    return {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}
