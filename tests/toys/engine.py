"""Random prompts, an engine run until it is idle, and the check of its tokens against plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.request import Request
from outrider.decoding.scheduler import StepPlan
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import BlockDrafter
from outrider.drafters.dspark import DSpark, DSparkConfig
from outrider.evaluation.evaluate import compare_greedy
from outrider.target.model import Target
from tests.toys.targets import randomise, toy_config


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    chooser = random.Random(seed)
    return [[chooser.randrange(4, 97) for _ in range(chooser.randint(1, longest))] for _ in range(count)]


def finish(
    engine: Engine, requests: Sequence[Request], each_step: Callable[[], None] = lambda: None
) -> dict[str, list[int]]:
    """Submit all and run until idle."""
    for request in requests:
        engine.submit(request)
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    while not engine.idle:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            found[output.id] += output.tokens
        each_step()
    return found


def assert_solo(target: Target, request: Request, tokens: list[int]) -> None:
    """Greedy tokens are plain decoding's, but for a near-tie of the target's own."""
    plain = generate(target, request.prompt, None, request.params, request.rules).tokens
    assert compare_greedy(target, request.prompt, plain, tokens) != "mismatch", request.id


def toy_drafter(target: Target, seed: int = 0) -> BlockDrafter:
    config = toy_config()
    assert isinstance(config, DSparkConfig)
    module = DSpark(config)
    randomise(module, seed)
    return BlockDrafter(DrafterWeights(module.eval()), target)


def watch_preemptions(engine: Engine) -> list[str]:
    """The ids that the engine preempts from now on, filled as it runs."""
    preempted: list[str] = []
    plan = engine.scheduler.plan

    def watched() -> StepPlan:
        step = plan()
        preempted.extend(step.preempted)
        return step

    engine.scheduler.plan = watched  # type: ignore[method-assign]
    return preempted
