"""Tool calls in a response's text, in the three forms that the targets' chat templates teach: read, and constrained.

    hermes    <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>                      Qwen 2.5, Qwen3
    xml       <tool_call><function=f><parameter=x>1</parameter></function></tool_call>       Qwen3-Next, Qwen3.5
    llama     {"name": "f", "parameters": {"x": 1}}, the whole response                       Llama 3.1 and newer

Text between two marks that is no call is the response's text, as it was written; white space between two calls is not.

`call_structure` describes a response whose calls a request asks for, for the grammar that it is decoded under.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.decoding.structured import JSONWithin, StructureError
from outrider.serving.schema import ChatRequest, Function

Format = Literal["hermes", "xml", "llama"]
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_NEXT_CALL = re.compile(rf"{_OPEN}\n\s*<function=")  # a value of JSON cannot hold it: texts have no line breaks there
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A function's name and its arguments, a JSON object as text."""

    name: str
    arguments: str


def format_of(template: str) -> Format | None:
    """The form of tool calls that a chat template asks for; None if it is none of those above."""
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
        self._behind_call = False  # nothing but white space has come since a call
        self._passed = self._quotes = 0  # of a call that has begun: characters that do not end it, quotes in them
        self._first_mark = False  # there was a call that cannot be read: from there on the first mark ends each

    def push(self, text: str, final: bool) -> tuple[str, list[ToolCall]]:
        """(text that belongs to no call, calls that are complete); `final`: there will be no more text."""
        self._held += text
        return self._whole(final) if self.format == "llama" else self._marked(final)

    def _marked(self, final: bool) -> tuple[str, list[ToolCall]]:
        read: Callable[[str], ToolCall | None] = self._json if self.format == "hermes" else self._xml
        content, calls = "", list[ToolCall]()
        while (begin := self._held.find(_OPEN)) >= 0:
            start = begin + len(_OPEN)
            end = self._end_of_call(start)
            if end < 0 and not final:
                content, self._held = content + self._outside(self._held[:begin]), self._held[begin:]
                return content, calls
            call = read(self._held[start : len(self._held) if end < 0 else end])
            if call is None and end != self._held.find(_CLOSE, start):
                # A quote too many, or a mark too few: calls that come after the first mark can be read all the same.
                # What they hold is not counted again, or the work would grow with the square of the text.
                self._first_mark, self._passed, self._quotes = True, 0, 0
                continue
            after = len(self._held) if end < 0 else end + len(_CLOSE)
            content += self._outside(self._held[:begin] if call else self._held[:after])
            calls += [call] if call else []
            self._behind_call = call is not None
            self._held = self._held[after:]
        kept = 0 if final else _beginning(self._held)
        if self._behind_call and not final and not self._held[: len(self._held) - kept].strip():
            return content, calls
        content += self._outside(self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]
        return content, calls

    def _end_of_call(self, start: int) -> int:
        """Where the mark begins that ends the call; -1: it has not come. In JSON a text may have such a mark in it."""
        while (end := self._held.find(_CLOSE, start + self._passed)) >= 0:
            passed = self._held[start + self._passed : end]
            self._quotes += _ESCAPED.sub("", passed).count('"')
            complete = passed.rstrip().endswith("</function>") if self.format == "xml" else self._quotes % 2 == 0
            if complete or self._first_mark:
                self._passed = self._quotes = 0
                return end
            self._passed = end + 1 - start
        return -1

    def _outside(self, text: str) -> str:
        """The part of the text before a call, or after all of them, that is content."""
        if self._behind_call and not text.strip():
            return ""
        self._behind_call = False
        return text

    def _whole(self, final: bool) -> tuple[str, list[ToolCall]]:
        self._text = self._text or self._held.lstrip()[:1] not in ("{", "")
        if not (self._text or final):
            return "", []
        text, self._held = self._held, ""
        call = None if self._text else self._json(text)
        return ("", [call]) if call else (text, [])

    def _json(self, text: str) -> ToolCall | None:
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict):
            return None
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if name not in self._schemas or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))

    def _xml(self, text: str) -> ToolCall | None:
        match = _FUNCTION.fullmatch(text)
        if match is None or match[1] not in self._schemas or _NEXT_CALL.search(text):
            return None
        types = self._schemas[match[1]].get("properties") or {}
        arguments = {name: _typed(value, types.get(name)) for name, value in _PARAMETER.findall(match[2])}
        return ToolCall(match[1], json.dumps(arguments, ensure_ascii=False))


