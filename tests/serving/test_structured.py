"""Structured output through real HTTP: the forms of the openai package and of vLLM, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from llguidance import LLParserLimits
from openai import OpenAI
from pydantic import BaseModel, Field

import outrider
import outrider.decoding.structured as structured_module
from outrider.target.model import Target
from tests.toys.schemas import problem
from tests.toys.serving import Served, serving
from tests.toys.tokenizer import TOKENIZER


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
]


@pytest.mark.parametrize(("body", "reason"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_followed_is_refused(served: Served, body: dict[str, Any], reason: str) -> None:
    found = served.post("/v1/chat/completions", messages=USER, max_tokens=5, **body)
    assert found.status_code == 400 and reason in found.json()["error"]["message"], found.text
    assert httpx.get(f"{served.url}/health").status_code == 200


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
