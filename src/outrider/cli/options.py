"""The options that several verbs share, in panels of `--help`; `--help-all` and `--config FILE.yaml`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from typer.core import TyperCommand

MODELS, PROMPTS, SAMPLING, DRAFTS, FILES, GENERAL = "Models", "Prompts", "Sampling", "Drafts", "Files", "General"
ENGINES = "Other engines"
API_KEY = "OUTRIDER_API_KEY"  # the variable that holds a server's key
CHOICES = "auto, hybrid, directory, ngram@K, lm:MODEL@K, published"
# Names that other modules define, written out: those import PyTorch, and help need not wait. A test compares them.
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"  # target.hub.EMBEDDED_ID
TREE_FORM = "NODES[,depth=D][,top_k=K]"  # drafters.draft
TREE_METHODS = "dflash, eagle3, medusa, hydra and installed methods that say so"
BACKENDS = "local, transformers, openai, vllm, sglang, llama.cpp, mlx"  # cli.bench.kinds()
EXPORTERS = "vllm, sglang, llama.cpp, zlab, deepspec, speculators"  # backends.registry.exporters()


def option(panel: str, help: str, *names: str, **settings: Any) -> Any:
    """`typer.Option` in a panel of `--help`."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


def rare(panel: str, help: str, *names: str, **settings: Any) -> Any:
    """An `option` that only `--help-all` shows."""
    return option(panel, help, *names, hidden=True, **settings)


TargetName = Annotated[str, option(MODELS, "model id or directory")]
DrafterName = Annotated[str, option(MODELS, CHOICES)]
DrafterNames = Annotated[list[str], option(MODELS, CHOICES, metavar="[NAME=]CHOICE", show_default=False)]
DrafterOrNone = Annotated[str, option(MODELS, f"none, {CHOICES}")]
Backend = Annotated[
    Literal["local", "mlx"], option(MODELS, "local: PyTorch; mlx: mlx-lm, for Apple silicon", metavar="ENGINE")
]
RecipePath = Annotated[Path, typer.Argument(help="a recipe: a YAML file, or one that outrider recipe lists")]
Overrides = Annotated[list[str] | None, typer.Argument(help="fields to change: optimizer.steps=200 ...")]

Tasks = Annotated[str, option(PROMPTS, "JSONL files, shipped sets or tasks (gsm8k,mbpp)")]


def _use_data_directory(path: Path | None) -> None:
    """What $OUTRIDER_DATA would say, for this command alone."""
    if path is not None:
        os.environ["OUTRIDER_DATA"] = str(path)


_DATA_HELP = "where prompts by name are looked for without network; $OUTRIDER_DATA"
DataDirectory = Annotated[
    Path | None,
    rare(PROMPTS, _DATA_HELP, "--data-dir",
         callback=_use_data_directory, expose_value=False, show_default=False),
]  # fmt: skip
DataDirectoryOfRecipe = Annotated[Path | None, rare(PROMPTS, _DATA_HELP, "--data-dir", show_default=False)]
MaxSamples = Annotated[int | None, option(PROMPTS, "prompts per task; all by default", min=1)]
Thinking = Annotated[bool, option(PROMPTS, "ask the chat template for it", "--thinking/--no-thinking")]

MaxNewTokens = Annotated[int, option(SAMPLING, "per response", min=1)]
Temperature = Annotated[float, option(SAMPLING, "0: the likeliest token", min=0.0)]
Temperatures = Annotated[str, option(PROMPTS, "as 0, or 0,1: requests take turns")]
Coupled = Annotated[bool, rare(SAMPLING, "by noise of seed and position: the text plain decoding gives", "--coupled")]
TopK = Annotated[int, rare(SAMPLING, "keep the k likeliest tokens; 0: all", min=0)]
TopP = Annotated[float, rare(SAMPLING, "keep the likeliest tokens of this total probability")]
MinP = Annotated[float, rare(SAMPLING, "keep tokens of this probability relative to the likeliest")]
RepetitionPenalty = Annotated[float, rare(SAMPLING, "divide positive logits of seen tokens, multiply negative ones")]
Seed = Annotated[int, option(SAMPLING, "of random numbers")]
SeedOrRandom = Annotated[int | None, option(SAMPLING, "of random numbers; another one each time by default")]

ConfidenceThreshold = Annotated[
    float | None, option(DRAFTS, "verify drafts while at least as confident", min=0.0, max=1.0)
]
Lookup = Annotated[str | None, rare(DRAFTS, "text files that hybrid drafts may copy from")]
Tree = Annotated[str | None, option(DRAFTS, f"{TREE_FORM}, of drafters that branch", metavar="SIZE")]
Typical = Annotated[
    str | None,
    option(DRAFTS, "LOSSY typical acceptance: 0.09,0.3 or default", metavar="E,D"),
]

Variants = Annotated[str | None, option(DRAFTS, "none,fixed-3,fixed-*,prefix,..,look-ahead+skip; all by default")]
SlaTtft = Annotated[float, rare("Service level", "seconds to the first token that a good request may take", min=0.0)]
SlaTokensPerSecond = Annotated[float, rare("Service level", "tokens per second that a good request must have", min=0.0)]

