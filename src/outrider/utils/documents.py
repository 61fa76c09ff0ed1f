"""Read untrusted JSON and YAML with bounded depth and size, so that recursion over the values cannot overflow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

_DEEPEST = 100  # maximum nesting of mappings and lists; Outrider's files have fewer than ten levels
_MOST_YAML_VALUES = 1_000_000  # aliases count each time: a few lines can expand beyond memory


class Section(BaseModel):
    """Base of sections of a recipe or another document.

    Unknown fields are refused; a field's docstring is its description in the JSON schema.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and kind in (int, float, int | None, float | None):
            raise ValueError(f"{value} is not a number")
        return value


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: it is not JSON or not Unicode, is nested more than 100 deep, or has a number of thousands of digits.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    brackets = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if brackets > _DEEPEST:  # fewer brackets cannot be nested deeper: most texts skip the check
        _check_bounds(value, len(text))
    return value


def read_json(path: Path) -> Any:
    """Read the value of a JSON file.

    Raises:
        ValueError: see `parse_json`; or the path is no regular file. The message names the path.
        OSError: the file cannot be read.
    """
    return _read(path, "JSON", parse_json)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read the mapping in a JSON file.

    Raises:
        ValueError: see `read_json`; or the value is no mapping.
    """
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: not a JSON mapping of fields.")
    return fields


def parse_yaml(text: str) -> Any:
    """Parse a YAML text.

    Raises:
        ValueError: it is not YAML, is nested more than 100 deep, or has more than a million values with aliases
            expanded.
    """
    import yaml  # imported here, because most callers read only JSON

    try:
        value = yaml.safe_load(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a 30th of February, too many digits
        raise ValueError(" ".join(str(error).split())) from error
    _check_bounds(value, _MOST_YAML_VALUES)
    return value


def read_yaml(path: Path) -> Any:
    """Read the value of a YAML file.

    Raises:
        ValueError: see `parse_yaml`; or the path is no regular file. The message names the path.
        OSError: the file cannot be read.
    """
    return _read(path, "YAML", parse_yaml)


def _read(path: Path, language: str, parse: Callable[[str], Any]) -> Any:
    if os.path.lexists(path) and not path.is_file():  # reading a pipe would wait forever
        raise ValueError(f"{path} is not a regular file.")
    try:
        return parse(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError, too
        raise ValueError(f"{path}: not valid {language} ({error}).") from error


_TOO_DEEP = f"lists and mappings are nested more than {_DEEPEST} deep"


def _check_bounds(value: object, limit: int) -> None:
    """Refuse a value that is nested too deep or contains more than `limit` values."""
    level, count = [value], 0
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        count += len(level)
        if not level:
            return
        if count > limit:
            raise ValueError(f"more than {limit} values, with aliases expanded")
    raise ValueError(_TOO_DEEP)
