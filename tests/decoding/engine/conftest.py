"""A toy target and a drafter that is right now and then."""

from __future__ import annotations

import pytest

from outrider.drafters.dflash import BlockDrafter
from outrider.target.model import Target
from tests.toys.engine import toy_drafter
from tests.toys.targets import toy_target


@pytest.fixture(scope="module")
def target() -> Target:
    """A toy with few likely tokens: a random drafter is right now and then."""
    found = toy_target()
    found.model.lm_head.weight.data[3:] *= 0.01
    return Target(found.model, None, "toy")


@pytest.fixture(scope="module")
def drafter(target: Target) -> BlockDrafter:
    return toy_drafter(target)
