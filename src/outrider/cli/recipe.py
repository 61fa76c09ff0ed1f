"""`outrider recipe` and `init`: the packaged recipes and what each field means; a recipe for a target and prompts."""

from __future__ import annotations

import json
import shlex
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from outrider.cli import options as opt
from outrider.cli.common import load, show_lines, training_dtype
from outrider.cli.options import FILES, GENERAL, option
from outrider.utils.measure import set_up, usable_device
from outrider.utils.packaged import PACKAGE, name_of
from outrider.utils.terminal import Terminal

if TYPE_CHECKING:
    from outrider.checkpoints.published import Offer
    from outrider.data.conversations import Conversation
    from outrider.training.plan import Plan, Split

_MOST = 20000  # conversations read of each source
_SHOWN = 4  # drafters that are listed
_TESTED, _TOKENS = 16, 128  # prompts that eval decodes, tokens of each
_CALIBRATED = 8  # held-out prompts, below which packaged ones are calibrated on as well


def recipes_directory() -> Path:
    """The directory of the packaged recipes."""
    return PACKAGE / "recipes"


def packaged_recipes() -> dict[str, Path]:
    """{name: file}; a name is the path below the recipes' directory, without its suffix."""
    top = recipes_directory()
    return {file.relative_to(top).with_suffix("").as_posix(): file for file in sorted(top.rglob("*.yaml"))}


def recipe_command(
    name: Annotated[str | None, typer.Argument(help="a packaged recipe, printed; with --explain: a field")] = None,
    *,
    copy: Annotated[Path | None, option(FILES, "write the recipe to this file, to be changed")] = None,
    explain: Annotated[bool, option(GENERAL, "type, default and meaning of each field, or of one")] = False,
    schema: Annotated[bool, option(GENERAL, "print the JSON schema of recipes, for editors")] = False,
) -> None:
    """List the packaged recipes, copy one, or explain the fields."""
    if (copy is not None) + explain + schema > 1:
        raise ValueError("--copy, --explain and --schema: give one of them.")
    console = Terminal(highlight=False, soft_wrap=True)
    if schema:
        from outrider.training.recipe import recipe_schema  # here: it imports PyTorch

        print(json.dumps(recipe_schema(), indent=2))
    elif explain:
        _explain(name, console)
    elif name is not None:
        text = _packaged(name).read_text(encoding="utf-8")
        if copy is None:
            print(text, end="")
            return
        if copy.exists():
            raise ValueError(f"--copy {copy} exists: name a new file.")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
        console.print(f"{copy}: set target, out and data.prompts in it, then: outrider train {copy}", markup=False)
    elif copy is not None:
        raise ValueError(f"--copy {copy}: name the recipe to copy, as outrider recipe demo --copy {copy}.")
    else:
        found = packaged_recipes()
        width = max(map(len, found))
        for known, file in found.items():
            first = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
            console.print(f"[bold]{known:{width}}[/bold]  {escape(first)}")


def _packaged(name: str) -> Path:
    found = packaged_recipes()
    if name not in found:
        near = get_close_matches(name, found, 1)
        raise ValueError(f"no packaged recipe {name!r}; {f'did you mean {near[0]}?' if near else ', '.join(found)}")
    return found[name]


def _explain(wanted: str | None, console: Console) -> None:
    from outrider.training.recipe import nearest_field, recipe_fields

    fields = recipe_fields()
    shown = [field for field in fields if wanted in (None, field.name) or field.name.startswith(f"{wanted}.")]
    if not shown:
        near = nearest_field(str(wanted), [field.name for field in fields])
        raise ValueError(f"recipes have no field {wanted!r}; {f'did you mean {near}?' if near else 'see --explain'}")
    for field in shown:
        default = "required" if field.required else f"default {json.dumps(field.default)}"
        if "section" in field.kind and not field.required:
            default = "see its fields"
        only = f", of {field.only}" if field.only else ""
        console.print(f"[bold]{field.name}[/bold]  [dim]{escape(f'{field.kind}, {default}{only}')}[/dim]")
        if field.meaning:
            console.print(f"    {escape(field.meaning)}")


