"""`outrider eval`, `compare`, `report`, `doctor`, `bench-drafters`: what a drafter is worth, what is wrong with it."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from outrider.api.drafter import (
    AUTO,
    HYBRID,
    load_for_mlx,
    mlx_versions,
    open_for_mlx,
    require_drafter,
    warn_of_thinking,
)
from outrider.cli import options as opt
from outrider.cli.common import (
    check_outputs,
    choose_policy,
    choose_tree,
    choose_typical,
    counting,
    load,
    show_lines,
    show_paths,
    split_names,
)
from outrider.cli.options import CHOICES, DRAFTS, FILES, GENERAL, MODELS, PROMPTS, SMOLLM2, option, rare
from outrider.evaluation.verdict import Speedup, comparison_verdict, drafter_verdict, grade, pooled
from outrider.utils.measure import set_up, usable_device, versions
from outrider.utils.packaged import name_of, packaged
from outrider.utils.terminal import Terminal

if TYPE_CHECKING:
    from outrider.api.drafter import DrafterChoice, OpenedDrafter
    from outrider.api.scheduling import Scheduling
    from outrider.data.sources import TaskSettings
    from outrider.evaluation.results import Results


def evaluate_command(
    *,
    target: opt.TargetName,
    drafter: opt.DrafterName = AUTO,
    backend: opt.Backend = "local",
    label: Annotated[
        str | None, rare(MODELS, "its name in comparisons; by default the algorithm, with the shape of its trees")
    ] = None,
    tasks: opt.Tasks,
    data_dir: opt.DataDirectory = None,
    max_samples: opt.MaxSamples = None,
    thinking: opt.Thinking = False,
    max_new_tokens: opt.MaxNewTokens = 256,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = 0,
    top_p: opt.TopP = 1.0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    seed: opt.Seed = 0,
    draft_length: Annotated[
        int | None, option(DRAFTS, "drafts to verify (of a tree: nodes); else by cost, per round", min=0)
    ] = None,
    confidence_threshold: opt.ConfidenceThreshold = None,
    block_size: Annotated[int | None, rare(DRAFTS, "rows of a block, if not as trained", min=1)] = None,
    tree: opt.Tree = None,
    typical: opt.Typical = None,
    concurrency: Annotated[int, rare(PROMPTS, "prompts decoded together, by the engine", min=1, max=1024)] = 1,
    others: Annotated[
        bool, rare(GENERAL, "where it is no faster, try other drafters on a few prompts", "--others/--no-others")
    ] = True,
    out: Annotated[Path, option(GENERAL, "directory for results.json and plots")],
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Decode tasks with and without a drafter: speedup, accepted length, same output."""
    from outrider.api.scheduling import choose_scheduling, given
    from outrider.data.sources import TaskSettings, load_tasks
    from outrider.evaluation.evaluate import evaluate
    from outrider.evaluation.figures import speedups
    from outrider.sampling import SamplingParams
    from outrider.training.parallel import join

    set_up(threads)
    asked, lossy = choose_policy(draft_length, confidence_threshold), choose_typical(typical)
    size = choose_tree(tree, confidence_threshold)
    check_outputs(out)
    choice = require_drafter(drafter, target, thinking)
    warn_of_thinking(choice, thinking)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed
    )
    on_mlx = backend == "mlx"
    if on_mlx and concurrency > 1:
        raise ValueError("--backend mlx decodes one prompt at a time: leave out --concurrency.")
    with join(device) as ranks:
        console = Terminal(quiet=not ranks.main)
        load_tasks(split_names(tasks), max_samples)  # a mistake in them is told before the target is loaded
        loaded: Any = load_for_mlx(target) if on_mlx else load(target, ranks.device)
        opened = (
            open_for_mlx(choice, loaded, block_size, tree=size) if on_mlx else choice.open(loaded, block_size, size)
        )
        say = partial(show_lines, Terminal(stderr=True, quiet=not ranks.main))
        chosen = choose_scheduling(loaded, opened, say) if asked is None else given(asked)
        config = TaskSettings(max_samples, max_new_tokens, params, thinking=thinking)
        about = {
            "drafter": opened.name,
            "drafter_step": opened.metadata.get("step"),
            "draft_length": draft_length,
            "confidence_threshold": confidence_threshold,
            "block_size": block_size,
            "tree": None if size is None else size.setting,
            "policy": chosen.name,
            "step_costs": chosen.costs or None,
            **({"backend": mlx_versions()} if on_mlx else {}),
        }
        measure = partial(
            evaluate, loaded, tasks=split_names(tasks), typical=lossy, concurrency=concurrency, ranks=ranks
        )
        with counting(console, "eval") as on_progress:
            results = measure(
                opened.drafter,
                settings=config,
                drafter_info=opened.info(label),
                policy=chosen.policy,
                recorded=about,
                versions=versions(),
                on_progress=on_progress,
            )
        tried: dict[str, list[Speedup]] = {}
        if others and grade(*pooled(speedups(results))) != "faster":
            ready = {
                name: open_for_mlx(other, loaded) if on_mlx else other.open(loaded)
                for name, other in other_choices(choice, target).items()
            }
            with counting(console, "eval of other drafters") as on_progress:
                again = partial(measure, on_progress=on_progress)
                choose = partial(choose_scheduling, loaded, say=say)
                tried = _measure_others(again, ready, results, choose=choose, settings=config, console=console)
        if ranks.main:
            faster = [name for name, found in tried.items() if pooled(found)[0] > pooled(speedups(results))[0]]
            advice = drafter_verdict(
                speedups(results),
                tried,
                fewer="" if chosen.costs else _fewer_drafts(results, opened.recommended_threshold),
                chosen=str(chosen),
                train=_how_to_train(choice, target, faster, tasks=tasks),
                keep=_how_to_use(choice, target, tasks, out=out),
            )
            report(results, out, console, verdict=advice)


