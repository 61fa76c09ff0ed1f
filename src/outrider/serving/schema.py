"""The requests that the server takes: OpenAI's fields, and those that vLLM adds.

A field that this server cannot serve is not declared, or declared with the one value that changes nothing: pydantic
then refuses it by name. null is a field left out. Fields of OpenAI's that do not change the answer are ignored. Types
are strict: true is not 1 and "1" is no number, but 1 is one where 0.5 would be.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from outrider.data.conversations import Message
from outrider.decoding.request import StopRules
from outrider.decoding.structured import StructuredOutput
from outrider.sampling import SamplingParams

_MOST_CHOICES, _MOST_STOPS, _LONGEST_STOP, _MOST_LOGPROBS, _LONGEST_SALT = 32, 16, 1000, 20, 1000
Token = Annotated[int, Field(ge=0)]
StopText = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]


def _of_its_type(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """A literal that is the value, where others equal it: 0 is not false."""
    if type(found := check(value)) is not type(value):
        raise ValueError(f"Input should be {json.dumps(found)}")
    return found


Never = Annotated[Literal[False], WrapValidator(_of_its_type)]
Always = Annotated[Literal[True], WrapValidator(_of_its_type)]
One = Annotated[Literal[1], WrapValidator(_of_its_type)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("a text holds half of a surrogate pair, which is no character") from error
        except RecursionError as error:
            raise ValueError("the values are nested too deeply") from error
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class StreamOptions(_Fields):
    """`continuous_usage_stats`: usage so far in every chunk, if `include_usage` is on."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # nothing is padded


class NamedSchema(_Fields):
    """A JSON schema as OpenAI's `json_schema` has it. It is followed whether or not `strict` asks for that."""

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool = True


class ResponseFormat(_Fields):
    """The form of an answer: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_is_asked_for(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and with no other")
        return self

    def structure(self) -> StructuredOutput | None:
        """The grammar that the answer follows; None: any text."""
        if self.type == "text":
            return None
        return StructuredOutput(json={"type": "object"} if self.json_schema is None else self.json_schema.schema_)


class StructuredOutputs(_Fields):
    """vLLM's field: what an answer must follow, one of the first five."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: Always | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        self.structure()
        return self

    def structure(self) -> StructuredOutput:
        """As decoding takes it."""
        if self.json_object and self.json_ is not None:
            raise ValueError("give json or json_object, one of them")
        return StructuredOutput(
            json={"type": "object"} if self.json_object else self.json_,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            whitespace="" if self.disable_any_whitespace else self.whitespace_pattern,
        )


class _Sampled(_Fields):
    """Fields that completions and chats share."""

    model: str = ""  # "": whichever is served
    n: int = Field(1, ge=1, le=_MOST_CHOICES)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # -1 is 0: off
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=0, lt=2**63)  # of choice i: seed + i
    stop: StopText | Annotated[list[StopText], Field(max_length=_MOST_STOPS)] = []
    stop_token_ids: Annotated[list[Token], Field(max_length=_MOST_STOPS)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    speculative: Literal["off", "auto"] = "auto"
    max_draft_tokens: int | None = Field(None, ge=0)  # of a round; None: as many as the drafter has
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    trace: bool = False  # the answer describes every round
    cache_salt: str = Field("", max_length=_LONGEST_SALT)  # only requests of the same salt share cached prefixes

    user: str = ""
    metadata: dict[str, Any] = {}
    store: bool = False
    service_tier: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] = {}

    def sampling(self, choice: int) -> SamplingParams:
        same = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        params: dict[str, Any] = {name: getattr(self, name) for name in same}
        seed = None if self.seed is None else self.seed + choice
        return SamplingParams(**params, top_k=max(0, self.top_k), seed=seed)

    @property
    def most_drafts(self) -> int | None:
        return 0 if self.speculative == "off" else self.max_draft_tokens

    @model_validator(mode="after")
    def _one_structure(self) -> _Sampled:
        if self.structured_outputs is not None and self.response_format is not None:
            raise ValueError("give response_format or structured_outputs, one of them")
        return self

    @property
    def structure(self) -> StructuredOutput | None:
        """The grammar that an answer follows; None: any text."""
        asked = self.structured_outputs or self.response_format
        return None if asked is None else asked.structure()

    def rules(self, max_new_tokens: int, eos_ids: frozenset[int]) -> StopRules:
        """When a choice ends, given the target's stop tokens."""
        ids = {*self.stop_token_ids, *(() if self.ignore_eos else eos_ids)}
        return StopRules(max_new_tokens, sorted(ids), (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))


