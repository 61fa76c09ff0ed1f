"""Config types: the settings of a verb, the same on the command line, in a YAML file and in Python.

    @dataclass(frozen=True, kw_only=True)
    class EvalConfig(Config):
        target: Annotated[str, option(MODELS, "model id or directory")]
        sampling: Sampling = Sampling()
        out: Annotated[Path, option(GENERAL, "directory for results.json and plots")]

A field with an `Option` is one option of the verb, `--field-name` unless it names another. A field whose type is a
`Config` is a group: its options take the field's place, in a panel of their own by `Annotated[Sampling, "Panel"]`.
A field with neither is for Python alone. cli/command.py makes a command of such a type.

Types of fields, with `| None` for what may be left out:

    int, float, str, bool, Path, Literal    one value
    tuple[X, ...]                           values between commas (`--concurrency 1,2`), or a `repeated` option

This module imports neither PyTorch nor what needs it: help and misspelt options must not wait for that.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import Self

MODELS, PROMPTS, SAMPLING, DRAFTS, FILES, GENERAL = "Models", "Prompts", "Sampling", "Drafts", "Files", "General"
ENGINES, SERVICE, SERVER, LOAD = "Other engines", "Service level", "Server", "Load"
API_KEY = "OUTRIDER_API_KEY"  # the variable that holds a server's key
AUTO, NONE = "auto", "none"  # of --drafter
CHOICES = "auto, hybrid, directory, ngram@K, lm:MODEL@K, published"
# Names that other modules define, written out: those import PyTorch. A test compares them.
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"  # target.hub.EMBEDDED_ID
TREE_FORM = "NODES[,depth=D][,top_k=K]"  # drafters.draft
TREE_METHODS = "dflash, eagle3, medusa, hydra and installed methods that say so"
EXPORTERS = "vllm, sglang, llama.cpp, zlab, deepspec, speculators"  # backends.registry.exporters()
ONE_LINE = SMOLLM2.partition("/")[2]  # the default target on one line of help

_MOST_COUNTED, _LARGEST_SEED = 2**31 - 1, 2**64 - 1


@dataclass(frozen=True)
class Option:
    """How a field is given on the command line, and which values it may have.

    Attributes:
        names: as `--name` or `--yes/--no`; by default the field's.
        rare: shown by `--help-all` alone.
        repeated: each value has an option of its own.
        argument: given by its place, not by a name.
        beside: what a text in an options file may be, for files that lie beside it: "path" always is one, "name" is
            one if it is there, "drafter" is a name with what `--drafter` allows around it.
        min, max: bounds, which are allowed; above: a bound that is not.
        choices: the texts that there are.
    """

    help: str
    panel: str | None = GENERAL
    names: tuple[str, ...] = ()
    rare: bool = False
    repeated: bool = False
    argument: bool = False
    beside: Literal["", "path", "name", "drafter"] = ""
    min: float | None = None
    max: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    show_default: bool | str = True

    def check(self, name: str, value: Any) -> None:
        """Refuse a value outside of the bounds.

        Raises:
            ValueError: naming the option and what it may be.
        """
        if self.choices and value not in self.choices:
            raise ValueError(f"{name} {value!r}: choose one of {', '.join(self.choices)}.")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        if not math.isfinite(value):
            raise ValueError(f"{name} {value}: give a finite number.")
        bounds = {"at least": self.min, "above": self.above, "at most": self.max}
        wrong = (
            (self.min is not None and value < self.min)
            or (self.above is not None and value <= self.above)
            or (self.max is not None and value > self.max)
        )
        if wrong:
            known = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
            raise ValueError(f"{name} {value}: give a number {known}.")
        most = _LARGEST_SEED if self.min is None else _MOST_COUNTED
        if self.max is None and isinstance(value, int) and abs(value) > most:
            raise ValueError(f"{name} {value}: give a number of at most {most}.")


def option(panel: str, help: str, *names: str, **settings: Any) -> Option:
    """An option in a panel of `--help`."""
    return Option(help, panel, names, **settings)


def rare(panel: str, help: str, *names: str, **settings: Any) -> Option:
    """An `option` that only `--help-all` shows."""
    return Option(help, panel, names, rare=True, **settings)


def argument(help: str, **settings: Any) -> Option:
    """A value that is given by its place; a tuple takes all that are left."""
    return Option(help, None, argument=True, repeated=True, **settings)


class Field(NamedTuple):
    """One option of a config type. `values`: the type of each value of a tuple, None for fields of one value."""

    name: str
    option: Option
    type: Any
    values: Any
    optional: bool
    default: Any  # MISSING if it must be given

    @property
    def flag(self) -> str:
        """The name in messages: `--max-new-tokens`, or that of an argument."""
        if self.option.argument:
            return self.name.upper()
        return next(iter(self.option.names), f"--{self.name.replace('_', '-')}").partition("/")[0]


class Group(NamedTuple):
    """A field whose type is a config type. `panel`: of `Annotated[Type, "Panel"]`, which all of its options are in."""

    name: str
    type: type[Config]
    panel: str | None
    default: Any


def parts_of(kind: type[Config]) -> tuple[Field | Group, ...]:
    """Fields and groups of a config type, in order."""
    return _parts_of(cast(Hashable, kind))


@cache
def _parts_of(kind: Any) -> tuple[Field | Group, ...]:
    hints, found = get_type_hints(kind, include_extras=True), list[Field | Group]()
    for field in fields(kind):
        hint = hints[field.name]
        base, known = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)
        if isinstance(base, type) and issubclass(base, Config):
            found.append(Group(field.name, base, panel=known, default=field.default))
            continue
        if known is None:
            continue  # Python's alone
        choices = get_args(base) if get_origin(base) in (Union, types.UnionType) else (base,)
        kinds = [choice for choice in choices if choice is not types.NoneType]
        values = get_args(kinds[0])[0] if get_origin(kinds[0]) is tuple else None
        optional = types.NoneType in choices
        found.append(Field(field.name, known, kinds[0], values=values, optional=optional, default=field.default))
    return tuple(found)


def options_of(kind: type[Config], default: Config | None = None) -> Iterator[Field]:
    """Every option of a config type, groups unfolded. `default`: an instance whose values are the defaults."""
    for part in parts_of(kind):
        known = part.default if default is None else getattr(default, part.name)
        if isinstance(part, Group):
            for field in options_of(part.type, None if known is MISSING else known):
                yield field._replace(option=replace(field.option, panel=part.panel)) if part.panel else field
        else:
            yield part._replace(default=known)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a verb or a group of them; making one checks every field.

    A text for a field of several values is split at its commas.

    Raises:
        ValueError: a value that its option does not allow, or that does not go with the others (`check`).
    """

    def __post_init__(self) -> None:
        for part in parts_of(type(self)):
            if isinstance(part, Group):
                continue
            value = getattr(self, part.name)
            if part.values is not None and isinstance(value, str):
                value = split(part.flag, value, part.values)
                object.__setattr__(self, part.name, value)
            for one in value if isinstance(value, tuple) else (value,):
                part.option.check(part.flag, one)
        self.check()

    def check(self) -> None:
        """Refuse fields that do not go together; for subclasses."""

    @classmethod
    def from_values(cls, values: Mapping[str, Any], default: Config | None = None) -> Self:
        """From values by field name, groups unfolded; those that are missing are the default's.

        Raises:
            ValueError: see the class.
            TypeError: a field without default is missing.
        """
        made: dict[str, Any] = {}
        for part in parts_of(cls):
            known = part.default if default is None else getattr(default, part.name)
            if isinstance(part, Group):
                made[part.name] = part.type.from_values(values, None if known is MISSING else known)
            elif part.name in values:
                made[part.name] = values[part.name]
            elif known is not MISSING:
                made[part.name] = known
        return cls(**made)

    def settings(self) -> dict[str, Any]:
        """Values by field name, groups unfolded, as JSON and YAML hold them."""
        found: dict[str, Any] = {}
        for part in parts_of(type(self)):
            value = getattr(self, part.name)
            if isinstance(value, Config):
                found |= value.settings()
            elif isinstance(value, tuple):
                found[part.name] = [str(one) if isinstance(one, Path) else one for one in value]
            else:
                found[part.name] = str(value) if isinstance(value, Path) else value
        return found

    def changed(self) -> dict[str, str]:
        """Options by field name whose value is not the default: what somebody asked for."""
        mine = self.settings()
        return {
            field.name: field.flag
            for field in options_of(type(self))
            if field.default is MISSING or mine[field.name] != _plain(field.default)
        }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(map(_plain, value))
    return str(value) if isinstance(value, Path) else value


