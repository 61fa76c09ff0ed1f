"""Regenerated responses: the on-policy text a drafter learns from, kept as tokens in a JSON Lines file.

    line 1   {"settings": {...}}                                    what made the file; another recipe is refused
    others   {"id", "turn", "prompt": [tokens], "response": [tokens], "finished"}

The file grows batch by batch, and a run that was killed goes on where it stopped. Prompts and responses are stored as
tokens so that the loss mask's boundary is exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.data.chat import render, response_text
from outrider.data.generation import generate_all
from outrider.data.prompts import Prompt
from outrider.data.samples import Reply
from outrider.sampling import SamplingParams
from outrider.target import Target


@dataclass(frozen=True)
class RegenerationConfig:
    """How responses are made. Lengths in tokens."""

    max_new_tokens: int = 256
    max_prompt_tokens: int = 512
    temperature: float = 0.0
    batch_size: int = 64
    seed: int = 0


def read_responses(path: Path) -> tuple[dict[str, Any], list[Reply]]:
    """Settings and replies of a responses file; a last line cut short by a crash is ignored.

    Raises:
        ValueError: a malformed line elsewhere (file and line named).
    """
    settings: dict[str, Any] = {}
    replies: list[Reply] = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, text in enumerate(lines, start=1):
        if not text:
            continue
        try:
            entry = json.loads(text)
            if number == 1:
                settings = entry["settings"]
            else:
                replies.append(Reply(**entry))
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines) and number > 1:
                break  # no newline after it: the process died while writing this line
            raise ValueError(
                f"{path}:{number}: not a responses line ({error}). Delete the file to regenerate."
            ) from error
    return settings, replies


def regenerate(
    target: Target,
    prompts: Sequence[Prompt],
    config: RegenerationConfig,
    path: Path,
    on_progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Reply]:
    """Write the target's responses to every turn of every prompt, appending to `path`, and return the prompts' replies.

    At a temperature above 0 a resumed run draws other responses than an uninterrupted one would have.

    Args:
        on_progress: called after each batch with (turns done, turns in all, response tokens so far).
        stop: asked between batches; True ends early with what there is.

    Raises:
        ValueError: `path` holds responses made with other settings, or to another prompt of the same id.
    """
    settings = {"target": target.name, **asdict(config)}
    settings.pop("batch_size")  # speed, not content
    replies: list[Reply] = []
    if path.exists() and path.stat().st_size:
        found, replies = read_responses(path)
        if found != settings:
            raise ValueError(
                f"{path} was made with other settings ({found}) than the recipe's ({settings}). "
                "Point data.responses to another file, or delete this one."
            )
    assert target.tokenizer is not None
    text = "".join(json.dumps(e) + "\n" for e in [{"settings": settings}, *map(asdict, replies)])
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".tmp")
    staging.write_text(text, encoding="utf-8")  # drops a half-written last line
    staging.replace(path)

    done = {(s.id, s.turn): s for s in replies}
    total = sum(len(p.turns) for p in prompts)
    tokens = sum(len(s.response) for s in replies)
    params = SamplingParams(temperature=config.temperature, seed=config.seed)
    kept: list[Reply] = []
    with path.open("a", encoding="utf-8") as file:
        for turn in range(max((len(p.turns) for p in prompts), default=0)):
            wanted, rendered = [], []
            for prompt in prompts:
                earlier = [done.get((prompt.id, t)) for t in range(turn)]
                if turn >= len(prompt.turns) or None in earlier:
                    continue
                said = [response_text(target.tokenizer, s.response) for s in earlier if s is not None]
                tokens_T = render(target.tokenizer, prompt.turns[: turn + 1], said)
                stored = done.get((prompt.id, turn))
                if stored is not None:
                    if stored.prompt != tokens_T:
                        raise ValueError(
                            f"{path} holds a response to another prompt with the id {prompt.id!r}. "
                            "Give the new prompt its own id, or delete the file."
                        )
                    kept.append(stored)
                elif len(tokens_T) <= config.max_prompt_tokens:
                    wanted.append(prompt.id)
                    rendered.append(tokens_T)
            for batch in generate_all(target, rendered, config.max_new_tokens, params, config.batch_size, stop):
                for r in batch:
                    reply = Reply(wanted[r.index], turn, rendered[r.index], r.tokens, r.finished)
                    done[reply.id, turn] = reply
                    kept.append(reply)
                    tokens += len(r.tokens)
                    file.write(json.dumps(asdict(reply)) + "\n")
                file.flush()
                on_progress(len(done), total, tokens)
    return kept
