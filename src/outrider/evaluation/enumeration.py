"""Every way in which a random computation may go, with its probability.

    draft x_1 -+- 0 -- draft x_2 -+- ...          An `EnumeratingSource` takes the place of the generator and answers
               +- 1 -- ...        +- ...          every `accept` and `choose` in every possible way, depth first,
               +- 2 -- ...                        while the weight of the trace is multiplied up in float64.

Shapes: V vocab.
"""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torch import Tensor

from outrider.drafters.base import Proposal
from outrider.drafters.tree import TreeProposal
from outrider.sampling import RandomSource

T = TypeVar("T")
D = TypeVar("D", Proposal, TreeProposal)
Tokens = tuple[int, ...]


class EnumeratingSource:
    """Replays a script of decisions; beyond its end takes the first option and remembers the others."""

    def __init__(self) -> None:
        self.weight = 1.0
        self._script: list[int] = []
        self._widths: list[int] = []
        self._depth = 0

    def accept(self, probability: float) -> bool:
        probability = min(max(probability, 0.0), 1.0)
        return self._decide([(1, probability), (0, 1.0 - probability)]) == 1

    def choose(self, probs_V: Tensor) -> int:
        probs = probs_V.tolist()
        total = sum(probs)
        return self._decide([(index, probability / total) for index, probability in enumerate(probs)])

    def backtrack(self) -> bool:
        """Turn to the next trace; False when all have been seen."""
        while self._script and self._script[-1] + 1 == self._widths[-1]:
            self._script.pop()
            self._widths.pop()
        if self._script:
            self._script[-1] += 1
        self.weight, self._depth = 1.0, 0
        return bool(self._script)

    def _decide(self, options: list[tuple[int, float]]) -> int:
        possible = [option for option in options if option[1] > 0.0]
        if self._depth == len(self._script):
            self._script.append(0)
            self._widths.append(len(possible))
        assert self._widths[self._depth] == len(possible), "the enumerated function is not deterministic"
        outcome, probability = possible[self._script[self._depth]]
        self._depth += 1
        self.weight *= probability
        return outcome


def enumerate_traces(run: Callable[[RandomSource], T]) -> Iterator[tuple[T, float]]:
    """Every outcome of `run`, with the probability of the trace that led to it."""
    source = EnumeratingSource()
    while True:
        outcome = run(source)
        yield outcome, source.weight
        if not source.backtrack():
            return


class DraftTree(Generic[D]):
    """All that one draft may become, computed once; `draw` asks a source the same questions again."""

    def __init__(self, draft: Callable[[RandomSource], D]) -> None:
        self._questions: dict[Tokens, Tensor] = {}  # choices so far -> the distribution of the next
        self._proposals: dict[Tokens, D] = {}

        def recorded(source: RandomSource) -> tuple[Tokens, D]:
            recorder = _Recorder(source, self._questions)
            proposal = draft(recorder)
            return recorder.chosen, proposal

        for (chosen, proposal), _ in enumerate_traces(recorded):
            self._proposals[chosen] = proposal

    def draw(self, source: RandomSource) -> D:
        chosen: Tokens = ()
        while chosen in self._questions:
            chosen = (*chosen, source.choose(self._questions[chosen]))
        return self._proposals[chosen]


class _Recorder:
    """Passes questions on, and writes them down."""

    def __init__(self, source: RandomSource, questions: dict[Tokens, Tensor]) -> None:
        self.source, self.questions = source, questions
        self.chosen: Tokens = ()

    def accept(self, probability: float) -> bool:
        raise AssertionError("a draft accepts nothing")

    def choose(self, probs_V: Tensor) -> int:
        self.questions[self.chosen] = probs_V
        choice = self.source.choose(probs_V)
        self.chosen = (*self.chosen, choice)
        return choice
