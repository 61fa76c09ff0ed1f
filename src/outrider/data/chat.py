"""From a conversation to tokens, through the target's own chat template.

    [turn 1, response 1, ..., turn n] + generation prompt  ->  prompt tokens;  everything after them is the response

The loss mask of a training sample is that boundary, nothing else: no search for role markers in rendered text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase


def render(tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], responses: Sequence[str]) -> list[int]:
    """Prompt tokens for the next response, given n user turns and n - 1 earlier responses.

    Raises:
        ValueError: an empty prompt.
    """
    assert len(turns) == len(responses) + 1
    if not all(turn.strip() for turn in turns):
        raise ValueError("the prompt is empty: give at least one word to answer.")
    if tokenizer.chat_template is None:
        # A base model: plain text, turns and responses joined by blank lines.
        parts = [part for pair in zip(turns, [*responses, ""], strict=True) for part in pair if part]
        return list(tokenizer("\n\n".join(parts))["input_ids"])
    messages = []
    for turn, response in zip(turns, [*responses, None], strict=True):
        messages.append({"role": "user", "content": turn})
        if response is not None:
            messages.append({"role": "assistant", "content": response})
    encoded: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=False, return_dict=True
    )
    return list(encoded["input_ids"])


def response_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """The text of a response without special tokens."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
