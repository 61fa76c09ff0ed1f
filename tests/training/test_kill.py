"""`outrider train` as a process, killed ten times while it regenerates, stores features and trains: the same end."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml

from tests.toys.zygote import Zygote, run_killed, size, write_toy, zygote_in

KILLS = 10
STEPS = 40
TIMES = {"seconds", "share_of_time", "tokens_per_second", "break_even"}


def recipe_file(toy: Path, out: Path, features: dict[str, object]) -> Path:
    recipe = {
        "target": str(toy / "target"),
        "out": str(out),
        "threads": 1,
        "features": features,
        "data": {
            "prompts": [{"path": str(toy / "prompts.jsonl")}],
            "max_new_tokens": 12,
            "max_prompt_tokens": 200,
            "temperature": 1.1,
            "batch_size": 3,
            "held_out": 4,
        },
        "drafter": {"num_hidden_layers": 1, "num_aux_layers": 1, "target_layer_ids": [0], "markov_rank": 4},
        "optimizer": {"steps": STEPS, "sequences_per_step": 3, "anchors_per_sequence": 4},
        "watch": {"decode_every": 10, "decode_prompts": 2, "decode_tokens": 8},
        "log_every": 1,
        "eval_every": 7,
        "save_every": 1,
    }
    path = out.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe))
    return path


def progress(out: Path, responses: int) -> float:
    """How far a run has come: responses count as much as steps."""
    state = out / "state" / "state.json"
    try:
        steps = json.loads(state.read_text())["step"] if state.exists() else 0
    except (OSError, ValueError):
        steps = 0  # being replaced
    made = responses if (out / "responses.jsonl").exists() else size(out / "responses.journal.jsonl")
    return min(1.0, made / responses) + steps / STEPS


def files(out: Path) -> dict[str, bytes]:
    """What must be the same: all but plots, logs of time, and the window of features, which is a cache."""
    left_out = ("tensorboard", "features", "training.png", "metrics.jsonl", "outrider.json")
    kept = [p for p in out.rglob("*") if p.is_file() and not any(part in left_out for part in p.relative_to(out).parts)]
    return {str(p.relative_to(out)): p.read_bytes() for p in kept}


def logged(out: Path) -> list[dict[str, float]]:
    """Every entry of the log but those of speed, without times."""
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in e.items() if k not in TIMES} for e in entries if e["group"] != "speed"]


@pytest.mark.slow
@pytest.mark.parametrize("features", [{"mode": "online"}, {"mode": "store", "max_gb": 0.0005, "dtype": "bf16"}])
def test_ten_kills_change_nothing(tmp_path: Path, features: dict[str, object]) -> None:
    toy = write_toy(tmp_path)
    chance = random.Random(11)
    with zygote_in(tmp_path) as zygote:
        whole, out = tmp_path / "whole", tmp_path / "out"
        end(zygote, recipe_file(toy, whole, features))
        recipe = recipe_file(toy, out, features)
        responses = size(whole / "responses.jsonl")
        for number in range(KILLS):
            # the first run may be killed before it has done anything; all together come two thirds of the way
            limit = progress(out, responses) + chance.random() * 0.15 if number else -1.0

            def reached(limit: float = limit) -> bool:
                return progress(out, responses) > limit

            assert run_killed(zygote, ("train", recipe), reached, chance.random() * 0.04), (
                "it ended before it was killed"
            )
        end(zygote, recipe)
    assert files(out) == files(whole)
    assert logged(out) == logged(whole)
    assert not [p.name for p in out.iterdir() if p.name.startswith(".") and not p.name.endswith(".lock")], (
        "nothing is left behind"
    )


def end(zygote: Zygote, recipe: Path) -> None:
    status, output = zygote.run("train", recipe)
    assert status == 0, output
