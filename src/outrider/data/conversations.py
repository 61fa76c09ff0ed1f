"""Read conversations without their responses: the messages before each response of the target.

    messages   [system, user, ASSISTANT, tool, ASSISTANT, user]   ->   turns   (system, user) | (tool) | (user)

Assistant messages of the source mark the responses; their text is dropped, because a drafter learns from the responses
of its target. A conversation that ends with a user message gets one more response.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from outrider.utils.documents import parse_json

Message = dict[str, Any]
Turn = str | tuple[Message, ...]  # one user message as its text, or several messages (system prompts, tool results)

SHAPES = (
    '{"turns": [...]}, {"messages": [{"role": ..., "content": ...}]}, {"conversations": ...}, {"prompt": ...}, '
    '{"instruction": ..., "input": ...} or {"question": ...}'
)
_SURE, _UNSURE = ("messages", "conversations", "turns", "prompt"), ("instruction", "input", "question", "data")
COLUMNS = (*_SURE, *_UNSURE)
_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
}
_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """A conversation: its turns, each the messages before a response, and its tools (JSON schemas)."""

    id: str
    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()

    def first_turns(self, count: int | None) -> Conversation:
        """Return the conversation cut after `count` turns (None: uncut)."""
        return replace(self, turns=self.turns[:count])

    @property
    def opening_characters(self) -> int:
        """Number of characters before the first response."""
        return sum(len(str(message.get("content") or "")) for message in messages_of(self.turns[0]))


def messages_of(turn: Turn) -> list[Message]:
    """Return the messages of one turn, in the form that chat templates read."""
    return [{"role": "user", "content": turn}] if isinstance(turn, str) else list(turn)


def chat_messages(turns: Sequence[Turn], responses: Sequence[str]) -> list[Message]:
    """Return all messages before the next response, given n turns and n - 1 earlier responses."""
    assert len(turns) == len(responses) + 1
    messages: list[Message] = []
    for turn, response in zip(turns, [*responses, None], strict=True):
        messages += messages_of(turn)
        if response is not None:
            messages.append({"role": "assistant", "content": response})
    return messages


class _Message(BaseModel):
    """A message; ShareGPT's from/value are read as role/content, other fields (tool_call_id, name) are kept."""

    model_config = ConfigDict(extra="allow")
    role: str | None = None
    content: str | list[dict[str, Any]] | None = None
    sender: str | None = Field(None, alias="from")
    value: str | None = None

    def plain(self) -> Message:
        role = self.role or self.sender
        if role is None:
            raise ValueError('a message without "role" (or "from")')
        role = _ROLES.get(role, role)
        if role not in _KNOWN_ROLES:
            raise ValueError(f"role {role!r} is none of {', '.join(_KNOWN_ROLES)}")
        content = self.content if self.content is not None else self.value
        if isinstance(content, list):
            others = {str(part.get("type")) for part in content} - {"text"}
            if others:
                raise ValueError(f"content of type {', '.join(sorted(others))}; only text is supported")
            content = "".join(str(part.get("text") or "") for part in content)
        if role == "user" and not (content or "").strip():
            raise ValueError("an empty turn. Remove the line or write a prompt")
        # Data sets fill absent fields with null, which templates would treat as present.
        extra = {key: value for key, value in (self.model_extra or {}).items() if value is not None}
        return {"role": role, "content": content or "", **extra}


