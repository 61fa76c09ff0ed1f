"""List every drafting method and every checkpoint dialect.

    built in        the methods and dialects of this file
    installed       `Method` objects that packages declare as entry points of the group `outrider.drafters`
                    (docs/add-a-drafter.md), those of src/outrider/contrib/ included

    [project.entry-points."outrider.drafters"]
    bigram = "my_package.bigram:METHOD"

An entry point is loaded when a method is looked up or listed. If loading fails, lists omit the method and looking it up
raises the error.

The dialects, in the order in which they are tried; at most one recognises a config.json:

installed    dialects of installed methods
speculators  speculators_model_type   eagle3, dflash, dflash2, dspark, mtp; one envelope, read by vLLM
z-lab        DFlashDraftModel         DFlash; aux layers and mask token in `dflash_config`; anchor + masks layout
z-lab        DFlash2DraftModel        DFlash 2; the same, with the sizes of convolution and selector
DeepSpec     Qwen3DSparkModel         DSpark (and DFlash as markov_rank 0); aux layers and mask token at the top level
EAGLE-3      LlamaForCausalLMEagle3   EAGLE-3, one layer; aux layers in three spellings, DeepSpec's included
Medusa       model_type medusa        heads with an LM head each, or with the target's
Outrider     Outrider...Model         any method: `algorithm` and the fields of its config
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from outrider.checkpoints.dialects.base import Dialect
from outrider.checkpoints.dialects.deepspec import DeepSpec
from outrider.checkpoints.dialects.eagle3 import Eagle3Dialect
from outrider.checkpoints.dialects.medusa import MedusaDialect
from outrider.checkpoints.dialects.own import Own
from outrider.checkpoints.dialects.speculators import Speculators
from outrider.checkpoints.dialects.zlab import ZLab, ZLab2
from outrider.drafters.base import DrafterWeights, DraftModule
from outrider.drafters.config import DrafterConfig, DrafterSection, section_of
from outrider.drafters.dflash import DFlash, DFlashConfig
from outrider.drafters.dflash2 import DFlash2, DFlash2Config
from outrider.drafters.dspark import DSpark, DSparkConfig
from outrider.drafters.eagle3 import Eagle3, Eagle3Config
from outrider.drafters.hydra import Hydra, HydraConfig
from outrider.drafters.medusa import Medusa, MedusaConfig
from outrider.drafters.mtp import MTP, MTPConfig

GROUP = "outrider.drafters"


def _nothing_left_out(parts: DrafterWeights) -> list[str]:
    return []


@dataclass(frozen=True)
class Export:
    """How one engine serves the drafters of one method.

    Attributes:
        dialect: dialect that `outrider export` writes for the engine.
        name: method name on the engine's command line; None: the engine is not launched with such drafters.
        also_reads: another dialect that the engine loads without export.
        whole_vocabulary: whether the engine requires the target's whole vocabulary.
        widens: as `whole_vocabulary`, and export widens a reduced draft vocabulary.
        scales_embeddings: whether the engine multiplies the drafter's input embeddings by the target's factor (Gemma
            has one), or the drafter reads none.
        targets_vocabulary: whether the engine uses the target's LM head and embedding whatever the checkpoint has.
        states_length: whether the command line states the number of drafts; otherwise the checkpoint does.
        environment: environment variables that the server needs for the method.
        check: returns a sentence for each part of a drafter that the engine ignores; raises ValueError, naming field
            and remedy, if the engine cannot serve the drafter.
    """

    dialect: Dialect
    name: str | None = None
    also_reads: Dialect | None = None
    whole_vocabulary: bool = False
    widens: bool = False
    scales_embeddings: bool = False
    targets_vocabulary: bool = False
    states_length: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[DrafterWeights], list[str]] = _nothing_left_out


@dataclass(frozen=True)
class Method:
    """A drafting method.

    Attributes:
        config: class of its config; `algorithm` is the method's name.
        module: class of its trainable module, made as `module(config)`.
        dialect: dialect that its drafters are saved in; None: Outrider's.
        also_reads: further dialects of this method.
        exports: how engines serve its drafters, by engine name; built-in methods have theirs in the engines' files.
    """

    config: type[DrafterConfig]
    module: type[DraftModule]
    dialect: Dialect | None = None
    also_reads: tuple[Dialect, ...] = ()
    exports: Mapping[str, Export] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the method, as in a recipe's `drafter.algorithm` and in config.json."""
        return self.config.algorithm

    @property
    def section(self) -> type[DrafterSection]:
        """Fields of the config that a recipe may set."""
        config: Any = self.config
        return section_of(config)

    @property
    def saved_in(self) -> Dialect:
        """Dialect that its drafters are saved in."""
        return Own(self.config, self.module) if self.dialect is None else self.dialect


