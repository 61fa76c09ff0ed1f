"""Estimates time, memory and disk of a training run: some of its work is done, timed and multiplied.

    part        timed                                                        times
    responses   `_ANSWERED` conversations, up to `_TOKENS` tokens a turn     turns without a response
    features    the target's prefill of these conversations                  conversations that are trained on
    steps       `_STEPS` optimizer steps after one that is not counted       steps that are left
    checks      held-out metrics and decoding of a few conversations         checks that are due

Every rank takes part, as in the run. Nothing is written to the run's directory. Responses that do not end within
`_TOKENS` tokens are taken to end at the measured rate h per token, and at `data.max_new_tokens` = M at the latest:

    E[tokens] = (1 - exp(-h M)) / h          h = ended responses / tokens
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from outrider.data.conversations import Conversation
from outrider.data.regenerate import LocalSource, regenerate
from outrider.data.responses import TOKEN_BYTES, Sample, join_turns, open_responses
from outrider.target.model import Target
from outrider.training.batches import micro_batches
from outrider.training.dataset import Dataset, known_samples, recipe_prompts, responses_path
from outrider.training.feature_store import recipe_plan
from outrider.training.features import compute_features
from outrider.training.logging import peak_memory_gib
from outrider.training.machine import feature_cache_bytes
from outrider.training.parallel import ALONE, Ranks, whole_drafter
from outrider.training.recipe import Recipe
from outrider.training.setup import Start, assemble, begin, checkpoint_bytes
from outrider.training.trainer import Trainer, saved_run
from outrider.utils.measure import Clock

_ANSWERED, _TOKENS = 16, 64
_STEPS = 3
_HELD_OUT = 2  # conversations that checks are timed on


@dataclass(frozen=True)
class Part:
    """One part of a run: its seconds, the bytes it leaves on disk, and the counts behind both."""

    name: str
    source: str
    seconds: float = 0.0
    disk: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """The parts of a run, one after the other.

    Attributes:
        steps: optimizer steps that are left.
        memory: peak bytes of the timed steps, on the GPU or of this process.
        cached: bytes of host memory that features take later.
        ranks: the division of a step over ranks, in words.
    """

    parts: tuple[Part, ...]
    steps: int
    memory: float
    cached: float
    ranks: str

    @property
    def seconds(self) -> float:
        """Seconds of all parts."""
        return sum(part.seconds for part in self.parts)

    @property
    def disk(self) -> float:
        """Bytes of all parts."""
        return sum(part.disk for part in self.parts)

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    @property
    def step_seconds(self) -> float:
        return self.part("steps").seconds / max(1, self.steps)

    def with_steps(self, steps: int) -> Estimate:
        """The estimate of the same run with another number of steps, checked as often."""
        changed = replace(self.part("steps"), seconds=steps * self.step_seconds)
        return replace(self, steps=steps, parts=tuple(changed if p.name == "steps" else p for p in self.parts))


class _Texts(NamedTuple):
    """Some samples of a run, how many it trains on in all, and the making of those that are missing."""

    samples: list[Sample]
    trained: float
    responses: Part


def estimate(
    recipe: Recipe, target: Target, ranks: Ranks = ALONE, say: Callable[[str], None] = lambda line: None
) -> Estimate:
    """What `outrider train` takes here with the loaded target, from where the recipe's run is now; a collective.

    Args:
        say: called with a line before each measurement.
    """
    began, optimizer = saved_run(recipe), recipe.optimizer
    first = int(began.get("step", 0))
    start = begin(recipe, target)
    texts: _Texts = ranks.from_main(lambda: _texts(recipe, target, began=bool(began), say=say))
    say(f"timing features and {_STEPS} training steps")
    timed = _timed_steps(recipe, target, start, texts=texts, ranks=ranks)
    trainer, drafter = timed.trainer, timed.trainer.run.drafter
    chosen = trainer.schedule.step(0)
    last = began["settings"]["optimizer"]["steps"] if began else optimizer.steps
    if optimizer.epochs is not None and not began:
        last = optimizer.epochs * max(1, int(texts.trained / len(chosen)))
    left = max(0, last - first)
    held_out = min(recipe.data.held_out, max(1.0, texts.trained))
    budget = feature_cache_bytes(recipe.feature_cache_gb)
    missed = max(0.0, 1 - budget / (texts.trained * timed.feature_bytes))
    read = _features(recipe, texts.trained, left * len(chosen), missed=missed)
    parameters = sum(p.numel() for p in drafter.parameters())
    steps = f"{left} of {timed.step_seconds:.2f} s; {parameters / 1e6:.1f}M parameters"
    limits = optimizer.max_anchors_per_forward, optimizer.max_context_per_forward
    divided = micro_batches(chosen, ranks.world, *limits)
    return Estimate(
        parts=(
            texts.responses,
            replace(
                read,
                seconds=read.seconds * timed.prefill_seconds / ranks.world,
                disk=_stored_bytes(recipe, trainer, texts),
            ),
            Part("steps", steps, seconds=left * timed.step_seconds, disk=checkpoint_bytes(drafter)),
            _checks(recipe, trainer, held_out, first=first, last=last),
        ),
        steps=left,
        memory=peak_memory_gib(target.device) * 2**30,
        cached=min(budget, texts.trained * timed.feature_bytes) + min(budget, held_out * timed.feature_bytes),
        ranks=f"{ranks.world}; a step of {len(chosen)} conversations in {len(divided[0])} forward(s) on each",
    )


class _TimedSteps(NamedTuple):
    """A trainer after some steps; seconds of a step without features, seconds and bytes of features of a sample."""

    trainer: Trainer
    step_seconds: float
    prefill_seconds: float
    feature_bytes: float


def _timed_steps(recipe: Recipe, target: Target, start: Start, texts: _Texts, ranks: Ranks) -> _TimedSteps:
    """Prefill the samples and take `_STEPS` steps on them, repeated until they fill a step of the recipe."""
    samples, optimizer = texts.samples, recipe.optimizer
    repeated = min(optimizer.anchors_per_step or optimizer.sequences_per_step, max(1, round(texts.trained)))
    dataset = Dataset(list(islice(cycle(samples), repeated)), samples[:_HELD_OUT], {})
    run = assemble(recipe, target, start, dataset=dataset)
    clock, scale_L = Clock(target.device), run.drafter.aux_scale_L
    with clock:
        features = list(compute_features(target, samples, run.drafter.config.target_layer_ids, aux_scale_L=scale_L))
    recipe = recipe.model_copy(update={"optimizer": optimizer.model_copy(update={"epochs": None})})
    trainer = Trainer(recipe, run, ranks)
    figures = trainer.rehearse(_STEPS, list(islice(cycle(features), repeated)))
    return _TimedSteps(
        trainer,
        step_seconds=figures["step_seconds"],
        prefill_seconds=clock.take() / len(samples),
        feature_bytes=sum(each.nbytes for each in features) / len(features),
    )


def _stored_bytes(recipe: Recipe, trainer: Trainer, texts: _Texts) -> float:
    """Size of the recipe's feature store, 0 without one."""
    if recipe.features.mode == "online":
        return 0.0
    planned = recipe_plan(recipe, replace(trainer.run, samples=texts.samples))
    window = math.inf if recipe.features.max_gb is None else recipe.features.max_gb * 2**30
    return min(texts.trained * planned.bytes / len(texts.samples), window)


