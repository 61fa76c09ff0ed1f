"""What a drafter is trained on: the tokens of a conversation and the ranges that the target generated.

    tokens   [system, user 1, RESPONSE 1, user 2, RESPONSE 2]        spans = ranges of the responses, [start, end)

A position is supervised exactly when generation produced its token; nothing is searched for in rendered text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One sequence. `spans` are ascending, disjoint and not empty, each starting at 1 or later."""

    id: str
    tokens: list[int]
    spans: tuple[tuple[int, int], ...]

    @property
    def supervised_positions(self) -> list[int]:
        """Positions of generated tokens, ascending."""
        return [p for start, end in self.spans for p in range(start, end)]

    @property
    def supervised_tokens(self) -> list[int]:
        return [token for start, end in self.spans for token in self.tokens[start:end]]

    @property
    def anchors(self) -> list[int]:
        """Positions whose next token was generated: the last prompt token of each turn, then its response's tokens."""
        return [p - 1 for p in self.supervised_positions]

    @property
    def num_supervised(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True)
class Reply:
    """One generated turn: prompt tokens, then the tokens of the response (its stop token included when it has one).

    `exact` is false where a server gave text only and its tokens had to be guessed by splitting it again.
    """

    id: str
    turn: int
    prompt: list[int]
    response: list[int]
    finished: bool
    exact: bool = True


def join_turns(replies: Iterable[Reply]) -> list[Sample]:
    """Samples from replies: a turn continues its conversation's sample where its prompt begins with those tokens.

    A chat template that rewrites earlier turns (dropped thinking, say) breaks the chain, and the turn becomes a sample
    of its own. Samples are in the order in which their first replies come.
    """
    turns: dict[str, list[Reply]] = {}
    for reply in replies:
        turns.setdefault(reply.id, []).append(reply)
    samples: list[Sample] = []
    for name, conversation in turns.items():
        tokens: list[int] = []
        spans: list[tuple[int, int]] = []
        for reply in sorted(conversation, key=lambda r: r.turn):
            if spans and reply.prompt[: len(tokens)] != tokens:
                samples.append(Sample(name, tokens, tuple(spans)))
                spans = []
            tokens = reply.prompt + reply.response
            if reply.response:
                spans.append((len(reply.prompt), len(tokens)))
        if spans:
            samples.append(Sample(name, tokens, tuple(spans)))
    return samples
