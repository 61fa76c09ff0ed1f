"""The trace of a round: every draft with its confidences and what became of it, every token with where it comes from.

It is made after a round, for requests that ask for it, from what the round has computed: it changes no token. What
confidences there are of a draft:

    raw         of the drafter's head                   sigmoid(s_k)
    calibrated  what the drafter hands over             sigmoid(s_k / T_k + b_k), as `outrider calibrate` fitted them
    believed    as earlier outcomes have corrected it   what the policy reads

Shapes: P rows, of the anchor and the accepted path; V target vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.decoding.verification import Origin, RoundResult, TargetRows
from outrider.drafters.draft import Draft
from outrider.sampling import at_least_float32

Outcome = Literal["accepted", "rejected", "unread", "left out"]
Source = Literal["drafter", "copy"]
_TOP = 5  # of the target's likeliest tokens
_CHUNK = 64  # of the vocabulary


@dataclass(frozen=True)
class DraftTrace:
    """A draft token: a node after node `parent` (-1: the anchor).

    `outcome`: "unread" where the round ended before it, "left out" where the policy did not have it verified.
    `p_draft`: the probability that it was drawn with; 1 where it was chosen, as at temperature 0. `p_target`: what
    verification held against that, 1 or 0 where the target's token is settled without the draft. `target`: the target's
    probability of it at temperature 1, before penalties and top-p. None: there is none, or it was not looked at.
    """

    token: int
    parent: int
    outcome: Outcome
    p_draft: float
    p_target: float | None
    target: float | None
    raw: float | None
    calibrated: float | None
    believed: float | None


@dataclass(frozen=True)
class TokenTrace:
    """A committed token: node `node` of the draft, or the target's own (None). "plain": nothing was verified.

    `target` is as of `DraftTrace`; `top` are the likeliest tokens in its place (id, the same probability).
    """

    token: int
    origin: Origin | Literal["plain"]
    node: int | None
    target: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class RoundTrace:
    """A round of a request.

    Attributes:
        number: among the request's rounds, from 1.
        source: who drafted; None: nobody.
        reason: why no more drafts were verified, for people.
        drafts: all nodes of the draft, verified or not.
        tokens: what was committed.
    """

    number: int
    source: Source | None
    reason: str
    drafts: list[DraftTrace]
    tokens: list[TokenTrace]


def recorded(rows: TargetRows) -> tuple[TargetRows, dict[int, Tensor]]:
    """These rows, and a mapping that will hold those of them that verification has read: `compared` of a trace."""
    read: dict[int, Tensor] = {}

    def row(k: int) -> Tensor:
        read[k] = rows.row(k)
        return read[k]

    return replace(rows, row=row, node_probs=None), read  # so that every row is asked for


@dataclass(frozen=True)
class PathRows:
    """The target's probabilities at temperature 1 after the anchor and every node of a round's accepted path.

    `probs_PV`: of all tokens, an array where they are in main memory. `top`: the likeliest of every row (id,
    probability), likeliest first.
    """

    probs_PV: NDArray[Any] | Tensor
    top: list[list[tuple[int, float]]]


def path_rows(logits_NV: Tensor, paths: Sequence[tuple[int, Sequence[int]]]) -> list[PathRows]:
    """The rows of several rounds, computed together: one pass over them costs less than one each.

    Args:
        logits_NV: the target's, of all these rounds.
        paths: of every round the anchor's row in `logits_NV`, and its accepted path.
    """
    rows = [anchor + row for anchor, path in paths for row in (0, *(node + 1 for node in path))]
    adjacent = rows == list(range(rows[0], rows[0] + len(rows)))
    logits_PV = at_least_float32(logits_NV[rows[0] : rows[0] + len(rows)] if adjacent else logits_NV[rows])
    ids_PT = _likeliest(logits_PV, min(_TOP, logits_PV.shape[1]))
    probs_PV = logits_PV.softmax(-1)
    values = probs_PV.gather(1, ids_PT).tolist()
    top = [list(zip(ids, some, strict=True)) for ids, some in zip(ids_PT.tolist(), values, strict=True)]
    # An array picks single numbers many times as fast as a tensor does. From a GPU all of it would have to be copied.
    known_PV = probs_PV.numpy() if probs_PV.device.type == "cpu" else probs_PV
    found, first = [], 0
    for _, path in paths:
        own = slice(first, first + 1 + len(path))
        found.append(PathRows(known_PV[own], top[own]))
        first = own.stop
    return found


def trace_round(
    result: RoundResult,
    tokens: Sequence[int],
    rows: PathRows,
    *,
    compared: Mapping[int, Tensor],
    number: int,
    source: Source | None,
    reason: str,
    raw: Callable[[float, int], float] | None,
    believed: Sequence[float],
) -> RoundTrace:
    """The trace of one round.

    Args:
        tokens: committed; fewer than `result.tokens` where the response ended among them.
        rows: of its accepted path.
        compared: the rows [V] that verification read, 0 the anchor's; none where it picked the target's token.
        raw: from a confidence and its position, counted from 0; None: the drafter has no head for them.
        believed: of the draft's first nodes.
    """
    draft, path = result.draft, result.verdict.path
    became = _outcomes(result, len(tokens))
    row_of = {node: row for row, node in enumerate([-1, *path])}
    compared_nodes = [node for node, outcome in enumerate(became) if outcome in ("accepted", "rejected")]
    places = [*(row_of[draft.parents[node]] for node in compared_nodes), *range(len(tokens))]
    found = rows.probs_PV[places, [*(draft.tokens[node] for node in compared_nodes), *tokens]].tolist()
    target_of = dict(zip(compared_nodes, found, strict=False))
    drafts = []
    for node, (token, parent, outcome) in enumerate(zip(draft.tokens, draft.parents, became, strict=True)):
        p_target, row_V = None, compared.get(parent + 1)
        if node in target_of:
            p_target = float(outcome == "accepted") if row_V is None else row_V[token].item()
        confidence = draft.confidences[node] if node < len(draft.confidences) and source == "drafter" else None
        drafts.append(
            DraftTrace(
                token,
                parent,
                outcome,
                p_draft=_drawn_with(draft, node),
                p_target=p_target,
                target=target_of.get(node),
                raw=None if confidence is None or raw is None else raw(confidence, node),
                calibrated=confidence,
                believed=_known(believed, node),
            )
        )
    nodes: list[int | None] = [*path, None]
    committed = []
    for row, (token, origin) in enumerate(zip(tokens, result.origins, strict=False)):
        shown: Origin | Literal["plain"] = origin if result.verified.tokens else "plain"
        target = found[len(compared_nodes) + row]
        committed.append(TokenTrace(token, shown, nodes[row], target=target, top=rows.top[row]))
    return RoundTrace(number, source, reason, drafts=drafts, tokens=committed)


def _likeliest(logits_PV: Tensor, count: int) -> Tensor:
    """[P, count] ids of the largest logits, largest first.

    They are among those of the `count` chunks with the largest maxima, and behind the last whole chunk: to compare V
    values with a maximum is several times faster than to select among them.
    """
    P, V = logits_PV.shape
    behind = V - V % _CHUNK
    if behind <= count * _CHUNK:
        return logits_PV.topk(count).indices
    chunks_PT = logits_PV[:, :behind].unflatten(1, (-1, _CHUNK)).amax(-1).topk(count).indices
    ids = (chunks_PT[..., None] * _CHUNK + torch.arange(_CHUNK, device=logits_PV.device)).flatten(1)
    if behind < V:
        ids = torch.cat((ids, torch.arange(behind, V, device=logits_PV.device).expand(P, -1)), dim=1)
    return ids.gather(1, logits_PV.gather(1, ids).topk(count).indices)


def _outcomes(result: RoundResult, committed: int) -> list[Outcome]:
    """What became of every node of the draft."""
    draft, verified = result.draft, len(result.verified.tokens)
    path = result.verdict.path[:committed]
    ended = committed <= result.verdict.accepted  # with an accepted draft: nothing behind it counts
    compared_with = {-1, *path} - ({path[-1]} if ended and path else set())
    found: list[Outcome] = []
    for node, parent in enumerate(draft.parents):
        if node >= verified:
            found.append("left out")
        elif node in path:
            found.append("accepted")
        elif parent in compared_with and not _settled(draft, node, path):
            found.append("rejected")
        else:
            found.append("unread")
    return found


def _settled(draft: Draft, node: int, path: Sequence[int]) -> bool:
    """Whether a sibling before this node was accepted."""
    return any(sibling < node and sibling in path for sibling in draft.children(draft.parents[node]))


def _drawn_with(draft: Draft, node: int) -> float:
    """The probability of a node in the distribution that its siblings were drawn from; 1 where it was chosen."""
    siblings = draft.siblings.get(draft.parents[node])
    if siblings is None:
        return 1.0
    if siblings.first is not None and draft.children(draft.parents[node])[0] == node:
        return siblings.first
    return float(siblings.row()[draft.tokens[node]])


def _known(values: Sequence[float], place: int) -> float | None:
    return values[place] if place < len(values) and not math.isnan(values[place]) else None