def _typed(value: str, schema: Any) -> Any:
    """The value that a parameter's text stands for: text if the schema says string, else JSON if it is any."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _beginning(text: str) -> int:
    """Length of the longest end of `text` that begins the opening mark."""
    return next((n for n in range(min(len(text), len(_OPEN) - 1), 0, -1) if _OPEN.startswith(text[-n:])), 0)


# ----------------------------------------------------------------------------
# Calls that are constrained.
# ----------------------------------------------------------------------------

_ANY_OBJECT = {"type": "object"}
_FREE_TEXT = {"type", "title", "description", "default", "examples", "enum"}  # keywords of a text in the XML form
_DEFINITIONS = ("$defs", "definitions")
# Keywords of the arguments as a whole that the XML form can follow, and those that only describe.
_ARGUMENTS = {"type", "properties", "required", "additionalProperties", *_DEFINITIONS}
_ARGUMENTS |= {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"}
_TERMINALS = [
    rf"OUTSIDE: /(.|\n)*/ & ~/(.|\n)*{_OPEN}(.|\n)*/",
    f'BEGIN: OUTSIDE "{_OPEN}"',
    r"OTHER: /(\s*[^{\s](.|\n)*)?/",  # llama: text that is no call
    r'VALUE: (/(.|\n)*/ & ~/(.|\n)*<\/(parameter|function|tool_call)>(.|\n)*/) "</parameter>\n"',
    r"KEY: /[^<>\s]+/",
]


def call_structure(request: ChatRequest, format: Format) -> JSONWithin | None:
    """The grammar of responses that call as the request asks; None: any text.

        tool_choice required, or a named tool    one of these functions is called, and nothing else is written
        strict functions, or one call at most    text, and calls if the target begins them

    Arguments follow the function's schema if it must be called or is strict; else they are any JSON object.

    Raises:
        StructureError: the form cannot express a schema, or the answer is to follow something else as well.
    """
    needed, functions = request.must_call, [tool.function for tool in request.tools]
    one = format == "llama" or not request.parallel_tool_calls
    bounded = one and format != "llama"  # by the request; the form llama has one call in any case
    if not (needed or bounded or any(function.strict for function in functions)):
        return None
    if request.structure is not None:
        raise StructureError("response_format and structured_outputs do not go with calls that are constrained, too.")
    rules = _Rules(format)
    bodies = [rules.call(function, bool(needed) or function.strict) for function in needed or functions]
    if needed:
        begin = "" if format == "llama" else f'"{_OPEN}" '
        start = f"{begin}call" + ("" if one else rf' ("\n" {begin}call)*')
    elif format == "llama":
        start = "call | OTHER"
    else:
        start = "BEGIN call | OUTSIDE" if one else "(BEGIN call)* OUTSIDE"
    return JSONWithin("\n".join([f"start: {start}", f"call: {' | '.join(bodies)}", *_TERMINALS]), tuple(rules.schemas))


class _Rules:
    """Writes calls, without the mark that begins them, as the right-hand sides of a Lark grammar."""

    def __init__(self, format: Format) -> None:
        self.schemas: list[Mapping[str, Any]] = []
        self._format = format

    def call(self, function: Function, follows: bool) -> str:
        """A call of a function, whose arguments follow its schema or are any object."""
        schema = _ANY_OBJECT | function.parameters if follows else _ANY_OBJECT
        if schema["type"] != "object":
            raise StructureError(f"tools: the parameters of {function.name!r} are no object.")
        if self._format == "xml":
            return self._xml(function.name, schema)
        before, arguments, after = (
            ("", "parameters", "}") if self._format == "llama" else ("\n", "arguments", f"}}\n{_CLOSE}")
        )
        opening = f'{before}{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{arguments}": '
        return f"{_text(opening)} {self._json(schema)} {_text(after)}"

    def _json(self, schema: Mapping[str, Any]) -> str:
        self.schemas.append(schema)
        return f"json_{len(self.schemas) - 1}"

    def _xml(self, name: str, schema: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties") or {}, set(schema.get("required") or [])
        others = schema.get("additionalProperties", True)
        unknown = schema.keys() - _ARGUMENTS
        if not isinstance(others, bool) and others != {}:
            unknown.add("additionalProperties")
        if unknown:
            raise StructureError(
                f"tools: {min(unknown)} of {name!r} cannot be followed in this target's form of calls."
            )
        if "properties" not in schema and not required:
            parts = [] if others is False else ['("<parameter=" KEY ">\\n" VALUE)*']
        else:
            shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
            _check_references(name, properties, shared)
            parts = []
            for key, value in properties.items():
                part = _text(f"<parameter={_word(key)}>\n") + " " + self._value(key, value, shared)
                parts.append(part if key in required else f"({part})?")
            if missing := required - properties.keys():
                raise StructureError(f"tools: {name!r} requires {min(missing)!r}, which is none of its properties.")
        return " ".join([_text(f"\n<function={_word(name)}>\n"), *parts, _text(f"</function>\n{_CLOSE}")])

    def _value(self, key: str, schema: Any, shared: Mapping[str, Any]) -> str:
        """A parameter's value and the mark that ends it: a text as it is, else JSON."""
        end = _text("\n</parameter>\n")
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise StructureError(f"tools: the schema of {key!r} is no object.")
        if schema.get("type") != "string":
            return f"{self._json({**schema, **shared} if _references(schema) else schema)} {end}"
        if unknown := schema.keys() - _FREE_TEXT:
            raise StructureError(f"tools: {min(unknown)} of {key!r} cannot be followed in this target's form of calls.")
        if "enum" not in schema:
            return "VALUE"
        if not isinstance(schema["enum"], list) or not all(isinstance(one, str) for one in schema["enum"]):
            raise StructureError(f"tools: the enum of {key!r} is no list of texts.")
        return f"({' | '.join(_text(one) for one in schema['enum'])}) {end}"


def _check_references(name: str, properties: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
    """In the XML form each argument has a schema of its own, which refers to shared definitions alone."""
    if not (used := _references(properties)):
        return
    beginnings = tuple(f"#/{key}/" for key in shared)
    if foreign := {one for one in used | _references(shared) if not one.startswith(beginnings)}:
        raise StructureError(
            f"tools: the $ref {min(foreign)[:100]!r} of {name!r} cannot be followed in this target's form of calls; "
            "refer to its $defs."
        )


def _references(schema: Any) -> set[str]:
    references, parts = set[str](), [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            parts += part.values()
            if isinstance(reference := part.get("$ref"), str):
                references.add(reference)
        elif isinstance(part, list):
            parts += part
    return references


def _text(text: str) -> str:
    """A literal of Lark's."""
    return json.dumps(text, ensure_ascii=False)


def _word(name: str) -> str:
    """A name as an XML mark can hold it."""
    if not re.fullmatch(r"[^<>\s]+", name):
        raise StructureError(f"tools: the name {name[:100]!r} cannot be written in this target's form of calls.")
    return name
