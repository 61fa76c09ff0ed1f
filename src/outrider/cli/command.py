"""Makes a command of a function that takes a config type; `--config FILE.yaml` and `--help-all`.

    def evaluate(config: EvalConfig) -> None:
        '''Decode tasks with and without a drafter.'''

The command's options are those of the config type (outrider/config.py), its help is the docstring.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import MISSING
from difflib import get_close_matches
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from outrider.config import GENERAL, Config, Field, options_of
from outrider.utils import measure

UsageError: Any = typer.BadParameter.__mro__[1]  # of which an unknown option is one; typer does not export it

# A drafter is one of the words, or [NAME=]PATH, [NAME=]hybrid:PATH or [NAME=]lm:PATH[@LENGTH] (api.drafter).
_DRAFTER = re.compile(
    r"(?P<name>[^=]*=)?(?:auto|none|hybrid|ngram(?:@\d+)?|(?P<kind>hybrid:|lm:)?(?P<path>.+?)(?P<length>@\d+)?)"
)


def config_type(verb: Callable[[Any], None]) -> type[Config]:
    """The type that a verb's function takes."""
    hints = get_type_hints(verb)
    return next(kind for name, kind in hints.items() if name != "return")


def command_of(verb: Callable[[Any], None], name: str | None = None, epilog: str | None = None) -> Any:
    """The command whose options are those of the verb's config type."""
    kind = config_type(verb)
    options = list(options_of(kind))

    def callback(**values: Any) -> None:
        config = _config(kind, options, values)
        _prepare_process(config)
        verb(config)

    parameters = [_parameter(field) for field in options]
    callback.__doc__ = verb.__doc__
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {one.name: one.annotation for one in parameters}
    command = _typer_command(callback, name, kind=Verb, epilog=epilog)
    command.fields = {field.name: field for field in options}
    return command


def parse(verb: Callable[[Any], None], name: str, args: list[str]) -> Any:
    """The config of these arguments.

    Raises:
        ValueError: the verb does not take them.
    """
    kind = config_type(verb)
    try:
        values = command_of(verb).make_context(name, args).params
    except UsageError as error:
        raise ValueError(error.format_message()) from error
    return _config(kind, list(options_of(kind)), values)


def _config(kind: type[Config], options: list[Field], values: dict[str, Any]) -> Config:
    """Values of the command line as the config type holds them."""
    read = {}
    for field in options:
        value, many = values[field.name], field.values is not None
        if many and (field.option.repeated or (value is None and not field.optional)):
            value = tuple(value or ())
        read[field.name] = value
    return kind.from_values(read)


def _prepare_process(config: Config) -> None:
    """Threads, and where prompts are looked for, of the process that runs the verb."""
    known = config.settings()
    if known.get("data_dir") is not None:
        os.environ["OUTRIDER_DATA"] = known["data_dir"]
    if "threads" in known:
        measure.set_up(known["threads"])


def _parameter(field: Field) -> inspect.Parameter:
    """The parameter by which typer reads an option."""
    known, default = field.option, field.default
    many = field.values is not None
    kind: Any = GenericAlias(list, (field.values,)) if many and known.repeated else str if many else field.type
    if many and default is not MISSING:
        default = list(default or ()) or None if known.repeated else _joined(default)
    if field.optional or default is None:
        kind = kind | None
    settings: dict[str, Any] = {"help": known.help, "min": known.min, "max": known.max}
    if known.above is not None or field.type not in (int, float):
        settings["min"] = settings["max"] = None
    if known.argument:
        info = typer.Argument(help=known.help, show_default=known.show_default)
    else:
        info = typer.Option(
            *known.names,
            rich_help_panel=known.panel,
            hidden=known.rare,
            metavar=known.metavar,
            show_default=known.show_default,
            **settings,
        )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[kind, info],
    )


def _joined(values: Any) -> str | None:
    """Values as the command line has them between commas; None for none."""
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values or ()) or None


def _typer_command(
    callback: Callable[..., None], name: str | None, *, kind: type[TyperCommand], epilog: str | None = None
) -> Any:
    app = typer.Typer(add_completion=False)
    app.command(name, cls=kind, epilog=epilog)(callback)
    return typer.main.get_command(app)


