"""The parts of an engine step are functions that there are, and their times are those of the step."""

from __future__ import annotations

from benchmarks.steps import PARTS, fill, measured
from outrider.decoding.engine import Engine
from outrider.decoding.policies import FixedPolicy
from outrider.decoding.scheduler import EngineConfig
from tests.toys.engine import prompts, toy_drafter
from tests.toys.targets import toy_target


def test_parts_of_a_step() -> None:
    target = toy_target()
    engine = Engine(target, toy_drafter(target), FixedPolicy(), config=EngineConfig(2, num_blocks=200))
    fill(engine, prompts(2), 2, temperature=1.0)
    found = measured(engine, 3)
    parts = found["parts_ms"]
    assert list(parts) == list(PARTS) and found["users"] == 2
    assert all(parts[part] > 0 for part in ("drafter: block", "drafter: chain", "drafter: reads", "verify", "plan"))
    assert sum(parts.values()) < 10 * found["step_ms"][2]
