"""What several verbs share: options and their panels, `--config`, `--drafter`, loading, progress bars."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer.core import TyperCommand

from outrider.checkpoints.checkpoint import load_checkpoint, read_metadata
from outrider.checkpoints.published import Published, fetch, published_by, published_for, shipped_drafter
from outrider.drafters.base import Drafter, DraftModule, draft_slots
from outrider.drafters.draft import TREE_FORM, TreeSize
from outrider.drafters.language_model import StandaloneConfig, StandaloneDrafter
from outrider.drafters.ngram import NgramConfig, NgramDrafter
from outrider.drafters.registry import tree_methods
from outrider.evaluation.draft_cost import with_block_size
from outrider.evaluation.results import DrafterInfo, TrainingInfo
from outrider.scheduling.policies import FixedPolicy, Policy, ThresholdPolicy
from outrider.target.model import Target, load_target
from outrider.utils.measure import default_dtype
from outrider.verification import TypicalAcceptance

# ----------------------------------------------------------------------------
# Options: `--help` shows them in panels. Hidden ones are shown by `--help-all`; `--config FILE.yaml` sets any.
# ----------------------------------------------------------------------------


MODELS, PROMPTS, SAMPLING, DRAFTS, FILES, GENERAL = "Models", "Prompts", "Sampling", "Drafts", "Files", "General"
CHOICES = "auto, directory, ngram@K, lm:MODEL@K, published"


def option(panel: str, help: str, *names: str, **settings: Any) -> Any:
    """`typer.Option` in a panel of `--help`."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


def rare(panel: str, help: str, *names: str, **settings: Any) -> Any:
    """An `option` that only `--help-all` shows."""
    return option(panel, help, *names, hidden=True, **settings)


TargetName = Annotated[str, option(MODELS, "model id or directory")]
DrafterName = Annotated[str, option(MODELS, CHOICES)]
DrafterOrNone = Annotated[str, option(MODELS, f"none, {CHOICES}")]
Backend = Annotated[
    Literal["local", "mlx"], option(MODELS, "local: PyTorch; mlx: mlx-lm, for Apple silicon", metavar="ENGINE")
]
RecipePath = Annotated[Path, typer.Argument(help="a recipe, see recipes/")]
Overrides = Annotated[list[str] | None, typer.Argument(help="fields to change: optimizer.steps=200 ...")]

Tasks = Annotated[str, option(PROMPTS, "JSONL files, shipped sets or tasks (gsm8k,mbpp)")]
MaxSamples = Annotated[int | None, option(PROMPTS, "prompts per task; all by default", min=1)]
Thinking = Annotated[bool, option(PROMPTS, "ask the chat template for it", "--thinking/--no-thinking")]

MaxNewTokens = Annotated[int, option(SAMPLING, "per response", min=1)]
Temperature = Annotated[float, option(SAMPLING, "0: the likeliest token", min=0.0)]
TopK = Annotated[int, rare(SAMPLING, "keep the k likeliest tokens; 0: all", min=0)]
TopP = Annotated[float, rare(SAMPLING, "keep the likeliest tokens of this total probability")]
MinP = Annotated[float, rare(SAMPLING, "keep tokens of this probability relative to the likeliest")]
RepetitionPenalty = Annotated[float, rare(SAMPLING, "divide positive logits of seen tokens, multiply negative ones")]
Seed = Annotated[int, option(SAMPLING, "of random numbers")]

ConfidenceThreshold = Annotated[float | None, option(DRAFTS, "verify drafts while at least as confident")]
Tree = Annotated[str | None, option(DRAFTS, f"{TREE_FORM} ({', '.join(tree_methods())})", metavar="SIZE")]
Typical = Annotated[
    str | None,
    option(DRAFTS, "LOSSY typical acceptance: 0.09,0.3 or default", metavar="E,D"),
]

Variants = Annotated[str | None, option(DRAFTS, "none,fixed-3,threshold,prefix,...,look-ahead+skip; all by default")]
SlaTtft = Annotated[float, rare("Service level", "seconds to the first token that a good request may take")]
SlaTokensPerSecond = Annotated[float, rare("Service level", "tokens per second that a good request must have")]

Device = Annotated[str, option(GENERAL, "cpu, cuda, ...")]
Threads = Annotated[int | None, option(GENERAL, "CPU threads; all by default", min=1)]