class _Row(BaseModel):
    """The columns of public data sets that hold prompts; columns of answers (output, answer, ...) are not read.

    turns                user turns (ours)
    messages             messages of role and content (UltraChat 200k, Nemotron 2, Tulu)
    conversations        messages of from and value (ShareGPT, PerfectBlend)
    prompt               a text, or messages
    instruction, input   a task and its input, which may be empty (CodeAlpaca)
    question             a text (gsm8k)
    input                a text, or messages (Nemotron 1)
    data                 texts of user and assistant in turns (UltraChat's first form)
    """

    turns: list[str] | None = Field(None, min_length=1)
    messages: list[_Message] | None = None
    conversations: list[_Message] | None = None
    prompt: str | list[_Message] | None = None
    instruction: str | None = None
    input: str | list[_Message] | None = None
    question: str | None = None
    data: list[str] | None = Field(None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    id: str | int | None = None

    @model_validator(mode="before")
    @classmethod
    def _first_shape(cls, row: object) -> object:
        """Ignore columns with ambiguous names if another column holds the conversation."""
        if isinstance(row, Mapping) and any(row.get(name) is not None for name in _SURE):
            return {name: value for name, value in row.items() if name not in _UNSURE}
        return row

    @field_validator("tools", mode="before")
    @classmethod
    def _tools_from_text(cls, value: object) -> object:
        """Parse tools that a data set keeps as one JSON string."""
        return parse_json(value) if isinstance(value, str) and value.strip() else value or None


def instruction(text: str, about: str | None) -> str:
    """Join an instruction and its input, which may be empty, into a user turn, as in DFlash's evaluation."""
    return f"{text}\n\nInput:\n{about}" if about else text


def content_id(turns: Sequence[Turn], tools: Sequence[dict[str, Any]]) -> str:
    """Return the default id of a conversation: 16 hexadecimal digits of its content's SHA-256.

    It does not depend on the position in a file, so prompts can be added, removed and moved.
    """
    return hashlib.sha256(json.dumps([turns, tools], sort_keys=True).encode()).hexdigest()[:16]


def number_copies(conversations: Iterable[Conversation]) -> Iterator[Conversation]:
    """Append `-2` to the id of a second conversation with the same id and content, `-3` to the third."""
    seen: dict[str, str] = {}
    for conversation in conversations:
        content = content_id(conversation.turns, conversation.tools)
        name, copy = conversation.id, 1
        while seen.get(name) == content:
            copy += 1
            name = f"{conversation.id}-{copy}"
        seen.setdefault(name, content)
        yield replace(conversation, id=name)


def parse_row(row: str | Mapping[str, Any]) -> Conversation:
    """Parse a conversation from a JSON line or a data set's row; without an id it gets its `content_id`.

    Raises:
        ValueError: it has no conversation, a malformed field (named first in the message), or an empty user turn.
    """
    try:
        line = _Row.model_validate_json(row) if isinstance(row, str) else _Row.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where + ': ' if where else ''}{first['msg']}") from error
    lists = (line.messages, line.conversations, line.prompt, line.input)
    messages = next((value for value in lists if value and isinstance(value, list)), None)
    about = line.input if isinstance(line.input, str) else None
    task = instruction(line.instruction, about) if line.instruction is not None else None
    text = next((value for value in (line.prompt, task, line.question, about) if isinstance(value, str)), None)
    turns: tuple[Turn, ...]
    if line.turns is not None:
        turns = tuple(line.turns)
    elif messages is not None:
        turns = split_turns([message.plain() for message in messages])
    elif text is not None:
        turns = (text,)
    elif line.data is not None:
        turns = tuple(line.data[::2])
    else:
        keys = sorted(parse_json(row) if isinstance(row, str) else row)
        raise ValueError(f"no conversation among the fields {', '.join(keys) or '(none)'}")
    if not turns:
        raise ValueError("messages: no user message to respond to")
    if any(isinstance(turn, str) and not turn.strip() for turn in turns):
        raise ValueError("an empty turn. Remove the line or write a prompt")
    tools = tuple(line.tools or ())
    return Conversation(content_id(turns, tools) if line.id is None else str(line.id), turns, tools)


def row_of(conversation: Conversation) -> dict[str, Any]:
    """Write the row from which `parse_row` reads the conversation."""
    turns: list[Any] = list(conversation.turns)
    if all(isinstance(turn, str) for turn in turns) and not conversation.tools:
        return {"id": conversation.id, "turns": turns}
    row = {"id": conversation.id, "messages": chat_messages(turns, [""] * (len(turns) - 1))}
    return {**row, "tools": list(conversation.tools)} if conversation.tools else row


def split_turns(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """Split messages into turns; drop assistant messages that answer nothing."""
    turns: list[Turn] = []
    pending: list[Message] = []

    def close() -> None:
        if any(message["role"] in ("user", "tool") for message in pending):
            plain_user = len(pending) == 1 and set(pending[0]) == {"role", "content"} and pending[0]["role"] == "user"
            turns.append(pending[0]["content"] if plain_user else tuple(pending))
            pending.clear()

    for message in messages:
        if message["role"] == "assistant":
            close()
        else:
            pending.append(message)
    close()
    return tuple(turns)