def init(
    *,
    target: opt.TargetName,
    prompts: Annotated[
        list[str] | None, option(FILES, "JSONL file, shipped set, hf:owner/name[:split]; repeatable")
    ] = None,
    out: Annotated[Path | None, option(FILES, "directory for recipe and prompts; runs/NAME by default")] = None,
    force: Annotated[bool, option(FILES, "write over files that are there", "--force")] = False,
) -> None:
    """Look at a model and prompts; write a recipe and say what to run."""

    from outrider.checkpoints.published import drafters_for
    from outrider.data.chat import Chat
    from outrider.data.conversations import row_of
    from outrider.target.hub import base_of, model_config, resolve_model
    from outrider.target.model import family_of
    from outrider.training.plan import PACKAGED, Plan, split_prompts
    from outrider.utils.files import write_atomically

    set_up(None)
    console = Terminal(highlight=False, soft_wrap=True, markup=False)
    directory = out or Path("runs") / Path(target).expanduser().resolve().name
    files = {name: directory / f"{name}.jsonl" for name in ("train", "held_out", "test")}
    recipe = directory / "recipe.yaml"
    if (there := [str(path) for path in (recipe, *files.values()) if path.exists()]) and not force:
        raise ValueError(f"{', '.join(there)}: there already. --force writes over them, --out DIR goes elsewhere.")
    gpu = usable_device("auto").type == "cuda"
    config = model_config(resolve_model(target, weights=False)).get_text_config()
    family_of(config)
    chat = Chat.load(target)
    offers = list(drafters_for(target))
    split = split_prompts(_read(prompts))
    fitting = [offer for offer in offers if not offer.misfit]
    start = next((offer for offer in fitting if isinstance(offer.drafter, Path)), None)
    plan = Plan(
        chat,
        directory,
        split.train,
        layers=config.num_hidden_layers,
        start_from=None if start is None else (_name(start), start.made_for),
        gpu=gpu,
        mixed=not set(prompts or PACKAGED) & set(PACKAGED),
    )
    directory.mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        rows = (json.dumps(row_of(conversation), ensure_ascii=False) for conversation in getattr(split, name))
        write_atomically(path, "".join(f"{row}\n" for row in rows))
    write_atomically(recipe, plan.recipe())
    estimate = _estimated(plan, recipe, console)

    def say(label: str, *lines: str) -> None:
        for number, line in enumerate(lines):
            console.print(f"{'' if number else label:10}{line}")

    shape = f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}, {config.vocab_size:,} tokens"
    say("target", f"{target}: {config.model_type}, {shape}", *chat.notes(thinking=False))
    relations = dict.fromkeys(relation for offer in offers if (relation := offer.relation(target)))
    base = base_of(target)
    say("base", *(relations or [f"{base}, no drafter known" if base else "none is named in its files"]))
    more = len(fitting) - _SHOWN
    listed = [f"{_name(offer)}, made for {offer.made_for}" for offer in fitting[:_SHOWN]]
    say("drafters", *listed, *([f"{more} more: outrider models"] if more > 0 else []), "ngram: nothing to train")
    source = ", ".join(prompts) if prompts else f"none given, so packaged ones are used ({', '.join(PACKAGED)})"
    left_out = f"; {split.duplicates} left out, there twice" if split.duplicates else ""
    counts = f"{len(split.train)} to train, {len(split.held_out)} held out, {len(split.test)} to test{left_out}"
    say("prompts", source, counts)
    say("estimate", estimate)
    say("written", str(recipe), *map(str, files.values()))
    console.print("\nnext, in this order (stop where the speed is enough):")
    for reason, command in commands(target, plan, fitting[:1], split=split):
        console.print(f"\n# {reason}\n{command}")


def _read(prompts: list[str] | None) -> list[Conversation]:
    """The prompts, or packaged ones, those of one turn."""
    from outrider.data.sources import iterate_prompts
    from outrider.training.plan import PACKAGED

    if prompts:
        return [conversation for source in prompts for conversation in islice(iterate_prompts(source), _MOST)]
    return [conversation.first_turns(1) for name in PACKAGED for conversation in iterate_prompts(name)]