class CompletionRequest(_Sampled):
    """`prompt`: a text, token ids, or several of either."""

    prompt: str | list[Token] | list[str] | list[list[Token]] = Field(min_length=1)
    max_tokens: int = Field(16, ge=1)
    echo: Never = False
    best_of: One = 1
    logprobs: int | None = Field(None, ge=0, le=_MOST_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens the answer gives at each position; None: no log-probabilities."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [one for one in self.prompt if isinstance(one, int)]
        return [ids] if ids else [one for one in self.prompt if not isinstance(one, int)]


class _TextPart(_Fields):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """Fields that are not declared go to the chat template, as `name` or `tool_call_id` do."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def plain(self) -> Message:
        """As chat templates read it: text in one piece, the arguments of tool calls as objects."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: Message = {"role": self.role, "content": text}
        message |= {key: value for key, value in (self.model_extra or {}).items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = [_with_object(call) for call in self.tool_calls]
        return message


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments or "{}")}}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"messages: the arguments of a tool call are not JSON: {arguments[:100]!r}") from error


class Function(_Fields):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False  # arguments follow the schema even if the target chooses whether to call

    @model_validator(mode="after")
    def _properties_by_name(self) -> Function:
        required = self.parameters.get("required") or []
        names = isinstance(required, list) and all(isinstance(one, str) for one in required)
        if not names or not isinstance(self.parameters.get("properties") or {}, dict):
            raise ValueError("parameters: properties must be an object, required a list of their names")
        return self


class Tool(_Fields):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_unset=True, exclude={"strict"})}


class FunctionName(_Fields):
    name: str


class NamedTool(_Fields):
    type: Literal["function"]
    function: FunctionName


class TemplateSettings(_Fields):
    """Variables of a chat template besides the messages."""

    enable_thinking: bool | None = None  # None: as the server was started


class ChatRequest(_Sampled):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)  # None: as many as fit
    max_completion_tokens: int | None = Field(None, ge=1)  # its newer name
    tools: list[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True  # False: at most one call
    chat_template_kwargs: TemplateSettings = TemplateSettings()
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=_MOST_LOGPROBS)

    @model_validator(mode="after")
    def _logprobs_for_top(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        return self

    @model_validator(mode="after")
    def _tools_that_there_are(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: two functions have the same name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: no tool is named {self.tool_choice.function.name[:100]!r}")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: a call is required, and there are no tools")
        return self

    @property
    def must_call(self) -> list[Function]:
        """One of these functions must be called; []: none need be."""
        if isinstance(self.tool_choice, NamedTool):
            return [one.function for one in self.tools if one.function.name == self.tool_choice.function.name]
        return [one.function for one in self.tools] if self.tool_choice == "required" else []

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class TokenizeRequest(_Fields):
    """A text, or a chat as its prompt would be."""

    model: str = ""
    prompt: str = ""
    add_special_tokens: bool = True
    return_token_strs: bool = False
    messages: list[ChatMessage] = []
    tools: list[Tool] = []
    chat_template_kwargs: TemplateSettings = TemplateSettings()

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if ("prompt" in self.model_fields_set) == bool(self.messages):
            raise ValueError("give prompt or messages, one of them")
        return self


class DetokenizeRequest(_Fields):
    model: str = ""
    tokens: list[Token]
