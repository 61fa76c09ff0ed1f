"""The prompts of a sweep: first turns that are known beforehand, later ones that the baseline's answers lead to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.benchmark.arrivals import WallClock
from outrider.benchmark.backends.sources import Source
from outrider.benchmark.frontier import Sweep, responses, run_sweep
from outrider.benchmark.journal import Journal
from outrider.benchmark.prompts import Prompt, with_next_turn
from outrider.training.ranks import Ranks

Respond = Callable[[int, Sequence[Sequence[int]]], list[list[int]]]  # (turn, prompts) -> the baseline's answers
_TEMPLATE = 64  # tokens that a chat template puts around a turn, at most


class Workload:
    """What users ask: at most `turns` turns of each conversation, answered with at most `max_new_tokens` each."""

    def __init__(self, first: Sequence[Prompt], turns: int, max_new_tokens: int) -> None:
        self.asked, self.turns, self._most = list(first), turns, max_new_tokens
        self._known = 1  # turns whose prompts are there

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [prompt.tokens for prompt in self.asked]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt there will be; unknown answers count as whole, a token as one byte of text."""
        return max(len(prompt.tokens) + self._to_come(prompt) for prompt in self.asked)

    def _to_come(self, prompt: Prompt) -> int:
        later = prompt.conversation.turns[self._known : self.turns]
        return sum(self._most + len(str(turn).encode()) + _TEMPLATE for turn in later)

    def room(self, users: int) -> tuple[int, int]:
        """(users, tokens of the longest request)"""
        return users, self.longest + self._most

    def chat_of(self, tokens: Sequence[int]) -> dict[str, Any]:
        """The messages and tools that a prompt of ours is made of."""
        wanted = tuple(tokens)
        return next(prompt.chat for prompt in self.asked if prompt.tokens == wanted)

    def grow(self, tokenizer: PreTrainedTokenizerBase, thinking: bool, respond: Respond) -> None:
        """Add the later turns."""
        for turn in range(1, self.turns):
            going_on = [prompt for prompt in self.asked if prompt.goes_on_after(turn)]
            if not going_on:
                return
            answers = respond(turn, [prompt.tokens for prompt in going_on])
            self.asked = with_next_turn(tokenizer, self.asked, dict(zip(going_on, answers, strict=True)), thinking)
            self._known = turn + 1


def run_workload(
    sweep: Sweep,
    source: Source,
    work: Workload,
    tokenizer: PreTrainedTokenizerBase,
    thinking: bool,
    journal: Journal,
    ranks: Ranks,
    on_progress: Callable[[str, int, int], None],
) -> None:
    """Make the later turns, then `run_sweep`. Answers once given are kept beside the points and not asked for again."""
    said = ranks.from_main(journal.said)
    known = len(said)

    def respond(turn: int, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        if turn > len(said):
            on_progress(f"answers to turn {turn}", turn - 1, work.turns - 1)
            plain = source.serve(sweep.baseline, max(sweep.levels))
            said.append(ranks.from_main(lambda: responses(plain, prompts, sweep.max_new_tokens)))
        return said[turn - 1]

    work.grow(tokenizer, thinking, respond)
    if ranks.main and len(said) > known:
        journal.keep_said(said)
    run_sweep(sweep, source.serve, work.prompts, source.compare, journal, WallClock, on_progress, ranks)
