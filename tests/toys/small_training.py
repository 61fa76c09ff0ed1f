"""Drafters fluent in a few answers of the real SmolLM2: seconds of training through the production path.

    prompts -> the target's own greedy answers -> a file of responses -> Recipe -> prepare -> Trainer -> OUT/drafter

A drafter that has met an answer has its drafts accepted there in earnest, which an untrained one never has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.data.chat import Chat
from outrider.data.responses import FORMAT
from outrider.decoding.generate import Generation, generate
from outrider.decoding.request import StopRules
from outrider.target.model import Target
from outrider.training.recipe import Recipe
from outrider.training.setup import Run, prepare
from tests.toys import training

TOKENS = 40
CHUNK, MOST_STEPS = 20, 400  # of `train_until`


class Answer(NamedTuple):
    """A prompt and the target's own answer to it."""

    prompt: list[int]
    response: list[int]


class Trained(NamedTuple):
    """What was trained, on all answers but one, and its checkpoint's directory; metrics.jsonl lies beside that.

    `decoded`: what it decodes, served from there, for the prompt of every answer, the held-out one too.
    """

    run: Run
    directory: Path
    decoded: list[Generation]

    @property
    def accepted(self) -> float:
        """Mean number of accepted draft tokens of a round."""
        return mean(stats.accepted for generation in self.decoded for stats in generation.rounds)


def answer(target: Target, prompts: list[list[int]]) -> list[Answer]:
    """Greedy answers of at most TOKENS tokens."""
    return [Answer(prompt, generate(target, prompt, rules=StopRules(TOKENS)).tokens) for prompt in prompts]


def train_until(
    accepted_length: float,
    method: str,
    target: Target,
    answers: list[Answer],
    folder: Path,
    sections: Mapping[str, Any] | None = None,
) -> Trained:
    """Train a drafter until it has that accepted length over all answers.

    `sections`: drafter and objective of a recipe, where the method's own defaults are not what is asked about.
    """
    recipe, directory = _recipe(method, target, answers, folder, sections or {}), folder / "out" / "drafter"
    trained = Trained(prepare(recipe, target), directory, [])

    def reached(_: dict[str, float]) -> bool:
        drafter = load_checkpoint(directory).serve(target)
        trained.decoded[:] = [generate(target, prompt, drafter, rules=StopRules(TOKENS)) for prompt, _ in answers]
        return 1 + trained.accepted >= accepted_length

    training.train_until(reached, recipe, trained.run, part=CHUNK)
    return trained


def _recipe(method: str, target: Target, answers: list[Answer], folder: Path, sections: Mapping[str, Any]) -> Recipe:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "responses.jsonl"
    settings = {"target": target.name, "chat_template_sha256": Chat.of(target).template_sha256}
    rows: list[dict[str, object]] = [{"format": FORMAT, "settings": settings}]
    for number, (prompt, response) in enumerate(answers):
        rows.append({"id": str(number), "turn": 0, "prompt": prompt, "response": response, "finished": True})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Recipe.model_validate(
        {
            "target": target.name,
            "out": str(folder / "out"),
            "data": {"responses": str(path), "held_out": 1},
            "drafter": {"algorithm": method, "draft_vocab_size": 4096},
            "objective": {"ce": 1.0, "confidence": 0.0},
            "optimizer": {
                "steps": MOST_STEPS,
                "sequences_per_step": 3,
                "anchors_per_sequence": 20,
                "learning_rate": 2e-3,
            },
            "watch": {"decode_every": None},
            "log_every": 1,
            "eval_every": CHUNK,
            "save_every": CHUNK,
            **sections,
        }
    )
