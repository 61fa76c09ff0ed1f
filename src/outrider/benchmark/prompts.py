"""Mixed prompts: each task shuffled by the seed, then one of each in turn, so that any beginning holds all tasks alike.

a3 b1 c2 | a0 b0 c1 | a2 b4 | ...        a task that runs out leaves the round
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from outrider.data.chat import render
from outrider.data.prompts import load_prompts


@dataclass(frozen=True)
class Prompt:
    """The tokens that ask for the first response of one conversation."""

    name: str
    tokens: tuple[int, ...]


def mixed_prompts(tokenizer: PreTrainedTokenizerBase, tasks: Sequence[str], count: int, seed: int) -> list[Prompt]:
    """At most `count` prompts from task files (JSONL) or shipped sets; fewer where the files hold fewer.

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
        try:
            tokens = render(tokenizer, conversation.turns[:1], [], conversation.tools)
        except ValueError as error:
            raise ValueError(f"{name}, prompt {conversation.id}: {error}") from error
        prompts.append(Prompt(f"{name}/{conversation.id}", tuple(tokens)))
    return prompts
