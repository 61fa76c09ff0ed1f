"""The two requests an OpenAI-compatible server knows, and the tokens in its answers.

    POST /v1/completions        prompt = our own prompt tokens; the response starts exactly behind them
    POST /v1/chat/completions   messages; the server's template renders them, and says so only if it returns token ids

vLLM gives `token_ids` and `prompt_token_ids` when asked for `return_token_ids`; others call the first `output_ids`.
Where a server gives text only, the text is split into tokens again, which need not be the tokens that were generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from outrider.data.chat import Chat
from outrider.data.samples import Reply
from outrider.data.sources import RegenerationConfig, Request


class Unusable(Exception):
    """An answer that asking again will not improve."""


def payload(request: Request, config: RegenerationConfig, model: str, chat_api: bool) -> dict[str, Any]:
    """The JSON body for one request. Its seed is its own, so that the order of the requests does not matter."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "seed": request.seed,
        "return_token_ids": True,
    }
    if config.top_k:
        body["top_k"] = config.top_k
    if not chat_api:
        return {**body, "prompt": request.prompt}
    body |= {"messages": request.messages, "chat_template_kwargs": {"enable_thinking": config.thinking}}
    if request.tools:
        body["tools"] = list(request.tools)
    return body


def parse(answer: Mapping[str, Any], request: Request, chat: Chat, chat_api: bool) -> Reply:
    """The reply in a server's answer.

    Raises:
        Unusable: no tokens can be made of it, or they are not the target's.
        KeyError, IndexError, TypeError, ValueError: not an answer of this protocol (asking again may help).
    """
    choice = answer["choices"][0]
    reason = choice["finish_reason"]
    if reason not in ("stop", "length", "tool_calls"):
        raise ValueError(f"finish_reason {reason!r}")
    prompt = _ids(choice.get("prompt_token_ids") or answer.get("prompt_token_ids")) or request.prompt
    if not chat_api and prompt != request.prompt:
        raise Unusable("the server changed the prompt's tokens")
    tokens = _ids(choice.get("token_ids") or choice.get("output_ids"))
    exact = bool(tokens)
    if not tokens:
        tokens = _split(choice, chat, chat_api)
    stop = choice.get("stop_reason")
    finished = reason != "length"
    if finished and not (tokens and tokens[-1] in chat.eos_ids):
        # The stop token was generated too; servers that give text leave it out.
        end = stop if isinstance(stop, int) and stop in chat.eos_ids else chat.tokenizer.eos_token_id
        if not exact and end in chat.eos_ids:
            tokens = [*tokens, end]
    if not tokens:
        raise ValueError("an empty response")
    if max(tokens) >= chat.vocab_size or max(prompt) >= chat.vocab_size:
        raise Unusable(f"token {max(*tokens, *prompt)} is not in the target's vocabulary of {chat.vocab_size}")
    return Reply(request.id, request.turn, prompt, tokens, finished, exact)


def _split(choice: Mapping[str, Any], chat: Chat, chat_api: bool) -> list[int]:
    """The tokens of an answer that is text."""
    message = choice["message"] if chat_api else {"content": choice["text"]}
    parsed = [name for name in ("tool_calls", "reasoning_content", "reasoning") if message.get(name)]
    if parsed:
        raise Unusable(
            f"the server took {' and '.join(parsed)} out of the text and gives no token ids; leave out --chat"
        )
    return list(chat.tokenizer(str(message["content"] or ""), add_special_tokens=False)["input_ids"])


def _ids(value: object) -> list[int]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise ValueError("token ids that are not a list of numbers")
    return list(value)


def retry_after(header: str | None) -> float | None:
    """Seconds from a Retry-After header, which holds seconds or a date."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(timezone.utc)).total_seconds())
    except (ValueError, TypeError):
        return None
