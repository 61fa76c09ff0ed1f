"""The verbs that decode in this process, with --device cuda on the simulated device: none of them mixes devices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.gpu.simulated import simulated_device
from tests.gpu.toys import simulate_kernels
from tests.toys.command_line import Run


@pytest.mark.parametrize("verb", ["generate", "calibrate", "doctor", "profile", "prepare", "eval"])
def test_a_verb_on_the_device(verb: str, toy: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(i), "turns": ["say " + "ab"[i % 2]]}) + "\n" for i in range(4)))
    replies = tmp_path / "replies.jsonl"
    reply = {"id": "a", "turn": 0, "prompt": [5] * 9, "response": [7] * 9, "finished": True}
    replies.write_text("".join(json.dumps(row) + "\n" for row in ({"format": 2, "settings": {}}, reply)))
    drafter = shutil.copytree(toy / "drafter", tmp_path / "drafter")  # calibrate writes into it
    models = ["--target", toy / "target", "--drafter", drafter]
    arguments = {
        "generate": ["say a", *models, "--max-new-tokens", "6"],
        "calibrate": [*models, "--tasks", prompts, "--max-new-tokens", "60"],
        "doctor": [*models, "--data", replies, "--samples", "1", "--max-new-tokens", "8"],
        "profile": [
            *[*models, "--out", tmp_path / "p.json", "--contexts", "8,16", "--max-requests", "2"],
            *["--max-tokens", "16", "--repeats", "1"],
        ],
        "prepare": [
            *models[:2],
            "--prompts",
            prompts,
            "--out",
            tmp_path / "made.jsonl",
            "--max-new-tokens",
            "6",
            "--max-prompt-tokens",
            "100",
        ],
        "eval": [*models, "--tasks", prompts, "--max-new-tokens", "6", "--out", tmp_path / "out"],
    }[verb]
    with simulated_device() as device:
        simulate_kernels(device, monkeypatch)
        status, out, error = run(verb, *arguments, "--device", "cuda")
    assert "same device" not in out + error and "the check itself broke" not in out, out + error
    assert status == 0 or verb == "doctor", error  # it finds faults in a random drafter
    assert device.counts.launches, "it ran on the device"