_OTHERS_SECONDS = 60.0  # most that measuring other drafters, too, may take


def other_choices(choice: DrafterChoice, target: str) -> dict[str, DrafterChoice]:
    """By option: ngram, and the best other drafter on this machine for the target or its base model."""
    from outrider.api.drafter import DrafterChoice
    from outrider.checkpoints.published import drafters_for

    found = {} if choice.kind == "ngram" else {"--drafter ngram": DrafterChoice("ngram", "")}
    for offer in drafters_for(target):
        here = offer.drafter
        if isinstance(here, Path) and not offer.misfit and here.resolve() != Path(choice.where).resolve():
            return found | {f"--drafter {shlex.quote(name_of(here))}": DrafterChoice("directory", str(here))}
    return found


def _measure_others(
    measure: Callable[..., Results],
    others: Mapping[str, OpenedDrafter],
    results: Results,
    *,
    choose: Callable[[OpenedDrafter], Scheduling],
    settings: TaskSettings,
    console: Console,
) -> dict[str, list[Speedup]]:
    """Speedups of other drafters on the first prompts of each task; {} where two of each would take too long."""
    from outrider.evaluation.figures import speedups

    # Both ways of decoding a prompt, as long as they took with the drafter that is no faster.
    seconds = sum((t.baseline_seconds + t.tokens / t.tokens_per_second) / t.samples for t in results.tasks)
    count = min(int(_OTHERS_SECONDS / seconds / max(1, len(others))), max(t.samples for t in results.tasks))
    names = " and ".join(others)
    if count < 2 or not others:
        show_lines(console, *[f"not seen to be faster than plain decoding; try {names} as well"] * bool(others))
        return {}
    show_lines(
        console, f"not seen to be faster than plain decoding; for comparison {names}, {count} prompts of each task"
    )
    few = replace(settings, max_samples=count)
    found = {}
    for name, other in others.items():
        chosen = choose(other)
        found[name] = speedups(measure(other.drafter, settings=few, drafter_info=other.info(), policy=chosen.policy))
    return found


def _fewer_drafts(results: Results, threshold: float | None) -> str:
    """The option that verifies fewer drafts than all; "" where one was given."""
    settings = results.settings
    if settings["draft_length"] is not None or settings["confidence_threshold"] is not None:
        return ""
    if threshold is not None and settings["tree"] is None:
        return f"--confidence-threshold {threshold:g}"
    length = math.ceil(min(task.accepted_length for task in results.tasks))
    return f"--draft-length {length}" if length < results.drafter.gamma else ""


def _how_to_train(choice: DrafterChoice, target: str, faster: Sequence[str], *, tasks: str) -> str:
    """The command that trains: the recipe that `outrider init` wrote beside the tasks, or else from a directory among
    the options that were `faster`, or from this drafter.
    """
    from outrider.checkpoints.checkpoint import read_metadata

    recipes = [Path(name).parent / "recipe.yaml" for name in split_names(tasks)]
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


