"""Measure where the time of an engine step goes, by number of users and variant.

    python -m benchmarks.steps --profile PROFILE.json --out FILE.json

Prompts are those of eval_math, all requests decode in every step that counts, and none ends. Milliseconds are medians
and exclusive: those of a part are without those of the parts that it calls. Each is timed on the calling thread, which
waits for the operators of a CPU.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer
from rich.console import Console
from rich.table import Table

import outrider.decoding.engine as engine_module
import outrider.decoding.scoring as scoring
from outrider.backends.local import build_variant, limited
from outrider.checkpoints.checkpoint import load_drafter
from outrider.checkpoints.published import shipped_drafter
from outrider.data.chat import Chat
from outrider.data.sources import load_prompts
from outrider.decoding.acceptance import Acceptance
from outrider.decoding.cost import Profile
from outrider.decoding.drafting import Drafting
from outrider.decoding.engine import Engine
from outrider.decoding.policies import SkipDrafting
from outrider.decoding.request import Request, RequestState, StopRules
from outrider.decoding.scheduler import EngineConfig, Scheduler
from outrider.drafters.base import Drafter
from outrider.drafters.cache import CachedKeys
from outrider.drafters.dflash import BlockDrafter
from outrider.sampling import SamplingParams
from outrider.target.fused import FusedDecoder
from outrider.target.hub import EMBEDDED_ID
from outrider.target.kernels import LayerKernels
from outrider.target.linear import PackedLinear
from outrider.target.model import Target, load_target
from outrider.target.paged import PagedKV, RaggedStep
from outrider.utils.measure import machine, quartiles, set_up, versions

# The parts of a step and what they consist of: (owner, name of the function).
PARTS: dict[str, list[tuple[Any, str]]] = {
    "plan": [(Scheduler, "plan")],
    "policy, acceptance": [
        (SkipDrafting, "depths"),
        (Acceptance, "plan_view"),
        (Drafting, "observe"),
        (Engine, "schedule"),
    ],
    "drafter: reads": [(Drafting, "read"), (Drafting, "read_overdue")],
    "drafter: attention": [(CachedKeys, "attend")],
    "drafter: block": [(BlockDrafter, "block_hidden")],
    "drafter: chain": [(BlockDrafter, "propose")],
    "matrix products": [(PackedLinear, "forward"), (PackedLinear, "__call__")],
    "target: set-up": [(RaggedStep, "__init__"), (Engine, "score")],
    "layers' kernels": [(LayerKernels, name) for name in ("forward", "before_attention", "after_attention")],
    "target: attention": [(RaggedStep, "attend")],
    "target: the rest": [(FusedDecoder, "run"), (Target, "forward_ragged")],
    "verify": [(scoring, "target_rows"), (engine_module, "verify_all")],
    "keep rows": [(PagedKV, "keep_paths"), (Engine, "commit")],
    "commit, text": [(RequestState, "commit")],
    "step: the rest": [(Engine, "step")],
}


class Stopwatch:
    """Exclusive seconds by part, of functions that call one another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def watched(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its exclusive seconds added to `part`."""

        def timed(*args: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                spent = time.perf_counter() - started
                self.seconds[part] += spent - self._inner.pop()
                self._inner[-1] += spent

        return timed

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Every function of `PARTS` is timed inside."""
        with ExitStack() as stack:
            for part, functions in PARTS.items():
                for owner, name in functions:
                    stack.enter_context(patch.object(owner, name, self.watched(part, getattr(owner, name))))
            yield


def fill(engine: Engine, prompts: list[list[int]], users: int, temperature: float) -> None:
    """Submit `users` requests that end long after the measurement, and run until all decode."""
    for user in range(users):
        params = SamplingParams(temperature, seed=user)
        engine.submit(Request(f"{user}", prompts[user % len(prompts)], params, StopRules(1024, stop_ids=())))
    while engine.last is None or engine.last.requests < users or engine.last.prefill_tokens:
        engine.step()


def measured(engine: Engine, steps: int) -> dict[str, Any]:
    """Milliseconds of a step by part, and of whole steps without the stopwatch, which costs time itself."""
    for _ in range(5):  # kernels are built for these numbers of rows
        engine.step()
    watch, tokens, whole = Stopwatch(), 0, []
    for _ in range(steps):
        started = time.perf_counter()
        tokens += sum(len(output.tokens) for output in engine.step())
        whole.append(time.perf_counter() - started)
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    with watch.watching():
        for _ in range(steps):
            watch.seconds.clear()
            engine.step()
            for part, values in parts.items():
                values.append(1e3 * watch.seconds[part])
    return {
        "users": len(engine.scheduler.running),
        "step_ms": [1e3 * value for value in quartiles(whole)],
        "tokens_per_second": tokens / sum(whole),
        "parts_ms": {part: statistics.median(values) for part, values in parts.items()},
    }


def main(
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
    target: Annotated[str, typer.Option(help="Model id or directory.")] = EMBEDDED_ID,
    drafter: Annotated[Path | None, typer.Option(help="Directory; by default the one shipped for the target.")] = None,
    profile: Annotated[Path | None, typer.Option(help="For variants that decide by cost.")] = None,
    variants: Annotated[str, typer.Option(help="none, fixed-3, look-ahead+skip, ...")] = "none,fixed-3",
    users: Annotated[str, typer.Option(help="Numbers of users.")] = "1,4,8,16,32",
    steps: Annotated[int, typer.Option(min=2, help="Steps measured, twice.")] = 20,
    temperature: Annotated[float, typer.Option(help="Of all requests.")] = 0.0,
    threads: Annotated[int | None, typer.Option(help="By default every core.")] = None,
) -> None:
    """Milliseconds of an engine step by part."""
    set_up(threads)
    loaded = load_target(target)
    directory = drafter or shipped_drafter(target)
    assert directory is not None, "no drafter is shipped for this target: give --drafter"
    served: Drafter = load_drafter(directory, loaded)
    cost = None if profile is None else Profile.load(profile)
    levels = [int(level) for level in users.split(",")]
    chat = Chat.of(loaded)
    prompts = [chat.prompts(conversation, [], False)[0] for conversation in load_prompts("eval_math", 32)]
    found = []
    for name in variants.split(","):
        variant = build_variant(name, served.slots, 0.5, cost=cost)
        for level in levels:
            engine = Engine(
                loaded,
                limited(served, variant.drafts),
                variant.policy,
                config=EngineConfig(max(levels), num_blocks=max(levels) * 96),
            )
            fill(engine, prompts, level, temperature)
            found.append({"variant": name, **measured(engine, steps)})
    for name in variants.split(","):
        rows = [row for row in found if row["variant"] == name]
        table = Table("part", *(f"{row['users']} users" for row in rows), title=f"{name}: milliseconds of a step")
        for part in PARTS:
            table.add_row(part, *(f"{row['parts_ms'][part]:.2f}" for row in rows))
        table.add_row("whole step", *(f"{row['step_ms'][1]:.1f}" for row in rows))
        table.add_row("tokens/s", *(f"{row['tokens_per_second']:.1f}" for row in rows))
        Console(width=120).print(table)
    if out is not None:
        out.write_text(json.dumps({"measured": found, "machine": machine(), "versions": versions()}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
