"""A recipe: everything one training run depends on, as YAML, checked before anything is loaded.

`outrider train RECIPE.yaml optimizer.steps=200 drafter.markov_head_type=rnn` overrides fields by their dotted name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from outrider.data.regenerate import DataSection, Section
from outrider.drafters.config import DrafterSection
from outrider.drafters.registry import method_of
from outrider.utils.files import invalid_fields

_DEFAULT_METHOD = "dspark"
Precision = Literal["float32", "bfloat16"]
Model = TypeVar("Model", bound=BaseModel)


def _drafter_section(value: object) -> object:
    """A mapping becomes the section of the method it names."""
    if not isinstance(value, Mapping):
        return value
    name = value.get("algorithm", _DEFAULT_METHOD)
    try:
        section = method_of(name).section
    except ValueError as error:
        raise _refusal("algorithm", name, str(error)) from error
    fields = section.model_fields
    for unknown in value:
        if unknown not in fields:
            raise _refusal(unknown, value[unknown], f"no field of {name} drafters, which have {', '.join(fields)}")
    return section.model_validate(value)


def _refusal(field: str, value: object, reason: str) -> ValidationError:
    error = PydanticCustomError("drafter", "{reason}", {"reason": reason})
    return ValidationError.from_exception_data("drafter", [InitErrorDetails(type=error, loc=(field,), input=value)])


class ObjectiveConfig(Section):
    """Weights of the three terms of the loss and the decay length in positions (training/loss.py)."""

    ce: float = Field(0.1, ge=0)
    l1: float = Field(0.9, ge=0)  # of the 1-norm ||p_d - p_t||_1, DeepSpec's l1_loss_alpha
    confidence: float = Field(1.0, ge=0)
    decay: float = Field(4.0, gt=0)

    def position_weights(self, gamma: int, device: torch.device) -> torch.Tensor:
        """w_k = exp(-(k - 1) / decay) for k = 1..gamma."""
        return torch.exp(-torch.arange(gamma, device=device, dtype=torch.float32) / self.decay)


class OptimizerSection(Section):
    steps: int = Field(1000, ge=1)
    sequences_per_step: int = Field(4, ge=1)
    anchors_per_step: int | None = Field(None, ge=1)  # as many sequences as bring that many, instead
    anchors_per_sequence: int = Field(28, ge=1)
    # Any response token, or only those before each gamma-th one, as in plain block diffusion (training/batches.py).
    anchors: Literal["random", "blocks"] = "random"
    learning_rate: float = Field(6e-4, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    warmup_fraction: float = Field(0.04, ge=0, lt=1)
    clip: float = Field(1.0, gt=0)
    # A rank's share of a step is accumulated over forwards of at most this size; null: one forward.
    max_anchors_per_forward: int | None = Field(None, ge=1)
    max_context_per_forward: int | None = Field(None, ge=1)  # context tokens, of all its sequences
    checkpoint_activations: bool = False  # recompute each draft layer in the backward

    @model_serializer(mode="wrap")
    def _omit_default_anchors(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The default is left out, so that digests and states of recipes that do not set it agree."""
        fields: dict[str, Any] = handler(self)
        if self.anchors == "random":
            fields.pop("anchors", None)
        return fields


class FeaturesSection(Section):
    mode: Literal["online", "store"] = "online"
    directory: str | None = None  # OUT/features when null
    dtype: Literal["bf16", "int8", "fp8"] = "bf16"  # on disk; int8 and fp8 with a scale per row
    max_gb: float | None = Field(None, gt=0)  # keep at most this much on disk, as a window that training refreshes
    shard_tokens: int = Field(16384, ge=1)  # one shard is in memory while it is written
    # Layers a complete store holds, so that drafters with different aux hidden states can share it; null: the drafter's
    # own.
    aux_layers: list[int] | None = None

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

    decode_every: int | None = Field(500, ge=1)  # steps; null: never, and held-out metrics choose the best drafter
    decode_prompts: int = Field(4, ge=1)  # 4 of 64 tokens are some 100 rounds: tau to about 0.2
    decode_tokens: int = Field(64, ge=1)
    temperature: float = Field(0.0, ge=0)
    patience: int | None = Field(None, ge=1)  # checks in a row that may fail to improve; null: no early stopping
    min_delta: float = Field(0.0, ge=0)  # the least that counts as an improvement there, in tokens per round


