"""A pass that fails leaves a session as it was: the same call again ends like one that never failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.drafters.base import Drafter, DrafterWeights
from outrider.drafters.cache import DraftKV
from outrider.drafters.dflash import BlockDrafter
from outrider.drafters.dspark import DSpark
from outrider.drafters.eagle3 import Eagle3Drafter
from outrider.drafters.language_model import StandaloneDrafter
from outrider.drafters.mtp import MTPDrafter
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.toys.drafters import call_for, make_mtp, small_model
from tests.toys.eagle3 import make_drafter
from tests.toys.oracle import row_of
from tests.toys.targets import randomise, toy_config, toy_target


def dspark(target: Target) -> Drafter:
    module = DSpark(toy_config())
    randomise(module)
    return BlockDrafter(DrafterWeights(module), target)


SERVED: dict[str, Callable[[Target], Drafter]] = {
    "dspark": dspark,
    "eagle3": lambda target: Eagle3Drafter(DrafterWeights(make_drafter(target)), target),
    "mtp": lambda target: MTPDrafter(DrafterWeights(make_mtp(target, 2, 4)), target),
    "lm": lambda target: StandaloneDrafter(small_model(), target, 4),
}


class Broken(RuntimeError):
    """Memory ran out, say."""


def fails_at(number: int, real: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def once(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Broken
        return real(*args, **options)

    return once


@pytest.mark.parametrize("call", ["extend", "propose"])
@pytest.mark.parametrize("name", SERVED)
@torch.inference_mode()
def test_a_failed_pass_can_be_repeated(name: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = toy_target()
    drafter = SERVED[name](target)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(4, 97, (30,), generator=generator).tolist()
    aux_TLD = torch.randn(30, len(drafter.aux_layers), 32, generator=generator)

    def extend(session: Any, start: int, end: int) -> None:
        drafter.extend([session], [text[start:end]], aux_TLD[start:end])

    def draft(session: Any, end: int) -> list[Tensor]:
        (proposal,) = drafter.propose([call_for(session, text[: end + 1], SamplingParams(temperature=1.0))])
        return [row_of(proposal, k) for k in range(len(proposal.tokens))]

    def broken(number: int) -> None:
        owner, method = (DraftKV, "write") if drafter.aux_layers else (drafter.model, "forward_ragged")  # type: ignore[attr-defined]
        monkeypatch.setattr(owner, method, fails_at(number, getattr(owner, method)))

    steady, shaken = drafter.new_session(60), drafter.new_session(60)
    for session in (steady, shaken):
        extend(session, 0, 9)
        draft(session, 9)
    with monkeypatch.context() as monkeypatch, pytest.raises(Broken):
        if call == "extend":
            broken(2 if name in ("dspark", "mtp") else 1)  # where there are several layers: between them
            extend(shaken, 9, 21)
        else:
            broken(2)
            draft(shaken, 9)
    for session in (steady, shaken):
        extend(session, 9, 21)
    for row, expected in zip(draft(shaken, 21), draft(steady, 21), strict=True):
        assert torch.equal(row, expected)
