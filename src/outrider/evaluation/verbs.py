"""What `outrider eval`, `profile` and `bench-drafters` do, from their settings to what they measured."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from outrider.api.drafter import (
    HYBRID,
    DrafterChoice,
    OpenedDrafter,
    choose_drafter,
    load_for_mlx,
    mlx_versions,
    name_drafters,
    open_for_mlx,
    require_drafter,
    warn_of_thinking,
)
from outrider.api.scheduling import Scheduling, choose_scheduling, given, given_policy, given_typical
from outrider.backends.sglang import TABLE_FILE, write_sps_table
from outrider.checkpoints.checkpoint import read_metadata
from outrider.checkpoints.published import drafters_for
from outrider.data.sources import TaskSettings, load_tasks
from outrider.decoding.cost import Profile
from outrider.decoding.profile import PLAIN_WIDTH, measure_profile
from outrider.drafters.base import draft_slots
from outrider.drafters.draft import TreeSize
from outrider.evaluation.config import DraftCostConfig, EvalConfig, MachineProfileConfig
from outrider.evaluation.draft_cost import DraftCosts, measure_costs, plot_draft_cost
from outrider.evaluation.evaluate import evaluate
from outrider.evaluation.figures import plot_profile, speedups
from outrider.evaluation.results import Results
from outrider.evaluation.verdict import Speedup, drafter_verdict, grade, pooled
from outrider.target.model import load_target
from outrider.training.parallel import ALONE, Ranks
from outrider.utils.files import check_outputs
from outrider.utils.measure import default_dtype, versions
from outrider.utils.packaged import name_of

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]
Size = TypeVar("Size")
_OTHERS_SECONDS = 60.0  # most that measuring other drafters, too, may take


def _silent(what: str, done: int, total: int) -> None:
    """No progress is shown."""


# ----------------------------------------------------------------------------
# outrider eval
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluated:
    """The results of an evaluation, and what they say to do."""

    results: Results
    verdict: list[str]


def run_eval(
    config: EvalConfig,
    ranks: Ranks = ALONE,
    *,
    say: Say = lambda line: None,
    on_progress: Progress = _silent,
) -> Evaluated:
    """Decode tasks with and without a drafter; if it is no faster, with others, too.

    Args:
        say: gets a line before other drafters are measured.

    Raises:
        ValueError: the models or the tasks cannot be had, or do not go together.
    """
    policy = given_policy(config.draft_length, config.confidence_threshold)
    typical, tree = given_typical(config.typical), config.tree and TreeSize.parse(config.tree)
    params, thinking = config.sampling.params(), config.prompts.thinking
    check_outputs(config.out)
    choice = require_drafter(config.drafter, config.target, thinking)
    warn_of_thinking(choice, thinking)
    load_tasks(config.tasks, config.prompts.max_samples)  # a mistake in them is told before the target is loaded
    mlx = config.backend == "mlx"
    target: Any = (
        load_for_mlx(config.target) if mlx else load_target(config.target, default_dtype(ranks.device), ranks.device)
    )

    def ready(choice: DrafterChoice, *shape: Any) -> OpenedDrafter:
        return open_for_mlx(choice, target, *shape) if mlx else choice.open(target, *shape)

    schedule = partial(choose_scheduling, target, say=say if ranks.main else lambda line: None)
    opened = ready(choice, config.block_size, tree or None)
    chosen = schedule(opened) if policy is None else given(policy)
    settings = TaskSettings(config.prompts.max_samples, config.max_new_tokens, params, thinking=thinking)
    measure = partial(
        evaluate,
        target,
        tasks=config.tasks,
        typical=typical,
        concurrency=config.concurrency,
        ranks=ranks,
        on_progress=on_progress,
    )

    def measured(chosen: Scheduling) -> Results:
        return measure(
            opened.drafter,
            settings=settings,
            drafter_info=opened.info(config.label),
            policy=chosen.policy,
            recorded=_recorded(config, opened, chosen, tree=tree or None),
            versions=versions(),
        )

    results = measured(chosen)
    if chosen.uneven and ranks.world == 1 and grade(*pooled(speedups(results))) != "faster":
        say("not seen to be faster, but step costs were measured beside other work: both are measured again")
        chosen = schedule(opened, again=True)
        results = measured(chosen)
    tried: dict[str, list[Speedup]] = {}
    if config.others and grade(*pooled(speedups(results))) != "faster":
        others = {name: ready(other) for name, other in other_choices(choice, config.target).items()}
        tried = _measure_others(measure, others, results, choose=schedule, settings=settings, say=say)
    return Evaluated(results, _verdict(config, choice, opened, results=results, chosen=chosen, tried=tried))


def _recorded(config: EvalConfig, opened: OpenedDrafter, chosen: Scheduling, tree: TreeSize | None) -> dict[str, Any]:
    """Settings of the results that only the command knows."""
    return {
        "drafter": opened.name,
        "drafter_step": opened.metadata.get("step"),
        "draft_length": config.draft_length,
        "confidence_threshold": config.confidence_threshold,
        "block_size": config.block_size,
        "tree": None if tree is None else tree.setting,
        "policy": chosen.name,
        "step_costs": chosen.costs or None,
        **({"backend": mlx_versions()} if config.backend == "mlx" else {}),
    }


def other_choices(choice: DrafterChoice, target: str) -> dict[str, DrafterChoice]:
    """By option: ngram, and the best other drafter on this machine for the target or its base model."""
    others = {} if choice.kind == "ngram" else {"--drafter ngram": DrafterChoice("ngram", "")}
    for offer in drafters_for(target):
        here = offer.drafter
        if isinstance(here, Path) and not offer.misfit and here.resolve() != Path(choice.where).resolve():
            return others | {f"--drafter {shlex.quote(name_of(here))}": DrafterChoice("directory", str(here))}
    return others


def _measure_others(
    measure: Callable[..., Results],
    others: Mapping[str, OpenedDrafter],
    results: Results,
    *,
    choose: Callable[[OpenedDrafter], Scheduling],
    settings: TaskSettings,
    say: Say,
) -> dict[str, list[Speedup]]:
    """Speedups of other drafters on the first prompts of each task; {} if two of each would take too long."""
    # Both ways of decoding a prompt, as long as they took with the drafter that is no faster.
    seconds = sum((t.baseline_seconds + t.tokens / t.tokens_per_second) / t.samples for t in results.tasks)
    count = min(int(_OTHERS_SECONDS / seconds / max(1, len(others))), max(t.samples for t in results.tasks))
    if not others:
        return {}
    names = " and ".join(others)
    if count < 2:
        say(f"not seen to be faster than plain decoding; try {names} as well")
        return {}
    say(f"not seen to be faster than plain decoding; for comparison {names}, {count} prompts of each task")
    few, measured = replace(settings, max_samples=count), {}
    for name, other in others.items():
        chosen = choose(other)
        measured[name] = speedups(measure(other.drafter, settings=few, drafter_info=other.info(), policy=chosen.policy))
    return measured


def _verdict(
    config: EvalConfig,
    choice: DrafterChoice,
    opened: OpenedDrafter,
    *,
    results: Results,
    chosen: Scheduling,
    tried: Mapping[str, list[Speedup]],
) -> list[str]:
    """Whether the drafter pays, and what to do next."""
    ours = pooled(speedups(results))[0]
    faster = [name for name, measured in tried.items() if pooled(measured)[0] > ours]
    return drafter_verdict(
        speedups(results),
        tried,
        fewer="" if chosen.costs else _fewer_drafts(results, opened.recommended_threshold),
        chosen=str(chosen),
        uneven=chosen.uneven,
        train=_how_to_train(choice, config.target, faster, tasks=config.tasks),
        keep=_how_to_use(choice, config),
    )


def _fewer_drafts(results: Results, threshold: float | None) -> str:
    """The option that verifies fewer drafts than all; "" if one was given."""
    settings = results.settings
    if settings["draft_length"] is not None or settings["confidence_threshold"] is not None:
        return ""
    if threshold is not None and settings["tree"] is None:
        return f"--confidence-threshold {threshold:g}"
    length = math.ceil(min(task.accepted_length for task in results.tasks))
    return f"--draft-length {length}" if length < results.drafter.gamma else ""


def _how_to_train(choice: DrafterChoice, target: str, faster: Sequence[str], *, tasks: Sequence[str]) -> str:
    """The command that trains: the recipe that `outrider init` wrote beside the tasks, or else from a directory among
    the options that were `faster`, or from this drafter.
    """
    recipes = [Path(name).parent / "recipe.yaml" for name in tasks]
    if planned := next((recipe for recipe in recipes if recipe.is_file()), None):
        command = f"outrider train {shlex.quote(str(planned))}"
        if choice.directory is None or planned.parent.resolve() not in choice.directory.resolve().parents:
            return command
        optimizer = read_metadata(choice.directory)["recipe"]["optimizer"]
        longer = "epochs" if "epochs" in optimizer else "steps"
        places = (choice.directory, *choice.directory.parents)
        run = next(place for place in places if place.parent.resolve() == planned.parent.resolve())
        start, out = shlex.quote(str(choice.directory)), shlex.quote(f"{run}-longer")
        return f"{command} start_from={start} out={out} optimizer.{longer}={2 * optimizer[longer]}"
    directories = [option.removeprefix("--drafter ") for option in faster if option != "--drafter ngram"]
    if choice.directory is not None and not directories:
        directories = [shlex.quote(name_of(choice.directory))]
    if not directories:
        return f"outrider init --target {shlex.quote(target)} --prompts YOUR_PROMPTS.jsonl"
    return f"outrider train RECIPE start_from={directories[0]} out=ANOTHER"


def _how_to_use(choice: DrafterChoice, config: EvalConfig) -> list[str]:
    """The commands that decode with the drafter, and that measure it with several users at once."""
    drafter = f"lm:{choice.where}" if choice.kind == "lm" else choice.kind
    if choice.directory is not None:
        drafter = f"{HYBRID}:{name_of(choice.directory)}" if choice.hybrid else name_of(choice.directory)
    both = ("--target", config.target, "--drafter", drafter)
    few = ("--concurrency", "1,4", "--repeats", "1", "--prompts", "8")
    tasks = ("--tasks", ",".join(config.tasks))
    bench = ("outrider", "bench", *both, *tasks, *few, "--out", str(config.out / "bench"))
    return [
        f"Use it: {shlex.join(('outrider', 'generate', *both))} PROMPT",
        f"Next, several users at once: {shlex.join(bench)}",
    ]


# ----------------------------------------------------------------------------
# outrider profile
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Profiled:
    """A measured profile. `rows`: of a request in one forward; `context`: cached tokens at which drafts are timed;
    `paths`: files that were written beside it."""

    profile: Profile
    rows: int
    context: int
    paths: list[Path]


def run_profile(config: MachineProfileConfig, on_progress: Progress = _silent) -> Profiled:
    """Measure what a step costs on this machine, and write it.

    Raises:
        ValueError: the models cannot be had, or a tree is asked for without a drafter.
    """
    check_outputs(config.export_sglang, files=[config.out])
    tree = None if config.tree is None else TreeSize.parse(config.tree)
    choice = choose_drafter(config.drafter, config.target)
    if choice is None and tree is not None:
        raise ValueError(f"--drafter {config.drafter}: nothing is drafted, so --tree has no meaning.")
    device = config.machine.device
    target = load_target(config.target, default_dtype(device), device)
    drafter = None if choice is None else choice.open(target, tree=tree).drafter
    profile = measure_profile(target, drafter, config.steps, on_progress=on_progress)
    profile.save(config.out)
    rows, context = PLAIN_WIDTH if drafter is None else draft_slots(drafter) + 1, config.steps.middle
    paths = []
    if config.export_sglang is not None:
        lone = sorted((c.tokens, c.median) for c in profile.cells if (c.requests, c.context) == (1, context))
        paths.append(config.export_sglang / TABLE_FILE)
        write_sps_table(paths[-1], lone)
    if config.plot:
        paths.append(config.out.with_suffix(".png"))
        plot_profile(profile, paths[-1], context, rows=rows)
    return Profiled(profile, rows, context, paths=paths)


# ----------------------------------------------------------------------------
# outrider bench-drafters
# ----------------------------------------------------------------------------


def run_draft_costs(config: DraftCostConfig, on_progress: Progress = _silent) -> tuple[DraftCosts, list[Path]]:
    """Time drafts by their length, drafters taking turns: the figures, and what was written.

    Raises:
        ValueError: no such drafter, or one without the trees or blocks that are asked of it.
    """
    check_outputs(files=[config.out])
    named = name_drafters(config.drafters)
    trees = sizes("--tree", config.tree, named, read=TreeSize.parse)
    blocks = sizes("--block-size", config.block_size, named, read=_rows)
    choices = {name: require_drafter(choice, config.target) for name, choice in named.items()}
    device = config.machine.device
    target = load_target(config.target, default_dtype(device), device)
    opened = {name: choice.open(target, blocks.get(name), trees.get(name)) for name, choice in choices.items()}
    costs = measure_costs(
        target,
        [(drafter.info(name), drafter.drafter) for name, drafter in opened.items()],
        config.context,
        repeats=config.repeats,
        versions=versions(),
        on_progress=on_progress,
    )
    if config.out is None:
        return costs, []
    config.out.parent.mkdir(parents=True, exist_ok=True)
    config.out.write_text(costs.model_dump_json(indent=1) + "\n", encoding="utf-8")
    picture = config.out.with_suffix(".png")
    plot_draft_cost(costs, picture)
    return costs, [config.out, picture]


def sizes(option: str, texts: Sequence[str], named: Mapping[str, str], read: Callable[[str], Size]) -> dict[str, Size]:
    """{name: size} of a repeated `NAME=SIZE`; a name that is a path may hold the sign itself.

    Raises:
        ValueError: no drafter of that name, or no size.
    """
    by_name: dict[str, Size] = {}
    for text in texts:
        name = max((name for name in named if text.startswith(f"{name}=")), key=len, default=None)
        if name is None:
            meant = text.partition("=")[0]
            raise ValueError(f"{option} {text!r}: no drafter is called {meant!r}; there are {', '.join(named)}.")
        try:
            by_name[name] = read(text.removeprefix(f"{name}="))
        except ValueError as error:
            raise ValueError(f"{option} {text!r}: {error}") from error
    return by_name


def _rows(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("give NAME=NUMBER, the number at least 1.")
    return int(text)