class Verb(TyperCommand):
    """A command with panels of options that fit a screen; `--config` if it has any, `--help-all` if some are hidden."""

    shows_all = False
    fields: dict[str, Field]

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if any(param.opts[0].startswith("--") for param in self.params):
            general = _typer_command(_general_options, None, kind=TyperCommand).params
            hides = any(getattr(param, "hidden", False) for param in self.params)
            self.params += general if hides else general[:1]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; without ranges and negations, unless all was asked for."""
        params: list[Any] = [] if self.shows_all else self.params
        for param in params:
            if getattr(param, "is_bool_flag", False):
                param.secondary_opts, param.metavar = [], ""
            elif getattr(param, "min", None) is not None:
                param.min, param.max, param.metavar = None, None, f"<{param.bare_type()}>"
        super().format_help(ctx, formatter)

    def get_help_option(self, ctx: Any) -> Any:
        """`--help`, in the last panel."""
        found = super().get_help_option(ctx)
        if found is not None:
            found.rich_help_panel = GENERAL
        return found


# ----------------------------------------------------------------------------
# --config FILE.yaml: {option name: value}; and --help-all.
# ----------------------------------------------------------------------------


def _read_config(context: typer.Context, path: Path | None) -> None:
    """Take options from a YAML file of {option name: value}; what the command line gives comes first.

    Relative paths are relative to the file; what may also be a name is a path where it is there. This holds for each
    text between commas, and for a drafter's path after NAME=, hybrid: and lm:.

    Raises:
        ValueError: no such file, not YAML, an option that the verb does not have, or a value of another kind than its.
    """
    if path is None:
        return
    from outrider.utils.documents import read_yaml  # here, since only this option needs it

    try:
        given = read_yaml(path)
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}.") from error
    if not isinstance(given, dict):
        raise ValueError(f"{path}: write one option per line, as max-new-tokens: 128.")
    command: Any = context.command
    named = {
        name.removeprefix("--"): param
        for param in command.params
        for name in param.opts
        if name.startswith("--") and not param.is_eager
    }
    context.default_map = {}
    for key, value in given.items():
        name = str(key).replace("_", "-")
        param = named.get(name)
        if param is None:
            near = get_close_matches(name, named, 1)
            hint = f"did you mean {near[0]}?" if near else f"{context.command_path} --help-all lists them."
            raise ValueError(f"{path}: {context.info_name} has no option {key!r}; {hint}")
        if value is None:
            context.default_map[param.name] = None
            continue
        known = command.fields[param.name]
        several = value if isinstance(value, list) else [value]
        values = [config_value(param, known, one, place=path) for one in several]
        alone = values[0] if len(values) == 1 else ",".join(map(str, values))
        context.default_map[param.name] = values if param.multiple else alone


def config_value(param: Any, known: Field, value: Any, place: Path) -> bool | str:
    """A value in the options file at `place` as the command line would give it."""
    if not isinstance(value, (bool, int, float, str)) or isinstance(value, bool) != bool(param.is_flag):
        kind = "true or false" if param.is_flag else "a number or a text (in quotes if it is yes, no or a date)"
        raise ValueError(f"{place}: {param.opts[0].removeprefix('--')}: {value!r} is not {kind}.")
    if isinstance(value, bool):
        return value
    text = str(value)
    if not known.option.beside:
        return text
    find = {"path": _beside, "name": _found_beside, "drafter": _drafter_beside}[known.option.beside]
    if known.values is None or known.option.repeated:
        return find(text, place)
    return ",".join(find(part, place) for part in map(str.strip, text.split(",")) if part)


def _beside(text: str, place: Path) -> str:
    """A path of the file at `place`."""
    return str(place.parent / text)


def _found_beside(text: str, place: Path) -> str:
    """A path of the file at `place` where it is there, else a name."""
    return _beside(text, place) if text and (place.parent / text).exists() else text


def _drafter_beside(text: str, place: Path) -> str:
    """As `_found_beside`, for a drafter's path and what may be around it."""
    match = _DRAFTER.fullmatch(text)
    if match is None or match["path"] is None:
        return text
    if (whole := _found_beside(text, place)) != text:  # the name of a directory may hold the signs
        return whole
    name, kind, path, length = (part or "" for part in match.group("name", "kind", "path", "length"))
    return f"{name}{kind}{_found_beside(path, place)}{length}"


def _show_all(context: typer.Context, asked: bool) -> None:
    """Print the help with its hidden options."""
    if asked:
        command: Any = context.command
        command.shows_all = True
        for param in command.params:
            param.hidden = False
        typer.echo(context.get_help())
        raise typer.Exit


def _general_options(
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of options; the command line wins",
            rich_help_panel=GENERAL,
            callback=_read_config,
            is_eager=True,
            expose_value=False,
        ),
    ] = None,
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all",
            help="all options, the rarely used ones too",
            rich_help_panel=GENERAL,
            callback=_show_all,
            is_eager=True,
            expose_value=False,
        ),
    ] = False,
) -> None: ...
