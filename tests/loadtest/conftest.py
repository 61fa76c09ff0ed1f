"""Load generators and the frontier on a fake engine and a simulated clock, exact numbers; the verb on a toy model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.toys.target_directory import save_toy_drafter, save_toy_target


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, drafter/ and tasks.jsonl."""
    directory = tmp_path_factory.mktemp("toy")
    vocab = save_toy_target(directory / "target", layers=5)
    save_toy_drafter(directory / "drafter", vocab)
    lines = [json.dumps({"turns": [f"number {i}"]}) for i in range(6)]
    (directory / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    return directory
