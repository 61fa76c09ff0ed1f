"""Fields of requests: each takes values of its own types alone."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from outrider.serving import schema
from outrider.serving.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Function,
    NamedSchema,
    NamedTool,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    TemplateSettings,
    TokenizeRequest,
    Tool,
)

MESSAGE: dict[str, Any] = {"role": "user", "content": "a"}
FUNCTION: dict[str, Any] = {"name": "f"}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
REQUESTS: dict[type[BaseModel], dict[str, Any]] = {
    ChatMessage: MESSAGE,
    ChatRequest: {"messages": [MESSAGE]},
    CompletionRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [1]},
    Function: FUNCTION,
    NamedSchema: {},
    NamedTool: TOOL,
    ResponseFormat: {"type": "text"},
    StreamOptions: {},
    StructuredOutputs: {"regex": "a"},
    TemplateSettings: {},
    TokenizeRequest: {"prompt": "a"},
    Tool: TOOL,
    schema._TextPart: {"type": "text", "text": "a"},
    schema.FunctionName: {"name": "f"},
}
VALUES: list[Any] = [True, False, 0, 1, 2, 1.0, 0.5, "1", "true", "", [], {}]


def leaves(kind: Any) -> list[Any]:
    """The types, and literal values, that an annotation allows."""
    if get_origin(kind) is Annotated:
        return leaves(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [leaf for part in get_args(kind) for leaf in leaves(part)]
    return [kind]


def takes(kind: Any, value: Any) -> bool:
    """Whether JSON's `value` is one of the type: of numbers, only whole ones are of both."""
    if kind is Any:
        return True
    if get_origin(kind) is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(kind))
    if kind is float:
        return type(value) in (int, float)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return type(value) is dict
    return type(value) is (get_origin(kind) or kind)


@pytest.mark.parametrize("model", REQUESTS)
def test_a_value_of_another_type_is_refused(model: type[BaseModel]) -> None:
    model.model_validate(REQUESTS[model])
    for name, field in model.model_fields.items():
        kinds, known = leaves(field.annotation), field.alias or name
        passed = list[Any]()
        for value in (one for one in VALUES if not any(takes(kind, one) for kind in kinds if kind is not NoneType)):
            try:
                model.model_validate({**REQUESTS[model], known: value})
                passed.append(value)
            except ValidationError as error:
                assert any(one["loc"][0] == known for one in error.errors())
        assert not passed, known


def test_every_type_of_a_request_is_asked_for_its_fields() -> None:
    declared = {one for one in vars(schema).values() if isinstance(one, type) and issubclass(one, BaseModel)}
    assert declared - {BaseModel, schema._Fields, schema._Sampled} == set(REQUESTS)


@pytest.mark.parametrize("items", [[True, False], [1.0], ["1", 1], [[True]], [[1], ["1"]], [None]])
def test_lists_hold_one_type(items: list[Any]) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": items})
    if not isinstance(items[0], list):
        with pytest.raises(ValidationError):
            DetokenizeRequest.model_validate({"tokens": items})
        with pytest.raises(ValidationError):
            CompletionRequest.model_validate({"prompt": "a", "stop_token_ids": items})


def test_whole_numbers_are_numbers() -> None:
    """As clients in JavaScript write them."""
    found = CompletionRequest.model_validate({"prompt": [1, 0], "temperature": 1, "top_p": 1, "min_p": 0, "n": 2})
    assert found.temperature == found.top_p == 1.0 and found.prompts == [[1, 0]]
