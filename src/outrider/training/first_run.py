"""A first run, planned from a model and prompts: recipe and prompt files, and the commands from cheap to dear."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from outrider.checkpoints.published import Offer, drafters_for
from outrider.data.chat import Chat
from outrider.data.conversations import Conversation, row_of
from outrider.data.sources import iterate_prompts
from outrider.target.hub import base_of, model_config, resolve_model
from outrider.target.model import family_of, load_target
from outrider.training.config import InitConfig
from outrider.training.estimate import Estimate, estimate
from outrider.training.machine import free_memory_bytes
from outrider.training.plan import PACKAGED, Plan, Split, split_prompts
from outrider.training.recipe import load_recipe
from outrider.training.run import computing_dtype
from outrider.utils.files import write_atomically
from outrider.utils.measure import usable_device
from outrider.utils.packaged import name_of

_MOST = 20000  # conversations read of each source
TESTED, TOKENS = 16, 128  # prompts that eval decodes, tokens of each
_CALIBRATED = 8  # held-out prompts, below which packaged ones are calibrated on as well
Say = Callable[[str], None]


@dataclass(frozen=True)
class FirstRun:
    """What is known of the model, and what was planned.

    Attributes:
        text: the target's config.json, of its language model.
        offers: drafters of the target and of its base model; `fitting`: those that can draft for it.
        files: prompts by part; `recipe`: the file.
    """

    config: InitConfig
    text: Any
    plan: Plan
    split: Split
    offers: list[Offer]
    recipe: Path
    files: dict[str, Path]

    @property
    def fitting(self) -> list[Offer]:
        return [offer for offer in self.offers if not offer.misfit]

    @property
    def base(self) -> list[str]:
        """Whom the target is made from, and which drafters that means."""
        target = self.config.target
        relations = dict.fromkeys(relation for offer in self.offers if (relation := offer.relation(target)))
        base = base_of(target)
        return list(relations) or [f"{base}, no drafter known" if base else "none is named in its files"]

    def write(self) -> None:
        """Write the prompt files and the recipe."""
        self.plan.directory.mkdir(parents=True, exist_ok=True)
        for name, path in self.files.items():
            rows = (json.dumps(row_of(conversation), ensure_ascii=False) for conversation in getattr(self.split, name))
            write_atomically(path, "".join(f"{row}\n" for row in rows))
        write_atomically(self.recipe, self.plan.recipe())

    def estimate(self, say: Say) -> Estimate:
        """Time and size of the training, measured with the target; writes a recipe of fewer steps if there is no time
        for all.

        Raises:
            ValueError: the weights are not here, or too large for this machine: there is nothing to measure.
        """
        check_memory(resolve_model(self.plan.chat.name, download=False))
        recipe = load_recipe(self.recipe)
        device = usable_device(recipe.device)
        say(f"loading {recipe.target}")
        target = load_target(recipe.target, computing_dtype(recipe.precision, device, say), device)
        measured = estimate(recipe, target, say=say)
        fixed = measured.seconds - measured.part("steps").seconds
        fitting = self.plan.within_budget(measured.steps, fixed, seconds_per_step=measured.step_seconds)
        if fitting is not self.plan:
            write_atomically(self.recipe, fitting.recipe())
            measured = measured.with_steps(load_recipe(self.recipe).optimizer.steps)
        return measured


def plan_first_run(config: InitConfig) -> FirstRun:
    """Look at the model and the prompts, and plan; nothing is written.

    Raises:
        ValueError: there is no such model, too few prompts, or files are there that would be written over.
    """
    directory = config.directory
    files = {name: directory / f"{name}.jsonl" for name in ("train", "held_out", "test")}
    recipe = directory / "recipe.yaml"
    if (there := [str(path) for path in (recipe, *files.values()) if path.exists()]) and not config.force:
        raise ValueError(f"{', '.join(there)}: there already. --force writes over them, --out DIR goes elsewhere.")
    gpu = usable_device("auto").type == "cuda"
    text = model_config(resolve_model(config.target, weights=False)).get_text_config()
    family_of(text)
    chat = Chat.load(config.target)
    offers = list(drafters_for(config.target))
    split = split_prompts(_read(config.prompts))
    start = next((offer for offer in offers if not offer.misfit and isinstance(offer.drafter, Path)), None)
    plan = Plan(
        chat,
        directory,
        split.train,
        layers=text.num_hidden_layers,
        start_from=None if start is None else (offer_name(start), start.made_for),
        gpu=gpu,
        mixed=not set(config.prompts or PACKAGED) & set(PACKAGED),
    )
    return FirstRun(config, text, plan, split=split, offers=offers, recipe=recipe, files=files)


def _read(prompts: tuple[str, ...]) -> list[Conversation]:
    """The prompts, or packaged ones, those of one turn."""
    if prompts:
        return [conversation for source in prompts for conversation in islice(iterate_prompts(source), _MOST)]
    return [conversation.first_turns(1) for name in PACKAGED for conversation in iterate_prompts(name)]


def check_memory(directory: Path) -> None:
    """Refuse weights that would not fit the memory as float32.

    Raises:
        ValueError: naming both sizes.
    """
    weights, free = sum(file.stat().st_size for file in directory.glob("*.safetensors")), free_memory_bytes()
    if 2 * weights > free:  # bfloat16 becomes float32 on a CPU
        raise ValueError(f"weights of {weights / 2**30:.1f} GB, {free / 2**30:.1f} GB of memory free")


def offer_name(offer: Offer) -> str:
    """What `--drafter` and `start_from` call it."""
    return name_of(offer.drafter) if isinstance(offer.drafter, Path) else offer.drafter.repo


def commands(first: FirstRun) -> list[tuple[str, str]]:
    """(reason, command) from the cheapest measurement to an export."""
    plan, split = first.plan, first.split

    def path(below: str) -> str:
        return shlex.quote(str(plan.directory / below))

    model, best = f"--target {shlex.quote(first.config.target)}", path("run/best")
    few = f" --max-samples {TESTED}" if len(split.test) > TESTED else ""
    # Calibrate fits on half of its prompts' rounds and wants a hundred.
    more = f",eval_chat --max-samples {_CALIBRATED}" if len(split.held_out) < _CALIBRATED else ""

    def measure(drafter: str, out: str) -> str:
        tests = f"--tasks {path('test.jsonl')}{few} --max-new-tokens {TOKENS}"
        return f"outrider eval {model} --drafter {drafter} {tests} --out {path(out)}"

    as_it_is = [
        (f"the drafter made for {offer.made_for}, as it is", measure(shlex.quote(offer_name(offer)), "eval-as-it-is"))
        for offer in first.fitting[:1]
    ]
    learns = "train it further" if plan.adapts else "train a drafter"
    doctor = f"outrider doctor --quick {model} --drafter {best} --data {path('run/responses.jsonl')}"
    calibrate = (
        f"outrider calibrate {model} --drafter {best} --tasks {path('held_out.jsonl')}{more} --max-new-tokens {TOKENS}"
    )
    return [
        ("copying from the text so far: nothing to train", measure("ngram", "eval-ngram")),
        *as_it_is,
        (f"if that is not enough, {learns} on this target's answers", f"outrider train {path('recipe.yaml')}"),
        ("whether a mistake costs acceptance", doctor),
        (f"fit its confidences{', on packaged prompts too since few are held out' if more else ''}", calibrate),
        ("what it is worth", measure(best, "eval")),
        ("for an engine", f"outrider export {best} --to vllm --out {path('vllm')}"),
    ]
