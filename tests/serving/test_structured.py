"""Structured output through real HTTP: the forms of the openai package and of vLLM, and what is refused."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from llguidance import LLParserLimits
from openai import OpenAI
from pydantic import BaseModel, Field

import outrider
import outrider.decoding.structured as structured_module
from outrider.decoding.structured import GrammarCompiler, StructureError
from outrider.serving.schema import ChatRequest
from outrider.serving.tools import Format, call_structure
from outrider.target.model import Target
from tests.toys.schemas import problem
from tests.toys.serving import Served, serving
from tests.toys.tokenizer import CHAT_TEMPLATE, TOKENIZER, ids


@pytest.fixture(scope="module")
def served(toy: Path) -> Iterator[Served]:
    """The toy with its tokenizer's stop token."""
    model = outrider.load(toy / "target", str(toy / "drafter"))
    assert isinstance(model.target, Target)
    model.target.model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    with serving(model) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


USER: Any = [{"role": "user", "content": "hi"}]


class Town(BaseModel):
    kind: Literal["port", "capital"]
    size: int = Field(ge=0, le=500)
    old: bool


def test_parse(client: OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="m", messages=USER, response_format=Town, temperature=1, seed=seed, max_tokens=200
        )
        town = answer.choices[0].message.parsed
        assert town is not None and 0 <= town.size <= 500 and answer.choices[0].finish_reason == "stop"


def test_a_schema_streamed_and_whole_is_that_of_plain_decoding(client: OpenAI, served: Served) -> None:
    schema = Town.model_json_schema() | {"additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "town", "strict": True, "schema": schema}}
    asked: dict[str, Any] = {"model": "m", "messages": USER, "temperature": 0, "max_tokens": 200}
    whole: Any = client.chat.completions.create(**asked, response_format=form, logprobs=True, n=2)
    text = whole.choices[0].message.content
    assert problem(schema, text) is None and whole.choices[1].message.content == text
    parts = client.chat.completions.create(**asked, response_format=form, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    drafted: Any = client.chat.completions.create(**asked, response_format=form)
    assert drafted.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    plain = client.chat.completions.create(**asked, response_format=form, extra_body={"speculative": "off"})
    assert plain.choices[0].message.content == text


def test_the_forms_of_vllm(served: Served) -> None:
    def said(**wanted: Any) -> str:
        body = {"prompt": "ab", "max_tokens": 120, "seed": 4, "structured_outputs": wanted}
        found = served.post("/v1/completions", **body)
        assert found.status_code == 200, found.text
        choice = found.json()["choices"][0]
        return str(choice["text"]) if choice["finish_reason"] == "stop" else ""

    assert re.fullmatch("[xyz]{5}", said(regex="[xyz]{5}"))
    assert said(choice=["left", "right"]) in ("left", "right")
    assert re.fullmatch("(ab){1,9}", said(grammar='start: "ab"~1..9'))
    assert re.fullmatch("a[bc]", said(grammar='root ::= "a" ("b" | "c")'))
    assert json.loads(said(json={"const": {"a": [None]}}, disable_any_whitespace=True)) == {"a": [None]}
    assert said(json='{"const": {"a": 1}}', whitespace_pattern="  ") in (
        '{"a":1}',
        '{  "a":1}',
        '{"a":  1}',
        '{  "a":  1}',
    )
    asked = {"messages": USER, "max_tokens": 1, "response_format": {"type": "json_object"}}
    cut = served.post("/v1/chat/completions", **asked).json()["choices"][0]
    assert cut["message"]["content"] == "{" and cut["finish_reason"] == "length"


def rules(count: int) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(count)) + f'r{count}: "a"'


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "null"}


