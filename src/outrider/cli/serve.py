"""`outrider serve`: OpenAI's API over the engine; or the command that serves the same models on another engine."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from outrider.api.drafter import AUTO, choose_drafter
from outrider.cli import options as opt
from outrider.cli.common import choose_tree, show_lines, split_names, split_words
from outrider.cli.options import API_KEY, DRAFTS, ENGINES, SMOLLM2, option, rare
from outrider.utils.measure import set_up
from outrider.utils.packaged import name_of
from outrider.utils.terminal import Terminal

if TYPE_CHECKING:
    from outrider.api.drafter import DrafterChoice
    from outrider.api.model import Model
    from outrider.backends.base import ExternalEngine, Launch, Speculation
    from outrider.decoding.scheduler import EngineConfig
    from outrider.serving.app import Server

SERVER, LOAD = "Server", "Load"
_Result = TypeVar("_Result")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve_command(
    context: typer.Context,
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
    lookup: opt.Lookup = None,
    lookup_responses: Annotated[int, rare(DRAFTS, "and tokens of the latest responses, anyone's", min=0)] = 0,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    engine: Annotated[
        Literal["vllm", "sglang"] | None,
        option(SERVER, "vllm or sglang: print the command that serves this there", metavar="ENGINE"),
    ] = None,
    launch: Annotated[bool, option(SERVER, "and run it, in place of this process", "--launch")] = False,
    engine_dtype: Annotated[opt.EngineType | None, rare(ENGINES, "of its weights; the engine's choice")] = None,
    engine_python: opt.EnginePython = sys.executable,
    engine_command: opt.EngineCommand = None,
    engine_args: opt.EngineArgs = "",
) -> None:
    """Serve OpenAI's API, with drafts; a key, if any, is in $OUTRIDER_API_KEY."""
    _check_whose(context, engine)
    if engine is not None:
        from outrider.backends.base import Launch

        unnamed = engine_python == sys.executable and not launch  # a printed command is for any machine
        plan = Launch(
            target,
            host=host,
            port=port,
            name=name,
            dtype=engine_dtype,
            users=max_requests if _is_given(context, "max_requests") else None,
            python="python" if unnamed else engine_python,
            executable=engine_command,
            extra=split_words("--engine-args", engine_args),
        )
        serve_elsewhere(engine, plan, choose_drafter(drafter, target), launch=launch)
        return
    require_serving()

    from outrider.api.model import load
    from outrider.decoding.scheduler import EngineConfig
    from outrider.serving.connection import http_server

    set_up(threads)
    console, key = Terminal(stderr=True, highlight=False, soft_wrap=True), os.environ.get(API_KEY)
    if key is not None and (not key.isascii() or not key.strip()):
        raise ValueError(f"{API_KEY} must be ASCII text, or not set.")
    if key is None and host not in _LOOPBACK:
        console.print(f"warning: anyone who reaches {host} may use this server; set {API_KEY} to ask for a key.")
    config = EngineConfig(max_requests, token_budget, num_blocks=kv_tokens // EngineConfig.block_size)
    choice, say = choose_drafter(drafter, target, thinking), partial(show_lines, console)
    texts = () if lookup is None else split_names(lookup, "text file")
    loading = partial(load, lookup=texts, lookup_responses=lookup_responses, tree=choose_tree(tree), say=say)
    building = partial(
        build_server, max_waiting=max_waiting, max_new_tokens=max_new_tokens, name=name, thinking=thinking
    )

    def load_and_build() -> tuple[Model, Server]:
        model = loading(target, choice, device, thinking=thinking)
        return model, building(model, config, profile)  # it may run forwards, to measure what a step costs

    with _bind(host, port) as address:  # before minutes of loading
        model, server = _call_in_thread(load_and_build)
        drafted = "plain decoding" if model.drafter is None else f"drafter {model.drafter.name}"
        url = f"http://{host}:{port}"
        console.print(f"serving {server.name} ({drafted}) at {url}/v1; {url}/ shows its work", markup=False)
        running = http_server(server, key, host=host, port=port)
        with suppress(KeyboardInterrupt):  # raised again once the server has ended in order
            running.run(sockets=[address])
    if not running.started:  # uvicorn has said why
        raise typer.Exit(1)


def _bind(host: str, port: int) -> socket.socket:
    """The server's socket. Clients are refused until it listens.

    Raises:
        ValueError: the address is in use or none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ValueError(
            f"--host {host} --port {port}: {error.strerror or error}; give another --port or --host."
        ) from error
    return bound


def _call_in_thread(function: Callable[[], _Result]) -> _Result:
    """What a function returns that is called in a thread of its own, which has ended on return.

    GCC's OpenMP keeps a pool of threads for every thread that has computed in parallel, until that thread ends. While
    all pools together have more threads than there are cores, whoever waits at a barrier sleeps instead of spinning,
    and a step of the engine has hundreds of barriers: the engine's thread must have the only pool. Source: libgomp,
    config/linux/wait.h (`gomp_managed_threads`).
    """
    done: Future[_Result] = Future()

    def call() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    thread = Thread(target=call, name="load", daemon=True)  # a daemon: Ctrl-C must not wait for a download
    thread.start()
    found = done.result()
    thread.join()
    return found


# ----------------------------------------------------------------------------
# --engine: the commands that serve target and drafter on vLLM or SGLang; printed, or with --launch carried out.
#
#     [outrider export DRAFTER --to ENGINE --out runs/DRAFTER-ENGINE]     where the engine does not load it as it is
#     [VARIABLE=VALUE] python -m ...
# ----------------------------------------------------------------------------


_FOR_ENGINES = {"target", "drafter", "host", "port", "name", "max_requests"}  # options of any engine


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")  # the latter: --config


def _check_whose(context: typer.Context, engine: str | None) -> None:
    """Refuse options that the engine which is to serve does not have.

    Raises:
        ValueError: naming them.
    """
    params = [param for param in context.command.params if param.expose_value and param.name is not None]
    given = {str(param.name): param.opts[0] for param in params if _is_given(context, str(param.name))}
    theirs = {name: option for name, option in given.items() if name == "launch" or name.startswith("engine_")}
    if engine is None and theirs:
        raise ValueError(f"{', '.join(theirs.values())}: for another engine; name it with --engine.")
    ours = [option for name, option in given.items() if name not in {*_FOR_ENGINES, *theirs, "engine"}]
    if engine is not None and ours:
        raise ValueError(f"{', '.join(ours)}: of our own engine; flags of {engine} go into --engine-args.")
    if engine is not None and API_KEY in os.environ:
        raise ValueError(f"{engine} does not read {API_KEY}: unset it, and give --engine-args '--api-key KEY'.")


def serve_elsewhere(name: str, plan: Launch, choice: DrafterChoice | None, launch: bool) -> None:
    """Print the commands that serve on another engine; with `launch` carry them out and become the engine.

    Raises:
        ValueError: it cannot serve this drafter, or its command cannot be run.
    """
    from outrider.backends.launch import become, check_installed
    from outrider.backends.registry import server_of
    from outrider.target.hub import loadable_name, resolve_model

    engine, console = server_of(name), Terminal(stderr=True, highlight=False, soft_wrap=True)
    speculation, export = None, list[str]()
    if choice is not None:
        speculation, export = _speculation(engine, choice, plan.target)
    place = str(resolve_model(plan.target)) if launch else loadable_name(plan.target)
    plan = replace(plan, target=place, speculation=speculation)
    command, variables = engine.command(plan), engine.environment(plan)
    if plan.host not in _LOOPBACK and not any(word.startswith("--api-key") for word in plan.extra):
        console.print(
            f"warning: anyone who reaches {plan.host} may use this server; give --engine-args '--api-key KEY'."
        )
    shown = " ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(command)])
    if not launch:
        print(*([shlex.join(export)] if export else []), shown, sep="\n")
        return
    try:
        check_installed(command)
    except ValueError as error:
        option = "--engine-python" if plan.executable is None else "--engine-command"
        raise ValueError(f"{option}: {error}") from error
    if export:
        _export(export, console)
    console.print(shown, markup=False)
    become(command, variables)


def _speculation(engine: ExternalEngine, choice: DrafterChoice, target: str) -> tuple[Speculation, list[str]]:
    """How the engine is told of the drafter, and the command that exports it before; [] where it is loaded as it is.

    Raises:
        ValueError: the engine cannot serve it.
    """
    from outrider.backends.base import Speculation
    from outrider.backends.export import embedding_factor
    from outrider.checkpoints.checkpoint import load_weights
    from outrider.target.model import count_layers

    try:
        return choice.speculation(engine, target), []
    except ValueError:
        if choice.directory is None or choice.hybrid:
            raise
    parts = load_weights(choice.directory, count_layers(target))
    try:
        engine.limits(parts, embedding_factor(target))
    except ValueError as error:
        raise ValueError(f"--engine {engine.name} with the drafter {name_of(choice.directory)}: {error}") from error
    out = Path("runs") / f"{choice.directory.resolve().name}-{engine.name}"
    words = ["outrider", "export", name_of(choice.directory), "--to", engine.name]
    return Speculation.of(parts, str(out)), [*words, "--target", target, "--out", str(out)]


def _export(command: list[str], console: Terminal) -> None:
    """Carry out an export, unless it is there."""
    out = Path(command[-1])
    if out.is_dir():
        console.print(f"drafter: {out}, exported before; remove it to export it again", markup=False)
        return
    from outrider.cli.checkpoints import export_command
    from outrider.cli.options import verb_options

    export_command(**verb_options(export_command, "export", command[2:]))


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
        profile: drafts and verifies by these costs; None: by the model's own `scheduling`, whose costs are those of a
            handful of users.

    Raises:
        ValueError: the target cannot be served, or the profile was measured with something else.
    """
    from outrider.api.scheduling import by_profile
    from outrider.decoding.cost import Profile
    from outrider.decoding.engine import Engine
    from outrider.decoding.profile import MachineProfile, setting_of
    from outrider.serving.app import Limits, Server
    from outrider.serving.metrics import ServerMetrics
    from outrider.serving.worker import Worker
    from outrider.target.model import Target

    if not isinstance(model.target, Target):
        raise ValueError("the engine serves targets of PyTorch.")
    drafter = None if model.drafter is None else model.drafter.drafter
    if profile is None:
        chosen = model.scheduling
    else:
        if drafter is None or drafter.trees:
            raise ValueError(
                "--profile chooses how much of a chain is drafted, and no chains are drafted here: leave it out."
            )
        cost = Profile.load(profile)
        cost.check(setting_of(model.target, drafter))
        chosen = by_profile(drafter, MachineProfile(cost, profile, None))
    engine = Engine(model.target, drafter, chosen.policy, config=config)
    name = name or model.target.name
    worker = Worker(engine, ServerMetrics(name, engine), max_waiting)
    return Server(worker, name, Limits(max_new_tokens), thinking=thinking)
