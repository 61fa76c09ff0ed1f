"""Tokenise conversations with the target's chat template.

    [turn 1, response 1, ..., turn n] + generation prompt  ->  prompt tokens;  everything after them is the response

The boundary alone gives the loss mask of a training sample; rendered text is not searched for role markers. If the
template allows it, a later turn is appended to the generated tokens, because tokenising their text again may split it
differently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from outrider.data.conversations import Conversation, Message, Turn, chat_messages, messages_of
from outrider.data.responses import Reply
from outrider.target.hub import load_tokenizer, model_config, resolve_model
from outrider.target.loading import end_tokens, generation_config
from outrider.target.model import Target
from outrider.utils.measure import time_limit


def render(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    responses: Sequence[str],
    tools: Sequence[dict[str, Any]] = (),
    thinking: bool = False,
) -> list[int]:
    """Render and tokenise the prompt of the next response, given n turns and n - 1 earlier responses.

    Raises:
        ValueError: the prompt is empty, or the template cannot express the conversation (tools, a role).
    """
    return _prompt_tokens(tokenizer, render_text(tokenizer, turns, responses, tools=tools, thinking=thinking))


def _prompt_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    tokens = list(tokenizer(text, add_special_tokens=tokenizer.chat_template is None)["input_ids"])
    if not tokens:
        raise ValueError("the target's chat template renders an empty prompt; decoding needs at least one token.")
    return tokens


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    responses: Sequence[str],
    tools: Sequence[dict[str, Any]] = (),
    thinking: bool = False,
) -> str:
    """Render the prompt that `render` tokenises."""
    messages = chat_messages(turns, responses)
    if not all(any(str(m["content"]).strip() for m in messages_of(turn)) for turn in turns):
        raise ValueError("the prompt is empty: give at least one word to answer.")
    if tokenizer.chat_template is None:
        # A base model: plain text, turns and responses joined by blank lines.
        if tools:
            raise ValueError("the target has no chat template, so it cannot use tools: leave tools out.")
        return "\n\n".join(str(m["content"]) for m in messages if m["content"])
    if tools and "tools" not in template_of(tokenizer, tools):
        raise ValueError(
            "the target's chat template does not support tool calling (it never reads `tools`). Leave out "
            "conversations with tools, or choose another target."
        )
    return apply_template(tokenizer, messages, tools=list(tools) or None, enable_thinking=thinking)


_TEMPLATE_SECONDS = 5.0  # time limit of a template; real ones take milliseconds


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: list[Message], **settings: Any) -> str:
    """Render messages with the chat template.

    A template is untrusted code in jinja's sandbox, which forbids attributes that begin with an underscore and ranges
    above 100,000.

    Raises:
        ValueError: the template refuses the messages, fails, or takes too long.
    """
    try:
        with time_limit(_TEMPLATE_SECONDS):
            return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **settings))
    except Exception as error:  # its code may raise anything: ZeroDivisionError, TypeError, RecursionError, ...
        roles = ", ".join(dict.fromkeys(str(m["role"]) for m in messages))
        reason = f"{error}" if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the target's chat template refuses a conversation with the roles {roles}: {reason[:300]}"
        ) from error


def template_of(tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]] = ()) -> str:
    """Return the chat template in use (some models have another one for tools); empty for a base model."""
    if tokenizer.chat_template is None:
        return ""
    return str(tokenizer.get_chat_template(None, list(tools) or None))


def response_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Decode a response without special tokens."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


_LONGEST_LINE = 100


def printable_lines(text: str, limit: int = 8) -> list[str]:
    """Split a text into at most `limit` lines without its middle; long lines are cut, control characters escaped, and
    newlines visible."""
    ended = [*(f"{line}\n" for line in text.split("\n")[:-1]), text.split("\n")[-1]]
    lines = []
    for line in filter(None, ended):
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        lines.append(shown if len(shown) <= _LONGEST_LINE else f"{shown[:_LONGEST_LINE]}...")
    if len(lines) <= limit:
        return lines
    return [*lines[: limit - 4], f"... {len(lines) - limit + 1} more lines ...", *lines[-3:]]


@dataclass(frozen=True)
class Chat:
    """Name, tokenizer and limits of a target without its weights, which requests to a server need."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    vocab_size: int
    max_context: int

    @classmethod
    def of(cls, target: Target) -> Chat:
        assert target.tokenizer is not None
        return cls(target.name, target.tokenizer, target.eos_ids, target.vocab_size, target.max_context)

    @classmethod
    def load(cls, id_or_dir: str) -> Chat:
        """Load tokenizer and configs only.

        Raises:
            ValueError: the model cannot be found, or its files are damaged.
        """
        path = resolve_model(id_or_dir, weights=False)
        config: Any = model_config(path)
        eos = end_tokens(generation_config(path).eos_token_id or config.eos_token_id, path)
        return cls(id_or_dir, load_tokenizer(path), eos, config.vocab_size, config.max_position_embeddings)

    @property
    def template_sha256(self) -> str:
        return hashlib.sha256(template_of(self.tokenizer).encode()).hexdigest()

    def notes(self, thinking: bool) -> list[str]:
        """List notes for the user on how prompts are rendered: no template, or the effect of thinking."""
        if self.tokenizer.chat_template is None:
            return [f"{self.name} has no chat template: prompts are continued as plain text"]
        messages = [{"role": "user", "content": "Hello"}]

        def rendered(switch: dict[str, Any]) -> str:
            return apply_template(self.tokenizer, messages, **switch)

        try:
            default, on, off = (rendered(s) for s in ({}, {"enable_thinking": True}, {"enable_thinking": False}))
        except ValueError:
            return []  # it requires other roles; errors of the prompts' roles are reported with the prompts
        if not thinking and default == on != off:
            return [
                f"{self.name} thinks by default, which is switched off here; --thinking (data.thinking) switches it on"
            ]
        if thinking and on == off:
            return [f"the chat template of {self.name} has no switch for thinking: asking for it changes nothing"]
        return []

    def prompts(self, conversation: Conversation, replies: Sequence[Reply], thinking: bool) -> list[list[int]]:
        """Return the prompt tokens of the turn after `replies`, the preferred tokenisation first.

        The preferred one continues the exact tokens of the last reply. If the template rewrites them (dropped thinking,
        trimmed text), only the tokenised rendering of the whole conversation is returned.

        Raises:
            ValueError: see `render`; the message names the conversation.
        """
        turns = conversation.turns[: len(replies) + 1]
        responses = [response_text(self.tokenizer, reply.response) for reply in replies]
        try:
            whole = render_text(self.tokenizer, turns, responses, tools=conversation.tools, thinking=thinking)
            plain = _prompt_tokens(self.tokenizer, whole)
            if not replies or self.tokenizer.chat_template is None:
                return [plain]
            last = render_text(self.tokenizer, turns[:-1], responses[:-1], tools=conversation.tools, thinking=thinking)
        except ValueError as error:
            raise ValueError(f"conversation {conversation.id!r}: {error}") from error
        appended = self._append(replies[-1], last, whole)
        return [plain] if appended in (None, plain) else [appended, plain]

    def _append(self, reply: Reply, last: str, whole: str) -> list[int] | None:
        """Append the template's continuation to the reply's tokens; None if the template changes them."""
        tokens = reply.prompt + reply.response
        before = last + self._decode(reply.response)
        if not whole.startswith(before):
            return None  # other text, or another stop token than the template's
        tail = whole[len(before) :]
        appended = tokens + list(self.tokenizer(tail, add_special_tokens=False)["input_ids"])
        return appended if self._decode(appended) == whole else None

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