def _features(recipe: Recipe, trained: float, visits: int, missed: float) -> Part:
    """The number of conversations that the target reads for `visits` of `trained` conversations, as seconds of 1.

    Args:
        missed: share of the features that memory does not hold.
    """
    if recipe.features.mode == "store":
        return Part("features", f"{trained:.0f} conversations, stored", seconds=trained)
    read = min(trained, visits) + max(0.0, visits - trained) * missed
    kept = f"memory holds {1 - missed:.0%}" if missed else "kept in memory"
    return Part("features", f"{read:.0f} conversations are read; {kept}", seconds=read)


def _checks(recipe: Recipe, trainer: Trainer, held_out: float, first: int, last: int) -> Part:
    """Held-out metrics and decoding, each timed on the trainer's few held-out conversations."""
    metrics = trainer.evaluate()  # features of held-out samples are computed now
    began = time.perf_counter()
    trainer.evaluate()
    evaluation = (time.perf_counter() - began) / len(trainer.run.held_out)
    every, watch = recipe.watch.decode_every, recipe.watch
    ends = range(first + 1, last + 1)
    decodings = sum(step % every == 0 or step == last for step in ends) if every else 0
    due = {recipe.eval_every, every or recipe.eval_every}
    evaluations = sum(step == last or any(step % number == 0 for number in due) for step in ends)
    if recipe.start_from is not None and not first:  # the drafter that training begins with is measured, too
        evaluations, decodings = evaluations + 1, decodings + bool(every)
    drafter, decoding = whole_drafter(trainer.run.drafter), 0.0
    if every:
        began = time.perf_counter()
        trainer.watch.look(0, drafter, metrics)
        prompts = min(watch.decode_prompts, len(trainer.run.held_out))
        decoding = (time.perf_counter() - began) / prompts * min(watch.decode_prompts, held_out)
    return Part(
        "checks",
        f"{evaluations} evaluations of {held_out:.0f} held-out conversations, {decodings} decodings of some",
        seconds=evaluations * held_out * evaluation + decodings * decoding,
    )


