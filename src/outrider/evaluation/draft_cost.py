"""Measure the cost of drafting by draft length: seconds per round of several drafters on the same text.

    repeat 1:  A k=3   B k=3   C k=3   A k=7   B k=7 ...     lengths shuffled, drafters one after another,
    repeat 2:  B k=1   C k=1   A k=1 ...                     starting with another drafter: drift affects all alike

A round is what decoding asks of a drafter: read the tokens that the last round committed (`extend`), then `propose` k.
A block drafter (DFlash, DFlash 2, DSpark) drafts a block of k tokens here, backbone and heads alike, as one trained
with that block size would. In serving a limit below its own block shortens LM head and sampling chain alone.
What Figure 3 of DFlash, arXiv 2602.06036, shows.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import MaxNLocator
from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.table import Table

from outrider.checkpoints.describe import DrafterInfo
from outrider.data.conversations import messages_of
from outrider.data.sources import load_prompts, shipped_sets
from outrider.decoding.profile import READ
from outrider.drafters.base import DraftCall, Drafter
from outrider.evaluation.plots import (
    COLOURS,
    GREY,
    MOST_SERIES,
    draw_band,
    save_figure,
    short_name,
    small_multiples,
)
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target.model import Target
from outrider.utils.measure import Clock, Quartiles, machine, quartiles, today
from outrider.utils.terminal import markdown_table, terminal_table

WARM_UP = 2  # repeats that are not counted


class CostPoint(BaseModel):
    """Seconds (lower quartile, median, upper quartile) of reading, of proposing `gamma` tokens, and of both."""

    gamma: int
    read: Quartiles
    propose: Quartiles
    whole: Quartiles
    proposed: float  # tokens that were proposed, mean: fewer than gamma where a drafter stops early


class DrafterCost(BaseModel):
    """The costs of one drafter at 1 .. gamma tokens."""

    info: DrafterInfo
    points: list[CostPoint]


class DraftCosts(BaseModel):
    """The contents of draft_cost.json."""

    target: str
    context: int
    repeats: int
    drafters: list[DrafterCost]
    machine: dict[str, Any]
    versions: dict[str, str]
    date: str | None = None  # of the measurement; None: not recorded


def load_costs(path: Path) -> DraftCosts:
    """Read the file of `outrider bench-drafters --out`.

    Raises:
        ValueError: no such file, or not one of these.
    """
    if not path.is_file():
        raise ValueError(f"no draft costs {path}: measure them with outrider bench-drafters --out {path}.")
    try:
        return DraftCosts.model_validate_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not the draft costs that outrider bench-drafters writes.") from error


@torch.inference_mode()
def measure_costs(
    target: Target,
    drafters: Sequence[tuple[DrafterInfo, Drafter]],
    context: int,
    repeats: int,
    versions: dict[str, str],
    on_progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> DraftCosts:
    """Time drafters after the same `context` tokens of English text.

    Raises:
        ValueError: the context exceeds the target's.
    """
    gammas = [drafter.sources.drafter.gamma for _, drafter in drafters]
    deepest = max(gammas)
    if context + READ * deepest + deepest > target.max_context:
        raise ValueError(f"context {context}: {target.name} reads {target.max_context} tokens; give less.")
    tokens = sample_text(target, context + 1)
    aux_layers = [_aux_hidden_states(target, drafter, tokens[:-1]) for _, drafter in drafters]
    shortened = [
        {k: drafter if k == gamma else drafter.of_length(k) for k in range(1, gamma + 1)}
        for (_, drafter), gamma in zip(drafters, gammas, strict=True)
    ]
    spent: dict[tuple[int, int], list[tuple[float, float, int]]] = {}
    shuffle = random.Random(0).shuffle
    for repeat in range(WARM_UP + repeats):
        sessions = [
            TimedSession(target, drafter, tokens, aux_layers=aux, rounds=deepest)
            for (_, drafter), aux in zip(drafters, aux_layers, strict=True)
        ]
        lengths = list(range(1, deepest + 1))
        shuffle(lengths)
        for length, turn in product(lengths, range(len(drafters))):
            i = (turn + repeat) % len(drafters)
            if length in shortened[i]:
                spent.setdefault((i, length), []).append(sessions[i].round(length, shortened[i][length]))
        for timed in sessions:
            timed.drafter.end(timed.session)
        on_progress("bench-drafters", repeat + 1, WARM_UP + repeats)
    costs = [
        DrafterCost(info=info, points=[_point(k, spent[i, k][WARM_UP:]) for k in shortened[i]])
        for i, (info, _) in enumerate(drafters)
    ]
    return DraftCosts(target=target.name, context=context, repeats=repeats, drafters=costs, machine=machine(),
                      versions=versions, date=today())  # fmt: skip


def sample_text(target: Target, count: int) -> list[int]:
    """`count` tokens of the shipped evaluation prompts, repeated where they are too few."""
    assert target.tokenizer is not None
    prompts = chain.from_iterable(load_prompts(name) for name in shipped_sets() if name.startswith("eval_"))
    said = [message["content"] for prompt in prompts for turn in prompt.turns for message in messages_of(turn)]
    tokens = list(target.tokenizer("\n\n".join(said))["input_ids"])
    return (tokens * (count // len(tokens) + 1))[:count]


class TimedSession:
    """A drafter session after the context; each timed round reads the same READ tokens again."""

    def __init__(
        self, target: Target, drafter: Drafter, tokens: Sequence[int], aux_layers: torch.Tensor | None, rounds: int
    ) -> None:
        self.drafter, self.tokens, self.aux_layers = drafter, list(tokens), aux_layers
        self.committed = len(tokens)
        self.session = drafter.new_session(len(tokens) + READ * rounds)
        self.seen, self.source = SeenTokens(target.vocab_size), SeededSource(0)
        self.reading, self.proposing = Clock(target.device), Clock(target.device)
        drafter.extend([self.session], [self.tokens[:-1]], aux_layers)

    def round(self, gamma: int, drafter: Drafter) -> tuple[float, float, int]:
        """Time one round: (seconds of reading, seconds of proposing, number of proposed tokens).

        Args:
            drafter: the session's, as one of drafts of `gamma` tokens.
        """
        read = self.tokens[-READ - 1 : -1]
        with self.reading:
            drafter.extend([self.session], [read], None if self.aux_layers is None else self.aux_layers[-READ:])
        self.committed += READ
        call = DraftCall(
            self.session, self.tokens[-1], SamplingParams(), seen=self.seen, source=self.source, limit=gamma,
            position=self.committed,
        )  # fmt: skip
        with self.proposing:
            (proposal,) = drafter.propose([call])
        return self.reading.take(), self.proposing.take(), len(proposal.tokens)


def _aux_hidden_states(target: Target, drafter: Drafter, tokens: Sequence[int]) -> torch.Tensor | None:
    """The target's aux hidden states of the text [T, L, D]; None for a drafter that reads none."""
    if not drafter.aux_layers:
        return None
    tokens_BT = torch.tensor([tokens], device=target.device)
    found = target.forward(tokens_BT, target.new_cache(len(tokens)), drafter.aux_layers, logits=0).aux_BTLD
    assert found is not None
    return found[0]


