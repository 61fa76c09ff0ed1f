"""Mixed prompts: each task shuffled by the seed, then one of each in turn, so that any beginning holds all tasks alike.

a3 b1 c2 | a0 b0 c1 | a2 b4 | ...        a task that runs out leaves the round

Later turns need what was said before them, and every variant must be asked the same: the baseline answers first, and
its answers are the history for all, as in an evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.data.chat import render, response_text
from outrider.data.conversations import Conversation, chat_messages
from outrider.data.prompts import load_prompts


@dataclass(frozen=True)
class Prompt:
    """The tokens that ask for the next response of one conversation, `said` being the earlier ones."""

    name: str
    tokens: tuple[int, ...]
    conversation: Conversation = field(repr=False, compare=False)
    said: tuple[str, ...] = ()

    def goes_on_after(self, turn: int) -> bool:
        """Whether it is the turn of that number, counted from 1, and not its conversation's last."""
        return len(self.said) == turn - 1 and len(self.conversation.turns) > turn

    @property
    def chat(self) -> dict[str, Any]:
        """For a server that renders prompts itself: the fields `messages` and, where there are any, `tools`."""
        messages = chat_messages(self.conversation.turns[: len(self.said) + 1], self.said)
        tools = {"tools": list(self.conversation.tools)} if self.conversation.tools else {}
        return {"messages": messages, **tools}


def mixed_prompts(
    tokenizer: PreTrainedTokenizerBase, tasks: Sequence[str], count: int, seed: int, thinking: bool = False
) -> list[Prompt]:
    """First turns of at most `count` conversations from task files (JSONL), shipped sets or tasks by name; fewer where
    they hold fewer.

    Raises:
        ValueError: a file is missing or malformed, or a prompt cannot be rendered (file and conversation are named).
    """
    shuffled = []
    for task in tasks:
        name = Path(task).stem
        conversations = [(name, conversation) for conversation in load_prompts(task)]
        random.Random(f"{seed} {name}").shuffle(conversations)
        shuffled.append(conversations)
    turns = (entry for entry in chain.from_iterable(zip_longest(*shuffled)) if entry is not None)
    prompts = []
    for (name, conversation), _ in zip(turns, range(count), strict=False):
        prompts.append(_prompt(tokenizer, f"{name}/{conversation.id}", conversation, (), thinking))
    return prompts


def with_next_turn(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    answers: Mapping[Prompt, Sequence[int]],
    thinking: bool,
) -> list[Prompt]:
    """Each prompt that was answered is followed by the next turn of its conversation.

    Raises:
        ValueError: a turn cannot be rendered.
    """
    grown = []
    for prompt in prompts:
        grown.append(prompt)
        if prompt in answers:
            said = (*prompt.said, response_text(tokenizer, answers[prompt]))
            name = f"{prompt.name.partition('#')[0]}#{len(said) + 1}"
            grown.append(_prompt(tokenizer, name, prompt.conversation, said, thinking))
    return grown


def _prompt(
    tokenizer: PreTrainedTokenizerBase, name: str, conversation: Conversation, said: tuple[str, ...], thinking: bool
) -> Prompt:
    try:
        tokens = render(tokenizer, conversation.turns[: len(said) + 1], said, conversation.tools, thinking)
    except ValueError as error:
        raise ValueError(f"{name.replace('/', ', prompt ', 1)}: {error}") from error
    return Prompt(name, tuple(tokens), conversation, said)
