"""`outrider serve`: OpenAI's API over the engine."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from outrider.api.drafter import AUTO, choose_drafter
from outrider.cli import options as opt
from outrider.cli.common import choose_tree, show_lines
from outrider.cli.options import DRAFTS, SMOLLM2, option, rare
from outrider.utils.measure import set_up
from outrider.utils.terminal import Terminal

if TYPE_CHECKING:
    from outrider.api.model import Model
    from outrider.engine.scheduler import EngineConfig
    from outrider.serving.app import Server

SERVER, LOAD = "Server", "Load"
API_KEY = "OUTRIDER_API_KEY"
_STOP_SECONDS = 30  # that requests have to finish when the server is stopped


def serve_command(
    *,
    target: opt.TargetName = SMOLLM2,
    drafter: opt.DrafterOrNone = AUTO,
    host: Annotated[str, option(SERVER, "address to listen at; 0.0.0.0: every one of this machine's")] = "127.0.0.1",
    port: Annotated[int, option(SERVER, "to listen at", min=1, max=65535)] = 8000,
    name: Annotated[str | None, option(SERVER, "of the model, for clients; else the target's")] = None,
    thinking: opt.Thinking = False,
    max_requests: Annotated[int, option(LOAD, "decoded at once", min=1)] = 32,
    max_waiting: Annotated[int, option(LOAD, "more that may wait; further ones get 429", min=0)] = 128,
    max_new_tokens: Annotated[int | None, option(LOAD, "of a response; else what fits", min=1)] = None,
    kv_tokens: Annotated[int, rare(LOAD, "that all requests at once may hold", min=16)] = 16384,
    token_budget: Annotated[int, rare(LOAD, "most rows of one forward", min=1)] = 512,
    profile: Annotated[Path | None, option(DRAFTS, "from outrider profile: draft and verify what pays")] = None,
    tree: opt.Tree = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Serve OpenAI's API, with drafts; a key, if any, is in $OUTRIDER_API_KEY."""
    require_serving()
    import uvicorn

    from outrider.api.model import load
    from outrider.engine.scheduler import EngineConfig
    from outrider.serving.app import create_app

    set_up(threads)
    console, key = Terminal(stderr=True, highlight=False, soft_wrap=True), os.environ.get(API_KEY)
    if key is not None and (not key.isascii() or not key.strip()):
        raise ValueError(f"{API_KEY} must be ASCII text, or not set.")
    if key is None and host not in ("127.0.0.1", "localhost", "::1"):
        console.print(f"warning: anyone who reaches {host} may use this server; set {API_KEY} to ask for a key.")
    config = EngineConfig(max_requests, token_budget, num_blocks=kv_tokens // EngineConfig.block_size)
    choice, say = choose_drafter(drafter, target, thinking), partial(show_lines, console)
    model = load(target, choice, device, thinking=thinking, tree=choose_tree(tree), say=say)
    server = build_server(
        model, config, profile, max_waiting=max_waiting, max_new_tokens=max_new_tokens, name=name, thinking=thinking
    )
    drafted = "plain decoding" if model.drafter is None else f"drafter {model.drafter.name}"
    console.print(f"serving {server.name} ({drafted}) at http://{host}:{port}/v1", markup=False)
    uvicorn.run(
        create_app(server, key), host=host, port=port, log_level="warning", timeout_graceful_shutdown=_STOP_SECONDS
    )


def require_serving() -> None:
    """Raises: ValueError: the packages that only the server needs are not installed."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError("outrider serve needs FastAPI and uvicorn: pip install 'outrider[serve]'.") from error


def build_server(
    model: Model,
    config: EngineConfig,
    profile: Path | None,
    *,
    max_waiting: int,
    max_new_tokens: int | None,
    name: str | None,
    thinking: bool,
) -> Server:
    """The server of a loaded model.

    Args:
        profile: drafts and verifies by these costs (look-ahead, +skip); None: by the model's own `scheduling`, whose
            costs are those of a handful of users.

    Raises:
        ValueError: the target cannot be served, or the profile was measured with something else.
    """
    from outrider.backends.local import SKIP, build_variant
    from outrider.engine.engine import Engine
    from outrider.evaluation.profile import setting_of
    from outrider.scheduling.cost import Profile
    from outrider.serving.app import Limits, Server
    from outrider.serving.metrics import ServerMetrics
    from outrider.serving.worker import Worker
    from outrider.target.model import Target

    if not isinstance(model.target, Target):
        raise ValueError("the engine serves targets of PyTorch.")
    drafter = None if model.drafter is None else model.drafter.drafter
    if profile is None:
        policy, gate = model.scheduling.policy, model.scheduling.gate
    else:
        if drafter is None or drafter.trees or drafter.heads is None or not drafter.heads.confident:
            raise ValueError(
                "--profile chooses drafts by their confidences, and none are drafted that have any: leave it out."
            )
        cost = Profile.load(profile)
        cost.check(setting_of(model.target, drafter))
        variant = build_variant(f"look-ahead{SKIP}", drafter.gamma, None, cost=cost)
        policy, gate = variant.policy, variant.gate
    engine = Engine(model.target, drafter, policy, gate=gate, config=config)
    name = name or model.target.name
    worker = Worker(engine, ServerMetrics(name, engine), max_waiting)
    return Server(worker, name, Limits(max_new_tokens), thinking=thinking)
