"""`--dry-run`: what a verb would take on this machine, as one table (training/estimate.py says how it is known)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outrider.api.drafter import DrafterChoice, recommended_threshold
from outrider.backends.local import NO_SPECULATION, Kinds, default_variants, match_variants, variant_of
from outrider.checkpoints.checkpoint import load_checkpoint, with_block_size
from outrider.cli.common import split_names
from outrider.data.regenerate import DataSection
from outrider.data.responses import TOKEN_BYTES, join_turns, read_responses
from outrider.data.sources import load_tasks
from outrider.decoding.profile import (
    FEWEST_SWEEPS,
    PLAIN_WIDTH,
    READ,
    WARM_UP_STEPS,
    ProfileConfig,
    grid,
)
from outrider.doctor.examine import QUICK_SAMPLES, QUICK_TOKENS
from outrider.drafters.base import DraftModule
from outrider.drafters.language_model import StandaloneConfig
from outrider.drafters.ngram import NgramConfig
from outrider.evaluation.draft_cost import WARM_UP
from outrider.evaluation.experiment import ExperimentTable, Stage, as_overrides
from outrider.target.model import count_layers
from outrider.training.dataset import recipe_prompts, responses_path
from outrider.training.estimate import (
    RATES,
    Estimate,
    MeasuredTarget,
    Measurements,
    Part,
    Rates,
    Texts,
    cache_bytes,
    decoding,
    drafter_share,
    drafting,
    estimate,
    loading,
    measure_texts,
    responding,
)
from outrider.training.gpu_estimate import TOKENS, UTILISATION, estimate_on_gpus, parse_gpus
from outrider.training.recipe import Recipe, load_recipe
from outrider.utils.files import cache_dir, free_bytes
from outrider.utils.machine import free_memory_bytes, training_dtype
from outrider.utils.measure import default_dtype, usable_device

_ANCHORS = 24  # of a conversation, in doctor's comparisons
_VARIANTS, _QUICK_VARIANTS = (40, 6), (3, 4)  # that doctor compares on _SCREENED conversations, and on all
_SCREENED = 2
_CALIBRATED_TOGETHER = 16  # texts decoded at once by calibrate


def show(found: Estimate, out: Path | None, console: Console) -> None:
    """The table, with what is free. `out`: where results would go."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("part", no_wrap=True)
    for heading in ("time", "memory", "disk"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("from")
    for part in found.parts:
        table.add_row(
            part.name, spoken_time(part.seconds), spoken_size(part.memory), spoken_size(part.disk), part.source
        )
    memory, disk = free_memory_bytes(), free_bytes(out or Path())
    free = f"free now: {spoken_size(memory)} of memory, {spoken_size(disk)} on disk"
    table.add_row(
        "total", spoken_time(found.seconds), spoken_size(found.memory), spoken_size(found.disk), free, style="bold"
    )
    console.print(table, highlight=False)
    for what, wanted, there in (("memory", found.memory, memory), ("disk", found.disk, disk)):
        if wanted > there:
            console.print(
                f"warning: not enough {what}: {spoken_size(wanted)} wanted, {spoken_size(there)} free", highlight=False
            )
    console.print("dry run: nothing of the run was written", highlight=False)
    kept = f"rates of this machine: {cache_dir() / RATES} (delete it to measure again)"
    console.print(kept, style="dim", highlight=False, soft_wrap=True)


def spoken_time(seconds: float) -> str:
    """`2.5 h`, `12.0 min`, `40 s`, `< 1 s`; `-` for none."""
    if not seconds:
        return "-"
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else "< 1 s"


def spoken_size(size: float) -> str:
    """`1.5 GB`, `120 MB`; `-` for none."""
    if not size:
        return "-"
    return f"{size / 2**30:.1f} GB" if size >= 0.1 * 2**30 else f"{max(1.0, size / 2**20):.0f} MB"


def measurements(console: Console, brief: bool = False) -> Measurements:
    """Nothing measured yet; what is being measured is printed."""
    return Measurements(partial(console.print, highlight=False, markup=False, soft_wrap=True), brief)


def measured_target(target: str, device: str, known: Measurements, precision: str | None = None) -> MeasuredTarget:
    """Of the target as a verb loads it: in a recipe's precision, else as it is decoded with."""
    place = usable_device(device)
    if precision is None:
        dtype = default_dtype(place)
    else:
        dtype = training_dtype(place)[0] if precision == "auto" else getattr(torch, precision)
    return known.of(target, place, dtype)


def of_training(recipe: Recipe, console: Console) -> None:
    """`outrider train`."""
    show(estimate(recipe, measurements(console)), Path(recipe.out), console)


def on_gpus(recipe: Recipe, gpus: str, console: Console) -> None:
    """`outrider train --dry-run --gpus`: another machine, by a model of it (training/gpu_estimate.py)."""
    found = estimate_on_gpus(recipe, *parse_gpus(gpus))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading, align in (("on each GPU", "left"), ("memory", "right"), ("of a step", "left"), ("time", "right")):
        table.add_column(heading, justify=align, no_wrap=True)  # type: ignore[arg-type]
    memory = [(name, spoken_size(size)) for name, size in found.memory.items() if size]
    seconds = [(name, f"{1000 * part:.1f} ms") for name, part in found.seconds.items()]
    for left, right in zip_longest(memory, seconds, fillvalue=("", "")):
        table.add_row(*left, *right)
    used = sum(found.memory.values())
    table.add_row("total", spoken_size(used), "total", f"{1000 * found.step_seconds:.1f} ms", style="bold")
    console.print(table, highlight=False)
    console.print(
        f"{found.steps} steps: {spoken_time(3600 * found.hours)}, {found.count * found.hours:.1f} GPU-hours, features "
        f"included; a model: {UTILISATION:.0%} of the peak, {TOKENS} tokens a conversation; no device has confirmed it",
        highlight=False,
        soft_wrap=True,
    )
    if used > found.gpu.memory:
        console.print(
            f"warning: not enough memory: {spoken_size(used)} wanted, {spoken_size(found.gpu.memory)} on each GPU; "
            "try parallel=fsdp, shard_target=true or smaller optimizer.max_anchors_per_forward",
            highlight=False,
            soft_wrap=True,
        )


def of_prepare(data: DataSection, measured: MeasuredTarget, path: Path, console: Console) -> None:
    """`outrider prepare`."""
    prompts = recipe_prompts(data, lambda line: console.print(line, markup=False, soft_wrap=True))
    texts = measure_texts(measured, prompts, data, known=path)
    first = () if data.base_urls else (loading(measured),)
    show(Estimate((*first, responding(measured, texts, data)[0])), path, console)


def task_texts(measured: MeasuredTarget, tasks: str, most: int | None, max_new_tokens: int, thinking: bool) -> Texts:
    """Sizes of the prompts of `--tasks`, at most so many of each."""

    def count() -> Texts:
        conversations = list(chain.from_iterable(prompts for _, prompts in load_tasks(split_names(tasks), most)))
        # Prompts of tasks are never too long to be used.
        longest = max(2, max_new_tokens)
        data = DataSection(responses=tasks, max_new_tokens=longest, max_prompt_tokens=2**31, thinking=thinking)
        return measure_texts(measured, conversations, data)

    return measured.texts((tasks, most, max_new_tokens, thinking), count)


def of_evaluation(measured: MeasuredTarget, texts: Texts, out: Path, console: Console) -> None:
    """`outrider eval`."""
    show(Estimate((loading(measured), decoding(measured, "decoding", texts, times=2))), out, console)


def of_calibration(
    measured: MeasuredTarget, texts: Texts, module: DraftModule, temperature: float, console: Console
) -> None:
    """`outrider calibrate`: at temperature 0 the target's texts together, then a draft after every token."""
    parts = [loading(measured)]
    if temperature > 0:
        parts.append(decoding(measured, "decoding", texts, times=1))
    else:
        parts.append(decoding(measured, "texts", texts, times=1, at_once=min(_CALIBRATED_TOGETHER, int(texts.turns))))
        positions = texts.turns * texts.response
        rows = positions * (module.config.gamma + 1)
        parts.append(drafting(measured, module, rows, source=f"{positions:.0f} drafts, one after every token"))
    show(Estimate(tuple(parts)), None, console)


def of_doctor(
    measured: MeasuredTarget,
    drafter: Path | None,
    data: Path | None,
    *,
    quick: bool,
    samples: int,
    most: int,
    console: Console,
) -> None:
    """`outrider doctor`, where it has a drafter and data; without one of them it reads files."""
    parts = [loading(measured)]
    if drafter is not None and data is not None:
        module = load_checkpoint(drafter, num_target_layers=count_layers(measured.name)).weights.module
        texts = join_turns(read_responses(data)[1])
        length = sum(len(text.tokens) for text in texts) / max(1, len(texts))
        passes = [("quick checks", _QUICK_VARIANTS, min(samples, QUICK_SAMPLES), min(most, QUICK_TOKENS))]
        passes += [] if quick else [("longer checks", _VARIANTS, samples, most)]
        for name, (few, whole), conversations, tokens in passes:
            count = min(conversations, len(texts))
            runs = few * min(_SCREENED, count) + whole * count
            rows = runs * (length + _ANCHORS * module.config.gamma)
            source = f"a drafter and its variants on {runs} conversations in all"
            decoded = decoding(measured, name, Texts(count, count, 0, prompt=3 * length, response=tokens), times=1)
            parts += [
                replace(decoded, source=f"{count} conversations"),
                drafting(measured, module, rows, source=source),
            ]
    show(Estimate(tuple(parts)), None, console)


def bench_variants(choices: Mapping[str, DrafterChoice], names: Sequence[str] | None, target: str) -> list[str]:
    """The variants of a sweep without opening its drafters.

    Args:
        target: says how deep it is where a drafter's files do not.
    """
    matched = match_variants(names, {name: _kinds(choice, target) for name, choice in choices.items()})
    return [NO_SPECULATION, *(variant_of(name, kind) for name, kind in matched)]


def _kinds(choice: DrafterChoice, target: str) -> Kinds:
    """The variants that a drafter allows."""
    if choice.directory is None:
        gamma = choice.gamma or NgramConfig.gamma
        return Kinds(gamma, default_variants(gamma, None, confident=choice.kind == "lm"))
    checkpoint = load_checkpoint(choice.directory, num_target_layers=count_layers(target))
    module, threshold = checkpoint.weights.module, recommended_threshold(checkpoint.metadata)
    gamma, confident = module.config.gamma, module.calibratable == "confidences"
    return Kinds(gamma, default_variants(gamma, threshold, confident=confident))


def of_bench(
    measured: MeasuredTarget,
    prompts: Sequence[Sequence[int]],
    most: int,
    counts: Sequence[tuple[float, int, int]],
    *,
    seconds: float | None,
    out: Path,
    console: Console,
) -> None:
    """`outrider bench` on our engine.

    Args:
        counts: (load, requests served at once, requests in all) of each level.
        seconds: of each level, where windows of time are asked for instead.
    """
    rates = measured.rates
    prompt = sum(map(len, prompts)) / len(prompts)
    parts = [loading(measured)]
    for level, users, requests in counts:
        texts = Texts(requests, requests, 0, prompt=prompt, response=rates.reply_tokens(most))
        part = decoding(measured, f"load {level:g}", texts, times=1, at_once=min(users, requests))
        parts.append(part if seconds is None else replace(part, seconds=seconds, source="windows of time, as asked"))
    show(Estimate(tuple(parts)), out, console)


@dataclass(frozen=True)
class _Passes:
    """Of a drafter. `share`: multiplications of a row of it, as a share of the target's; `gamma`: its longest draft.

    A block is one pass; others take one for every token.
    """

    share: float
    gamma: int
    blocks: bool = False

    @staticmethod
    def of(measured: MeasuredTarget, choice: DrafterChoice, block_size: int | None = None) -> _Passes:
        """Without opening it on the target. Copying n-grams is free, a model (`lm`) takes no more than the target."""
        if choice.directory is None:
            usual = NgramConfig.gamma if choice.kind == "ngram" else StandaloneConfig.gamma
            return _Passes(0.0 if choice.kind == "ngram" else 1.0, choice.gamma or usual)
        checkpoint = load_checkpoint(choice.directory, num_target_layers=count_layers(measured.name))
        module = (checkpoint if block_size is None else with_block_size(checkpoint, block_size)).weights.module
        return _Passes(drafter_share(measured, module), module.config.gamma, module.drafts_blocks)

    def seconds(self, rates: Rates, tokens: int, read: int, requests: int = 1) -> float:
        """Of reading so many rows of each request, then drafting so many tokens for it."""
        passes, rows = (1, self.gamma) if self.blocks else (tokens, 1)
        return self.share * (rates.step(requests * read) + passes * rates.step(requests * rows))


def of_drafters(
    measured: MeasuredTarget,
    choices: Sequence[tuple[DrafterChoice, int | None]],
    context: int,
    repeats: int,
    console: Console,
) -> None:
    """`outrider bench-drafters`. `choices`: each with its size of blocks, if another than trained."""
    rates, parts = measured.rates, [loading(measured)]
    for choice, block_size in choices:
        passes, times = _Passes.of(measured, choice, block_size), WARM_UP + repeats
        rounds = sum(passes.seconds(rates, tokens, READ) for tokens in range(1, passes.gamma + 1))
        source = f"{times} times drafts of 1 to {passes.gamma} tokens"
        seconds = times * (rounds + passes.share * context / rates.prefill) + context / rates.prefill
        parts.append(Part("drafts", source, seconds, memory=rates.memory))
    show(Estimate(tuple(parts)), None, console)


def of_profile(
    measured: MeasuredTarget,
    choice: DrafterChoice | None,
    nodes: int | None,
    *,
    config: ProfileConfig,
    out: Path,
    console: Console,
) -> None:
    """`outrider profile`. `nodes`: of the drafter's trees, where it drafts them."""
    rates, counts = measured.rates, config.requests
    passes = None if choice is None else _Passes.of(measured, choice)
    slots = 0 if passes is None else nodes or passes.gamma
    shapes = grid(config, PLAIN_WIDTH if passes is None else slots + 1)
    sweep = sum(rates.step(tokens) for _, tokens, _ in shapes)
    if passes is not None:  # drafts, those of one token, and what is read
        sweep += sum(
            passes.seconds(rates, passes.gamma, READ, requests=n) + passes.seconds(rates, 1, READ, requests=n)
            for n in counts
        )
    seconds = min(config.repeats * sweep, max(FEWEST_SWEEPS * sweep, config.seconds))
    source = f"{len(shapes)} shapes of forwards, {max(1, round(seconds / sweep))} times"
    held = max(requests * context + tokens for requests, tokens, context in shapes) * cache_bytes(measured)
    steps = round(seconds / sweep) + WARM_UP_STEPS
    others = steps * sum(rates.step(n * (slots + 1)) for n in counts)
    memory = rates.memory + held
    show(
        Estimate((
            loading(measured),
            Part("forwards", source, seconds, memory=memory),
            Part("engine", f"{steps} steps of up to {counts[-1]} requests", others, memory=memory),
        )),
        out,
        console,
    )  # fmt: skip


def of_recording(
    measured: MeasuredTarget, choice: DrafterChoice, prompts: Sequence[int], *, most: int, out: Path, console: Console
) -> None:
    """`outrider simulate --record`: plain decoding, and a draft at every position. `prompts`: their tokens."""
    rates, count, passes = measured.rates, len(prompts), _Passes.of(measured, choice)
    texts = Texts(count, count, 0, prompt=sum(prompts) / count, response=rates.reply_tokens(most))
    positions = count * texts.response
    seconds = positions * passes.seconds(rates, passes.gamma, 1)
    disk = positions * (4 * passes.gamma + TOKEN_BYTES) + sum(prompts) * TOKEN_BYTES
    drafts = Part("drafts", f"{positions:.0f}, one at every position", seconds, memory=rates.memory, disk=disk)
    show(Estimate((loading(measured), decoding(measured, "decoding", texts, times=1), drafts)), out, console)


def of_features(recipe: Recipe, processes: int, console: Console) -> None:
    """`outrider features write`, by one of so many processes.

    Raises:
        ValueError: as of `estimate`, or the recipe's run is finished.
    """
    found = {part.name: part for part in estimate(recipe, measurements(console)).parts}
    if not found:
        raise ValueError(f"{recipe.out}: the run is finished; its responses and features are not made again.")
    written = found["features"]
    written = replace(written, seconds=written.seconds / processes, disk=written.disk / processes)
    show(Estimate((found["load"], found["responses"], written)), Path(recipe.out), console)


def of_stage(table: ExperimentTable, stage: Stage, options: dict[str, Any], known: Measurements) -> Estimate:
    """A command of an experiment, before the earlier ones have run; no parts: only its drafters or figures would tell.

    Args:
        known: what the table's other commands measured.

    Raises:
        ValueError: its prompts or its recipe cannot be read.
    """
    verb, base = stage.args[0], load_recipe(Path(table.recipe), as_overrides(table.data_fields))
    if verb == "eval":
        measured = measured_target(table.target, options["device"], known)
        texts = task_texts(
            measured, options["tasks"], options["max_samples"],
            max_new_tokens=options["max_new_tokens"], thinking=options["thinking"],
        )  # fmt: skip
        return Estimate((loading(measured), decoding(measured, "decoding", texts, times=2)))
    if verb == "prepare":
        responses = str(stage.output)
        recipe = base.model_copy(
            update={"out": table.out, "data": base.data.model_copy(update={"responses": responses})}
        )
        names = {"load", "responses"}
    elif verb == "features":
        recipe, names = load_recipe(Path(stage.args[2]), stage.args[3:-1]), {"load", "features"}
    elif verb == "train":
        recipe, names = load_recipe(Path(stage.args[1]), stage.args[2:]), {"load", "features", "steps", "checks"}
        names -= set() if table.feature_aux_layers is None else {"features"}  # stored before
    else:
        return Estimate(())
    if not responses_path(recipe).is_file():
        data = recipe.data.model_copy(update={"prompts": base.data.prompts})
        recipe = recipe.model_copy(update={"data": data})
    return Estimate(tuple(part for part in estimate(recipe, known).parts if part.name in names))


def of_demo(recipe: Recipe, samples: int, tokens: int, tasks: str, *, console: Console) -> None:
    """`outrider demo`: training as if no response were packaged, then an evaluation; the race takes seconds."""
    known = measurements(console)
    training = estimate(recipe, known).parts
    measured = measured_target(recipe.target, recipe.device, known)
    texts = task_texts(measured, tasks, samples, max_new_tokens=tokens, thinking=False)
    decoded = decoding(measured, "evaluation", texts, times=2)
    show(Estimate((*training, decoded)), Path(recipe.out), console)