EngineType = Literal["float32", "bfloat16", "float16"]
EnginePython = Annotated[str, rare(ENGINES, "python of the engine's environment", show_default="this one")]
EngineCommand = Annotated[str | None, rare(ENGINES, "the engine's own command instead")]
EngineArgs = Annotated[str, rare(ENGINES, "further flags, as one string")]

Device = Annotated[str, option(GENERAL, "auto (cuda where there is one), cpu, cuda, ...")]
Threads = Annotated[int | None, option(GENERAL, "CPU threads; $OMP_NUM_THREADS, else all", min=1, max=1024)]


# Options whose value is a file or directory, or else a name of something; and those that take several, by commas.
_PATHS_OR_NAMES = ("target", "drafter", "assistant", "tasks", "fit_tasks", "prompts", "not_in", "evaluation", "recipe",
                   "engine_target", "engine_drafter", "engine_python", "engine_command")  # fmt: skip
_SEVERAL = ("tasks", "fit_tasks", "lookup")
# A drafter is one of the words, or [NAME=]PATH, [NAME=]hybrid:PATH or [NAME=]lm:PATH[@LENGTH] (api.drafter).
_DRAFTER = re.compile(
    r"(?P<name>[^=]*=)?(?:auto|none|hybrid|ngram(?:@\d+)?|(?P<kind>hybrid:|lm:)?(?P<path>.+?)(?P<length>@\d+)?)"
)


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
    options = {
        name.removeprefix("--"): param
        for param in context.command.params
        for name in param.opts
        if name.startswith("--") and not param.is_eager
    }
    context.default_map = {}
    for key, value in given.items():
        name = str(key).replace("_", "-")
        param = options.get(name)
        if param is None:
            near = get_close_matches(name, options, 1)
            hint = f"did you mean {near[0]}?" if near else f"{context.command_path} --help-all lists them."
            raise ValueError(f"{path}: {context.info_name} has no option {key!r}; {hint}")
        if value is None:
            context.default_map[param.name] = None
            continue
        values = [_config_value(param, one, place=path) for one in (value if isinstance(value, list) else [value])]
        alone = values[0] if len(values) == 1 else ",".join(map(str, values))
        context.default_map[param.name] = values if param.multiple else alone


def _config_value(param: Any, value: Any, place: Path) -> bool | str:
    """A value of an option as the command line would give it."""
    if not isinstance(value, (bool, int, float, str)) or isinstance(value, bool) != bool(param.is_flag):
        kind = "true or false" if param.is_flag else "a number or a text (in quotes if it is yes, no or a date)"
        raise ValueError(f"{place}: {param.opts[0].removeprefix('--')}: {value!r} is not {kind}.")
    if isinstance(value, bool):
        return value
    annotation = param.type_descriptor.annotation
    kinds = {annotation, *get_args(annotation)}  # of an option that can be repeated: list[Path]
    text = str(value)
    if param.name in _PATHS_OR_NAMES and kinds & {str, Path}:  # the prompts of bench are a number
        find = _drafter_beside if param.name == "drafter" else _found_beside
    elif Path in kinds or param.name == "lookup":
        find = _beside
    else:
        return text
    if param.name not in _SEVERAL:
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
        option(GENERAL, "YAML file of options; the command line wins",
               callback=_read_config, is_eager=True, expose_value=False),
    ] = None,
    help_all: Annotated[
        bool,
        option(GENERAL, "all options, the rarely used ones too",
               "--help-all", callback=_show_all, is_eager=True, expose_value=False),
    ] = False,
) -> None: ...  # fmt: skip


_MOST_COUNTED, _LARGEST_SEED = 2**31 - 1, 2**64 - 1


class Verb(TyperCommand):
    """A command with panels of options that fit a screen; with `--config` and `--help-all` if some are hidden."""

    shows_all = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if any(getattr(param, "hidden", False) for param in self.params):
            self.params += command_of(_general_options, kind=TyperCommand).params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options, and return the arguments that are left over.

        Raises:
            UsageError: also for a number that is not finite, or larger than any count (2^31) or seed (2^64) can be.
        """
        left: list[str] = super().parse_args(ctx, args)
        params: list[Any] = self.params
        for param in params:
            value = ctx.params.get(param.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(f"{value} is not a finite number.", ctx, param)
            most = _MOST_COUNTED if getattr(param, "min", None) is not None else _LARGEST_SEED
            if isinstance(value, int) and abs(value) > most:
                raise typer.BadParameter(f"{value} is larger than {most}.", ctx, param)
        return left

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


UsageError: Any = typer.BadParameter.__mro__[1]  # of which an unknown option is one; typer does not export it


def command_of(
    verb: Callable[..., None], name: str | None = None, kind: type[TyperCommand] = Verb, epilog: str | None = None
) -> Any:
    """The command that a function's signature and docstring describe."""
    app = typer.Typer(add_completion=False)
    app.command(name, cls=kind, epilog=epilog)(verb)
    return typer.main.get_command(app)


def verb_options(verb: Callable[..., None], name: str, args: list[str]) -> dict[str, Any]:
    """What a verb would be called with.

    Raises:
        ValueError: it does not take these arguments.
    """
    try:
        options: dict[str, Any] = command_of(verb).make_context(name, args).params
    except UsageError as error:
        raise ValueError(error.format_message()) from error
    return options