def _estimated(plan: Plan, recipe: Path, console: Console) -> str:
    """The time and size of the training, measured with the target if it is here. If there is no time for all steps, a
    recipe of fewer is written.
    """
    from outrider.cli.dry_run import spoken_size, spoken_time
    from outrider.target.hub import resolve_model
    from outrider.training.estimate import estimate
    from outrider.training.machine import free_memory_bytes
    from outrider.training.recipe import load_recipe
    from outrider.utils.files import free_bytes, write_atomically

    later = f"outrider train {shlex.quote(str(recipe))} --dry-run"
    try:
        directory = resolve_model(plan.chat.name, download=False)
    except ValueError:
        return f"not known before the weights are here: {later}"
    weights, free = sum(file.stat().st_size for file in directory.glob("*.safetensors")), free_memory_bytes()
    if 2 * weights > free:  # bfloat16 becomes float32 on a CPU
        return f"not measured: weights of {spoken_size(weights)}, {spoken_size(free)} of memory free; {later}"

    try:
        chosen = load_recipe(recipe)
        device = usable_device(chosen.device)
        target = load(chosen.target, device, training_dtype(chosen.precision, device, console), console=console)
        found = estimate(chosen, target, say=partial(show_lines, console))
    except ValueError as error:
        return f"none: {error}"
    fixed = found.seconds - found.part("steps").seconds
    fitting = plan.within_budget(found.steps, fixed, seconds_per_step=found.step_seconds)
    if fitting is not plan:
        write_atomically(recipe, fitting.recipe())
        found = found.with_steps(load_recipe(recipe).optimizer.steps)
    return (
        f"training {spoken_time(found.seconds)}, {spoken_size(found.memory + found.cached)} of memory, "
        f"{spoken_size(found.disk)} on disk (free: {spoken_size(free)}, {spoken_size(free_bytes(plan.directory))})"
    )


def _name(offer: Offer) -> str:
    """What `--drafter` and `start_from` call it."""
    if not isinstance(offer.drafter, Path):
        return offer.drafter.repo
    return name_of(offer.drafter)


def commands(target: str, plan: Plan, offers: list[Offer], split: Split) -> list[tuple[str, str]]:
    """(reason, command) from the cheapest measurement to an export."""

    def path(below: str) -> str:
        return shlex.quote(str(plan.directory / below))

    model, best = f"--target {shlex.quote(target)}", path("run/best")
    few = f" --max-samples {_TESTED}" if len(split.test) > _TESTED else ""
    # Calibrate fits on half of its prompts' rounds and wants a hundred.
    more = f",eval_chat --max-samples {_CALIBRATED}" if len(split.held_out) < _CALIBRATED else ""

    def measure(drafter: str, out: str) -> str:
        tests = f"--tasks {path('test.jsonl')}{few} --max-new-tokens {_TOKENS}"
        return f"outrider eval {model} --drafter {drafter} {tests} --out {path(out)}"

    found = [
        (f"the drafter made for {offer.made_for}, as it is", measure(shlex.quote(_name(offer)), "eval-as-it-is"))
        for offer in offers
    ]
    learns = "train it further" if plan.adapts else "train a drafter"
    doctor = f"outrider doctor --quick {model} --drafter {best} --data {path('run/responses.jsonl')}"
    calibrate = (
        f"outrider calibrate {model} --drafter {best} --tasks {path('held_out.jsonl')}{more} --max-new-tokens {_TOKENS}"
    )
    return [
        ("copying from the text so far: nothing to train", measure("ngram", "eval-ngram")),
        *found,
        (f"if that is not enough, {learns} on this target's answers", f"outrider train {path('recipe.yaml')}"),
        ("whether a mistake costs acceptance", doctor),
        (f"fit its confidences{', on packaged prompts too since few are held out' if more else ''}", calibrate),
        ("what it is worth", measure(best, "eval")),
        ("for an engine", f"outrider export {best} --to vllm --out {path('vllm')}"),
    ]