def _how_to_use(choice: DrafterChoice, target: str, tasks: str, out: Path) -> list[str]:
    """The commands that decode with the drafter, and that measure it with several users at once."""
    drafter = f"lm:{choice.where}" if choice.kind == "lm" else choice.kind
    if choice.directory is not None:
        drafter = f"{HYBRID}:{name_of(choice.directory)}" if choice.hybrid else name_of(choice.directory)
    both = ("--target", target, "--drafter", drafter)
    few = ("--concurrency", "1,4", "--repeats", "1", "--prompts", "8")
    bench = ("outrider", "bench", *both, "--tasks", tasks, *few, "--out", str(out / "bench"))
    return [
        f"Use it: {shlex.join(('outrider', 'generate', *both))} PROMPT",
        f"Next, several users at once: {shlex.join(bench)}",
    ]


def report(results: Results, out: Path, console: Console, verdict: Sequence[str]) -> None:
    """Write the files, print the table, where the plots are, and the verdict.

    Raises:
        ValueError: greedy output differed from plain decoding and no lossy rule was asked for: a bug worth reporting.
    """
    from outrider.evaluation.figures import table, write_report

    paths = write_report(results, out)
    console.print(table(results))
    show_paths(console, *paths)
    wrong = [t.task for t in results.tasks if t.greedy_mismatches]
    if wrong and not results.lossy:
        raise ValueError(f"output differs from plain decoding on {', '.join(wrong)}; this is a bug, please report it.")
    show_lines(console, *verdict)


def compare_command(
    results: Annotated[list[str], typer.Argument(help="directories of outrider eval --out, as DIR or NAME=DIR")],
    *,
    draft_cost: Annotated[Path | None, option(FILES, "JSON of outrider bench-drafters, to show as well")] = None,
    question: Annotated[
        list[str] | None,
        option(GENERAL, "names set side by side, the first being compared with; repeatable", metavar="TEXT=A,B"),
    ] = None,
    out: Annotated[Path | None, option(FILES, "directory for JSON, Markdown and pictures")] = None,
    allow_different: Annotated[
        bool, option(GENERAL, "compare other settings or machines, and say so", "--allow-different")
    ] = False,
) -> None:
    """Compare results of eval; those of one name are seeds of one drafter."""
    from outrider.evaluation.comparison import compare, load_results, notes, speedups_of, terminal, write_comparison
    from outrider.evaluation.draft_cost import cost_table, load_costs

    console = Terminal()
    loaded = [load_results(argument) for argument in results]
    known: set[Path] = set()
    for one in loaded:
        if one.path.resolve() in known:
            raise ValueError(f"{one.path} is given twice; the results of one directory are those of one seed.")
        known.add(one.path.resolve())
    costs = None if draft_cost is None else load_costs(draft_cost)
    questions = {}
    for text in question or ():
        name, _, labels = text.rpartition("=")  # the text may have one, names have none
        if not (name and labels.strip(" ,")):
            raise ValueError(f"--question {text!r}: give TEXT=NAME,NAME.")
        questions[name] = split_names(labels, "results")
    comparison = compare(loaded, allow_different, costs, questions=questions)
    for view in terminal(comparison):
        _print_whole(console, view)
    show_lines(console, *notes(comparison))
    if costs is not None:
        _print_whole(console, cost_table(costs))
    if out is not None:
        show_paths(console, *write_comparison(comparison, out))
    show_lines(console, *comparison_verdict(speedups_of(comparison)))


def _print_whole(console: Console, view: Table) -> None:
    """A terminal that is narrower wraps; nothing is cut off."""
    needed = Measurement.get(console, console.options.update(max_width=1000), view).maximum
    console.width = max(console.width, needed)
    console.print(view)


def report_command(
    places: Annotated[list[Path], typer.Argument(help="directories that other verbs wrote, or single files")],
    *,
    out: Annotated[Path, option(FILES, "HTML file")] = Path("report.html"),
    title: Annotated[str, option(FILES, "of the page")] = "Outrider report",
) -> None:
    """Write one HTML page of what was measured: verdicts, pictures, traces, settings."""
    check_outputs(files=[out])
    write_page(places, out, title, console=Terminal())


