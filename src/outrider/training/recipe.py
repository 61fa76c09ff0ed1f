"""A recipe: everything one training run depends on, as YAML, checked before anything is loaded.

`outrider train RECIPE.yaml optimizer.steps=200 drafter.markov_head_type=rnn` overrides fields by their dotted name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from outrider.checkpoints.registry import method_of, methods
from outrider.data.regenerate import DataSection
from outrider.drafters.config import DrafterSection
from outrider.drafters.loss import ObjectiveConfig
from outrider.utils.documents import Section, parse_yaml, read_yaml
from outrider.utils.files import invalid_fields
from outrider.utils.packaged import packaged

_DEFAULT_METHOD = "dspark"
Precision = Literal["float32", "bfloat16"]
Model = TypeVar("Model", bound=BaseModel)


def _drafter_section(value: object) -> object:
    """A mapping becomes the section of the method it names."""
    if not isinstance(value, Mapping):
        return value
    name = value.get("algorithm", _DEFAULT_METHOD)
    name = name if isinstance(name, str) else repr(name)
    try:
        section = method_of(str(name)).section
    except ValueError as error:
        raise _refusal("algorithm", name, str(error)) from error
    fields = section.model_fields
    for unknown in value:
        if unknown not in fields:
            near = get_close_matches(str(unknown), fields, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            reason = f"no field of {name} drafters, which have {', '.join(fields)}{hint}"
            raise _refusal(unknown, value[unknown], reason)
    return section.model_validate(value)


def _refusal(field: str, value: object, reason: str) -> ValidationError:
    error = PydanticCustomError("drafter", "{reason}", {"reason": reason})
    return ValidationError.from_exception_data("drafter", [InitErrorDetails(type=error, loc=(field,), input=value)])


class OptimizerSection(Section):
    steps: int = Field(1000, ge=1)
    """Optimizer steps of the whole run; with epochs, which replace it, as many as those have."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the samples, instead of steps; the samples that do not fill an epoch's last step are left out."""
    max_minutes: float | None = Field(None, gt=0)
    """Training ends after so long at the latest, and its schedule with it: the learning rate follows the share of the
    steps or of the time, whichever is larger. Weights then depend on how fast the machine is; null: no limit."""
    sequences_per_step: int = Field(4, ge=1)
    """Conversations of one step."""
    anchors_per_step: int | None = Field(None, ge=1)
    """As many sequences as bring that many anchors, instead of sequences_per_step."""
    anchors_per_sequence: int = Field(28, ge=1)
    """Anchors drawn from each conversation; each brings gamma draft positions."""
    anchors: Literal["random", "blocks", "all"] = "random"
    """random: any response token; blocks: only those before each gamma-th one, as in plain block diffusion; all: every
    response token, however many, as for EAGLE-3."""
    learning_rate: float = Field(6e-4, gt=0)
    """The highest one, after the warm-up."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's weight decay."""
    warmup_fraction: float = Field(0.04, ge=0, lt=1)
    """Part of the steps in which the learning rate rises from 0."""
    clip: float = Field(1.0, gt=0)
    """Largest norm of the gradient."""
    max_anchors_per_forward: int | None = Field(None, ge=1)
    """A rank's share of a step is accumulated over forwards of at most this size; null: one forward."""
    max_context_per_forward: int | None = Field(None, ge=1)
    """The same in context tokens of all sequences of a forward."""
    checkpoint_activations: bool = False
    """Recompute each draft layer in the backward: less memory, slower."""

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> OptimizerSection:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError("steps and epochs both say how long training is: leave steps out, or set epochs to null")
        return self

    @model_validator(mode="after")
    def _all_anchors_or_some(self) -> OptimizerSection:
        drawn = type(self).model_fields["anchors_per_sequence"].default
        if self.anchors == "all" and self.anchors_per_sequence != drawn:
            raise ValueError("anchors: all takes every one of a conversation: leave anchors_per_sequence out")
        return self

    @model_serializer(mode="wrap")
    def _omit_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Later fields' defaults are left out, so that digests and states of recipes that do not set them agree.

        With epochs, steps are there once the trainer has counted them.
        """
        fields: dict[str, Any] = handler(self)
        added = {"anchors": "random", "epochs": None, "max_minutes": None}
        if self.epochs is not None and "steps" not in self.model_fields_set:
            del fields["steps"]
        return {name: value for name, value in fields.items() if name not in added or value != added[name]}


class FeaturesSection(Section):
    mode: Literal["online", "store"] = "online"
    """online: the target's features are computed when needed; store: written to disk before training."""
    directory: str | None = None
    """Where the store is; OUT/features when null."""
    dtype: Literal["bf16", "int8", "fp8"] = "bf16"
    """On disk; int8 and fp8 with a scale per row."""
    max_gb: float | None = Field(None, gt=0)
    """Keep at most this much on disk, as a window that training refreshes; null: the whole store."""
    shard_tokens: int = Field(16384, ge=1)
    """Tokens of a shard; one shard is in memory while it is written."""
    aux_layers: list[int] | None = None
    """Layers a complete store holds, so that drafters with different aux hidden states can share it; null: the
    drafter's own."""

    @model_validator(mode="after")
    def _store_options_have_a_store(self) -> FeaturesSection:
        if self.mode == "online" and self.max_gb is not None:
            raise ValueError("max_gb bounds a store on disk: set mode to store, or leave max_gb out")
        if self.aux_layers is not None and (self.mode == "online" or self.max_gb is not None):
            raise ValueError(
                "aux_layers is for a complete store: set mode to store without max_gb, or leave aux_layers out"
            )
        return self


