"""Settings of the doctor. Read by `--help`, so nothing here imports PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from outrider.config import (
    API_KEY,
    ENGINES,
    FILES,
    GENERAL,
    MODELS,
    PROMPTS,
    Config,
    Machine,
    option,
    rare,
)

_OF_CHECKPOINTS = ("data", "evaluation", "quick")
_OF_SERVERS = ("baseline_url", "served_model", "also")


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Config):
    """What is examined: target, drafter and data, or with `base_url` a server."""

    target: Annotated[str | None, option(MODELS, "model id or directory", beside="name")] = None
    drafter: Annotated[Path | None, option(MODELS, "drafter directory", beside="drafter")] = None
    data: Annotated[Path | None, option(PROMPTS, "responses file the drafter learns from", beside="path")] = None
    evaluation: Annotated[
        str | None, option(PROMPTS, "prompts that must not be in the data", "--eval", beside="name")
    ] = None
    samples: Annotated[int, option(PROMPTS, "conversations run through the models", min=1)] = 8
    max_new_tokens: Annotated[int, option(PROMPTS, "tokens decoded per conversation", min=1)] = 48
    thinking: Annotated[bool, option(PROMPTS, "the mode the drafter is to serve in")] = False
    base_url: Annotated[str | None, option(ENGINES, f"a running server to examine; its key, if any, in {API_KEY}")] = (
        None
    )
    baseline_url: Annotated[str | None, option(ENGINES, "the same server without a drafter")] = None
    served_model: Annotated[str | None, rare(ENGINES, "the target's name on the servers")] = None
    tasks: Annotated[
        tuple[str, ...], option(ENGINES, "what the server is asked: tasks, files, shipped sets", beside="name")
    ] = ("eval_math", "eval_code", "eval_chat")
    questions: Annotated[int, option(ENGINES, "how many prompts of them", min=1)] = 24
    temperatures: Annotated[
        tuple[float, ...], option(ENGINES, "of equal parts of the prompts; of 0 and 1", "--temperature")
    ] = (0.0, 1.0)
    also: Annotated[
        tuple[Path, ...],
        rare(
            ENGINES,
            "another checkpoint that it may have loaded; may be repeated",
            repeated=True,
            beside="path",
            metavar="DIR",
        ),
    ] = ()
    timeout: Annotated[float, rare(ENGINES, "seconds to wait for an answer", min=1.0)] = 60.0
    quick: Annotated[bool, option(GENERAL, "end after the quick checks, under a minute for a small model")] = False
    json_out: Annotated[Path | None, option(FILES, "file for the findings", "--json", beside="path")] = None
    machine: Machine = Machine()

    def check(self) -> None:
        given, server = self.changed(), self.base_url is not None
        if idle := [given[name] for name in (_OF_CHECKPOINTS if server else _OF_SERVERS) if name in given]:
            raise ValueError(f"{', '.join(idle)}: {'not together with' if server else 'only with'} --base-url.")
        if server and (self.target is None or self.drafter is None):
            raise ValueError("--base-url: give --target and --drafter, too: what the server should have loaded.")
        if self.target is None and self.drafter is None and self.data is None:
            raise ValueError("nothing to examine: give --target, --drafter or --data, best all three.")
        values = self.temperatures
        if not set(values) <= {0.0, 1.0} or not values or len(set(values)) < len(values):
            raise ValueError(f"--temperature {list(values)}: give 0, 1 or 0,1; acceptance is computed at these.")