def schema(value: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": value, **more}}}


WRONG: list[tuple[dict[str, Any], str]] = [
    (schema({"type": "string", "minLength": 3, "maxLength": 1}), "nsatisfiable"),
    (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (schema({"$ref": "#"}), "rules never end"),
    (schema({"enum": [f"value {i}" for i in range(20_000)]}), "characters"),
    (schema({"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)}, "$ref": "#/$defs/d0"}), "refer"),
    ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ({"response_format": {"type": "text", "json_schema": {"name": "s"}}}, "json_schema"),
    ({"response_format": {"type": "structural_tag"}}, "type"),
    ({"structured_outputs": {}}, "one of json"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "one of json"),
    ({"structured_outputs": {"json": {}, "json_object": True}}, "one of them"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "no such field"),
    ({"guided_regex": "a"}, "no such field"),
    ({"structured_outputs": {"regex": "(a"}}, "unclosed"),
    ({"structured_outputs": {"regex": "(" * 30_000 + ")" * 30_000}}, "regex"),
    ({"structured_outputs": {"regex": r"[^\s\S]"}}, "nothing satisfies"),
    ({"structured_outputs": {"grammar": rules(3000)}}, "rules"),
    ({"structured_outputs": {"grammar": "start: start"}}, "rules never end"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "one of them"),
    (schema({"type": "integer", "minimum": -(10**19), "maximum": -(2**63)}), "cannot be followed exactly"),
    (schema({"type": "integer", "multipleOf": 9_999_991}), "remainders"),
    (schema({"type": "object", "properties": {f"k{i}": {"type": "null"} for i in range(3500)}}), "max is 2000"),
    (schema(nested(400)), "recursion"),
]


@pytest.mark.parametrize(("body", "reason"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_followed_is_refused(served: Served, body: dict[str, Any], reason: str) -> None:
    found = served.post("/v1/chat/completions", messages=USER, max_tokens=5, **body)
    assert found.status_code == 400 and reason in found.json()["error"]["message"], found.text
    assert served.get("/health").status_code == 200


CATASTROPHIC = [
    "(a*)*b", "(a|a)*c", "(x+x+)+y", "((a{1,100}){1,100}){1,100}", "[ab]*a[ab]{200}", r"(\w|\d|\p{L})*\p{L}{99}z",
    "a?" * 2000 + "a" * 2000, "(.*.*.*.*)*=(.*.*)*", "a{1000000000}",
]  # fmt: skip


@pytest.mark.parametrize("regex", CATASTROPHIC, ids=range(len(CATASTROPHIC)))
def test_expressions_that_make_others_search_for_ever(served: Served, regex: str) -> None:
    """They are followed, or refused with a reason, and cost little time: as a response, and as a text in JSON."""
    pattern = schema({"type": "string", "pattern": regex})
    for wanted in ({"structured_outputs": {"regex": regex}}, pattern):
        began = time.process_time()
        found = served.post("/v1/chat/completions", messages=USER, max_tokens=60, seed=1, **wanted)
        assert time.process_time() - began < 30, "of a processor; others would be waited for until the client gave up"
        if found.status_code != 200:
            assert found.status_code == 400 and "too many" in found.json()["error"]["message"], found.text


def test_too_much_work_is_the_clients_fault(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows while the answer is decoded."""
    monkeypatch.setattr(structured_module, "_LIMITS", LLParserLimits(max_lexer_states=40, verbose_errors=False))
    body = {"prompt": "ab", "max_tokens": 150, "seed": 1, "structured_outputs": {"regex": "[ab]*a[ab]{60}"}}
    found = served.post("/v1/completions", **body)
    assert found.status_code == 400 and "too many states" in found.json()["error"]["message"], found.text
    lines = served.post("/v1/completions", **body, stream=True).text.split("\n\n")
    error = json.loads(lines[-3].removeprefix("data: "))["error"]
    assert error["code"] == 400 and "too many states" in error["message"]
    served.wait_until_free()
    assert served.post("/v1/completions", prompt="ab", max_tokens=2).status_code == 200


# ----------------------------------------------------------------------------
# Tool calls that are constrained, in the three forms.
# ----------------------------------------------------------------------------


def function(name: str, strict: bool, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}}


TEMPLATES: dict[Format, str] = {
    "hermes": "<tool_call>",
    "xml": "<tool_call><function=",
    "llama": 'ipython "parameters"',
}
CITY = {"type": "string", "enum": ["Oslo", "Rome"]}
TOOLS = [function("weather", False, ["city"], city=CITY), function("time", False, ["hour"], hour={"enum": [1, 2]})]
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@pytest.mark.parametrize("format", TEMPLATES)
def test_a_call_that_is_required(
    served: Served, client: OpenAI, monkeypatch: pytest.MonkeyPatch, format: Format
) -> None:
    """By a target that would never call anything; whole, streamed and without drafts it is the same."""
    tools = "{% for tool in tools or [] %}T{% endfor %}"
    monkeypatch.setattr(served.server.tokenizer, "chat_template", f"{tools} {TEMPLATES[format]}{CHAT_TEMPLATE}")
    asked: dict[str, Any] = {"model": "m", "messages": USER, "tools": TOOLS, "max_tokens": 190}
    one = {**asked, "tool_choice": "required", "parallel_tool_calls": False}
    greedy: Any = client.chat.completions.create(**one, temperature=0)
    sampled = [client.chat.completions.create(**one, temperature=1.5, seed=seed) for seed in range(3)]
    named = {"type": "function", "function": {"name": "time"}}
    forced: Any = client.chat.completions.create(**{**one, "tool_choice": named}, temperature=0)
    for answer in (greedy, forced, *sampled):
        choice = answer.choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert problem(PARAMETERS[call.function.name], call.function.arguments) is None
    assert forced.choices[0].message.tool_calls[0].function.name == "time"
    call = greedy.choices[0].message.tool_calls[0].function
    plain: Any = client.chat.completions.create(**one, temperature=0, extra_body={"speculative": "off"})
    assert plain.choices[0].message.tool_calls[0].function == call
    parts = list(client.chat.completions.create(**one, temperature=0, stream=True))
    (streamed,) = [part.choices[0].delta.tool_calls[0].function for part in parts if part.choices[0].delta.tool_calls]
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments) and not any(
        part.choices[0].delta.content for part in parts
    )


def written(format: Format, name: str, arguments: dict[str, Any]) -> str:
    """A call as the form has it."""
    if format == "llama":
        return json.dumps({"name": name, "parameters": arguments})
    if format == "hermes":
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in shown.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


@pytest.mark.parametrize("format", TEMPLATES)
def test_which_responses_fit_what_is_asked_of_calls(served: Served, format: Format) -> None:
    strict = function("find", True, ["text", "most"], text={"type": "string"}, most={"$ref": "#/$defs/Count"}, by=CITY)
    strict["function"]["parameters"]["$defs"] = {"Count": {"type": "integer"}}
    lax = function("go", False, ["to"], to={"type": "integer"})
    find = written(format, "find", {"text": "a </b>\n{c", "most": 3})
    more = written(format, "find", {"text": "", "most": 3, "by": "Rome"})
    wrong = [find.replace("3", "3.5"), more.replace("Rome", "Bonn"), written(format, "find", {"most": 3})]
    go, anywhere = written(format, "go", {"to": 1}), written(format, "go", {"where": [None]})
    two, marked = f"{find}\n{go}", format != "llama"

    def fitting(texts: list[str], **asked: Any) -> list[bool]:
        wanted = call_structure(ChatRequest(messages=USER, tools=[strict, lax], **asked), format)
        assert wanted is not None
        grammar = GrammarCompiler(served.server.target).compile(wanted)

        def fits(text: str) -> bool:
            allowed_V = grammar.start().allowed(ids(text))
            return allowed_V is not None and bool(allowed_V[TOKENIZER.eos_token_id])

        return [fits(text) for text in texts]

    no = [False] * 3
    assert fitting([find, more, go, *wrong, two], tool_choice="required") == [True, True, True, *no, marked]
    assert fitting([find, go, two], tool_choice="required", parallel_tool_calls=False) == [True, True, False]
    assert fitting(["", "Hi", anywhere, f"Hi {find}"], tool_choice="required") == [False] * 4
    assert fitting([find, go], tool_choice={"type": "function", "function": {"name": "go"}}) == [False, True]
    assert fitting(["", "Hi", find, go, anywhere, *wrong, two]) == [*[True] * 5, *no, marked]
    assert fitting([f"Hi {find}", f"Hi {find} x {go}"]) == [True, True], "text of the form llama may have braces"
    assert fitting(["Hi", find, two], parallel_tool_calls=False) == [True, True, False]


def test_calls_that_need_no_grammar_and_calls_that_cannot_have_one() -> None:
    def wanted(format: Format, *tools: Any, **asked: Any) -> Any:
        return call_structure(ChatRequest(messages=USER, tools=list(tools), **asked), format)

    assert wanted("hermes", *TOOLS) is None and wanted("llama", *TOOLS, parallel_tool_calls=False) is None
    narrow = function("f", True, [], a={"type": "string", "pattern": "x+"})
    assert wanted("hermes", narrow) is not None
    strict = function("f", True, ["b"], a={"type": "integer"})
    keywords = {"$ref": "#/$defs/A", "anyOf": [{}], "allOf": [{}], "oneOf": [{}], "not": {}, "if": {}, "enum": [{}]}
    keywords |= {"minProperties": 1, "patternProperties": {}, "dependentRequired": {"a": ["b"]}}
    keywords |= {"additionalProperties": {"type": "integer"}}
    for keyword, value in keywords.items():
        tool = function("f", True, [], a={"type": "integer"})
        tool["function"]["parameters"][keyword] = value
        with pytest.raises(StructureError, match=re.escape(f"{keyword} of 'f' cannot be followed")):
            wanted("xml", tool)
    for format, tool, asked, reason in (
        ("xml", narrow, {}, "pattern of 'a'"),
        ("xml", function("f", True, [], a={"type": "integer"}, b={"items": {"$ref": "#/properties/a"}}), {},
         "'#/properties/a' of 'f'"),
        ("xml", function("f", True, [], a=False), {}, "the schema of 'a' is no object"),
        ("xml", function("f", True, [], a={"type": "string", "enum": ["x", 1]}), {}, "the enum of 'a' is no list"),
        ("xml", strict, {}, "requires 'b'"),
        ("xml", function("a name", True, []), {}, "'a name' cannot be written"),
        ("xml", function("f", True, [], a={"type": "string", "enum": 1}), {}, "the enum of 'a' is no list"),
        ("hermes", {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}, "strict": True}}, {},
         "no object"),
        ("hermes", narrow, {"response_format": {"type": "json_object"}}, "do not go with calls"),
    ):  # fmt: skip
        with pytest.raises(StructureError, match=reason):
            wanted(format, tool, **asked)  # type: ignore[arg-type]
    for tools, choice, reason in (
        ([], "required", "there are no tools"),
        (TOOLS, {"type": "function", "function": {"name": "h"}}, "no tool is named 'h'"),
        ([*TOOLS, TOOLS[0]], "auto", "the same name"),
        ([function("f", True, 3)], "auto", "required a list"),  # type: ignore[arg-type]
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}],
            "auto",
            "properties must",
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            wanted("hermes", *tools, tool_choice=choice)


def test_definitions_are_written_only_where_they_are_referred_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the XML form every argument has a schema of its own, and many that share definitions can be too large."""

    def source(referring: int) -> str:
        properties: dict[str, Any] = {f"a{i}": {"type": "integer"} for i in range(40)}
        properties |= {f"b{i}": {"$ref": "#/$defs/Word"} for i in range(referring)}
        tool = function("f", True, [], **properties)
        tool["function"]["parameters"]["$defs"] = {"Word": {"enum": ["w" * 4000]}}
        found = call_structure(ChatRequest(messages=USER, tools=[tool]), "xml")
        assert found is not None
        return found.source()

    assert source(2).count("w" * 4000) == 2
    sizes: list[int] = []
    check = structured_module._check_size
    monkeypatch.setattr(structured_module, "_check_size", lambda text: (sizes.append(len(text)), check(text)))
    with pytest.raises(StructureError, match="at least"):
        source(1000)
    assert sizes[-1] < 200_000, "nothing is written behind the limit"


def test_a_function_that_allows_no_arguments(served: Served) -> None:
    """Also where its schema names no properties."""
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    tool["function"] |= {"parameters": {"additionalProperties": False}}  # type: ignore[operator]
    wanted = call_structure(ChatRequest(messages=USER, tools=[tool], tool_choice="required"), "xml")  # type: ignore[list-item]
    assert wanted is not None
    grammar = GrammarCompiler(served.server.target).compile(wanted)
    for arguments, fits in (({}, True), ({"a": 1}, False)):
        allowed_V = grammar.start().allowed(ids(written("xml", "f", arguments)))
        assert (allowed_V is not None and bool(allowed_V[TOKENIZER.eos_token_id])) == fits