def write_page(places: Sequence[Path], out: Path, title: str, *, console: Console) -> None:
    """Write the report of what is at these places, and say where a browser finds it.

    Raises:
        ValueError: see `find_sources` and `render`.
    """
    from outrider.evaluation.html_report import find_sources, render
    from outrider.utils.files import write_atomically

    sources = find_sources(places)
    page = render(sources, title)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    count = len(sources)
    show_lines(
        console,
        f"report of {count} file{'s' * (count > 1)}, {len(page.encode()) / 1e3:.0f} kB; open it in a browser:",
        f"  {out.resolve().as_uri()}",
    )


Size = TypeVar("Size")


def bench_drafters(
    drafters: Annotated[list[str], typer.Argument(help=f"each as CHOICE or NAME=CHOICE. CHOICE: {CHOICES}")],
    *,
    target: opt.TargetName = SMOLLM2,
    tree: Annotated[
        list[str] | None,
        option(DRAFTS, f"that drafter drafts trees: {opt.TREE_FORM}; repeatable", metavar="NAME=SIZE"),
    ] = None,
    block_size: Annotated[
        list[str] | None,
        option(DRAFTS, "that drafter's blocks have so many rows; repeatable", metavar="NAME=ROWS"),
    ] = None,
    context: Annotated[int, option(DRAFTS, "committed tokens before the draft", min=3)] = 256,
    repeats: Annotated[int, option(DRAFTS, "rounds at every length, after two that are not counted", min=3)] = 20,
    out: Annotated[Path | None, option(FILES, "JSON file for the figures, and a PNG beside it")] = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Time drafts by their length, drafters taking turns."""
    from outrider.drafters.draft import TreeSize
    from outrider.evaluation.draft_cost import cost_table, measure_costs, plot_draft_cost

    check_outputs(files=[out])
    named = name_drafters(drafters)
    trees = sizes("--tree", tree, named, read=TreeSize.parse)
    blocks = sizes("--block-size", block_size, named, read=_number)
    choices = {name: require_drafter(choice, target) for name, choice in named.items()}
    set_up(threads)
    console = Terminal()
    loaded = load(target, device)
    opened = [(name, choice.open(loaded, blocks.get(name), trees.get(name))) for name, choice in choices.items()]
    measured = [(found.info(name), found.drafter) for name, found in opened]
    with counting(console, "bench-drafters") as on_progress:
        costs = measure_costs(loaded, measured, context, repeats=repeats, versions=versions(), on_progress=on_progress)
    console.print(cost_table(costs))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(costs.model_dump_json(indent=1) + "\n", encoding="utf-8")
        plot_draft_cost(costs, out.with_suffix(".png"))
        show_paths(console, out, out.with_suffix(".png"))


def name_drafters(arguments: Sequence[str]) -> dict[str, str]:
    """{name: choice}; a choice without a name is its own.

    Raises:
        ValueError: one name for two.
    """
    from outrider.evaluation.comparison import split_label

    pairs = [(label or choice, choice) for label, choice in map(split_label, arguments)]
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two drafters are called {', '.join(twice)}; name them: NAME=CHOICE.")
    return dict(pairs)


def sizes(
    option: str, given: Sequence[str] | None, named: Mapping[str, str], read: Callable[[str], Size]
) -> dict[str, Size]:
    """{name: size} of a repeated `NAME=SIZE`; a name that is a path may hold the sign itself.

    Raises:
        ValueError: no drafter of that name, or no size.
    """
    found: dict[str, Size] = {}
    for text in given or ():
        name = max((name for name in named if text.startswith(f"{name}=")), key=len, default=None)
        if name is None:
            meant = text.partition("=")[0]
            raise ValueError(f"{option} {text!r}: no drafter is called {meant!r}; there are {', '.join(named)}.")
        try:
            found[name] = read(text.removeprefix(f"{name}="))
        except ValueError as error:
            raise ValueError(f"{option} {text!r}: {error}") from error
    return found


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("give NAME=NUMBER, the number at least 1.")
    return int(text)


def doctor(
    *,
    target: Annotated[str | None, option(MODELS, "model id or directory")] = None,
    drafter: Annotated[Path | None, option(MODELS, "drafter directory")] = None,
    data: Annotated[Path | None, option(PROMPTS, "responses file the drafter learns from")] = None,
    evaluation: Annotated[str | None, option(PROMPTS, "prompts that must not be in the data", "--eval")] = None,
    samples: Annotated[int, option(PROMPTS, "conversations run through the models", min=1)] = 8,
    max_new_tokens: Annotated[int, option(PROMPTS, "tokens decoded per conversation", min=1)] = 48,
    thinking: Annotated[bool, option(PROMPTS, "the mode the drafter is to serve in")] = False,
    base_url: Annotated[
        str | None, option(opt.ENGINES, f"a running server to examine; its key, if any, in {opt.API_KEY}")
    ] = None,
    baseline_url: Annotated[str | None, option(opt.ENGINES, "the same server without a drafter")] = None,
    served_model: Annotated[str | None, rare(opt.ENGINES, "the target's name on the servers")] = None,
    tasks: Annotated[
        str, option(opt.ENGINES, "what the server is asked: tasks, files, shipped sets")
    ] = "eval_math,eval_code,eval_chat",
    questions: Annotated[int, option(opt.ENGINES, "how many prompts of them", min=1)] = 24,
    temperature: Annotated[str, option(opt.ENGINES, "of equal parts of the prompts; of 0 and 1")] = "0,1",
    also: Annotated[
        list[Path] | None,
        rare(opt.ENGINES, "another checkpoint that it may have loaded; may be repeated", metavar="DIR"),
    ] = None,
    timeout: Annotated[float, rare(opt.ENGINES, "seconds to wait for an answer", min=1.0)] = 60.0,
    quick: Annotated[bool, option(GENERAL, "end after the quick checks, under a minute for a small model")] = False,
    json_out: Annotated[Path | None, option(FILES, "file for the findings", "--json")] = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Check target, drafter and data, or a server; status 1 if a fault is found."""
    of_checkpoint = {"--data": data, "--eval": evaluation, "--quick": quick}
    of_server = {"--baseline-url": baseline_url, "--served-model": served_model, "--also": also}
    if idle := [name for name, given in (of_checkpoint if base_url else of_server).items() if given]:
        raise ValueError(f"{', '.join(idle)}: {'not together with' if base_url else 'only with'} --base-url.")
    if base_url is not None:
        _doctor_of_server(
            (base_url, baseline_url, served_model),
            target,
            drafter,
            also=also or [],
            tasks=split_names(tasks, "task"),
            questions=questions,
            temperatures=_of_zero_and_one(temperature),
            max_new_tokens=max_new_tokens,
            thinking=thinking,
            timeout=timeout,
            json_out=json_out,
            device=device,
            threads=threads,
        )
        return
    from outrider.data.sources import load_prompts
    from outrider.doctor.case import Inputs, read_data, read_drafter
    from outrider.doctor.examine import (
        LONG,
        QUICK,
        QUICK_SAMPLES,
        QUICK_TOKENS,
        as_json,
        examine,
        left_out,
        print_findings,
        print_summary,
        replaced,
        verdict,
    )

    if target is None and drafter is None and data is None:
        raise ValueError("nothing to examine: give --target, --drafter or --data, best all three.")
    check_outputs(files=[json_out])
    set_up(threads)
    console = Terminal()
    drafter = None if drafter is None else packaged(drafter, "models")
    for place, path in (("--drafter", drafter), ("--data", data)):
        if path is not None and not path.exists():
            raise ValueError(f"{place} {path}: there is nothing of that name.")
    few, short = min(samples, QUICK_SAMPLES), min(max_new_tokens, QUICK_TOKENS)
    inputs = Inputs(thinking=thinking, samples=few, max_new_tokens=short)
    if evaluation is not None:
        inputs.eval_prompts = load_prompts(evaluation)
    if target is not None:
        inputs.loaded_target = load(target, device)
    unread = [
        read_drafter(inputs, drafter, str(usable_device(device))) if drafter is not None else None,
        read_data(inputs, data) if data is not None else None,
    ]
    with counting(console, "doctor") as on_progress:
        found = examine(inputs, partial(on_progress, "quick checks"), QUICK)
    findings = [finding for finding in unread if finding is not None] + found
    print_findings(findings, console)
    rest = left_out(inputs)
    if quick:
        samples, max_new_tokens = few, short
    else:
        console.print(f"{rest}. Now these, which take longer:", highlight=False, markup=False, soft_wrap=True)
        inputs = replace(inputs, samples=samples, max_new_tokens=max_new_tokens)
        with counting(console, "doctor") as on_progress:
            longer = examine(inputs, partial(on_progress, "longer checks"), LONG)
        print_findings([finding for finding in longer if finding not in findings], console)
        findings = replaced(findings, longer)
    print_summary(findings, console)
    if quick:
        rest += ". The same command without --quick examines them."
        console.print(rest, highlight=False, markup=False, soft_wrap=True)
    if json_out is not None:
        paths = {"target": target, "drafter": drafter, "data": data, "eval": evaluation}
        examined = {name: None if value is None else str(value) for name, value in paths.items()}
        examined |= {
            "samples": str(samples),
            "max_new_tokens": str(max_new_tokens),
            "thinking": str(thinking),
            "quick": str(quick),
        }
        json_out.parent.mkdir(parents=True, exist_ok=True)
        json_out.write_text(json.dumps({**as_json(findings, examined), "versions": versions()}, indent=1) + "\n")
    if verdict(findings) == "fault":
        raise typer.Exit(1)


def _of_zero_and_one(text: str) -> list[float]:
    """The temperatures that a server is asked with.

    Raises:
        ValueError: another than 0 and 1, or one twice.
    """
    found = [part.strip() for part in text.split(",")]
    if not set(found) <= {"0", "1"} or len(set(found)) < len(found):
        raise ValueError(f"--temperature {text}: give 0, 1 or 0,1; acceptance is computed at these.")
    return [float(part) for part in found]


def _doctor_of_server(
    urls: tuple[str, str | None, str | None],
    target: str | None,
    drafter: Path | None,
    *,
    also: Sequence[Path],
    tasks: Sequence[str],
    questions: int,
    temperatures: Sequence[float],
    max_new_tokens: int,
    thinking: bool,
    timeout: float,
    json_out: Path | None,
    device: str,
    threads: int | None,
) -> None:
    """`outrider doctor --base-url`; `urls`: the server, the one without a drafter, the model's name there."""
    from outrider.backends.openai import Endpoint, served_model, shown_url
    from outrider.checkpoints.checkpoint import load_checkpoint
    from outrider.doctor.examine import as_json, print_causes, print_findings, print_summary, verdict
    from outrider.doctor.server import Question, ServerClient, examine_server
    from outrider.drafters.base import check_fits
    from outrider.evaluation.loadtest.load import mixed_prompts

    if target is None or drafter is None:
        raise ValueError("--base-url: give --target and --drafter, too: what the server should have loaded.")
    check_outputs(files=[json_out])
    set_up(threads)
    console = Terminal()
    base_url, baseline_url, name = urls
    endpoints = [Endpoint(url, name, os.environ.get(opt.API_KEY)) for url in (base_url, baseline_url) if url]
    model = served_model(endpoints)
    loaded = load(target, device)
    if loaded.tokenizer is None:
        raise ValueError(f"{target} has no tokenizer: a server is asked in text.")
    found = [load_checkpoint(path, loaded.device, loaded.num_layers).weights for path in (drafter, *also)]
    for weights in found:
        check_fits(weights.config, loaded, weights.module.reads_final_layer)
    own, *others = [weights.for_target(loaded) for weights in found]
    prompts = mixed_prompts(loaded.tokenizer, tasks, questions, seed=0, thinking=thinking)
    asked = [Question(prompt.name.partition("/")[0], prompt.tokens, prompt.chat) for prompt in prompts]
    clients = [
        ServerClient(one, model, loaded, max_new_tokens=max_new_tokens, timeout=timeout, thinking=thinking)
        for one in endpoints
    ]
    with counting(console, "doctor") as on_progress:
        report = examine_server(
            clients[0],
            own,
            asked,
            temperatures=temperatures,
            baseline=clients[1] if baseline_url else None,
            others={str(path): weights for path, weights in zip(also, others, strict=True)},
            on_progress=on_progress,
        )
    seen = [replace(f, meaning="", remedy="") for f in report.findings if f.group == "server"]
    print_findings(seen, console)
    print_causes(report.causes, console)
    print_summary(report.findings, console)
    if json_out is not None:
        examined = {"base_url": shown_url(base_url), "target": target, "drafter": str(drafter), "tasks": list(tasks)}
        causes = list(map(asdict, report.causes))
        data = {**as_json(report.findings, examined), "causes": causes, "server": report.as_json()}
        data["versions"] = versions()
        json_out.parent.mkdir(parents=True, exist_ok=True)
        json_out.write_text(json.dumps(data, indent=1) + "\n")
    if verdict(report.findings) == "fault":
        raise typer.Exit(1)