def split(name: str, text: str, kind: type) -> tuple[Any, ...]:
    """`1, 2` -> (1.0, 2.0), of numbers; `a, b` -> ("a", "b"), of texts.

    Raises:
        ValueError: no value, or one that is no finite number.
    """
    parts = [part.strip() for part in text.split(",")]
    if kind is str:
        if not any(parts):
            raise ValueError(f"{name} {text!r} names nothing: give one name, or several between commas.")
        return tuple(filter(None, parts))
    try:
        values = tuple(map(kind, parts))
    except ValueError:
        values = (math.nan,)
    if not all(map(math.isfinite, values)):
        example = "whole numbers, as 64,256" if kind is int else "numbers, as 1,2,4"
        raise ValueError(f"{name} {text!r}: give {example}.")
    return values


def check_tree(tree: str | None, confidence_threshold: float | None) -> None:
    """Refuse a threshold for the nodes of trees.

    Raises:
        ValueError: both are given.
    """
    if tree is not None and confidence_threshold is not None:
        raise ValueError("--tree with --confidence-threshold: nodes of a tree have no confidences; leave one out.")


# ----------------------------------------------------------------------------
# Groups that several verbs share.
# ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Machine(Config):
    """Where PyTorch computes."""

    device: Annotated[str, option(GENERAL, "auto (cuda where there is one), cpu, cuda, ...")] = "auto"
    threads: Annotated[int | None, option(GENERAL, "CPU threads; $OMP_NUM_THREADS, else all", min=1, max=1024)] = None


