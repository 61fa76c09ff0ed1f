"""The config of a drafter: one frozen dataclass per method, which is also the `drafter` section of its recipes.

    recipe's fields --from_target(target)--> config --module--> trainable drafter;   config <--> config.json

What a recipe may set, and what null or nothing means there:

    a field with a default          the default
    a field without one             the method's own choice for the target (target_layer_ids, draft_vocab_size)
    a keyword of `from_target`      the keyword's default; it decides a field and is not stored (num_aux_layers)
    a field marked `NotInRecipe`    nothing: it is the target's (hidden_size), or only other makers' checkpoints have it
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from outrider.drafters.loss import ObjectiveConfig
from outrider.target.model import Target

T = TypeVar("T")
Config = TypeVar("Config", bound="DrafterConfig")

NOT_IN_RECIPE = "not in recipes"
NotInRecipe = Annotated[T, NOT_IN_RECIPE]
Count = Annotated[int, Field(ge=1, lt=2**31)]
DraftVocabulary = Annotated[
    int, Field(ge=2, description="Tokens that can be drafted, the most frequent ones; null: the target's vocabulary.")
]
MaskToken = Annotated[
    str | None, Field(description="Fills the block; null: the tokenizer's, or a special token no chat template uses.")
]
AuxLayers = Annotated[
    T, Field(description="Layers of the target whose outputs the drafter reads, from 0; null: the method's choice.")
]


class DrafterSection(BaseModel):
    """What a recipe sets of a drafter's config: `algorithm` and fields by name (`section_of`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    config: ClassVar[type[DrafterConfig]]
    algorithm: str

    def chosen(self) -> dict[str, Any]:
        """The fields that the recipe sets; null leaves a field out unless it is one of the field's values."""
        hints = get_type_hints(self.config)
        takes_null = {name for name, hint in hints.items() if NoneType in get_args(hint)} | {"draft_vocab_size"}
        set_here = {name: getattr(self, name) for name in self.model_fields_set - {"algorithm"}}
        return {name: value for name, value in set_here.items() if value is not None or name in takes_null}


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Base of all methods' configs, which are frozen dataclasses with keyword fields.

    Attributes:
        algorithm: the method's name in recipes and in config.json.
        objective: the section `objective` of its recipes, with the weights of its loss.
        hidden_size: of the drafter, which is the target's because the LM head is.
        target_layer_ids: aux layers, as layer outputs counted from 0.
        gamma: most draft tokens of one chain.
    """

    algorithm: ClassVar[str]
    objective: ClassVar[type[ObjectiveConfig]] = ObjectiveConfig

    if TYPE_CHECKING:  # fields or properties of the subclasses; a property here would be taken for a field's default

        @property
        def hidden_size(self) -> int: ...
        @property
        def vocab_size(self) -> int: ...
        @property
        def draft_vocab_size(self) -> int: ...
        @property
        def target_layer_ids(self) -> tuple[int, ...]: ...
        @property
        def num_target_layers(self) -> int: ...
        @property
        def gamma(self) -> int: ...

    def __post_init__(self) -> None:
        """Check every field by its declared kind and bounds.

        Raises:
            ValueError: naming each field that is wrong.
        """
        try:
            kind: Any = type(self)
            _checks_of(kind).model_validate(vars(self))
        except ValidationError as error:
            reasons = [f"{'.'.join(map(str, e['loc']))} {e['input']!r}: {e['msg']}" for e in error.errors()]
            raise ValueError("; ".join(reasons)) from error

    @classmethod
    def from_target(cls: type[Config], target: Target, **chosen: Any) -> Config:
        """The config of a new drafter for `target`, with these of a recipe's fields.

        Raises:
            ValueError: the fields do not go together, or not with the target.
        """
        raise NotImplementedError(f"{cls.__name__} has no from_target: it cannot be trained.")

    @classmethod
    def default_objective(cls, chosen: Mapping[str, Any]) -> dict[str, float]:
        """The fields of a recipe's `objective` (drafters/loss.py) that have another default for this method.

        Args:
            chosen: fields that the recipe sets of the config.
        """
        return {}

    def as_recipe(self) -> dict[str, Any]:
        """The recipe section that this config would follow from, as JSON."""
        names = [name for name in _recipe_fields(type(self)) if hasattr(self, name)]
        values = {name: getattr(self, name) for name in names}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {"algorithm": self.algorithm, **values}

    def comparable_fields(self, chosen: Mapping[str, Any], target: Target) -> dict[str, tuple[object, object]]:
        """{field: (what a recipe sets it to, what this config has)}, in comparable terms.

        A subclass adds what its `from_target` turns into other fields.
        """
        pairs = {name: (value, getattr(self, name, None)) for name, value in chosen.items()}
        if "target_layer_ids" in pairs:
            pairs["target_layer_ids"] = (sorted(chosen["target_layer_ids"]), sorted(self.target_layer_ids))
        return pairs

    def describe(self) -> list[tuple[str, str]]:
        """The drafter's shape and what is special to its method, as (label, value) pairs for people."""
        return [("drafts per round", str(self.gamma)), *self.describe_heads()]

    def describe_heads(self) -> list[tuple[str, str]]:
        """The sequential and the confidence head, of methods that may have them."""
        return []


