"""Speed of decoding that begins with wrong step costs, over that with right ones, on the real model.

    python -m benchmarks.wrong_costs FILES --users 1,4,16 --out docs/results/wrong_costs.json

The right profile is measured first. Each wrong one is made of it: rows beyond the first, or drafts, ten times too dear
or too cheap, or the uneven one that ended drafting in a first user's demo. Two engines, one with each profile, answer
the same prompts and take turns, step by step, so that a machine whose speed wavers slows both alike. The first 32 steps
of both are not counted; then whoever has committed fewer tokens steps next, until one has fewer requests than users.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from outrider.api.drafter import require_drafter
from outrider.backends.local import build_variant
from outrider.data.chat import render
from outrider.data.sources import load_prompts
from outrider.decoding.cost import Cell, Curve, Profile
from outrider.decoding.engine import Engine
from outrider.decoding.profile import machine_profile
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.target.hub import EMBEDDED_ID
from outrider.target.model import Target, load_target
from outrider.utils.measure import machine, today

BEGINNING = 32
_UNEVEN = {1: 0.48, 4: 1.26, 8: 1.22, 16: 0.61, 32: 0.95}
_UNEVEN_DRAFT = 0.08


def scaled(profile: Profile, rows: float = 1.0, drafts: float = 1.0) -> Profile:
    """What rows beyond the first cost, and drafts, times so much."""
    one = {(c.requests, c.context): c.low for c in profile.cells if c.tokens == c.requests}
    first = one[1, min(c.context for c in profile.cells)]

    def cell(c: Cell) -> Cell:
        seconds = first + rows * max(c.low - first, 0.0)
        return c.model_copy(update={"low": seconds, "median": seconds, "high": seconds})

    def curve(c: Curve | None) -> Curve | None:
        return c and Curve(requests=c.requests, seconds=[(drafts * low,) * 3 for low, _, _ in c.seconds])

    changed = {name: curve(getattr(profile, name)) for name in ("draft", "draft_one", "extend")}
    return profile.model_copy(update={"cells": [cell(c) for c in profile.cells], **changed})


def uneven(profile: Profile) -> Profile:
    """As it was measured beside other work."""
    dearer = _UNEVEN[1] / min(c.low for c in profile.cells)

    def cell(c: Cell) -> Cell:
        seconds = _UNEVEN.get(c.tokens, dearer * c.low) if c.requests == 1 else dearer * c.low
        return c.model_copy(update={"low": seconds, "median": seconds, "high": seconds})

    draft = Curve(requests=[1], seconds=[(_UNEVEN_DRAFT,) * 3])
    return profile.model_copy(update={"cells": [cell(c) for c in profile.cells], "draft": draft, "draft_one": draft})


def wrong_profiles(profile: Profile) -> dict[str, Profile]:
    """The five by name."""
    return {
        "uneven": uneven(profile),
        "drafts ten times too dear": scaled(profile, drafts=10.0),
        "drafts ten times too cheap": scaled(profile, drafts=0.1),
        "rows ten times too dear": scaled(profile, rows=10.0),
        "rows ten times too cheap": scaled(profile, rows=0.1),
    }


@dataclass
class Lane:
    """An engine, and what it did after the beginning."""

    engine: Engine
    users: int
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether some user has no more requests."""
        return not self.engine.scheduler.waiting and len(self.engine.scheduler.running) < self.users

    def step(self) -> None:
        self.engine.step()
        last = self.engine.last
        assert last is not None
        self.steps += 1
        if self.steps > BEGINNING and not last.prefill_tokens:
            self.tokens, self.seconds = self.tokens + last.committed, self.seconds + last.seconds


def ratio(
    target: Target, prompts: Sequence[Sequence[int]], right: Profile, wrong: Profile, *, users: int, tokens: int
) -> float:
    """Tokens per second from the wrong profile over those from the right one."""
    opened = require_drafter("auto", EMBEDDED_ID).open(target)
    lanes = []
    for profile in (right, wrong):
        policy = build_variant("look-ahead+skip", opened.drafter.gamma, None, cost=profile).policy
        lane = Lane(Engine(target, opened.drafter, policy, EngineConfig(max_requests=users)), users)
        for number, prompt in enumerate(prompts):
            lane.engine.submit(Request(str(number), prompt, rules=StopRules(tokens)))
        lanes.append(lane)
    while not any(lane.ended for lane in lanes):
        early = [lane for lane in lanes if lane.steps <= BEGINNING]
        min(early or lanes, key=lambda lane: lane.steps if early else lane.tokens).step()
    first, second = (lane.tokens / lane.seconds for lane in lanes)
    return second / first


def main(
    files: list[str],
    users: Annotated[str, typer.Option(help="how many at once: 1,4,16")] = "1,4,16",
    repeats: Annotated[int, typer.Option(help="times that each pair runs, with other prompts")] = 3,
    tokens: Annotated[int, typer.Option(help="new tokens of a response")] = 160,
    threads: Annotated[int, typer.Option(help="CPU threads")] = 2,
    out: Annotated[Path | None, typer.Option(help="a JSON file")] = None,
) -> None:
    torch.set_num_threads(threads)
    target = load_target(EMBEDDED_ID)
    assert target.tokenizer is not None
    opened = require_drafter("auto", EMBEDDED_ID).open(target)
    right = machine_profile(target, opened.drafter, print, again=True).profile
    loaded = [load_prompts(name, 200) for name in files]
    texts = [prompt for group in zip(*loaded, strict=False) for prompt in group]
    prompts = [render(target.tokenizer, prompt.turns[:1], []) for prompt in texts]
    print(f"spread of the right profile {right.spread:.0%}", flush=True)
    found: dict[str, dict[int, list[float]]] = {}
    for count in map(int, users.split(",")):
        size = max(4, 2 * count)
        for name, wrong in wrong_profiles(right).items():
            parts = [prompts[i * size : (i + 1) * size] for i in range(repeats)]
            ratios = [ratio(target, part, right, wrong, users=count, tokens=tokens) for part in parts]
            found.setdefault(name, {})[count] = [round(value, 3) for value in ratios]
            print(f"{count:3d} users, {name}: {', '.join(f'{value:.2f}' for value in sorted(ratios))}", flush=True)
    if out is not None:
        record = {"ratios": found, "machine": machine(), "date": today(), "spread": right.spread}
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
