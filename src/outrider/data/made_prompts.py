"""Generate training prompts from a small grammar: the named source `made_prompts`.

    template  "How do I {skill}?{limits}"  ->  words and wordings of made_prompts.yaml in its fields  ->  a prompt

Prompt i has kind i modulo the number of kinds, so every prefix is an even mixture, and its own seed, so the first N
prompts are the same for any limit. Nothing here is taken from a data set.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from outrider.data.conversations import content_id
from outrider.utils.documents import parse_yaml

COUNT = 60_000
_FIELD = re.compile(r"\{(\w+)((?:\.\d+)*)(?::(\d+)-(\d+)(?:/(\d+))?)?\}")
_PARTS, _FEWEST_PARTS = re.compile(r"\w+|[^\w\s]"), 10  # words and signs of the first turn, roughly its tokens
_ATTEMPTS = 200  # to find a new prompt; kinds have many more than COUNT


class MadePrompt(NamedTuple):
    """A conversation with its kind and skeleton: the text with words replaced by the names of their lists and numbers
    by #."""

    id: str
    turns: tuple[str, ...]
    kind: str
    skeleton: str


def made_prompts() -> Iterator[MadePrompt]:
    """Generate COUNT distinct conversations, the kinds in turn."""
    kinds = _grammar()["kinds"]
    seen: set[tuple[str, ...]] = set()
    for number in range(COUNT):
        kind = list(kinds)[number % len(kinds)]
        for attempt in range(_ATTEMPTS):
            writer = _Writer(random.Random(f"{kind} {number} {attempt}"))
            template = writer.pick(kinds[kind])
            written = [writer.write(turn) for turn in ([template] if isinstance(template, str) else template)]
            turns = tuple(text for text, _ in written)
            if turns not in seen and len(_PARTS.findall(turns[0])) >= _FEWEST_PARTS:
                break
        else:
            raise RuntimeError(f"{kind} has no prompt number {number}")
        seen.add(turns)
        skeleton = "\n".join(skeleton for _, skeleton in written)
        yield MadePrompt(f"made-{kind}-{content_id(turns, ())[:12]}", turns, kind=kind, skeleton=skeleton)


@cache
def _grammar() -> dict[str, Any]:
    text = (resources.files("outrider.data") / "made_prompts.yaml").read_text(encoding="utf-8")
    grammar: dict[str, Any] = parse_yaml(text)
    return grammar


class _Writer:
    """Fills the fields of one conversation's templates; a repeated field keeps its value."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._chosen: dict[str, dict[str, str]] = {}  # list -> number of the field -> its option

    def pick(self, options: Sequence[Any]) -> Any:
        """Pick an option. Only the numbers of `Random.random` are the same in every version of Python."""
        return options[int(self._chance.random() * len(options))]

    def write(self, template: str, number: str = "") -> tuple[str, str]:
        """Fill a template; return text and skeleton. `number`: prefix of the numbers of its fields."""
        text = skeleton = ""
        end = 0
        for field in _FIELD.finditer(template):
            before = template[end : field.start()]
            value, shown = self._fill(field, number)
            vowel = re.search(r"\b[Aa] $", before) is not None and value[:1] in tuple("aeiouAEIOU")
            text += (before[:-1] + "n " if vowel else before) + value
            skeleton += before + shown
            end = field.end()
        return text + template[end:], skeleton + template[end:]

    def _fill(self, field: re.Match[str], number: str) -> tuple[str, str]:
        written, suffix, low, high, step = field.groups()
        name, place = written[0].lower() + written[1:], suffix + number
        chosen = self._chosen.setdefault(name, {})
        if low is not None:
            return chosen.setdefault(place, str(self.pick(range(int(low), int(high) + 1, int(step or 1))))), "#"
        words = _grammar()["words"].get(name)
        if place not in chosen:
            options = words or _grammar()["wordings"][name]
            taken = chosen.values()
            left = [option for option in options if option not in taken] if taken else options
            chosen[place] = self.pick(left or options)
        text, skeleton = self.write(chosen[place], place)
        text = text[:1].upper() + text[1:] if written[0].isupper() else text
        return text, f"{{{name}}}" if words else skeleton
