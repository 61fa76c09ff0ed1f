"""How slow this core is at the moment, for tests that compare times."""

from __future__ import annotations

import statistics
import timeit

import numpy as np

YARDSTICK_MICROSECONDS = 46.0  # on that machine


def slowness() -> float:
    """Of this core now, against a quiet machine; 1 where it is as fast or faster.

    The yardstick is what plans are made of: a product, a radix sort and a sum of 256 x 16 numbers. It is timed as they
    are, by the least of several medians: on a busy machine the least of all calls is much below.
    """
    values = np.random.default_rng(0).random((256, 16))

    def yardstick() -> None:
        keys = (np.cumprod(values, axis=1) * 65534).astype(np.uint16)
        np.cumsum(keys.ravel()[np.argsort(keys, axis=None, kind="stable")], dtype=np.int64)

    medians = [statistics.median(timeit.repeat(yardstick, number=1, repeat=50)) for _ in range(10)]
    return max(1.0, 1e6 * min(medians) / YARDSTICK_MICROSECONDS)
