"""Outrider's dialect, for methods without a maker's dialect that stores all of them.

{"architectures": ["Outrider...Model"], "model_type": "outrider_drafter", "algorithm": NAME, fields of the config}
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from outrider.checkpoints.dialects.base import (
    LARGEST_VOCABULARY,
    LONGEST_CONTEXT,
    MOST_DRAFTS,
    MOST_LAYERS,
    WIDEST,
    ExportedCheckpoint,
    Fields,
    Source,
    TargetFacts,
)
from outrider.checkpoints.dialects.blocks import read_scaling, read_vocabulary, write_vocabulary
from outrider.drafters.base import DrafterWeights, DraftModule
from outrider.drafters.config import DrafterConfig
from outrider.drafters.rope import RopeScaling

_TYPE = "outrider_drafter"
_BESIDE = {"architectures", "algorithm", "model_type", "dtype"}  # allowed besides the config's fields
_HIGHEST = {  # bounds of numbers that the shapes of tensors do not bound
    "max_position_embeddings": LONGEST_CONTEXT,
    "sliding_window": LONGEST_CONTEXT,
    "vocab_size": LARGEST_VOCABULARY,
    "draft_vocab_size": LARGEST_VOCABULARY,
    **dict.fromkeys(("num_target_layers", "num_hidden_layers", "num_layers", "num_modules"), MOST_LAYERS),
    **dict.fromkeys(("gamma", "block_size", "num_heads"), MOST_DRAFTS),
}
_MAY_BE_ZERO = {"mask_token_id", "markov_rank"}


class Own:
    """Outrider's dialect for one method."""

    name = "Outrider"
    prefix = ""

    def __init__(self, config: type[DrafterConfig], module: type[DraftModule]) -> None:
        self._config, self._module = config, module
        self.methods: tuple[str, ...] = (config.algorithm,)
        self.spelling = f"Outrider{''.join(part.capitalize() for part in config.algorithm.split('_'))}Model"

    def reads(self, raw: Mapping[str, Any]) -> bool:
        return self.spelling in (raw.get("architectures") or [])

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        kinds = typing.get_type_hints(self._config)
        wanted = [field.name for field in dataclasses.fields(self._config)]
        if unknown := sorted(set(raw) - set(wanted) - _BESIDE):
            raise ValueError(
                f"{source.where}: a {self._config.algorithm} drafter has no fields {', '.join(unknown)}; remove them."
            )
        fields = Fields(raw, source.where, self.name)
        given = {name: _value(fields, name, kinds[name]) for name in wanted if name in raw or kinds[name] is not bool}
        config = self._config(**given)
        return read_vocabulary(config, tensors, source, kind=self._module)

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        names = {"architectures": [self.spelling], "algorithm": self._config.algorithm, "model_type": _TYPE}
        return ExportedCheckpoint({**names, **dataclasses.asdict(parts.config)}, write_vocabulary(parts))


def _value(fields: Fields, name: str, kind: Any) -> Any:
    """Read a field of the type that the config's dataclass declares."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):  # X | None
        if name not in fields:
            return None
        (kind,) = (option for option in typing.get_args(kind) if option is not types.NoneType)
    if kind is RopeScaling:
        return read_scaling(fields.section(name))
    if kind is bool:
        return fields.flag(name)
    if kind is int:
        return fields.integer(name, low=int(name not in _MAY_BE_ZERO), high=_HIGHEST.get(name, WIDEST))
    if kind is float:
        return fields.number(name)
    if kind is str or typing.get_origin(kind) is typing.Literal:
        return fields.text(name)  # the config checks the choice
    assert typing.get_origin(kind) is tuple, f"{name}: a config field of kind {kind} has no spelling in JSON here"
    if typing.get_args(kind)[0] is not int:
        return fields.texts(name)  # the config checks the choice
    return fields.integers(name, low=-1, high=MOST_LAYERS)
