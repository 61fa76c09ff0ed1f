"""Reading of JSON and YAML that others wrote, bounded in depth and size: recursion over what is read cannot
overflow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

_DEEPEST = 100  # mappings and lists inside one another; ours have fewer than ten
_MOST_YAML_VALUES = 1_000_000  # aliases counted each time: a few lines can mean more than fits into memory


class Section(BaseModel):
    """A section of a recipe or another document. Unknown fields are refused; a field's docstring is its description in
    the JSON schema.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and kind in (int, float, int | None, float | None):
            raise ValueError(f"{value} is no number")
        return value


def parse_json(text: str | bytes) -> Any:
    """The value that a JSON text means.

    Raises:
        ValueError: not JSON, not in a Unicode encoding, nested more than 100 deep, or a number of thousands of digits.
    """
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    brackets = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if brackets > _DEEPEST:  # fewer cannot be nested deeper, so most texts need no walk
        _check_bounds(found, len(text))
    return found


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        ValueError: see `parse_json`, or the path is a directory or a pipe; the message names it.
        OSError: it cannot be read.
    """
    return _read(path, "JSON", parse_json)


def read_mapping(path: Path) -> dict[str, Any]:
    """The fields in a JSON file.

    Raises:
        ValueError: see `read_json`, or not a mapping.
    """
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a JSON mapping of fields.")
    return found


def parse_yaml(text: str) -> Any:
    """The value that a YAML text means.

    Raises:
        ValueError: not YAML, nested more than 100 deep, or more than a million values where aliases are written out.
    """
    import yaml  # here: JSON is read without it

    try:
        found = yaml.safe_load(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a 30th of February, too many digits
        raise ValueError(" ".join(str(error).split())) from error
    _check_bounds(found, _MOST_YAML_VALUES)
    return found


def read_yaml(path: Path) -> Any:
    """The value in a YAML file.

    Raises:
        ValueError: see `parse_yaml`, or the path is a directory or a pipe; the message names it.
        OSError: it cannot be read.
    """
    return _read(path, "YAML", parse_yaml)


def _read(path: Path, language: str, parse: Callable[[str], Any]) -> Any:
    if os.path.lexists(path) and not path.is_file():  # reading a pipe would wait for ever
        raise ValueError(f"{path} is no file.")
    try:
        return parse(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError, too
        raise ValueError(f"{path}: not valid {language} ({error}).") from error


_TOO_DEEP = f"lists and mappings are nested more than {_DEEPEST} deep"


def _check_bounds(value: object, most: int) -> None:
    """Refuse a value that is nested too deep, or has more than `most` values inside it."""
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
        if count > most:
            raise ValueError(f"more than {most} values, aliases written out")
    raise ValueError(_TOO_DEEP)