@dataclass(frozen=True, kw_only=True)
class Sampling(Config):
    """How tokens are drawn: sampling.SamplingParams."""

    temperature: Annotated[float, option(SAMPLING, "0: the likeliest token", min=0.0)] = 0.0
    top_k: Annotated[int, rare(SAMPLING, "keep the k likeliest tokens; 0: all", min=0)] = 0
    top_p: Annotated[
        float, rare(SAMPLING, "keep the likeliest tokens of this total probability", above=0.0, max=1.0)
    ] = 1.0
    min_p: Annotated[
        float, rare(SAMPLING, "keep tokens of this probability relative to the likeliest", min=0.0, max=1.0)
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        rare(SAMPLING, "divide positive logits of seen tokens, multiply negative ones", min=0.01, max=100.0),
    ] = 1.0
    seed: Annotated[int | None, option(SAMPLING, "of random numbers")] = 0

    def params(self) -> Any:
        """As decoding takes them (SamplingParams)."""
        from outrider.sampling import SamplingParams

        return SamplingParams(**asdict(self))


TaskNames = Annotated[
    tuple[str, ...], option(PROMPTS, "JSONL files, shipped sets or tasks (gsm8k,mbpp)", beside="name")
]
DataDirectory = Annotated[
    Path | None,
    rare(
        PROMPTS,
        "where prompts by name are looked for without network; $OUTRIDER_DATA",
        beside="path",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Prompts(Config):
    """Which prompts of tasks are decoded, and how they are asked."""

    data_dir: DataDirectory = None
    max_samples: Annotated[int | None, option(PROMPTS, "prompts per task; all by default", min=1)] = None
    thinking: Annotated[bool, option(PROMPTS, "ask the chat template for it", "--thinking/--no-thinking")] = False


@dataclass(frozen=True, kw_only=True)
class StartedEngine(Config):
    """How another engine is started."""

    engine_python: Annotated[
        str | None, rare(ENGINES, "python of the engine's environment", beside="name", show_default="this one")
    ] = None
    engine_command: Annotated[str | None, rare(ENGINES, "the engine's own command instead", beside="name")] = None
    engine_args: Annotated[str, rare(ENGINES, "further flags, as one string")] = ""

    def words(self) -> tuple[str, ...]:
        """The further flags, split as a shell splits them.

        Raises:
            ValueError: a quotation mark has no partner, or a key is among them.
        """
        import shlex

        if re.search(r"--(admin-)?api-key(?![\w-])", self.engine_args):
            raise ValueError(f"--engine-args: every user of the machine reads a key there; put it into {API_KEY}.")
        try:
            return tuple(shlex.split(self.engine_args))
        except ValueError as error:
            raise ValueError(f"--engine-args {self.engine_args!r}: {error}.") from error


EngineType = Literal["float32", "bfloat16", "float16"]
TargetName = Annotated[str, option(MODELS, "model id or directory", beside="name")]
DrafterName = Annotated[str, option(MODELS, CHOICES, beside="drafter")]
DrafterOrNone = Annotated[str, option(MODELS, f"none, {CHOICES}", beside="drafter")]
TreeText = Annotated[str | None, option(DRAFTS, f"{TREE_FORM}, of drafters that branch", metavar="SIZE")]
Typical = Annotated[str | None, option(DRAFTS, "LOSSY typical acceptance: 0.09,0.3 or default", metavar="E,D")]
Threshold = Annotated[float | None, option(DRAFTS, "verify drafts while at least as confident", min=0.0, max=1.0)]
MaxNewTokens = Annotated[int, option(SAMPLING, "per response", min=1)]
Thinking = Annotated[bool, option(PROMPTS, "ask the chat template for it", "--thinking/--no-thinking")]
Lookup = Annotated[tuple[str, ...], rare(DRAFTS, "text files that hybrid drafts may copy from", beside="path")]
Backend = Annotated[
    Literal["local", "mlx"], option(MODELS, "local: PyTorch; mlx: mlx-lm, for Apple silicon", metavar="ENGINE")
]
