"""Settings of `outrider serve`. Read by `--help`, so nothing here imports PyTorch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from outrider.config import (
    API_KEY,
    AUTO,
    DRAFTS,
    ENGINES,
    LOAD,
    SERVER,
    SMOLLM2,
    Config,
    DrafterOrNone,
    EngineType,
    Lookup,
    Machine,
    StartedEngine,
    TargetName,
    Thinking,
    TreeText,
    option,
    rare,
)

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # addresses that only this machine reaches
_OF_ANY_ENGINE = {"target", "drafter", "host", "port", "name", "max_requests", "engine"}
_OF_OTHERS = {"launch", "engine_dtype", "engine_python", "engine_command", "engine_args"}


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Config):
    """A server of OpenAI's API: ours, or with `engine` another engine's (serving/start.py)."""

    target: TargetName = SMOLLM2
    drafter: DrafterOrNone = AUTO
    host: Annotated[str, option(SERVER, "address to listen at; 0.0.0.0: every one of this machine's")] = "127.0.0.1"
    port: Annotated[int, option(SERVER, "to listen at", min=1, max=65535)] = 8000
    name: Annotated[str | None, option(SERVER, "of the model, for clients; else the target's")] = None
    thinking: Thinking = False
    max_requests: Annotated[int | None, option(LOAD, "decoded at once", min=1, show_default="32")] = None
    max_waiting: Annotated[int, option(LOAD, "more that may wait; further ones get 429", min=0)] = 128
    shutdown_timeout: Annotated[
        int, rare(LOAD, "seconds that requests in progress have to finish after SIGTERM or Ctrl-C", min=0)
    ] = 30
    max_new_tokens: Annotated[int | None, option(LOAD, "of a response; else what fits", min=1)] = None
    kv_tokens: Annotated[
        int | None,
        rare(LOAD, "that all requests at once may hold; by free memory on a GPU", min=16, show_default="16384"),
    ] = None
    token_budget: Annotated[
        int | None, rare(LOAD, "most rows of one forward; 4096 on a GPU", min=1, show_default="512")
    ] = None
    prefix_cache: Annotated[bool, option(LOAD, "keep what was read, for prompts that begin alike")] = True
    profile: Annotated[
        Path | None, option(DRAFTS, "from outrider profile: draft and verify what pays", beside="path")
    ] = None
    tree: TreeText = None
    lookup: Lookup = ()
    lookup_responses: Annotated[int, rare(DRAFTS, "and tokens of the latest responses, anyone's", min=0)] = 0
    machine: Machine = Machine()
    engine: Annotated[
        Literal["vllm", "sglang"] | None,
        option(SERVER, "vllm or sglang: print the command that serves this there", metavar="ENGINE"),
    ] = None
    launch: Annotated[bool, option(SERVER, "and run it, in place of this process", "--launch")] = False
    engine_dtype: Annotated[EngineType | None, rare(ENGINES, "of its weights; the engine's choice")] = None
    started: StartedEngine = StartedEngine()

    def check(self) -> None:
        given = self.changed()
        theirs = [flag for name, flag in given.items() if name in _OF_OTHERS]
        ours = [flag for name, flag in given.items() if name not in _OF_OTHERS | _OF_ANY_ENGINE]
        if self.engine is None and theirs:
            raise ValueError(f"{', '.join(theirs)}: for another engine; name it with --engine.")
        if self.engine is not None and ours:
            raise ValueError(f"{', '.join(ours)}: of our own engine; flags of {self.engine} go into --engine-args.")
        if self.engine == "sglang" and API_KEY in os.environ:
            raise ValueError(
                f"sglang takes its key as a flag, which every user of the machine can read: unset {API_KEY}, and give "
                "--engine-args '--config FILE', a YAML file with api-key: KEY that is yours alone."
            )
        self.started.words()


def require_packages() -> None:
    """Refuse to go on without the packages that only the server needs."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError("outrider serve needs FastAPI and uvicorn: pip install 'outrider[serve]'.") from error
