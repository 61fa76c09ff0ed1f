"""Code shared by all dialects: typed reading of config.json, and the types that dialects read and write.

A missing or invalid field raises a ValueError that names it. null counts as absent, as in every engine; a bool is no
integer; every number is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.drafters.base import DrafterWeights, DraftModule
from outrider.utils.files import check_tensors

# Bounds far above any model, far below anything that overflows a shape or never ends.
MOST_LAYERS, MOST_DRAFTS, WIDEST, LARGEST_VOCABULARY = 2**10, 2**12, 2**20, 2**24
LONGEST_CONTEXT = 2**40
_HUGE = 1e30
_REQUIRED: Any = object()


class Fields:
    """A mapping read field by field; `where` (the file) and `dialect` are for error messages."""

    def __init__(self, raw: Mapping[str, Any], where: str, dialect: str, path: str = "") -> None:
        self._raw, self.where, self.dialect, self.path = raw, where, dialect, path

    @property
    def everything(self) -> Mapping[str, Any]:
        """The mapping, unchecked."""
        return self._raw

    def __contains__(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """Return the same mapping with values for absent fields."""
        given = {name: value for name, value in self._raw.items() if value is not None}
        return Fields({**defaults, **given}, self.where, self.dialect, path=self.path)

    def replaced(self, values: Mapping[str, Any]) -> Fields:
        """Return the same mapping with these fields overwritten."""
        return Fields({**self._raw, **values}, self.where, self.dialect, path=self.path)

    def raw(self, name: str) -> Any:
        """Return the unchecked value; None if it is absent."""
        return self._raw.get(name)

    def _value(self, name: str, default: Any) -> Any:
        value = self._raw.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"{self.where}: the {self.dialect} dialect needs the field {self.path + name!r}.")
        return default

    def refuse(self, name: str, wanted: str) -> ValueError:
        """Make the error for a field whose value is not `wanted`."""
        return ValueError(f"{self.where}: {self.path}{name} is {self._raw.get(name)!r}; it must be {wanted}.")

    def integer(self, name: str, low: int = 1, high: int = WIDEST, default: Any = _REQUIRED) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """Read a finite number above 0."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _HUGE:
            raise self.refuse(name, "a number above 0")
        return float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.refuse(name, "a string")
        return value

    def integers(self, name: str, low: int, high: int, default: Any = _REQUIRED) -> tuple[int, ...]:
        """Read a list of distinct ascending integers; engines read layers in ascending order whatever the list says."""
        value = self._value(name, default)
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise self.refuse(name, "a list of integers")
        if any(isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high for item in value):
            raise self.refuse(name, f"a list of integers from {low} to {high}")
        if list(value) != sorted(set(value)):
            raise self.refuse(name, "ascending, each id once: engines read layers in ascending order")
        return tuple(value)

    def texts(self, name: str, default: Any = _REQUIRED) -> tuple[str, ...]:
        value = self._value(name, default)
        if not isinstance(value, Sequence) or isinstance(value, str) or any(not isinstance(v, str) for v in value):
            raise self.refuse(name, "a list of strings")
        return tuple(value)

    def section(self, name: str, default: Any = _REQUIRED) -> Fields:
        """Read a mapping inside the mapping."""
        value = self._value(name, default)
        if not isinstance(value, Mapping):
            raise self.refuse(name, "a mapping of fields")
        return Fields(value, self.where, self.dialect, path=f"{self.path}{name}.")


# ----------------------------------------------------------------------------
# A checkpoint dialect converts config.json and tensors of one maker to and from `DrafterWeights`.
#
#     config.json + tensors --read--> DrafterWeights
#                           <--write-- DrafterWeights + the target's facts if the dialect stores them
#
# A reader uses every tensor or names the unknown one. A writer returns an `ExportedCheckpoint`, or raises a ValueError
# naming the field or tensor that the dialect cannot store. Parts that it omits, because no reader needs them for the
# same drafts or because an engine ignores them, are listed in `ExportedCheckpoint.fallbacks`, one sentence each.
#
# Shapes: V target vocabulary, Vd draft vocabulary, H hidden size (the target's).
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """The origin of a checkpoint, for error messages, and facts that its dialect may not state.

    `num_target_layers`: depth of the target; None if unknown.
    """

    where: str
    num_target_layers: int | None = None


@dataclass(frozen=True)
class TargetFacts:
    """Facts about the target that some dialects store: its name, and its tensors for engines that need a copy.

    `embedding_scale`: factor of the target's input embeddings.
    """

    name_or_path: str
    architectures: tuple[str, ...]
    num_layers: int
    embedding_VH: Tensor
    head_VH: Tensor
    embedding_scale: float = 1.0


