"""One streamed answer of an OpenAI-compatible server: server-sent events, each with a part of the response.

    data: {"choices": [{"text": " four", "token_ids": [2, 9], "finish_reason": null}]}
    data: {"choices": [], "usage": {...}, "metrics": {...}}        after the last part, where the server is asked for it
    data: [DONE]

Accepted length of one request: vLLM tells it (`metrics.speculative_decoding`, started with
--per-request-spec-decode-metrics summary); llama.cpp counts drafts (`timings`), and each round gives one token that is
no draft: tokens / (tokens - accepted).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DONE = "[DONE]"


@dataclass(frozen=True)
class Part:
    """What one event brought. `tokens` None: the server gives text only."""

    text: str
    tokens: list[int] | None
    finished: bool
    accepted_length: float | None


def parse_event(line: str) -> Part | None:
    """The part in a line of the stream; None: no event, or the end.

    Raises:
        ValueError: an error of the server, or something else than an answer of this protocol.
    """
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == DONE:
        return None
    try:
        event = json.loads(data)
        if "error" in event:
            raise ValueError(f"the server says {json.dumps(event['error'])[:300]}")
        choices = event.get("choices") or [{}]
        choice: Mapping[str, Any] = choices[0]
        delta: Mapping[str, Any] = choice.get("delta") or choice
        if delta.get("tool_calls"):
            raise ValueError("the server parsed tool calls out of the text: start it without a tool call parser")
        spoken = [delta.get(name) for name in ("reasoning_content", "reasoning", "content", "text")]
        tokens = choice.get("token_ids")
        return Part(
            "".join(part for part in spoken if isinstance(part, str)),
            None if tokens is None else [int(token) for token in tokens],
            choice.get("finish_reason") is not None,
            _accepted_length(event),
        )
    except (json.JSONDecodeError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"not an event of this protocol ({type(error).__name__}): {data[:200]}") from error


def _accepted_length(event: Mapping[str, Any]) -> float | None:
    told = (event.get("metrics") or {}).get("speculative_decoding")
    if told and told["num_spec_steps"]:
        return float(told["mean_acceptance_length"])
    timings = event.get("timings") or {}
    if timings.get("draft_n"):
        return float(timings["predicted_n"] / (timings["predicted_n"] - timings["draft_n_accepted"]))
    return None
