"""The plan of a first run: prompts split into three parts, and a recipe scaled to prompts, target and machine.

    a drafter that fits, and not thousands of prompts     go on from it, some hundred steps
    otherwise                                             a new DSpark drafter

Where prompts are few, packaged ones are answered beside them: a drafter that has seen a handful of texts learns those.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import yaml

from outrider.data.chat import Chat, render
from outrider.data.conversations import Conversation, content_id

PACKAGED = ("train_chat", "train_code", "train_math")
_TEST, _HELD_OUT = 0.2, 0.1  # shares of the prompts; the rest is trained on
_LEAST_TEST, _LEAST_HELD_OUT = 10, 4  # prompts, of which a third and a sixth of all at most
_FEW = 200  # conversations to train on, below which packaged prompts are added
_ENOUGH = 3000  # conversations to train on, from which a new drafter is worth it though another fits
_LEAST_STEPS = 20
_COUNTED = 1000  # conversations whose tokens are counted


class Split(NamedTuple):
    """Conversations of each part, none in two, and how many were left out because they are there already."""

    train: list[Conversation]
    held_out: list[Conversation]
    test: list[Conversation]
    duplicates: int


def split_prompts(conversations: Sequence[Conversation]) -> Split:
    """Split by a hash of the content: adding, removing or moving prompts moves no other one into another part.

    Only parts of few prompts take more than their share: a verdict on three prompts says nothing.

    Raises:
        ValueError: there are fewer than three different conversations.
    """
    unique = {content_id(c.turns, c.tools): c for c in reversed(conversations)}
    if len(unique) < 3:
        raise ValueError(f"{len(unique)} different prompts cannot be split into three parts: give at least 3.")
    ids = Counter(c.id for c in unique.values())
    ranks = {key: int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64 for key in unique}
    keys = sorted(unique, key=ranks.__getitem__)
    found = [unique[key] if ids[unique[key].id] == 1 else replace(unique[key], id=key) for key in keys]
    count = len(found)
    tests = max(sum(rank < _TEST for rank in ranks.values()), min(_LEAST_TEST, count // 3))
    tests = min(tests, count - 2)
    others = max(sum(rank < _TEST + _HELD_OUT for rank in ranks.values()) - tests, min(_LEAST_HELD_OUT, count // 6), 1)
    start = min(tests + others, count - 1)
    return Split(found[start:], found[tests:start], found[:tests], duplicates=len(conversations) - count)


def prompt_tokens(chat: Chat, conversation: Conversation, max_new_tokens: int) -> int:
    """Tokens before the last response of a conversation, if every response is as long as it may be."""
    earlier = len(conversation.turns) - 1
    rendered = render(chat.tokenizer, conversation.turns, [""] * earlier, tools=conversation.tools)
    return len(rendered) + earlier * max_new_tokens


@dataclass(frozen=True)
class Plan:
    """What a recipe is written for.

    Attributes:
        directory: of the recipe, train.jsonl beside it.
        conversations: those in train.jsonl.
        layers: of the target.
        start_from: a drafter on this machine that fits, and whom it was made for.
        gpu: whether training is to run on one.
        most_steps: of training; None: as many as the prompts are worth.
        mixed: whether packaged prompts may be added; not where some of them are held out or tested on.
    """

    chat: Chat
    directory: Path
    conversations: Sequence[Conversation]
    layers: int
    start_from: tuple[str, str] | None = None
    gpu: bool = False
    mixed: bool = True
    most_steps: int | None = None

    @property
    def out(self) -> Path:
        """The directory of the run."""
        return self.directory / "run"

    @property
    def packaged(self) -> int:
        """Conversations of each packaged set that are answered beside the user's."""
        return max(0, -(-(_FEW - len(self.conversations)) // len(PACKAGED))) if self.mixed else 0

    @property
    def adapts(self) -> bool:
        """Whether training goes on from `start_from`."""
        return self.start_from is not None and len(self.conversations) < _ENOUGH

    @property
    def budget(self) -> float:
        """Seconds that training may take: of few prompts nobody wants to wait for long."""
        return 3600.0 * (1 / 3 if len(self.conversations) < _FEW else 12)

    def within_budget(self, steps: int, fixed: float, seconds_per_step: float) -> Plan:
        """The same plan with as many steps as there is time for, where `steps` take longer.

        Args:
            fixed: seconds that pass whatever the number of steps.
        """
        fitting = int((self.budget - fixed) / seconds_per_step)
        return self if steps <= fitting else replace(self, most_steps=max(_LEAST_STEPS, fitting))

    def recipe(self) -> str:
        """The recipe as YAML, with the reason beside what was chosen."""
        own, total = len(self.conversations), len(self.conversations) + self.packaged * len(PACKAGED)
        reply = min(1024 if self.gpu else 256, self.chat.max_context // 2)
        counted = self.conversations[:: max(1, own // _COUNTED)]
        lengths = sorted(prompt_tokens(self.chat, conversation, reply) for conversation in counted)
        longest = min(max(512, -(-lengths[-1] // 64) * 64), self.chat.max_context - reply)
        fitting = sum(length <= longest for length in lengths) / len(lengths)
        per_step = 16 if self.gpu else 4
        passes, least, most = (3, 60, 2000) if self.adapts else (6, 200, 20000 if self.gpu else 6000)
        steps = max(least, min(most, passes * total // per_step))
        steps = min(steps, self.most_steps or steps)
        held_out = max(1, min(32, total // 12))

        sources = ["    - {path: train.jsonl}"]
        sources += [
            f"    - {{path: {name}, limit: {self.packaged}, max_turns: 1}}  # packaged, since {own} prompts are few"
            for name in PACKAGED
            if self.packaged
        ]
        minutes = [] if self.gpu else [f"  max_minutes: {10 if own < _FEW else 120}  # null: answer all prompts"]
        lines = [
            f"# A drafter for {self.chat.name}, by outrider init. What a field means: outrider recipe --explain FIELD",
            f"target: {_scalar(self.chat.name)}",
            f"out: {_scalar(self.out)}",
            "data:",
            "  prompts:",
            *sources,
            f"  max_new_tokens: {reply}  # of a response; longer ones cost time, cut-off ones teach no endings",
            f"  max_prompt_tokens: {longest}  # median {lengths[len(lengths) // 2]}, longest {lengths[-1]}; "
            f"{fitting:.0%} of the conversations fit",
            *minutes,
            f"  held_out: {held_out}  # conversations that choose the best drafter and are not trained on",
            *(self._adapting() if self.adapts else self._fresh()),
            "optimizer:",
            f"  steps: {steps}  # {per_step * steps / total:.1f} passes over {total} conversations",
            f"  sequences_per_step: {per_step}",
            f"  anchors_per_sequence: {256 if self.gpu else 28}",
            *(["  max_anchors_per_forward: 512", "  max_context_per_forward: 16384"] if self.gpu else []),
            f"  learning_rate: {'2.0e-4' if self.adapts else '6.0e-4' if self.gpu else '1.0e-3'}",
            f"watch: {{decode_every: {max(1, steps // 3)}, decode_prompts: {min(8, held_out)}}}",
            f"eval_every: {max(1, steps // 3)}",
            f"save_every: {max(1, steps // 3)}",
        ]
        return "\n".join(lines) + "\n"

    def _adapting(self) -> list[str]:
        assert self.start_from is not None
        directory, made_for = self.start_from
        return [
            f"start_from: {_scalar(directory)}  # made for {made_for}; null, with a drafter section: a new one",
            f"objective: {_OBJECTIVE}",
        ]

    def _fresh(self) -> list[str]:
        vocabulary = 32000 if self.gpu else 12288
        reduced = vocabulary if self.chat.vocab_size > 2 * vocabulary else "null"
        return [
            "drafter:",
            "  algorithm: dspark",
            f"  num_hidden_layers: {5 if self.gpu else 2}",
            "  block_size: 7",
            f"  num_aux_layers: {min(5 if self.gpu else 4, max(1, self.layers - 3))}",
            f"  draft_vocab_size: {reduced}  # the most frequent tokens; null: all, which some engines need",
            f"  markov_rank: {256 if self.gpu else 64}",
            *([] if self.gpu else [f"objective: {_OBJECTIVE}"]),
        ]


_OBJECTIVE = "{ce: 1.0}  # as the packaged drafter was trained; the paper's, and the default, is 0.1"


def _scalar(value: object) -> str:
    """A text as YAML writes it on one line, quoted where it must be."""
    return yaml.safe_dump(str(value), width=10**6, allow_unicode=True).removesuffix("\n").removesuffix("\n...")
