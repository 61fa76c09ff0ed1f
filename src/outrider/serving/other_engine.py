"""The commands that serve target and drafter on another engine.

[outrider export DRAFTER --to ENGINE --out runs/DRAFTER-ENGINE]     if the engine does not load it as it is
[VARIABLE=VALUE] python -m ...
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.api.drafter import DrafterChoice, choose_drafter
from outrider.backends.base import ExternalEngine, Launch, Speculation
from outrider.backends.config import ExportConfig
from outrider.backends.export import embedding_factor, run_export
from outrider.backends.launch import become, check_installed
from outrider.backends.registry import server_of
from outrider.checkpoints.checkpoint import load_weights
from outrider.config import API_KEY
from outrider.serving.config import LOOPBACK, ServeConfig
from outrider.target.hub import loadable_name, resolve_model
from outrider.target.model import count_layers, read_architectures
from outrider.utils.packaged import name_of

Say = Callable[[str], None]


@dataclass(frozen=True)
class EngineCommand:
    """How another engine is started.

    Args:
        key: the variable that its key is in, which is never printed; None: it asks for none.
        export: what has to be written before.
    """

    words: list[str]
    variables: dict[str, str]
    key: str | None = None
    export: ExportConfig | None = None

    @property
    def lines(self) -> list[str]:
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        variables += [] if self.key is None else [f'{self.key}="${API_KEY}"']
        lines = [" ".join([*variables, shlex.join(self.words)])]
        if self.export is not None:
            words = ["outrider", "export", str(self.export.drafter), "--to", str(self.export.to)]
            words += ["--target", str(self.export.target), "--out", str(self.export.out)]
            lines.insert(0, shlex.join(words))
        return lines


def engine_command(config: ServeConfig, say: Say) -> EngineCommand:
    assert config.engine is not None
    engine, choice = server_of(config.engine), choose_drafter(config.drafter, config.target)
    speculation, export = (None, None) if choice is None else _speculation(engine, choice, config.target)
    extra = config.started.words()
    key = engine.key_variable if API_KEY in os.environ else None
    if config.host not in LOOPBACK and key is None and "--config" not in extra:
        how = f"set {API_KEY}" if engine.key_variable else "give --engine-args '--config FILE' with api-key: KEY"
        say(f"warning: anyone who reaches {config.host} may use this server; {how} to ask for a key.")
    plan = Launch(
        str(resolve_model(config.target)) if config.launch else loadable_name(config.target),
        speculation,
        host=config.host,
        port=config.port,
        name=config.name,
        dtype=config.engine_dtype,
        architectures=() if choice is None else read_architectures(config.target),
        users=config.max_requests,
        python=config.started.engine_python or (sys.executable if config.launch else "python"),
        executable=config.started.engine_command,
        extra=extra,
    )
    return EngineCommand(engine.command(plan), engine.environment(plan), key=key, export=export)


def become_engine(config: ServeConfig, command: EngineCommand, say: Say) -> None:
    """Export the drafter if that is needed, and run the engine in place of this process."""
    try:
        check_installed(command.words)
    except ValueError as error:
        option = "--engine-python" if config.started.engine_command is None else "--engine-command"
        raise ValueError(f"{option}: {error}") from error
    if command.export is not None and command.export.out is not None:
        if command.export.out.is_dir():
            say(f"drafter: {command.export.out}, exported before; remove it to export it again")
        else:
            run_export(command.export)
            say(f"drafter: exported to {command.export.out}")
    say(command.lines[-1])
    become(command.words, command.variables | ({} if command.key is None else {command.key: os.environ[API_KEY]}))


def _speculation(engine: ExternalEngine, choice: DrafterChoice, target: str) -> tuple[Speculation, ExportConfig | None]:
    """How the engine is told of the drafter, and the export that it needs before; None if it loads it as it is."""
    try:
        return choice.speculation(engine, target), None
    except ValueError:
        if choice.directory is None or choice.hybrid:
            raise
    parts = load_weights(choice.directory, count_layers(target))
    try:
        engine.limits(parts, embedding_factor(target))
    except ValueError as error:
        raise ValueError(f"--engine {engine.name} with the drafter {name_of(choice.directory)}: {error}") from error
    out = Path("runs") / f"{choice.directory.resolve().name}-{engine.name}"
    export = ExportConfig(drafter=Path(name_of(choice.directory)), to=engine.name, out=out, target=target)
    return Speculation.of(parts, str(out)), export
