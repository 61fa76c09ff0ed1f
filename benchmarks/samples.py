"""Memory and start-up of a training's samples, on made-up conversations of one size.

    python -m benchmarks.samples --directory DIR [--conversations 800000] [--tokens 1500] [--write]

With --write it makes DIR/responses.jsonl (8 bytes a token) and ends; without, it reads the file as a training does: the
samples, their split, the schedule's first step and its tokens, the digest of a part of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from outrider.data.responses import FORMAT, open_responses, stored_samples
from outrider.training.batches import Schedule
from outrider.training.dataset import split_samples
from outrider.training.feature_store import samples_digest

_SUMMED = 20_000  # samples whose digest is taken; the rest takes as long each
_MANY = 64  # conversations of which the file is made, again and again under other ids


def memory() -> dict[str, float]:
    """Gigabytes of this process: its own memory, and pages of the mapped file, which are the system's to take back."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kilobytes = {line.split(":")[0]: float(line.split()[1]) for line in lines if line.startswith("Rss")}
    return {"own": kilobytes["RssAnon"] / 2**20, "mapped": kilobytes["RssFile"] / 2**20}


@contextmanager
def told(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    found = memory()
    print(f"{what}: {time.perf_counter() - began:.1f} s; {found['own']:.2f} GB own, {found['mapped']:.2f} GB mapped")


def write(path: Path, conversations: int, tokens: int) -> None:
    """A file of conversations of so many tokens, a third of them the prompt's."""
    ids = [[(17 * i + 7919 * k) % 90_000 + 10_000 for k in range(tokens)] for i in range(_MANY)]
    ends = [
        f'"turn": 0, "prompt": {json.dumps(part[: tokens // 3])}, "response": {json.dumps(part[tokens // 3 :])}, '
        '"finished": true, "exact": true}\n'
        for part in ids
    ]
    with path.open("w", encoding="ascii") as file:
        file.write(json.dumps({"format": FORMAT, "settings": {}}) + "\n")
        for number in range(conversations):
            file.write(f'{{"id": "{number:016x}", {ends[number % _MANY]}')


def main(
    directory: Annotated[Path, typer.Option()],
    conversations: Annotated[int, typer.Option(min=1000)] = 800_000,
    tokens: Annotated[int, typer.Option(min=3)] = 1500,
    to_write: Annotated[bool, typer.Option("--write")] = False,
) -> None:
    """Write the file, or read it and say what it takes."""
    path = directory / "responses.jsonl"
    if to_write:
        directory.mkdir(parents=True, exist_ok=True)
        write(path, conversations, tokens)
        print(f"{path}: {path.stat().st_size / 2**30:.2f} GB")
        return
    with told("samples"):
        samples = stored_samples(path, open_responses(path)[1])
    with told(f"split of {len(samples)}"):
        trained, _ = split_samples(samples, 64, path)
    with told("schedule"):
        schedule = Schedule(trained, sequences_per_step=512, anchors_per_sequence=512, seed=0)
        chosen = schedule.step(0)
    with told(f"tokens of a step of {len(chosen)}"):
        lengths = [len(trained[index].tokens) for index, _ in chosen]
    assert set(lengths) == {tokens}
    with told(f"digest of {_SUMMED}"):
        samples_digest(trained[:_SUMMED])


if __name__ == "__main__":
    typer.run(main)
