"""The verdict on a measurement: what its figures say about using the drafter, and what to do next, as sentences.

    ratio = plain seconds / speculative seconds of the same tokens        n: turns of a task, or repeats of a load
    error = two standard errors of a mean, 2 * (high - low) / (1.35 * sqrt(n)), but at least 2 %

(high - low is the distance of the quartiles, 1.35 standard deviations of a normal distribution; to the ratio where a
few long turns put it beyond them.) A speedup is faster or slower than plain where it differs from 1 by more than its
error, else no difference can be seen. With next to no accepted draft there is none either: the machine differed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

_LEAST_ERROR = 0.02  # of a ratio: what the machine's clock drifts between two runs
_FEW, _FEW_ERROR = 4, 0.10  # quartiles of fewer values say little about their spread
_UNDRAFTED = 1.03  # an accepted length below which drafts decide nothing
_VAGUE = 0.10  # an error of a ratio that hides differences worth having: none seen does not mean that there is none

Grade = Literal["faster", "same", "slower"]


class Speedup(NamedTuple):
    """A ratio over plain decoding with the quartiles (low, high) of `samples` values.

    Args:
        name: the task, load or drafter it belongs to.
        seconds: of speculative decoding: its weight among others.
        accepted_length: tokens per round; None: not known.
    """

    name: str
    ratio: float
    low: float
    high: float
    samples: int
    seconds: float = 1.0
    accepted_length: float | None = None

    @property
    def error(self) -> float:
        """Two standard errors of the ratio."""
        width = max(self.high, self.ratio) - min(self.low, self.ratio)
        spread = 2 * width / (1.35 * math.sqrt(self.samples))
        return max(spread, self.ratio * (_LEAST_ERROR if self.samples >= _FEW else _FEW_ERROR))


def grade(ratio: float, error: float) -> Grade:
    """Faster, slower, or no difference from plain decoding within the error."""
    return "same" if abs(ratio - 1) <= error else "faster" if ratio > 1 else "slower"


def pooled(parts: Sequence[Speedup]) -> tuple[float, float]:
    """(ratio, error) over all parts: plain seconds of all / speculative seconds of all."""
    seconds = sum(part.seconds for part in parts)
    ratio = sum(part.ratio * part.seconds for part in parts) / seconds
    return ratio, math.hypot(*(part.error * part.seconds for part in parts)) / seconds


def drafter_verdict(
    tasks: Sequence[Speedup],
    others: Mapping[str, Sequence[Speedup]],
    *,
    chosen: str = "",
    uneven: bool = False,
    fewer: str = "",
    train: str = "",
    keep: Sequence[str] = (),
) -> list[str]:
    """The verdict of `outrider eval`.

    Args:
        tasks: speedups of the drafter by task.
        others: speedups of other choices (`--drafter ngram`) on some of the same turns.
        chosen: how many drafts were verified, and by what costs; "" where all were, or as many as asked.
        uneven: whether those costs were measured while other work ran.
        fewer: the option that verifies fewer drafts; "" where there is none.
        train: the command that trains a better drafter.
        keep: what to do next where the drafter is worth keeping, as lines.
    """
    ratio, error = pooled(tasks)
    found, turns, figure = grade(ratio, error), _turns(tasks), _figure(tasks)
    lengths = [task.accepted_length for task in tasks if task.accepted_length is not None]
    undrafted = bool(lengths) and max(lengths) < _UNDRAFTED
    found = "same" if undrafted else found
    vague = found == "same" and error >= _VAGUE
    lines = {
        "faster": [f"Verdict: {figure.replace('x', 'x plain', 1)}: keep it."],
        "same": [f"Verdict: no difference from plain decoding can be seen: {figure}."],
        "slower": [f"Verdict: slower than plain decoding: {figure}."],
    }[found]
    if undrafted:
        lines = [
            "Verdict: no difference from plain decoding, since next to nothing was drafted (at most "
            f"{max(lengths):.2f} tokens a round): drafts were not expected to pay. Seconds differ as the machine did: "
            f"{figure}."
        ]
    elif vague:
        lines = [f"Verdict: not known yet: {figure}, give or take {error:.2f}."]
    if chosen:
        lines.append(f"{chosen[0].upper()}{chosen[1:]}.")
    if uneven and found != "faster":
        lines.append("The verdict is in doubt: other work ran beside the measurements. Repeat them on a quiet machine.")
    if turns < _FEW or vague:
        lines.append(
            f"That is {turns} turn{'s' * (turns > 1)}: measure more before you rely on it (--max-samples, or a longer "
            "file of --tasks)."
        )
    words = {"faster": "Faster than plain", "same": "No difference can be seen", "slower": "Slower than plain"}
    for kind, said in words.items():
        there = [task for task in tasks if grade(task.ratio, task.error) == kind]
        if found != kind and there:
            lines.append(f"{said} on {_list(_named(there))}.")
    if fewer and any(grade(task.ratio, task.error) != "faster" for task in tasks):
        lines.append(f"Verifying fewer drafts may help: {fewer}.")
    if found == "faster":
        return [*lines, *keep]
    by_speed = sorted(others.items(), key=lambda other: -pooled(other[1])[0])
    for option, measured in by_speed:
        lines.append(f"`{option}` on {_turns(measured)} of these turns: {_figure(measured)}.")
    option, (best, best_error) = (by_speed[0][0], pooled(by_speed[0][1])) if by_speed else ("", (0.0, 0.0))
    if grade(best, best_error) == "faster":
        lines.append(f"Use `{option}` until a better drafter is there.")
    elif best > max(1.0, ratio) and best_error >= _VAGUE:
        lines.append(f"`{option}` looks faster: measure it on more prompts.")
    elif not vague:
        lines.append("Serve without a drafter (--drafter none) until a better one is there.")
    return [*lines, f"Next: {train}"] if train else lines


def load_verdict(variants: Mapping[str, Sequence[Speedup]], plain: str = "plain", adapt: str = "") -> list[str]:
    """The verdict of `outrider bench`: on the variant with the highest mean ratio over all loads.

    Args:
        variants: ratio of each variant to no speculation, by load (`8 users`).
        plain: what the ratio is of.
        adapt: the command that gives variants which choose by the load; "" where they were measured.
    """
    means = {name: sum(level.ratio for level in levels) / len(levels) for name, levels in variants.items()}
    best = max(means, key=lambda name: means[name])
    levels = [level._replace(seconds=1.0) for level in variants[best]]
    found = grade(*pooled(levels))
    low, high = min(levels, key=lambda level: level.ratio), max(levels, key=lambda level: level.ratio)
    figure = f"{means[best]:.2f}x {plain}"
    if len(levels) > 1:
        figure += f" on average over the loads ({low.ratio:.2f}x with {low.name}, {high.ratio:.2f}x with {high.name})"
    else:
        figure += f" with {low.name}"
    lines = {
        "faster": [f"Verdict: {best}: {figure}: keep it."],
        "same": [f"Verdict: no difference from {plain} can be seen. The best is {best}: {figure}."],
        "slower": [f"Verdict: every variant is slower than {plain}. The best is {best}: {figure}."],
    }[found]
    if (fewest := min(level.samples for level in levels)) < _FEW:
        lines.append(f"Measured {'once' if fewest == 1 else f'{fewest} times'}: more --repeats show the spread.")
    slower = [level for level in levels if grade(level.ratio, level.error) == "slower"]
    if found != "faster":
        lines.append("Serve without a drafter under these loads (--drafter none).")
    elif slower:
        lines.append(f"Slower than {plain} with {_list(_named(slower))}: serve without a drafter there.")
    return [*lines, f"Next: {adapt}"] if adapt and (slower or found != "faster") else lines


def comparison_verdict(drafters: Mapping[str, Sequence[Speedup]]) -> list[str]:
    """The verdict of `outrider compare`: on the mean speedups of drafters, whose tasks and results weigh alike."""
    means = {name: pooled([part._replace(seconds=1.0) for part in parts]) for name, parts in drafters.items()}
    first, *rest = sorted(means, key=lambda name: -means[name][0])
    found = grade(*means[first])
    figure = f"{means[first][0]:.2f}x plain on average over the tasks"
    lines = {
        "faster": [f"Verdict: {first} is the fastest, {figure}."],
        "same": [f"Verdict: no difference from plain can be seen. The best is {first}, {figure}."],
        "slower": [f"Verdict: every drafter is slower than plain. The best is {first}, {figure}."],
    }[found]
    if len(drafters) == 1:
        lines = [lines[0].replace(f"{first} is the fastest", first)]
    ratios = [(name, means[name][0]) for name in rest]
    highest, error = means[first]
    close = [(name, mean) for name, mean in ratios if highest - mean <= math.hypot(error, means[name][1])]
    if close:
        lines.append(f"No difference from {first} can be seen: {_list(close)}.")
    elif rest:
        lines.append(f"Next is {_list(ratios[:1])}.")
    slower = [(name, mean) for name, mean in ratios if grade(*means[name]) == "slower"]
    if slower and found != "slower":
        lines.append(f"Slower than plain: {_list(slower)}.")
    return lines


def cost_verdict(break_even: Mapping[int, float], most: int) -> list[str]:
    """The verdict of `outrider profile`: for which accepted lengths, and how many requests at once, drafts pay.

    Args:
        break_even: by number of requests, the accepted length at which a round of drafts is as fast as plain decoding.
        most: the accepted length of a round whose drafts are all accepted.
    """
    counts, paying = sorted(break_even), list[str]()
    for tau in (1.5, 2.0, 3.0, 5.0):
        paid = [count for i, count in enumerate(counts) if max(break_even[c] for c in counts[: i + 1]) < tau]
        if paid and tau <= most:
            paying.append(
                f"of {tau:g} up to {paid[-1]}{' request' * (not paying)}{'s' * (not paying and paid[-1] > 1)}"
            )
    least = break_even[counts[0]]
    if not paying:
        return [f"Verdict: drafts hardly pay here: a round of them costs {least:.1f} plain steps."]
    return [f"Verdict: drafts pay with an accepted length {', '.join(paying)} at once."]


def _turns(tasks: Sequence[Speedup]) -> int:
    return sum(task.samples for task in tasks)


def _figure(tasks: Sequence[Speedup]) -> str:
    """`1.82x (quartiles 1.69-1.99)` of one task, `1.38x over 36 turns (gsm8k 1.82x, mt-bench 1.01x)` of several"""
    if len(tasks) > 1:
        return f"{pooled(tasks)[0]:.2f}x over {_turns(tasks)} turns ({_list(_named(tasks))})"
    (task,) = tasks
    return f"{task.ratio:.2f}x" + (f" (quartiles {task.low:.2f}-{task.high:.2f})" if task.samples > 1 else "")


def _list(ratios: Sequence[tuple[str, float]]) -> str:
    """`gsm8k 1.82x, mt-bench 1.01x`; of more than five the first ones, and how many there are."""
    shown = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios[:5])
    return f"{shown} and {len(ratios) - 5} more" if len(ratios) > 5 else shown


def _named(parts: Sequence[Speedup]) -> list[tuple[str, float]]:
    return [(part.name, part.ratio) for part in parts]