class Recipe(Section):
    target: str
    out: str
    seed: int = 0
    threads: int | None = Field(None, ge=1)  # CPU threads; null: $OMP_NUM_THREADS, else as many as the machine has
    device: str = "auto"  # CUDA where there is one, else cpu; under torchrun each rank has its own
    # Of target and matrix products; parameters stay float32. auto: the faster one here, or what the run began with.
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"  # under torchrun; auto is ddp
    shard_target: bool = False  # spread the target's layers over the ranks
    compile: bool = False  # torch.compile the draft layers (CUDA)
    # Features in memory, wherever they come from; auto: a quarter of the free memory (utils/machine.py).
    feature_cache_gb: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    features: FeaturesSection = FeaturesSection()
    data: DataSection
    # A drafter directory to go on from, relative to the recipe or to where you are: its config and weights. Fields of
    # `drafter` may then be left out, and those that are set must agree with it.
    start_from: str | None = None
    initialize_from_target: bool = True  # where the method knows how and there is no start_from; noise otherwise
    # Fields of the method's config (drafters/NAME.py); the default method where `algorithm` is left out.
    drafter: Annotated[SerializeAsAny[DrafterSection], BeforeValidator(_drafter_section)] = Field(
        default_factory=method_of(_DEFAULT_METHOD).section
    )
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerSection = OptimizerSection()
    watch: WatchSection = WatchSection()
    log_every: int = Field(10, ge=1)
    eval_every: int = Field(250, ge=1)
    save_every: int = Field(500, ge=1)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key.path=value` overrides (values are YAML).

    Raises:
        ValueError: unreadable YAML, unknown or invalid fields, or a malformed override.
    """
    if not path.is_file():
        raise ValueError(f"no recipe {path}; the project's own are in recipes/.")
    recipe = read_yaml(path, Recipe, overrides, kind="recipe", needs="target, out and data")
    sources = [s.model_copy(update={"path": _beside(path, s.path)}) for s in recipe.data.prompts]
    found: dict[str, Any] = {"data": recipe.data.model_copy(update={"prompts": sources})}
    if recipe.start_from is not None and (path.parent / recipe.start_from / "config.json").is_file():
        found["start_from"] = str(path.parent / recipe.start_from)
    return recipe.model_copy(update=found)


def read_yaml(path: Path, model: type[Model], overrides: Sequence[str], *, kind: str, needs: str) -> Model:
    """Read a YAML file as a pydantic model, with `key.path=value` overrides.

    Args:
        kind: what messages call the file.
        needs: the fields that it must have, for messages.

    Raises:
        ValueError: unreadable YAML, unknown or invalid fields, or a malformed override.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: a {kind} is a YAML mapping with at least {needs}.")
    for override in overrides:
        apply_override(raw, override)
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ValueError(f"{path}: invalid {kind}: {'; '.join(invalid_fields(error))}") from error


def _beside(recipe: Path, source: str) -> str:
    candidate = recipe.parent / source
    return str(candidate) if source.endswith(".jsonl") and candidate.is_file() else source


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one field of a YAML mapping from `key.path=value`, the value YAML.

    Raises:
        ValueError: malformed, or the path leads through what is no section.
    """
    key, found, value = override.partition("=")
    if not found or not key:
        raise ValueError(f"override {override!r} is not of the form key.path=value.")
    *parents, last = key.split(".")
    section = raw
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise ValueError(f"override {override!r}: {parent} is not a section.")
    try:
        section[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"override {override!r}: the value is not valid YAML ({reason}).") from error
