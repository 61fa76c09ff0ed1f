"""Structured output: responses that follow a JSON schema, a regular expression, a choice of texts or a grammar.

    StructuredOutput --compile--> Grammar --start, once per request--> GrammarState.allowed(drafts): bool [V]

    target's row k     logits -> -inf where a token may not follow the drafts before it -> warp -> p_t
    a drawn draft      logits -> the same mask -> warp -> p_d, from which it is drawn
    a chosen draft     left out where it may not follow (drafters/draft.py)

Both distributions are masked before they are compared, so the response is distributed as in plain constrained decoding
(`tests/proof/test_proof_structured.py`). Grammars are llguidance's (github.com/guidance-ai/llguidance): it reads the
target's own tokenizer, computes a mask when it is asked for one, and takes tokens back.

Shapes: V vocab.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import Any, Protocol, cast

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer
from torch import Tensor

from outrider.target.model import DecodingTarget

# JSON may have one space, or a line break with indentation, between two parts: without a bound a small model may write
# white space until its tokens run out.
WHITESPACE = r"( |\n {0,20})"
_SPACES = {"x-guidance": {"whitespace_pattern": WHITESPACE}}  # of a schema that is a part of a grammar
_MOST_CHARACTERS = 100_000
_MOST_RULES = 1000  # llguidance follows a chain of rules by recursion, which ends the process beyond some 3,000
# llguidance reads numbers as float64: from here on two integers may be one, and some near -2^63 end the process.
_LEAST_INEXACT = 2**53
_BOUNDS = {"maximum": 1, "exclusiveMaximum": 1, "minimum": -1, "exclusiveMinimum": -1}
_VALUES = ("const", "enum", "default", "examples")  # keywords whose content is no schema
# An automaton has a state for every remainder of `multipleOf`; the limits below do not count them, 10^6 take 17 s.
_MOST_REMAINDERS = 10_000
# A request's mask is to take milliseconds: with these limits the worst found took 150, and then ended its request.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=250_000, step_lexer_fuel=50_000, max_lexer_states=50_000, verbose_errors=False
)
_KEPT_GRAMMARS = 64  # compiled; a server is asked for the same ones again and again


class StructureError(ValueError):
    """What a response should follow is not valid, cannot be followed, or is too much work."""


class Structure(Protocol):
    """What a response must follow."""

    def source(self) -> str:
        """As llguidance reads it.

        Raises:
            StructureError: it is no such thing, or too large.
        """


@dataclass(frozen=True)
class StructuredOutput:
    """What a response must follow; exactly one of the first four is given.

    Args:
        json: a JSON schema as a mapping or its text, or a class of pydantic's, whose fields alone are then written.
            Keywords that cannot be enforced are refused.
        regex: a regular expression (Rust's syntax) that the whole response matches.
        choice: texts, one of which is the response.
        grammar: a grammar of any of llguidance's Lark variant, or GBNF, as llama.cpp reads it.
        whitespace: of `json`, a regular expression of the white space between two parts, which may also be left out;
            None: a space, or a line break and up to 20 spaces. "": there is none.

    Raises:
        StructureError: none of them or several are given.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    whitespace: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(given) != 1:
            raise StructureError(f"structured output needs one of json, regex, choice and grammar, not {given}.")
        if self.whitespace is not None and self.json is None:
            raise StructureError("whitespace is about json: leave it out.")

    def source(self) -> str:
        """See `Structure`."""
        if self.json is not None:
            return self._json_source(self.json)
        text = self.regex if self.regex is not None else self.grammar
        if text is None:
            if not self.choice or not all(isinstance(one, str) for one in self.choice):
                raise StructureError("choice must be texts, at least one.")
            # One terminal: of alternatives of a rule llguidance follows 2,000 at most.
            text = "start: ONE\nONE: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in self.choice)
            _check_size(text)
            return LLMatcher.grammar_from_lark(text)
        _check_size(text)
        if self.regex is not None:
            return LLMatcher.grammar_from_regex(text)
        if text.count(":") > _MOST_RULES:
            raise StructureError(f"the grammar has more than {_MOST_RULES} rules.")
        _check_schemas(_schemas_within(text))
        try:
            return grammar_from("grammar", text)
        except ValueError as error:
            raise StructureError(f"the grammar cannot be read: {_brief(str(error))}") from error

    def _json_source(self, schema: str | Mapping[str, Any] | type) -> str:
        if isinstance(schema, type):
            describe = getattr(schema, "model_json_schema", None)
            if describe is None:
                raise StructureError(f"json: {schema.__name__} is not a class of pydantic's; give a schema.")
            schema = _closed(describe())
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
            _check_size(text)
            read = _narrowed(json.loads(text))
            text = json.dumps(read, ensure_ascii=False)
        except StructureError:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise StructureError(f"json: the schema is not JSON: {error}") from error
        _check_schemas([read])
        pattern = WHITESPACE if self.whitespace is None else self.whitespace
        spaces: Any = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
        try:
            return LLMatcher.grammar_from_json_schema(text, overrides=spaces)
        except ValueError as error:
            raise StructureError(f"json: {_brief(str(error))}") from error


def _closed(schema: Any) -> Any:
    """A schema whose objects have the properties that it names and no others, unless it says so itself."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    own = {"additionalProperties": False} if "properties" in schema else {}
    return own | {name: _closed(value) for name, value in schema.items()}


def _narrowed(schema: Any) -> Any:
    """A schema whose bounds are at most 2^53 - 1 from 0; beyond that numbers cannot be followed exactly.

    Bounds are narrowed, never widened: such as the greatest number of 64 bits, which programs write into schemas.
    """
    if isinstance(schema, list):
        return [_narrowed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: value if name in _VALUES else _narrowed(value) for name, value in schema.items()}
    for name, sign in _BOUNDS.items():
        bound = found.get(name)
        if isinstance(bound, int | float) and sign * bound >= _LEAST_INEXACT:
            found[name] = sign * (_LEAST_INEXACT - 1)
    return found


def _check_size(text: str) -> None:
    if len(text) > _MOST_CHARACTERS:
        raise StructureError(
            f"structured output is described in at least {len(text)} characters, {_MOST_CHARACTERS} are read."
        )


def _schemas_within(lark: str) -> list[Any]:
    """The JSON schemas that are parts of a grammar."""
    try:
        return [json.JSONDecoder().raw_decode(lark, found.end())[0] for found in re.finditer(r"%json\s*", lark)]
    except (ValueError, RecursionError) as error:
        raise StructureError(f"the grammar has a %json that no JSON follows: {error}") from error


def _check_schemas(schemas: Sequence[Any]) -> None:
    """Refuse what llguidance would follow inexactly, for minutes, or by ending the process.

    Raises:
        StructureError: the schemas have such numbers, or too many references in all.
    """
    references, remainders, waiting = 0, 1, list(schemas)
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, Mapping):
            references += "$ref" in value
            step = value.get("multipleOf")
            waiting += value.values()
            if isinstance(step, int | float) and step and abs(step) < _LEAST_INEXACT:
                digits = "".join(map(str, Decimal(str(step)).normalize().as_tuple().digits))
                remainders = math.lcm(remainders, int(digits))
        elif isinstance(value, int | float) and not abs(value) < _LEAST_INEXACT:  # also what is no number
            shown = str(value)[:50]
            raise StructureError(f"json: {shown} cannot be followed exactly; numbers between -2^53 and 2^53 can.")
    if references > _MOST_RULES:
        raise StructureError(f"json: the schema has more than {_MOST_RULES} references.")
    if remainders > _MOST_REMAINDERS:
        raise StructureError(f"json: the values of multipleOf have more than {_MOST_REMAINDERS} remainders together.")


@dataclass(frozen=True)
class JSONWithin:
    """A grammar of llguidance's Lark variant with JSON schemas as parts: `lark` names schema i as `json_i`."""

    lark: str
    schemas: tuple[Mapping[str, Any], ...] = ()

    def source(self) -> str:
        """See `Structure`."""
        text = self.lark
        for i, schema in enumerate(self.schemas):
            _check_size(text)  # before the next is written: schemas may share definitions, each writes them again
            text += f"\njson_{i}: %json {json.dumps({**schema, **_SPACES}, ensure_ascii=False)}"
        _check_size(text)
        _check_schemas(self.schemas)
        return LLMatcher.grammar_from_lark(text)


def _brief(message: str) -> str:
    """The part of a message of llguidance's that is about what was asked."""
    return re.split(r"\n?<(?:state|non-verbose)", message)[0].strip()[:500]


class GrammarCompiler:
    """Compiles what responses of one target must follow."""

    def __init__(self, target: DecodingTarget) -> None:
        self.target = target
        self._grammar = lru_cache(_KEPT_GRAMMARS)(self._compiled)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        target, tokenizer = self.target, cast(Any, self.target.tokenizer)
        if not target.eos_ids:
            raise StructureError(f"{target.name} has no stop token, with which a complete response would end.")
        try:
            return from_tokenizer(tokenizer, target.vocab_size, sorted(target.eos_ids))
        except ValueError as error:
            raise StructureError(f"structured output needs a fast tokenizer: {error}") from error

    def compile(self, wanted: Structure) -> Grammar:
        """Takes milliseconds, for the largest that are read about a second.

        Raises:
            StructureError: see there; or the target has no stop token, or no tokenizer whose tokens' bytes are known.
        """
        return self._grammar(wanted.source())

    def _compiled(self, source: str) -> Grammar:
        matcher = LLMatcher(self._tokens, source, log_level=0, limits=_LIMITS)
        _check(matcher)
        grammar = Grammar(matcher, self.target)
        grammar.start().allowed()  # nothing can be written that would follow it
        return grammar


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar, over the tokens of `target`."""

    matcher: LLMatcher
    target: DecodingTarget

    @property
    def eos_ids(self) -> frozenset[int]:
        """What ends a response that is complete."""
        return self.target.eos_ids

    def start(self) -> GrammarState:
        """The state of a response that has no token yet."""
        return GrammarState(self)


class GrammarState:
    """A `Constraint`: where in a grammar a response is, and for a moment the drafts behind it."""

    def __init__(self, grammar: Grammar) -> None:
        self._matcher = grammar.matcher.deep_copy()
        self._eos_ids, self._device = grammar.eos_ids, grammar.target.device
        self._ended = False
        self._read: list[int] = []  # drafts that the matcher has read
        self._masks: dict[tuple[int, ...], Tensor | None] = {}  # of this round, by the drafts before

    def allowed(self, drafts: Sequence[int] = ()) -> Tensor | None:
        """See `Constraint`.

        Raises:
            StructureError: no token can follow, or finding out takes too much work.
        """
        before = tuple(drafts)
        if before not in self._masks:
            self._masks[before] = self._mask() if self._move(before) else None
        return self._masks[before]

    def commit(self, token: int) -> None:
        """See `Constraint`."""
        if not self._move(()):
            return
        self._masks.clear()
        if token in self._eos_ids:
            self._ended = True
        elif not self._matcher.try_consume_tokens([token]):
            _check(self._matcher)
            raise StructureError(f"token {token} does not follow the grammar.")

    def _move(self, drafts: Sequence[int]) -> bool:
        """Bring the matcher behind `drafts`; False where the response has ended before, or they are not allowed."""
        if self._ended or not self._eos_ids.isdisjoint(drafts):
            return False
        pairs = zip(self._read, drafts, strict=False)
        common = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(self._read), len(drafts)))
        if common < len(self._read):
            self._matcher.rollback(len(self._read) - common)
            del self._read[common:]
        rest = list(drafts[common:])
        read = self._matcher.try_consume_tokens(rest) if rest else 0
        self._read += rest[:read]
        _check(self._matcher)
        return read == len(rest)

    def _mask(self) -> Tensor:
        """Bool [V]."""
        found = bytearray(self._matcher.compute_logit_bias())
        _check(self._matcher)
        allowed_V = torch.frombuffer(found, dtype=torch.uint8).bool()
        if not allowed_V.any():
            raise StructureError("no token of this target's can follow the grammar here.")
        return allowed_V.to(self._device)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        reason = _brief(matcher.get_error())
        if reason.startswith("NoExtension"):
            reason = "no token can follow here: nothing satisfies it, or its rules never end."
        raise StructureError(f"structured output: {reason}")