def _texts(recipe: Recipe, target: Target, began: bool, say: Callable[[str], None]) -> _Texts:
    """Samples of the responses that are there, else of some that are made now.

    Args:
        began: the run has its samples, and no more responses are made.
    """
    data, path = recipe.data, responses_path(recipe)
    known = known_samples(recipe)
    prompts = recipe_prompts(data) if data.prompts and not began and not target.sharded else []
    there = {(reply.id, reply.turn) for reply, _ in open_responses(path)[1]} if path.is_file() else set()
    wanted = {(conversation.id, turn) for conversation in prompts for turn in range(len(conversation.turns))}
    waiting = len(wanted - there)
    if not waiting:
        if not known:
            raise ValueError(f"{path} has no responses for more than data.held_out={data.held_out} conversations.")
        return _Texts(known[:: math.ceil(len(known) / _ANSWERED)], len(known), Part("responses", "all there"))
    say(f"timing the responses to {min(_ANSWERED, len(prompts))} of {len(prompts)} prompts")
    made = _answer(recipe, target, prompts)
    conversations = len(prompts) * made.share
    seconds = waiting * made.share * made.length * made.token_seconds
    context = sum(sample.length for sample in made.samples) / len(made.samples)
    disk = waiting * made.share * context * TOKEN_BYTES
    source = f"{waiting} of about {made.length:.0f} tokens, {1 / made.token_seconds:.0f} tokens/s"
    if data.base_urls:
        source, seconds = f"{waiting} by servers, which are not timed", 0.0
    elif data.max_minutes is not None and seconds > 60 * data.max_minutes:
        share = 60 * data.max_minutes / seconds
        source += f"; max_minutes ends it at {share:.0%}"
        conversations, seconds, disk = conversations * share, 60 * data.max_minutes, disk * share
    trained = max(1.0, conversations - data.held_out)
    return _Texts(made.samples, trained, Part("responses", source, seconds=seconds, disk=disk))


class _Answered(NamedTuple):
    """Samples of answered prompts, expected tokens of a response, seconds of a token, share of prompts short enough."""

    samples: list[Sample]
    length: float
    token_seconds: float
    share: float


def _answer(recipe: Recipe, target: Target, prompts: Sequence[Conversation]) -> _Answered:
    """Answer some of the prompts, and extend each last response to the length that responses are expected to have."""
    some = prompts[:: math.ceil(len(prompts) / _ANSWERED)]
    most = recipe.data.max_new_tokens
    data = recipe.data.model_copy(update={"max_new_tokens": min(_TOKENS, most), "base_urls": []})
    with TemporaryDirectory() as scratch:
        began = time.perf_counter()
        made = regenerate(LocalSource(target, data), some, Path(scratch) / "responses.jsonl", seed=recipe.seed)
        seconds = time.perf_counter() - began
    samples = join_turns(made.replies)
    if not samples:
        raise ValueError(f"none of {len(some)} prompts has at most data.max_prompt_tokens={data.max_prompt_tokens}.")
    rate = made.summary.finished / made.new_tokens
    length = (1 - math.exp(-rate * most)) / rate if rate else float(most)
    share = made.summary.done / made.summary.total
    extended = [_extended(sample, round(length)) for sample in samples]
    return _Answered(extended, length, token_seconds=seconds / made.new_tokens, share=share)


def _extended(sample: Sample, length: int) -> Sample:
    """The sample, its last response repeated up to `length` tokens: the time of a step depends on lengths alone."""
    *earlier, (start, end) = sample.spans
    tokens = list(islice(cycle(sample.tokens[start:end]), max(length, end - start)))
    return Sample(sample.id, sample.tokens[:start] + tokens, (*earlier, (start, start + len(tokens))))