class WatchSection(Section):
    """Real decoding of held-out prompts during training, the best drafter, early stopping (training/watch.py)."""

    decode_every: int | None = Field(500, ge=1)
    """Steps between decodings of held-out prompts; null: never, and held-out metrics choose the best drafter."""
    decode_prompts: int = Field(4, ge=1)
    """Held-out prompts of each decoding; 4 of 64 tokens are some 100 rounds: tau to about 0.2."""
    decode_tokens: int = Field(64, ge=1)
    """Tokens decoded for each of them."""
    temperature: float = Field(0.0, ge=0)
    """Of that decoding; 0: the likeliest token."""
    patience: int | None = Field(None, ge=1)
    """Checks in a row that may fail to improve before training stops; null: no early stopping."""
    min_delta: float = Field(0.0, ge=0)
    """The least that counts as an improvement there, in tokens per round."""


class Recipe(Section):
    target: str
    """The language model to draft for: a model id or a directory."""
    out: str
    """The directory of the run: responses, checkpoints, metrics and the drafter."""
    seed: int = Field(0, ge=0, lt=2**64)
    """Of weights, the order of samples, and anchors."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads; null: $OMP_NUM_THREADS, else as many as the machine has."""
    device: str = "auto"
    """auto: CUDA where there is one, else cpu; under torchrun each rank has its own."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of target and matrix products; parameters stay float32. auto: the faster one here, or what the run began with."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """Under torchrun; auto is ddp."""
    shard_target: bool = False
    """Spread the target's layers over the ranks."""
    compile: bool | None = None
    """torch.compile the draft layers. null: on CUDA where they can be, uncompiled with a warning where that fails."""
    feature_cache_gb: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Features in memory, wherever they come from; auto: a quarter of the free memory (training/machine.py)."""
    features: FeaturesSection = FeaturesSection()
    """Whether the target's features are stored on disk."""
    data: DataSection
    """The prompts, how they are answered, and by whom."""
    start_from: str | None = None
    """A drafter directory to go on from, relative to the recipe or to where you are: its config and weights. Fields
    of `drafter` may then be left out. Those that are set must agree with it, but for `draft_vocab_size`: another number
    chooses draft tokens anew, and what is known of a token stays with it."""
    initialize_from_target: bool = True
    """Fresh weights from the target's where the method knows how and there is no start_from; noise otherwise."""
    drafter: Annotated[SerializeAsAny[DrafterSection], BeforeValidator(_drafter_section)] = Field(
        default_factory=method_of(_DEFAULT_METHOD).section
    )
    """Fields of the method's config (drafters/NAME.py); dspark where `algorithm` is left out."""
    objective: SerializeAsAny[ObjectiveConfig] = Field(ObjectiveConfig(), validate_default=True)
    """Weights of the terms of the loss; dflash, dflash2, lilicorr: ce 1, l1 0, confidence 0, a decay by block_size;
    eagle3: soft_ce alone."""
    optimizer: OptimizerSection = OptimizerSection()
    """Steps, batches and learning rate."""
    watch: WatchSection = WatchSection()
    """Decoding of held-out prompts during training, the best drafter, early stopping."""
    log: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    """Where metrics go beside metrics.jsonl. wandb needs pip install wandb; WANDB_MODE=offline sends nothing."""
    log_every: int = Field(10, ge=1)
    """Steps between lines of metrics."""
    eval_every: int = Field(250, ge=1)
    """Steps between held-out metrics."""
    save_every: int = Field(500, ge=1)
    """Steps between checkpoints to resume from."""

    @field_validator("objective", mode="before")
    @classmethod
    def _objective_of_the_method(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, BaseModel):
            value = {name: getattr(value, name) for name in value.model_fields_set}
        section = info.data.get("drafter")  # None: it is not valid, which is told
        if section is None or not isinstance(value, Mapping):
            return value
        return section.config.objective.model_validate(section.config.default_objective(section.chosen()) | dict(value))


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, a file or a packaged one's name, and apply `key.path=value` overrides (values are YAML).

    Raises:
        ValueError: unreadable YAML, unknown or invalid fields, or a malformed override.
    """
    path = packaged(path, "recipes")
    if path.is_dir() and (path / "recipe.yaml").is_file():
        raise ValueError(f"{path} is a directory: give {path / 'recipe.yaml'}.")
    if not path.is_file():
        near = get_close_matches(path.name, [file.name for file in path.parent.glob("*.y*ml")], 1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "give one, or a recipe that outrider recipe lists."
        raise ValueError(f"no recipe {path}: there is no such file; {hint}")
    recipe = read_fields(path, Recipe, overrides, kind="recipe", needs="target, out and data")
    sources = [s.model_copy(update={"path": _beside(path, s.path)}) for s in recipe.data.prompts]
    place = recipe.data.directory
    if place is not None and (path.parent / place).is_dir():
        place = str(path.parent / place)
    apart = [_beside(path, name) for name in recipe.data.not_in]
    data = recipe.data.model_copy(update={"prompts": sources, "not_in": apart, "directory": place})
    found: dict[str, Any] = {"data": data}
    if recipe.start_from is not None:
        beside = path.parent / recipe.start_from
        there = (beside / "config.json").is_file()
        found["start_from"] = str(beside if there else packaged(recipe.start_from, "models"))
    return recipe.model_copy(update=found)


def read_fields(
    path: Path, model: type[Model], overrides: Sequence[str], *, kind: str, needs: str, flat: str | None = None
) -> Model:
    """Read a YAML file as a pydantic model, with `key.path=value` overrides.

    Args:
        kind: what messages call the file.
        needs: the fields that it must have, for messages.
        flat: as in `apply_override`.
    """
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: a {kind} is a YAML mapping with at least {needs}.")
    for override in overrides:
        apply_override(raw, override, flat)
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        known = [field.name for field in fields_of(recipe_schema() if model is Recipe else model.model_json_schema())]
        reasons = []
        for wrong, reason in zip(error.errors(), invalid_fields(error), strict=True):
            near = nearest_field(".".join(part for part in wrong["loc"] if isinstance(part, str)), known)
            unknown = wrong["type"] == "extra_forbidden"
            reasons.append(f"{reason}; did you mean {near}?" if unknown and near else reason)
        raise ValueError(f"{path}: invalid {kind}: {'; '.join(reasons)}") from error


def _beside(recipe: Path, source: str) -> str:
    candidate = recipe.parent / source
    return str(candidate) if source.endswith(".jsonl") and candidate.is_file() else source


def apply_override(raw: dict[str, Any], override: str, flat: str | None = None) -> None:
    """Set one field of a YAML mapping from `key.path=value`, the value YAML.

    Args:
        flat: name of a section whose keys are themselves paths: what follows it is one key.

    Raises:
        ValueError: malformed, or the path leads through what is no section.
    """
    key, found, value = override.partition("=")
    if not found or not key:
        raise ValueError(f"override {override!r} is not of the form key.path=value.")
    parts = key.split(".")
    if flat in parts[:-1]:
        depth = parts.index(flat) + 1
        parts[depth:] = [".".join(parts[depth:])]
    *parents, last = parts
    section = raw
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise ValueError(f"override {override!r}: {parent} is not a section.")
    try:
        section[last] = parse_yaml(value)
    except ValueError as error:
        raise ValueError(f"override {override!r}: the value is not valid YAML ({error}).") from error


# ----------------------------------------------------------------------------
# What a recipe may have, for editors and people.
# ----------------------------------------------------------------------------


class RecipeField(NamedTuple):
    """A field by its dotted name; `only` names the drafters that have it, "" where all do."""

    name: str
    kind: str
    required: bool
    default: Any
    meaning: str
    only: str = ""


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of recipes; `drafter` is the section of any method."""
    sections: Any = Union[tuple(method.section for method in methods())]  # noqa: UP007 - of a tuple
    section, meaning = method_of(_DEFAULT_METHOD).section, Recipe.model_fields["drafter"].description
    drafter = Field(default_factory=section, description=meaning)
    kinds: Any = Union[tuple(dict.fromkeys(method.config.objective for method in methods()))]  # noqa: UP007
    objective = Field(default=ObjectiveConfig(), description=Recipe.model_fields["objective"].description)
    model: Any = create_model("Recipe", __base__=Recipe, drafter=(sections, drafter), objective=(kinds, objective))
    schema: dict[str, Any] = model.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def recipe_fields() -> list[RecipeField]:
    """Every field of a recipe; a drafter's field is listed once for all methods that agree on it."""
    found: dict[tuple[str, ...], RecipeField] = {}
    owners: dict[tuple[str, ...], list[str]] = {}
    for field in fields_of(recipe_schema()):
        chosen = field.name == "drafter.algorithm"
        alike = (field.name,) if chosen else (field.name, field.kind, repr(field.default), field.meaning)
        owners.setdefault(alike, []).append(field.only)
        found.setdefault(alike, field)
        if chosen:
            names = " | ".join(owners[alike])
            found[alike] = field._replace(kind=names, default=_DEFAULT_METHOD)
    shared = len(methods())
    return [
        field._replace(only="" if not field.only or len(owners[alike]) == shared else ", ".join(owners[alike]))
        for alike, field in found.items()
    ]


