"""A first run, planned from a model and prompts: recipe and prompt files, and the commands from cheap to dear.

    a drafter that fits, and not thousands of prompts     go on from it, some hundred steps
    otherwise                                             a new DSpark drafter

The prompts are split into three parts. Where prompts are few, packaged ones are answered beside them: a drafter that
has seen a handful of texts learns those.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from outrider.checkpoints.published import Offer, drafters_for
from outrider.data.chat import Chat, render
from outrider.data.conversations import Conversation, content_id, row_of
from outrider.data.sources import iterate_prompts
from outrider.target.hub import base_of, model_config, resolve_model
from outrider.target.model import family_of, load_target
from outrider.training.config import InitConfig
from outrider.training.estimate import Estimate, estimate
from outrider.training.machine import free_memory_bytes
from outrider.training.recipe import load_recipe
from outrider.training.run import computing_dtype
from outrider.utils.files import write_atomically
from outrider.utils.measure import usable_device
from outrider.utils.packaged import name_of

_MOST = 20000  # conversations read of each source
TESTED, TOKENS = 16, 128  # prompts that eval decodes, tokens of each
_CALIBRATED = 8  # held-out prompts, below which packaged ones are calibrated on as well
Say = Callable[[str], None]
PACKAGED = ("train_chat", "train_code", "train_math")
_TEST, _HELD_OUT = 0.2, 0.1  # shares of the prompts; the rest is trained on
_LEAST_TEST, _LEAST_HELD_OUT = 10, 4  # prompts, of which a third and a sixth of all at most
_FEW = 200  # conversations to train on, below which packaged prompts are added
_ENOUGH = 3000  # conversations to train on, from which a new drafter is worth it though another fits
_LEAST_STEPS = 20
_COUNTED = 1000  # conversations whose tokens are counted


class Split(NamedTuple):
    """Conversations of each part, none in two, and how many were left out because they are there already."""

    train: list[Conversation]
    held_out: list[Conversation]
    test: list[Conversation]
    duplicates: int


def split_prompts(conversations: Sequence[Conversation]) -> Split:
    """Split by a hash of the content: adding, removing or moving prompts moves no other one into another part.

    Only parts of few prompts take more than their share: a verdict on three prompts says nothing.

    Raises:
        ValueError: there are fewer than three different conversations.
    """
    unique = {content_id(c.turns, c.tools): c for c in reversed(conversations)}
    if len(unique) < 3:
        raise ValueError(f"{len(unique)} different prompts cannot be split into three parts: give at least 3.")
    ids = Counter(c.id for c in unique.values())
    ranks = {key: int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64 for key in unique}
    keys = sorted(unique, key=ranks.__getitem__)
    found = [unique[key] if ids[unique[key].id] == 1 else replace(unique[key], id=key) for key in keys]
    count = len(found)
    tests = max(sum(rank < _TEST for rank in ranks.values()), min(_LEAST_TEST, count // 3))
    tests = min(tests, count - 2)
    others = max(sum(rank < _TEST + _HELD_OUT for rank in ranks.values()) - tests, min(_LEAST_HELD_OUT, count // 6), 1)
    start = min(tests + others, count - 1)
    return Split(found[start:], found[tests:start], found[:tests], duplicates=len(conversations) - count)


def prompt_tokens(chat: Chat, conversation: Conversation, max_new_tokens: int) -> int:
    """Tokens before the last response of a conversation, if every response is as long as it may be."""
    earlier = len(conversation.turns) - 1
    rendered = render(chat.tokenizer, conversation.turns, [""] * earlier, tools=conversation.tools)
    return len(rendered) + earlier * max_new_tokens


@dataclass(frozen=True)
class Plan:
    """What a recipe is written for.

    Attributes:
        directory: of the recipe, train.jsonl beside it.
        conversations: those in train.jsonl.
        layers: of the target.
        start_from: a drafter on this machine that fits, and whom it was made for.
        gpu: whether training is to run on one.
        most_steps: of training; None: as many as the prompts are worth.
        mixed: whether packaged prompts may be added; not where some of them are held out or tested on.
    """

    chat: Chat
    directory: Path
    conversations: Sequence[Conversation]
    layers: int
    start_from: tuple[str, str] | None = None
    gpu: bool = False
    mixed: bool = True
    most_steps: int | None = None

    @property
    def out(self) -> Path:
        """The directory of the run."""
        return self.directory / "run"

    @property
    def packaged(self) -> int:
        """Conversations of each packaged set that are answered beside the user's."""
        return max(0, -(-(_FEW - len(self.conversations)) // len(PACKAGED))) if self.mixed else 0

    @property
    def adapts(self) -> bool:
        """Whether training goes on from `start_from`."""
        return self.start_from is not None and len(self.conversations) < _ENOUGH

    @property
    def budget(self) -> float:
        """Seconds that training may take: of few prompts nobody wants to wait for long."""
        return 3600.0 * (1 / 3 if len(self.conversations) < _FEW else 12)

    def within_budget(self, steps: int, fixed: float, seconds_per_step: float) -> Plan:
        """The same plan with as many steps as there is time for, where `steps` take longer.

        Args:
            fixed: seconds that pass whatever the number of steps.
        """
        fitting = int((self.budget - fixed) / seconds_per_step)
        return self if steps <= fitting else replace(self, most_steps=max(_LEAST_STEPS, fitting))

    def recipe(self) -> str:
        """The recipe as YAML, with the reason beside what was chosen."""
        own, total = len(self.conversations), len(self.conversations) + self.packaged * len(PACKAGED)
        reply = min(1024 if self.gpu else 256, self.chat.max_context // 2)
        counted = self.conversations[:: max(1, own // _COUNTED)]
        lengths = sorted(prompt_tokens(self.chat, conversation, reply) for conversation in counted)
        longest = min(max(512, -(-lengths[-1] // 64) * 64), self.chat.max_context - reply)
        fitting = sum(length <= longest for length in lengths) / len(lengths)
        per_step = 16 if self.gpu else 4
        passes, least, most = (3, 60, 2000) if self.adapts else (6, 200, 20000 if self.gpu else 6000)
        steps = max(least, min(most, passes * total // per_step))
        steps = min(steps, self.most_steps or steps)
        held_out = max(1, min(32, total // 12))

        sources = ["    - {path: train.jsonl}"]
        sources += [
            f"    - {{path: {name}, limit: {self.packaged}, max_turns: 1}}  # packaged, since {own} prompts are few"
            for name in PACKAGED
            if self.packaged
        ]
        minutes = [] if self.gpu else [f"  max_minutes: {10 if own < _FEW else 120}  # null: answer all prompts"]
        lines = [
            f"# A drafter for {self.chat.name}, by outrider init. What a field means: outrider recipe --explain FIELD",
            f"target: {_scalar(self.chat.name)}",
            f"out: {_scalar(self.out)}",
            "data:",
            "  prompts:",
            *sources,
            f"  max_new_tokens: {reply}  # of a response; longer ones cost time, cut-off ones teach no endings",
            f"  max_prompt_tokens: {longest}  # median {lengths[len(lengths) // 2]}, longest {lengths[-1]}; "
            f"{fitting:.0%} of the conversations fit",
            *minutes,
            f"  held_out: {held_out}  # conversations that choose the best drafter and are not trained on",
            *(self._adapting() if self.adapts else self._fresh()),
            "optimizer:",
            f"  steps: {steps}  # {per_step * steps / total:.1f} passes over {total} conversations",
            f"  sequences_per_step: {per_step}",
            f"  anchors_per_sequence: {256 if self.gpu else 28}",
            *(["  max_anchors_per_forward: 512", "  max_context_per_forward: 16384"] if self.gpu else []),
            f"  learning_rate: {'2.0e-4' if self.adapts else '6.0e-4' if self.gpu else '1.0e-3'}",
            f"watch: {{decode_every: {max(1, steps // 3)}, decode_prompts: {min(8, held_out)}}}",
            f"eval_every: {max(1, steps // 3)}",
            f"save_every: {max(1, steps // 3)}",
        ]
        return "\n".join(lines) + "\n"

    def _adapting(self) -> list[str]:
        assert self.start_from is not None
        directory, made_for = self.start_from
        return [
            f"start_from: {_scalar(directory)}  # made for {made_for}; null, with a drafter section: a new one",
            f"objective: {_OBJECTIVE}",
        ]

    def _fresh(self) -> list[str]:
        vocabulary = 32000 if self.gpu else 12288
        reduced = vocabulary if self.chat.vocab_size > 2 * vocabulary else "null"
        return [
            "drafter:",
            "  algorithm: dspark",
            f"  num_hidden_layers: {5 if self.gpu else 2}",
            "  block_size: 7",
            f"  num_aux_layers: {min(5 if self.gpu else 4, max(1, self.layers - 3))}",
            f"  draft_vocab_size: {reduced}  # the most frequent tokens; null: all, which some engines need",
            f"  markov_rank: {256 if self.gpu else 64}",
            *([] if self.gpu else [f"objective: {_OBJECTIVE}"]),
        ]


_OBJECTIVE = "{ce: 1.0}  # as the packaged drafter was trained; the paper's, and the default, is 0.1"


def _scalar(value: object) -> str:
    """A text as YAML writes it on one line, quoted where it must be."""
    return yaml.safe_dump(str(value), width=10**6, allow_unicode=True).removesuffix("\n").removesuffix("\n...")


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
        files = resolve_model(self.plan.chat.name, download=False).glob("*.safetensors")
        weights, free = sum(file.stat().st_size for file in files), free_memory_bytes()
        if 2 * weights > free:  # bfloat16 becomes float32 on a CPU
            raise ValueError(f"weights of {weights / 2**30:.1f} GB, {free / 2**30:.1f} GB of memory free")
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
