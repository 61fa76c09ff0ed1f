"""A toy target with a drafter that is right now and then; the same as directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.drafters.dflash import BlockDrafter
from outrider.target.model import Target
from tests.toys.engine import toy_drafter
from tests.toys.target_directory import save_toy_drafter, save_toy_target
from tests.toys.targets import toy_target


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, drafter/ and tasks.jsonl."""
    directory = tmp_path_factory.mktemp("toy")
    vocab = save_toy_target(directory / "target", layers=5)
    save_toy_drafter(directory / "drafter", vocab)
    lines = [json.dumps({"turns": [f"number {i}"]}) for i in range(6)]
    (directory / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    return directory


@pytest.fixture(scope="module")
def target() -> Target:
    """With few likely tokens."""
    found = toy_target()
    found.model.lm_head.weight.data[8:] *= 0.05
    return Target(found.model, None, "toy")


@pytest.fixture(scope="module")
def drafter(target: Target) -> BlockDrafter:
    return toy_drafter(target, seed=6)
