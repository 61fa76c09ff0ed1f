"""Every drafter that recipes can train: one line each (docs/add-a-drafter.md)."""

from __future__ import annotations

from outrider.drafters.base import Method
from outrider.drafters.dflash import DFLASH
from outrider.drafters.dflash2 import DFLASH2
from outrider.drafters.dspark import DSPARK
from outrider.drafters.eagle3 import EAGLE3
from outrider.drafters.hydra import HYDRA
from outrider.drafters.medusa import MEDUSA
from outrider.drafters.mtp import MTP_METHOD
from outrider.drafters.peagle import PEAGLE

METHODS: tuple[Method, ...] = (
    DFLASH,
    DSPARK,
    EAGLE3,
    MEDUSA,
    HYDRA,
    MTP_METHOD,
    DFLASH2,
    PEAGLE,
)


def method_of(name: str) -> Method:
    """The method of that name, as in a recipe's `drafter.algorithm` or a module's `algorithm`.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    for method in METHODS:
        if method.name == name:
            return method
    raise ValueError(f"{name!r} is none of the drafters: {', '.join(method.name for method in METHODS)}.")


def tree_methods() -> list[str]:
    """Names of the methods whose drafts can branch."""
    return [method.name for method in METHODS if method.branch is not None]