def draft_vocabulary(target: Target, wanted: int | None) -> int:
    """How many tokens can be drafted: as many as wanted, the target's vocabulary at most."""
    return min(wanted or target.vocab_size, target.vocab_size)


def check_mask_token(token: int, vocab_size: int) -> None:
    """The mask token is one of the target's.

    Raises:
        ValueError: it is not.
    """
    if not 0 <= token < vocab_size:
        raise ValueError(f"mask_token_id {token} is outside the vocabulary of {vocab_size}.")


def mask_token_id(target: Target, wanted: str | None) -> int:
    """The id of the mask token: the recipe's, the tokenizer's own, or the last special token chat never uses."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    if wanted is not None:
        found = tokenizer.convert_tokens_to_ids(wanted)
        if not isinstance(found, int) or (found == tokenizer.unk_token_id and wanted != tokenizer.unk_token):
            raise ValueError(f"drafter.mask_token {wanted!r} is not one token of {target.name}.")
        return found
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, *target.eos_ids}
    template = tokenizer.chat_template or ""
    special = {
        token: index
        for token, index in tokenizer.get_added_vocab().items()
        if index not in used and token not in template and index < target.vocab_size
    }
    if not special:
        raise ValueError(f"{target.name} has no spare special token; name one with drafter.mask_token.")
    return max(special.values())


# ----------------------------------------------------------------------------
# The recipe section that belongs to a config.
# ----------------------------------------------------------------------------


@cache
def section_of(config: Any) -> type[DrafterSection]:
    """The model of a method's recipe section, with the bounds that its config class declares."""
    kinds: dict[str, Any] = {
        name: (kind | None, Field(default, description=_description(kind)))
        for name, (kind, default) in _recipe_fields(config).items()
    }
    kinds["algorithm"] = (Literal[config.algorithm], Field(config.algorithm, description="The drafting method."))
    section = create_model(f"{config.__name__}Section", __base__=DrafterSection, **kinds)
    section.config = config
    return section


def _description(kind: Any) -> str | None:
    """What the annotation of a field says that it is."""
    marks = getattr(kind, "__metadata__", ())
    return next((mark.description for mark in marks if isinstance(mark, FieldInfo) and mark.description), None)


def _recipe_fields(config: type[DrafterConfig]) -> dict[str, tuple[Any, Any]]:
    """{name: (type, default)} of what a recipe may set; a field without a default has None."""
    hints, found = get_type_hints(config, include_extras=True), {}
    for field in fields(config):
        if NOT_IN_RECIPE not in getattr(hints[field.name], "__metadata__", ()):
            found[field.name] = (hints[field.name], None if field.default is MISSING else field.default)
    keywords = get_type_hints(config.from_target, include_extras=True)
    for name, parameter in inspect.signature(config.from_target).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name not in found:
            found[name] = (keywords[name], parameter.default)
    return found


@cache
def _checks_of(config: Any) -> type[BaseModel]:
    """A model with the config's fields, to check values by."""
    hints = get_type_hints(config, include_extras=True)
    kinds: dict[str, Any] = {field.name: (hints[field.name], ...) for field in fields(config)}
    return create_model(f"{config.__name__}Checks", __config__=ConfigDict(allow_inf_nan=False), **kinds)


@dataclass(frozen=True, kw_only=True)
class LayerConfig(DrafterConfig):
    """Config of a drafter that has decoder layers in the target's shapes."""

    hidden_size: NotInRecipe[int]
    intermediate_size: NotInRecipe[int]
    num_attention_heads: NotInRecipe[int]
    num_key_value_heads: NotInRecipe[int]
    head_dim: NotInRecipe[int]
    vocab_size: NotInRecipe[int]
    draft_vocab_size: DraftVocabulary
    target_layer_ids: AuxLayers[tuple[int, ...]]
    num_target_layers: NotInRecipe[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}."
            )