def _read_config(context: typer.Context, path: Path | None) -> None:
    """Take options from a YAML file of {option name: value}; what the command line gives comes first.

    Raises:
        ValueError: no such file, not YAML, or an option that the verb does not have.
    """
    if path is None:
        return
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
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
        param = options.get(str(key).replace("_", "-"))
        if param is None:
            raise ValueError(
                f"{path}: {context.info_name} has no option {key!r}; {context.command_path} --help-all lists them."
            )
        values = [one if isinstance(one, bool) else str(one) for one in (value if isinstance(value, list) else [value])]
        alone = values[0] if len(values) == 1 else ",".join(map(str, values))
        context.default_map[param.name] = None if value is None else values if param.multiple else alone


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


class Verb(TyperCommand):
    """A command with panels of options that fit a screen; with `--config` and `--help-all` if some are hidden."""

    shows_all = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if any(getattr(param, "hidden", False) for param in self.params):
            self.params += _parser(_general_options, TyperCommand).params

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


def _parser(verb: Callable[..., None], kind: type[TyperCommand] = Verb) -> Any:
    app = typer.Typer(add_completion=False)
    app.command(cls=kind)(verb)
    return typer.main.get_command(app)


def verb_options(verb: Callable[..., None], name: str, args: list[str]) -> dict[str, Any]:
    """What a verb would be called with.

    Raises:
        ValueError: it does not take these arguments.
    """
    try:
        options: dict[str, Any] = _parser(verb).make_context(name, args).params
    except UsageError as error:
        raise ValueError(error.format_message()) from error
    return options


def load(
    target: str,
    device: str | torch.device,
    dtype: torch.dtype | None = None,
    place: Callable[[Any], None] = lambda model: None,
) -> Target:
    """The target on a device. `dtype` null: see `default_dtype`."""
    return load_target(target, dtype or default_dtype(device), device, place)


# ----------------------------------------------------------------------------
# What options of several verbs mean: which policy, which tasks; and their progress bars.
# ----------------------------------------------------------------------------


def choose_policy(draft_length: int | None, confidence_threshold: float | None) -> Policy:
    """The scheduling policy two options describe.

    Raises:
        ValueError: both are given.
    """
    if confidence_threshold is None:
        return FixedPolicy(draft_length)
    if draft_length is not None:
        raise ValueError("give --draft-length or --confidence-threshold, not both.")
    return ThresholdPolicy(confidence_threshold)


def choose_typical(text: str | None) -> TypicalAcceptance | None:
    """What `--typical` says.

    Raises:
        ValueError: not two numbers in (0, 1].
    """
    if text is None or text == "default":
        return None if text is None else TypicalAcceptance()
    thresholds = split_numbers("--typical", text)
    if len(thresholds) != 2:
        raise ValueError(f"--typical {text!r}: give EPSILON,DELTA, as 0.09,0.3, or `default`.")
    return TypicalAcceptance(*thresholds)


def choose_tree(text: str | None, confidence_threshold: float | None = None) -> TreeSize | None:
    """What `--tree` says.

    Raises:
        ValueError: not of its form, or a confidence threshold is given, too.
    """
    if text is None:
        return None
    if confidence_threshold is not None:
        raise ValueError(
            "--tree with --confidence-threshold: a node of a tree has no confidence of its own; leave one of them out."
        )
    return TreeSize.parse(text)


def split_names(names: str, kind: str = "task file or shipped set") -> list[str]:
    """`a, b` -> ["a", "b"]; `kind` is what they should name.

    Raises:
        ValueError: no name in it.
    """
    found = [name.strip() for name in names.split(",") if name.strip()]
    if not found:
        raise ValueError(f"{names!r} names no {kind}.")
    return found


def split_numbers(option: str, text: str) -> tuple[float, ...]:
    """`1, 2` -> (1.0, 2.0)

    Raises:
        ValueError: not numbers.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} {text!r}: give numbers, as 1,2,4.") from None


def show_paths(console: Console, *paths: Path) -> None:
    """What was written, a line each."""
    for path in paths:
        console.print(f"  {path}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def counting(console: Console, title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar; gives the function that moves it: (what, done, total)."""
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


