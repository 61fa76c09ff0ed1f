"""Attention over pages, written down densely, request by request: the reference of target/paged_attention.py, and the
cases that its kernels, of GPUs and of CPUs, are compared in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from outrider.target.attention import Branches
from outrider.target.paged_attention import Reader, bits_of
from tests.toys.trees import random_tree

PAGE = 4


@dataclass(frozen=True)
class Case:
    """Requests of (past, rows), or with a tree of so many nodes; kv heads, query heads of each and their dim."""

    name: str
    requests: tuple[tuple[int, int], ...]
    heads: tuple[int, int, int] = (2, 2, 16)
    trees: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    slots: int = 0  # of a layer of a block drafter, whose rows see each other
    causal: bool = False  # of such a layer
    padding: int = 0
    scale: float | None = None


CASES = (
    Case("one request", ((37, 1),)),
    Case("ragged", ((0, 3), (41, 1), (5, 6), (130, 2)), heads=(2, 3, 24), padding=4),
    Case("no groups", ((9, 2), (0, 1)), heads=(3, 1, 16)),
    Case("one kv head, more tokens than a tile has", ((70, 9), (3, 20)), heads=(1, 8, 32), padding=3),
    Case("a prompt beside a step", ((0, 70), (20, 1), (30, 66)), heads=(1, 4, 16)),
    Case("trees", ((33, 15), (150, 1), (40, 63)), trees=True, heads=(1, 2, 16), padding=2),
    Case("window", ((100, 5), (3, 2), (0, 70)), window=7, heads=(1, 2, 16)),
    Case("window within the rows, soft cap", ((100, 12), (1, 6)), window=3, softcap=2.0, scale=0.7),
    Case("window of trees", ((90, 20), (2, 5)), window=4, trees=True),
    Case("sinks", ((100, 5), (2, 1)), sinks=True, heads=(2, 4, 16)),
    Case("all of it", ((200, 6), (1, 1), (64, 9)), window=40, softcap=3.0, sinks=True, trees=True),
    Case("a draft", ((100, 5), (0, 5), (31, 5)), slots=400),
    Case("a causal draft", ((70, 5), (2, 5)), slots=400, causal=True),
    Case("slots in turn under a window", ((100, 5), (3, 5), (9, 5)), slots=12, window=8, heads=(2, 3, 16)),
    Case("the same, causal", ((100, 5), (9, 5)), slots=12, window=8, causal=True),
    Case("a window shorter than a draft", ((100, 5), (1, 5)), slots=12, window=2),
)


def readers_of(case: Case, generator: np.random.Generator) -> tuple[list[Reader], int]:
    """Readers whose pages are shuffled, and the number of pages."""
    found: list[Reader] = []
    for past, rows in case.requests:
        parents, sees = list(range(-1, rows - 1)), None
        if case.trees:
            parents = random_tree(rows - 1, 97, 4).row_parents or parents
            sees = bits_of(Branches.of(parents))
        if case.slots:
            sees = bits_of(Branches.of(parents)) if case.causal else np.full(rows, -1)
        depths = Branches.of(parents).depths_T.numpy()
        found.append(Reader(past, (past + depths).tolist(), [], sees, case.slots))
    counts = [-(-min(reader.end, case.slots or reader.end) // PAGE) for reader in found]
    order = generator.permutation(sum(counts) + 1)
    starts = np.cumsum(counts) - counts
    pages = [order[start : start + count].tolist() for start, count in zip(starts, counts, strict=True)]
    return [replace(reader, pages=own) for reader, own in zip(found, pages, strict=True)], len(order)


def visible_of(reader: Reader, window: int | None, drafts: bool) -> tuple[Tensor, Tensor]:
    """The positions that are read, and which of them each row sees, [rows, positions]."""
    low = max(0, reader.end - reader.slots) if reader.slots else 0
    place_N = np.arange(low, reader.end)
    own_N, row_T1 = place_N - reader.past, np.arange(len(reader.positions))[:, None]
    chain_TN = own_N <= row_T1
    sees_T1 = np.full(row_T1.shape, -1) if reader.sees_T is None else reader.sees_T[:, None]
    bits_TN = (sees_T1 >> own_N.clip(0, 63)) & 1 == 1
    visible = (own_N < 0) | (bits_TN if drafts else bits_TN & chain_TN)
    position_N = np.where(own_N < 0, place_N, np.array(reader.positions)[own_N.clip(0)])
    if window is not None:
        near = np.array(reader.positions)[:, None] - position_N < window
        visible &= near | (own_N >= 0) if drafts else near
    return torch.from_numpy(place_N), torch.from_numpy(visible)


def dense(
    q_THE: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    *,
    readers: Sequence[Reader],
    page_size: int,
    window: int | None = None,
    drafts: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention of all rows in the type of the arguments, [T, H, E]."""
    groups, out, first = q_THE.shape[1] // keys_KSE.shape[0], [], 0
    for reader in readers:
        q_HTE = q_THE[first : first + len(reader.positions)].transpose(0, 1)
        first += len(reader.positions)
        place_N, visible_TN = visible_of(reader, window, drafts)
        slot_N = place_N % reader.slots if reader.slots else place_N
        at_N = torch.tensor(reader.pages)[slot_N // page_size] * page_size + slot_N % page_size
        keys, values = (pool[:, at_N].repeat_interleave(groups, dim=0) for pool in (keys_KSE, values_KSE))
        scores = q_HTE @ keys.transpose(1, 2) * (q_THE.shape[2] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible_TN, -torch.inf)
        if sinks_H is not None:
            sinks = sinks_H.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], dim=2)
        weights = scores.softmax(-1)[..., : len(place_N)]
        out.append((weights @ values).transpose(0, 1))
    return torch.cat(out)
