"""The toy drafter with the metadata that training leaves, and a file of tasks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from outrider.checkpoints.checkpoint import add_metadata

TRAINED: dict[str, Any] = {
    "recipe": {
        "data": {"max_new_tokens": 64, "max_prompt_tokens": 32, "temperature": 0.0},
        "initialize_from_target": True,
        "drafter": {"algorithm": "dspark"},
        "objective": {"ce": 0.1, "l1": 0.9},
        "optimizer": {"steps": 20, "learning_rate": 0.001},
    },
    "step": 20,
    "samples": 1234,
    "response_tokens": 56789,
    "held_out": {"loss": 1.0, "expected_length_greedy": 2.345},
    "versions": {"torch": "9.9"},
}


def trained(toy: Path, place: Path, **more: object) -> Path:
    """The toy drafter, as training for the toy target would have left it."""
    shutil.copytree(toy / "drafter", place)
    add_metadata(place, **{**TRAINED, "target": str(toy / "target"), **more})
    return place


def tasks_file(place: Path, count: int = 2) -> Path:
    place.write_text("".join(json.dumps({"turns": [f"say {i}"]}) + "\n" for i in range(count)))
    return place