@contextmanager
def responding(console: Console) -> Iterator[Callable[[int, int, int], None]]:
    """A progress bar for responses, there once any are asked for; gives what moves it: (turns done, total, tokens)."""
    columns = (
        TextColumn("[bold]responses"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("responses", total=None, tokens=0, visible=False)
        yield lambda done, total, tokens: bar.update(task, completed=done, total=total, tokens=tokens, visible=True)


# ----------------------------------------------------------------------------
# `--drafter CHOICE`: which drafter a verb decodes with.
#
#     auto                      the shipped drafter of the target, or else a published one (outrider models)
#     none                      plain decoding
#     DIR                       a trained drafter (a directory of one of these names is ./NAME)
#     MAKER/NAME                one of those that `outrider models` lists, downloaded
#     ngram[@GAMMA]             copies from the text so far; nothing is trained or loaded
#     lm:ID_OR_DIR[@GAMMA]      a smaller language model with the target's tokenizer
#
# A choice is read before the target is loaded, so that a mistake costs nothing, and opened afterwards.
# ----------------------------------------------------------------------------


AUTO, NONE = "auto", "none"
HOW_TO_TRAIN = "train one: outrider train recipes/smollm2-135m/dspark.yaml with your target and prompts in it"
_UNTRAINED = re.compile(r"(?:(?P<ngram>ngram)|lm:(?P<model>[^@].*?))(?:@(?P<gamma>\d+))?")


def recommended_threshold(metadata: Mapping[str, Any]) -> float | None:
    """The confidence threshold a drafter was found to serve best with (`outrider package` stores it)."""
    return metadata.get("recommended", {}).get("confidence_threshold")


@dataclass(frozen=True)
class OpenedDrafter:
    """A drafter ready to serve, as results name it.

    `parameters` are its own, not the target's; `metadata` is its outrider.json, {} where there is none. `tree`: what
    was asked of its trees, None where it drafts chains.
    """

    drafter: Drafter
    name: str
    algorithm: str
    parameters: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tree: TreeSize | None = None

    def info(self, label: str | None = None) -> DrafterInfo:
        """Who drafts, for results and comparisons; called `label`, or as its algorithm and the shape of its trees."""
        training = TrainingInfo.of(self.metadata)
        shape = f" {self.tree}" if self.tree is not None and self.tree.shaped else ""
        name = label or f"{self.algorithm}{shape}"
        return DrafterInfo(
            label=name,
            algorithm=self.algorithm,
            gamma=self.drafter.gamma,
            nodes=draft_slots(self.drafter),
            parameters=self.parameters,
            training=training,
        )

    @property
    def recommended_threshold(self) -> float | None:
        """See the function of this name."""
        return recommended_threshold(self.metadata)

    @property
    def confident(self) -> bool:
        """Whether its drafts come with confidences."""
        return self.drafter.heads is not None and self.drafter.heads.confident


@dataclass(frozen=True)
class DrafterChoice:
    """What `--drafter` says. `where`: directory or model, "" for ngram; `gamma` None: the drafter's own.

    `repo`: whence the directory was downloaded.
    """

    kind: Literal["directory", "ngram", "lm"]
    where: str
    gamma: int | None = None
    repo: str | None = None

    @property
    def knows_thinking(self) -> bool | None:
        """Whether the texts it was trained on had thinking in them; None: not known, or nothing was trained."""
        if self.directory is None:
            return None
        if self.repo is not None and (entry := published_by(self.repo)) is not None:
            return entry.thinking
        data = read_metadata(self.directory).get("recipe", {}).get("data")
        return None if data is None else bool(data.get("thinking", False))

    @property
    def directory(self) -> Path | None:
        """Of a trained drafter, None for the others."""
        return Path(self.where) if self.kind == "directory" else None

    def open(self, target: Target, block_size: int | None = None, tree: TreeSize | None = None) -> OpenedDrafter:
        """Ready to draft for `target`.

        Args:
            block_size: rows of a block drafter's blocks, if not as trained.
            tree: draft trees of that size.

        Raises:
            ValueError: no drafter or model there, it does not fit the target, or it has no such blocks or trees.
        """
        if self.kind == "directory":
            checkpoint = load_checkpoint(self.where, num_target_layers=target.num_layers)
            if block_size is not None:
                checkpoint = with_block_size(checkpoint, block_size)
            module = checkpoint.drafter
            parameters = sum(parameter.numel() for parameter in module.parameters())
            served, name = checkpoint.packed(target), self.where
            if tree is not None:
                shape = f"tree of {tree}" + (", measured accuracies" if "candidates" in checkpoint.metadata else "")
                served, name = _branched(module, served, tree), f"{name} ({shape})"
            return OpenedDrafter(served, name, module.algorithm, parameters, checkpoint.metadata, tree)
        if block_size is not None or tree is not None:
            raise ValueError(f"a drafter of kind {self.kind} has neither blocks nor trees: leave both options out.")
        if self.kind == "ngram":
            config = NgramConfig() if self.gamma is None else NgramConfig(self.gamma)
            drafter = NgramDrafter(config)
            return OpenedDrafter(drafter, f"ngram@{config.gamma}", "ngram", 0)
        gamma = StandaloneConfig.gamma if self.gamma is None else self.gamma
        try:
            model = load(self.where, target.device, target.dtype)
            small = StandaloneDrafter(model, target, gamma)
        except ValueError as error:  # what loading says would be taken for the target's
            raise ValueError(f"--drafter lm:{self.where}: {error}") from error
        parameters = sum(parameter.numel() for parameter in model.model.parameters())
        return OpenedDrafter(small, f"lm:{self.where}@{gamma}", "lm", parameters)


def _branched(module: DraftModule, served: Any, size: TreeSize) -> Drafter:
    if not module.drafts_trees:
        raise ValueError(f"--tree {size}: {module.algorithm} drafts chains; trees are for {', '.join(tree_methods())}.")
    drafter: Drafter = served.with_trees(size)
    return drafter


def choose_drafter(choice: str, target: str, thinking: bool = False) -> DrafterChoice | None:
    """What `--drafter` means for a target's id or directory; None: plain decoding.

    Args:
        thinking: whether the responses will have it; `auto` then prefers a drafter that was not made without.

    Raises:
        ValueError: half a choice, as `lm:` without a model, or a published drafter that cannot be had.
    """
    if choice == NONE:
        return None
    if choice == AUTO:
        if (found := shipped_drafter(target)) is not None:
            return DrafterChoice("directory", str(found))
        published = published_for(target, thinking)
        return _downloaded(published[0]) if published else None
    if untrained := _UNTRAINED.fullmatch(choice):
        gamma = None if untrained["gamma"] is None else int(untrained["gamma"])
        return DrafterChoice("ngram" if untrained["ngram"] else "lm", untrained["model"] or "", gamma)
    if re.match("(ngram|lm)([:@]|$)", choice):
        raise ValueError(
            f"--drafter {choice}: write ngram, ngram@8, lm:ID_OR_DIR or lm:ID_OR_DIR@4, the number being the draft "
            f"length; a directory of that name is ./{choice}."
        )
    if not Path(choice).is_dir() and (entry := published_by(choice)) is not None:
        return _downloaded(entry)
    return DrafterChoice("directory", choice)


def _downloaded(entry: Published) -> DrafterChoice:
    return DrafterChoice("directory", str(fetch(entry)), repo=entry.repo)


def require_drafter(choice: str, target: str, thinking: bool = False) -> DrafterChoice:
    """`choose_drafter` where there must be one.

    Raises:
        ValueError: there is none.
    """
    found = choose_drafter(choice, target, thinking)
    if found is None:
        raise ValueError(
            f"--drafter {choice}: no drafter for {target}. Give its directory, put it into models/, use ngram or "
            f"lm:SMALLER_MODEL, or {HOW_TO_TRAIN}."
        )
    return found


def warn_of_thinking(choice: DrafterChoice, thinking: bool) -> None:
    """Say what it costs to think with a drafter that has never seen it."""
    if thinking and choice.knows_thinking is False:
        warnings.warn(
            f"the drafter {choice.repo or choice.where} was trained on responses without thinking, and reasoning is "
            "text unlike them: fewer drafts are accepted, while every rejected one costs its draft and its "
            "verification. Output stays the target's. Compare the accepted length with and without --thinking; to win "
            "it back, go on training with thinking: true in the recipe's data.",
            stacklevel=2,
        )


def require_directory(choice: str, target: str) -> Path:
    """The directory of a trained drafter.

    Raises:
        ValueError: there is none, or this choice has none.
    """
    found = require_drafter(choice, target).directory
    if found is None:
        raise ValueError(f"--drafter {choice} has no directory to store anything in: give a trained drafter.")
    return found