BUILT_IN: tuple[Method, ...] = (
    Method(DFlashConfig, DFlash, ZLab()),
    Method(DSparkConfig, DSpark, DeepSpec()),
    Method(Eagle3Config, Eagle3, also_reads=(Eagle3Dialect(),)),
    Method(MedusaConfig, Medusa, also_reads=(MedusaDialect(),)),
    Method(HydraConfig, Hydra),
    Method(MTPConfig, MTP),
    Method(DFlash2Config, DFlash2, ZLab2()),
)


@cache
def _installed() -> dict[str, EntryPoint]:
    """Return the entry points by method name; those of this package take precedence."""
    entries = sorted(entry_points(group=GROUP), key=lambda entry: (not entry.value.startswith("outrider."), entry.name))
    built_in = {method.name for method in BUILT_IN}
    return {entry.name: entry for entry in reversed(entries) if entry.name not in built_in}


@cache
def _load(name: str) -> Method | ValueError:
    """Load an installed method; return the error if that fails."""
    entry = _installed()[name]
    package = "a package" if entry.dist is None else entry.dist.name
    try:
        method = entry.load()
    except Exception as error:
        return ValueError(
            f"the drafter {name!r} of {package} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}. "
            "Repair or uninstall that package."
        )
    if not isinstance(method, Method) or method.name != name:
        return ValueError(f"the entry point {name!r} of {package} ({entry.value}) is no Method of that name.")
    return method


def methods() -> tuple[Method, ...]:
    """List the built-in methods, then the installed ones that can be loaded, sorted by name."""
    loaded = (_load(name) for name in sorted(_installed()))
    return (*BUILT_IN, *(method for method in loaded if isinstance(method, Method)))


def method_names() -> list[str]:
    """List the names of all methods, including those that cannot be loaded."""
    return [*(method.name for method in BUILT_IN), *sorted(_installed())]


def method_of(name: str) -> Method:
    """Look up a method by name.

    Raises:
        ValueError: the name is unknown (the message lists the known ones), or its package cannot be loaded.
    """
    for method in BUILT_IN:
        if method.name == name:
            return method
    if name not in _installed():
        raise ValueError(f"unknown drafting method {name!r}; use one of {', '.join(method_names())}.")
    loaded = _load(name)
    if isinstance(loaded, ValueError):
        raise loaded
    return loaded


def tree_methods() -> list[str]:
    """List the names of the methods that can draft trees."""
    return [method.name for method in methods() if method.module.drafts_trees()]


class UnknownDialect(ValueError):
    """The error for a config.json in no known dialect; `raw` is its content."""

    def __init__(self, message: str, raw: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.raw = raw


def dialects() -> tuple[Dialect, ...]:
    """List all dialects: of installed methods, built-in, and Outrider's for each method that is saved in it."""
    known = methods()
    installed = [
        dialect
        for method in known[len(BUILT_IN) :]
        for dialect in (method.dialect, *method.also_reads)
        if dialect is not None
    ]
    ours = [method.saved_in for method in known if method.dialect is None]
    makers = (Speculators(), ZLab(), ZLab2(), DeepSpec(), Eagle3Dialect(), MedusaDialect())
    return (*installed, *makers, *ours)


def dialect_of(raw: Mapping[str, Any], where: object) -> Dialect:
    """Recognise the dialect of a config.json.

    Raises:
        UnknownDialect: no known dialect matches.
        ValueError: `architectures` is no list of names.
    """
    named = raw.get("architectures")
    if named is not None and (not isinstance(named, list) or any(not isinstance(name, str) for name in named)):
        raise ValueError(f"{where}: architectures is {named!r}; it must be a list of names.")
    for dialect in dialects():
        if dialect.reads(raw):
            return dialect
    if named and named[0].endswith(("ForCausalLM", "ForConditionalGeneration")):
        raise UnknownDialect(
            f"{where}: architectures {named} is not a drafter dialect Outrider reads but a language model's; "
            "--drafter lm:DIRECTORY drafts with it.",
            raw,
        )
    known = ", ".join(f"{dialect.spelling} ({dialect.name})" for dialect in dialects())
    broken = " ".join(str(error) for name in _installed() if isinstance(error := _load(name), ValueError))
    raise UnknownDialect(
        f"{where}: architectures {named or []} is not a drafter dialect Outrider reads. Known: {known}."
        f"{broken and ' '}{broken}",
        raw,
    )
