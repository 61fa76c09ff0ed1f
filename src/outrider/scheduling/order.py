"""candidates (r, k) by survival, falling:   a_{1,1}  a_{2,1}  a_{1,2}  a_{1,3}  a_{2,2}  ...   -> causal order

Survival never rises along a block, so sorting all candidates gives the very order in which a heap of frontiers
(r, l_r + 1) would pop them: what stands before a candidate is either its own prefix or another request's, and nothing
behind it can move it. Survivals are compared in steps of 1 / 65534: that is a radix sort, some five times as fast as a
sort of floats, and steps keep the order of one block. Ties resolve by (position, request), never by token values.
Shapes: R requests, K draft positions, N candidates.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.scheduling.view import Floats, Ints

STEPS = 65534
_LAST = STEPS + 1  # behind everything drafted


def falling(survival: Floats) -> NDArray[np.uint16]:
    """Sort keys, any shape: the larger the survival, the smaller the key."""
    keys: NDArray[np.uint16] = (STEPS + 0.5 - survival * STEPS).astype(np.uint16)
    return keys


def causal_order(survival_RK: Floats, drafted_R: Ints) -> Ints:
    """Flat indices k * R + r of all drafted tokens, best first, [N]."""
    drafted_KR = np.arange(survival_RK.shape[1])[:, None] < drafted_R
    keys_KR = np.where(drafted_KR, falling(survival_RK.T), np.uint16(_LAST))
    order_N: Ints = np.argsort(keys_KR, axis=None, kind="stable")[: int(drafted_R.sum())]
    return order_N


def gains(values: Floats) -> Floats:
    """Sums of the largest 0, 1, 2, ... of `values` (any shape, in [0, 1]), to within 1 / 65534 each."""
    largest_first = np.sort(falling(values), axis=None, kind="stable")
    sums = np.zeros(largest_first.size + 1, dtype=np.int64)
    np.cumsum(STEPS - largest_first, dtype=np.int64, out=sums[1:])
    return sums / STEPS


def lengths_of(admitted_N: Ints, requests: int) -> Ints:
    """How many candidates of each request are among these, [R]."""
    lengths_R: Ints = np.bincount(admitted_N % requests, minlength=requests)
    return lengths_R
