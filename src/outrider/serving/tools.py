"""Tool calls in a response's text, in the three forms that the targets' chat templates teach.

    hermes    <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>                      Qwen 2.5, Qwen3
    xml       <tool_call><function=f><parameter=x>1</parameter></function></tool_call>       Qwen3-Next, Qwen3.5
    llama     {"name": "f", "parameters": {"x": 1}}, the whole response                       Llama 3.1 and newer

Text between two marks that is no call is the response's text, as it was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Format = Literal["hermes", "xml", "llama"]
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A function's name and its arguments, a JSON object as text."""

    name: str
    arguments: str


def format_of(template: str) -> Format | None:
    """In which form a chat template asks for tool calls; None where it is another one than those above."""
    if _OPEN in template:
        return "xml" if "<function=" in template else "hermes"
    return "llama" if '"parameters"' in template and "ipython" in template.lower() else None


class ToolCallParser:
    """Takes a response's text piece by piece and separates its tool calls from the rest.

    Args:
        tools: what may be called, as chat templates read it; the types of XML parameters are theirs.
    """

    def __init__(self, format: Format, tools: Sequence[Mapping[str, Any]]) -> None:
        self.format = format
        self._schemas: dict[str, Mapping[str, Any]] = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools
        }
        self._held = ""
        self._text = False  # llama: the response has begun with something else than a call

    def push(self, text: str, final: bool) -> tuple[str, list[ToolCall]]:
        """(text that belongs to no call, calls that are complete); `final`: there will be no more text."""
        self._held += text
        return self._whole(final) if self.format == "llama" else self._marked(final)

    def _marked(self, final: bool) -> tuple[str, list[ToolCall]]:
        read: Callable[[str], ToolCall | None] = self._json if self.format == "hermes" else self._xml
        content, calls = "", list[ToolCall]()
        while (begin := self._held.find(_OPEN)) >= 0:
            end = self._held.find(_CLOSE, begin)
            if end < 0 and not final:
                content, self._held = content + self._held[:begin], self._held[begin:]
                return content, calls
            after = len(self._held) if end < 0 else end + len(_CLOSE)
            call = read(self._held[begin + len(_OPEN) : len(self._held) if end < 0 else end])
            content += self._held[:begin] if call else self._held[:after]
            calls += [call] if call else []
            self._held = self._held[after:]
        kept = 0 if final else _beginning(self._held)
        content += self._held[: len(self._held) - kept]
        self._held = self._held[len(self._held) - kept :]
        return content, calls

    def _whole(self, final: bool) -> tuple[str, list[ToolCall]]:
        self._text = self._text or self._held.lstrip()[:1] not in ("{", "")
        if not (self._text or final):
            return "", []
        text, self._held = self._held, ""
        call = None if self._text else self._json(text)
        return ("", [call]) if call else (text, [])

    def _json(self, text: str) -> ToolCall | None:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
        if name not in self._schemas or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))

    def _xml(self, text: str) -> ToolCall | None:
        found = _FUNCTION.fullmatch(text)
        if found is None or found[1] not in self._schemas:
            return None
        types = self._schemas[found[1]].get("properties") or {}
        arguments = {name: _typed(value, types.get(name)) for name, value in _PARAMETER.findall(found[2])}
        return ToolCall(found[1], json.dumps(arguments, ensure_ascii=False))


def _typed(value: str, schema: Any) -> Any:
    """The value that a parameter's text stands for: text where the schema says string, else JSON where it is any."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _beginning(text: str) -> int:
    """Length of the longest end of `text` that begins the opening mark."""
    return next((n for n in range(min(len(text), len(_OPEN) - 1), 0, -1) if _OPEN.startswith(text[-n:])), 0)