@dataclass(frozen=True)
class ExportedCheckpoint:
    """The content of config.json and model.safetensors, and a sentence for each omitted part."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    fallbacks: list[str] = field(default_factory=list)


class Dialect(Protocol):
    """One maker's format of config.json and names of tensors.

    Attributes:
        name: name for users.
        spelling: value or field of config.json that identifies it.
        methods: names of the methods that it can store.
        prefix: prefix of its tensor names, if they are part of a larger checkpoint.
    """

    name: str
    spelling: str
    methods: tuple[str, ...]
    prefix: str

    def reads(self, raw: Mapping[str, Any]) -> bool:
        """Return whether this config.json is in the dialect."""

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        """Read a drafter.

        Raises:
            ValueError: a field or tensor is missing, invalid or unsupported; the message names it.
        """

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        """Write config.json, every field explicit, and tensors.

        Raises:
            ValueError: the dialect cannot store a field or tensor, or needs the target's facts.
        """


def module_of(config: Any, tensors: Mapping[str, Tensor], source: Source, kind: type[DraftModule]) -> DraftModule:
    """Build a module from these tensors, each in its type on disk, for aux hidden states that are not rescaled.

    Raises:
        ValueError: tensors are missing, unknown, or have another shape than the config implies.
    """
    with torch.device("meta"):  # the weights are replaced at once, so skip memory and initialisation
        module = kind(config).eval().requires_grad_(False)
    check_tensors(Path(source.where).parent, tensors, module.state_dict())
    module.load_state_dict(dict(tensors), assign=True)
    module.aux_scale_L = torch.ones(module.aux_scale_L.shape)
    return module


def draft_offsets(ids_Vd: Tensor) -> Tensor:
    """Return `d2t` [Vd]: target id = i + d2t[i]."""
    return ids_Vd - torch.arange(len(ids_Vd), device=ids_Vd.device)


def draft_mask(ids_Vd: Tensor, vocab_size: int) -> Tensor:
    """Return `t2d` bool [V]: which of the target's tokens can be drafted."""
    mask_V = torch.zeros(vocab_size, dtype=torch.bool, device=ids_Vd.device)
    mask_V[ids_Vd] = True
    return mask_V


def take_draft_ids(tensors: dict[str, Tensor], vocab: int, draft_vocab: int, where: str) -> Tensor | None:
    """Remove `d2t` and `t2d` from `tensors` and return the draft vocabulary; None if it is the whole vocabulary.

    Raises:
        ValueError: d2t is required but missing, does not fit the vocabularies, names an id twice, or t2d contradicts
            it.
    """
    d2t_Vd, t2d_V = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t_Vd is None or (draft_vocab == vocab == len(d2t_Vd) and not d2t_Vd.any()):
        if draft_vocab != vocab:
            raise ValueError(
                f"{where}: draft_vocab_size {draft_vocab} of {vocab} needs the tensor d2t, which is missing."
            )
        return None  # EAGLE-3's code saves both tables unfilled for a whole vocabulary
    if d2t_Vd.dim() != 1 or d2t_Vd.is_floating_point() or d2t_Vd.is_complex():
        raise ValueError(f"{where}: d2t is {d2t_Vd.dtype} of shape {list(d2t_Vd.shape)}; it must be a list of offsets.")
    ids_Vd = d2t_Vd.long() + torch.arange(len(d2t_Vd))
    if len(ids_Vd) != draft_vocab or ids_Vd.min() < 0 or ids_Vd.max() >= vocab:
        raise ValueError(
            f"{where}: d2t has {len(ids_Vd)} entries up to id {int(ids_Vd.max())}; config.json says {draft_vocab} of "
            f"{vocab}."
        )
    names, counts = ids_Vd.unique(return_counts=True)
    if len(names) != len(ids_Vd):
        raise ValueError(
            f"{where}: d2t names target id {int(names[counts.argmax()])} {int(counts.max())} times; each draft token "
            "must have its own target id, because verification needs its exact probability."
        )
    if t2d_V is not None and not torch.equal(t2d_V.bool(), draft_mask(ids_Vd, vocab)):
        raise ValueError(f"{where}: t2d is not the mask of the {draft_vocab} tokens that d2t names.")
    return ids_Vd


# ----------------------------------------------------------------------------
# The section `outrider` of config.json holds what a dialect has no field for.
#
#     "outrider": {"num_target_layers": 30, "gamma": 7}
#
# Engines ignore it. It is a section because vLLM's Medusa reads every top-level key that contains "num" and "layers" as
# its number of layers.
# ----------------------------------------------------------------------------


SECTION = "outrider"


class UnknownDepth(ValueError):
    """The error if neither the config nor the caller states the number of the target's layers."""


def write_extras(config: Any) -> dict[str, Any]:
    """Return the section `outrider` of config.json."""
    return {SECTION: {"num_target_layers": config.num_target_layers, "gamma": config.gamma}}


def target_depth(fields: Fields, source: Source) -> int:
    """Return the number of the target's layers: from the section `outrider`, the top level, or else the caller.

    Raises:
        UnknownDepth: none of them states it.
    """
    ours = fields.section(SECTION, {})
    for place in (ours, fields):
        if "num_target_layers" in place:
            return place.integer("num_target_layers", high=MOST_LAYERS)
    if source.num_target_layers is None:
        raise UnknownDepth(
            f"{source.where}: the {fields.dialect} dialect does not state num_target_layers: name the target of this "
            "drafter (--target)."
        )
    return source.num_target_layers


def draft_length(fields: Fields, default: int) -> int:
    """Return gamma, for dialects without a field for it."""
    return fields.section(SECTION, {}).integer("gamma", high=MOST_DRAFTS, default=default)
