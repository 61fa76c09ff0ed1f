"""Prompt files: JSON Lines, one `{"id": ..., "turns": [user turn, ...]}` per line; `id` is optional."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from outrider.data import stdlib


class _Line(BaseModel):
    turns: list[str] = Field(min_length=1)
    id: str | int | None = None


@dataclass(frozen=True)
class Prompt:
    """The user's turns of one conversation."""

    id: str
    turns: tuple[str, ...]


def shipped_sets() -> dict[str, Path]:
    """The prompt sets inside the package, by name (train_chat, eval_math, ...)."""
    folder = Path(str(resources.files("outrider.data") / "prompts"))
    return {path.stem: path for path in sorted(folder.glob("*.jsonl"))}


def load_prompts(path_or_name: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read a prompt file, or a shipped set or `stdlib_functions` by its name.

    Raises:
        ValueError: no such file or set, or a malformed line (the message names file and line).
    """
    if str(path_or_name) == stdlib.NAME:
        return [Prompt(name, (turn,)) for name, turn in islice(stdlib.stdlib_turns(), limit)]
    path = shipped_sets().get(str(path_or_name), Path(path_or_name))
    if not path.is_file():
        raise ValueError(
            f"no prompt file {str(path_or_name)!r}; give a JSONL path or one of the shipped sets: "
            f"{', '.join([*shipped_sets(), stdlib.NAME])}."
        )
    prompts: list[Prompt] = []
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if limit is not None and len(prompts) >= limit:
                break
            if not text.strip():
                continue
            try:
                line = _Line.model_validate_json(text)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                raise ValueError(
                    f"{path}:{number}: {where + ': ' if where else ''}{first['msg']}. Each line must be "
                    '{"turns": ["user turn", ...]} with an optional "id".'
                ) from error
            if not all(turn.strip() for turn in line.turns):
                raise ValueError(f"{path}:{number}: an empty turn. Remove the line or write a prompt.")
            prompts.append(Prompt(str(line.id if line.id is not None else f"{path.stem}-{number}"), tuple(line.turns)))
    if not prompts:
        raise ValueError(f"{path}: no prompts in the file.")
    return prompts