def _point(gamma: int, spent: Sequence[tuple[float, float, int]]) -> CostPoint:
    read, propose, counts = zip(*spent, strict=True)
    whole = [sum(seconds) for seconds in zip(read, propose, strict=True)]
    times: dict[str, Any] = {"read": quartiles(read), "propose": quartiles(propose), "whole": quartiles(whole)}
    return CostPoint(gamma=gamma, **times, proposed=statistics.fmean(counts))


# ----------------------------------------------------------------------------
# Draft costs as a table for the terminal and for Markdown: milliseconds per round by draft length.
#
# drafter     1     2     3   ...   quartiles
# dspark    6.1   6.2   6.2         6.0-6.5      one pass: flat
# eagle3    2.9   5.4   8.1         7.8-8.4      a pass per token: rising
# ----------------------------------------------------------------------------


def cost_cells(costs: DraftCosts) -> list[list[str]]:
    """The table's headings, then a row per drafter: medians by draft length, quartiles of the longest draft."""
    deepest = max(len(drafter.points) for drafter in costs.drafters)
    found = [["drafter", *map(str, range(1, deepest + 1)), "quartiles"]]
    for drafter in costs.drafters:
        medians = [f"{1e3 * point.whole[1]:.1f}" for point in drafter.points]
        low, _, high = drafter.points[-1].whole
        empty = [""] * (deepest - len(medians))
        found.append([drafter.info.label, *medians, *empty, f"{1e3 * low:.1f}-{1e3 * high:.1f}"])
    return found