def fields_of(
    schema: Mapping[str, Any], known: Mapping[str, Any] | None = None, prefix: str = "", only: str = ""
) -> Iterator[RecipeField]:
    """The fields of a pydantic model's JSON schema; one of several alternative sections is named in `only`."""
    known = schema.get("$defs", {}) if known is None else known
    for name, field in schema.get("properties", {}).items():
        alternatives = _alternatives(field)
        referred = [known.get(str(one.get("$ref", "")).rsplit("/", 1)[-1], {}) for one in alternatives]
        sections = [section for section in referred if "properties" in section]
        kinds = ["list of sections" if "items" in field else "section"] if sections else map(_kind, alternatives)
        yield RecipeField(
            prefix + name,
            kind=" or ".join(dict.fromkeys(kinds)),
            required=name in schema.get("required", ()),
            default=field.get("default"),
            meaning=" ".join(field.get("description", "").split()),
            only=only,
        )
        for section in sections:
            algorithm = section["properties"].get("algorithm", {}).get("const", "") if len(sections) > 1 else only
            yield from fields_of(section, known, prefix=f"{prefix}{name}.", only=algorithm)


def _alternatives(field: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "$ref" in field.get("items", {}):
        return [field["items"]]
    return [inner for one in field.get("anyOf", ()) for inner in _alternatives(one)] or [field]


_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema or "const" in schema:
        return " | ".join(map(str, schema.get("enum", [schema.get("const")])))
    if "items" in schema:
        return f"list of {_kind(schema['items'])}"
    bounds = [f"{sign} {schema[name]}" for name, sign in _BOUNDS.items() if name in schema]
    return " ".join([str(schema.get("type", "any")), *bounds])


def nearest_field(name: str, known: Sequence[str]) -> str | None:
    """The known dotted name that was probably meant: the same word in another section, or one spelt alike."""
    same = [other for other in known if other.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
    return next(iter([*same, *get_close_matches(name, known, 1)]), None)