def cost_title(costs: DraftCosts) -> str:
    """The title of the table."""
    return (
        f"Drafting after {costs.context} tokens: milliseconds by draft tokens in a row (of a tree: its depth), "
        f"median of {costs.repeats}; quartiles of the longest"
    )


def cost_table(costs: DraftCosts) -> Table:
    """The table for the terminal: of more than nine draft lengths 1, 2, 3, 4, 6, 8, 12, 16, ... and the longest."""
    headings, *rows = cost_cells(costs)
    lengths = range(1, len(headings) - 1)
    few = [k for k in lengths if len(lengths) <= 9 or k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) or k == lengths[-1]]
    shown = [[row[0], *(row[k] for k in few), row[-1]] for row in (headings, *rows)]
    title = cost_title(costs)
    return terminal_table(shown[0], shown[1:], text=("drafter",), title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def cost_markdown(costs: DraftCosts) -> list[str]:
    """The table as lines of Markdown."""
    headings, *rows = cost_cells(costs)
    return [f"{cost_title(costs)}.", "", *markdown_table(headings, rows, text=("drafter",))]


def plot_draft_cost(costs: DraftCosts, path: Path, first: Sequence[str] = ()) -> None:
    """Plot milliseconds per round by draft length: medians, with the quartiles as a band (Figure 3 of DFlash).

    More than eight drafters have a panel each, in which the others are grey.

    Args:
        first: labels in the order of their importance.
    """
    known = {drafter.info.label: drafter.points for drafter in costs.drafters}
    shown = list(dict.fromkeys((*(label for label in first if label in known), *known)))
    alone = len(shown) > MOST_SERIES
    if alone:
        figure, panels = small_multiples(len(shown), 6, panel=(2.0, 1.7))
        drawn = [(axes, [label]) for axes, label in zip(panels, shown, strict=True)]
    else:
        figure, axes = plt.subplots(figsize=(8.4, 4.6), layout="constrained")
        axes.set_xticks(range(1, max(drafter.info.gamma for drafter in costs.drafters) + 1))
        drawn = [(axes, shown)]
    for axes, labels in drawn:
        for points in known.values() if alone else ():
            axes.plot([p.gamma for p in points], [1e3 * p.whole[1] for p in points], color=GREY, lw=0.7, alpha=0.6)
        for label, color in reversed(list(zip(labels, COLOURS, strict=False))):  # the first one in front
            lengths = [point.gamma for point in known[label]]
            low, middle, high = ([1e3 * point.whole[i] for point in known[label]] for i in range(3))
            draw_band(axes, lengths, low=low, middle=middle, high=high, color=color, label="_" if alone else label,
                      markersize=3 if alone else 4)  # fmt: skip
            if alone:
                axes.set_title(f"{label}: {middle[-1]:.1f} ms for {lengths[-1]}", fontsize=8)
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    drawn[0][0].set_ylim(0, None)  # of all panels, which share it
    figure.supxlabel("draft tokens in a row (of a tree: its depth)", fontsize=9)
    figure.supylabel("milliseconds per round", fontsize=9)
    facts = (short_name(costs.target), costs.machine.get("cpu"), costs.date)
    save_figure(figure, path, f"Cost of drafting after {costs.context} tokens", *facts)
