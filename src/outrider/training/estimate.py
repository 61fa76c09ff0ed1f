"""What a run takes on this machine, before it is run: seconds, bytes of memory, bytes of disk.

    Rates       prefill, decoding steps of 1, 8 and 64 sequences, how soon replies end     of the real target, measured
    StepCost    a few training steps of the recipe on random features of the data's lengths  here once and remembered
    Estimate    these times counts: prompts, tokens, steps, checks

Where many recipes are asked about (`brief`), a step is measured on at most two conversations instead of the recipe's n:

    seconds = n / 2 * (seconds of its step - seconds of its optimizer) + seconds of its optimizer

Measurements are kept in the user's cache directory, by target, device, threads, precision and version; where they are
there no weights are loaded. Nothing of a run is written.

Replies end with chance h per token, and after M tokens at the latest:

    E[tokens] = (1 - exp(-h M)) / h          h = ended / tokens, of greedy replies to the package's own prompts
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from outrider.data.chat import Chat, render
from outrider.data.conversations import Conversation
from outrider.data.regenerate import DataSection, decode_batch
from outrider.data.responses import TOKEN_BYTES, Sample, open_responses
from outrider.data.sources import load_prompts
from outrider.drafters.base import DraftModule
from outrider.sampling import SamplingParams
from outrider.target.hub import canonical_id, model_config, resolve_model
from outrider.target.model import Target, load_target
from outrider.training.dataset import recipe_prompts, responses_path
from outrider.training.features import Features, compute_features, logit_summary
from outrider.training.logging import peak_memory_gib
from outrider.training.loss import BlockObjective
from outrider.training.recipe import Recipe
from outrider.training.setup import Run, load_start, new_drafter, training_precision, with_draft_vocabulary
from outrider.training.trainer import Trainer, saved_run
from outrider.utils import machine
from outrider.utils.distributed import Ranks
from outrider.utils.measure import Clock, dtype_name, pinned_bytes, to_host, usable_device, versions
from outrider.utils.measure import machine as describe_machine

RATES = "rates.json"  # in the user's cache directory
_BATCHES = (1, 8, 64)  # sequences of the decoding steps that are timed
_SLOW_STEP = 1.0  # seconds: larger batches of such a target are not timed
_REPLY_TOKENS, _REPLY_SECONDS = 160, 8.0  # of the replies that show how soon they end, whichever is reached first
_SAMPLE_PROMPTS = {"eval_chat": 3, "eval_math": 3, "eval_code": 2}
_PREFILL_TOKENS = 768
_STEPS = 2  # timed of a recipe, after one that is not
_BRIEF_SEQUENCES = 2  # of the one step that is timed where many recipes are asked about
_HELD_OUT = 2  # conversations that the held-out metrics are timed on
_RENDERED = 32  # prompts whose tokens are counted
_KNOWN_REPLIES = 8  # so many and more tell how long replies are
_STATE_BYTES = 12  # of a parameter: float32 weight and two moments

Kind = TypeVar("Kind", "Rates", "StepCost")


@dataclass(frozen=True)
class Part:
    """One part of a run: seconds, most bytes of memory in use meanwhile, bytes left on disk, and what says so."""

    name: str
    source: str
    seconds: float = 0.0
    memory: float = 0.0
    disk: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """The parts of a run, one after the other."""

    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def memory(self) -> float:
        """Bytes, of the part that takes most."""
        return max((part.memory for part in self.parts), default=0.0)

    @property
    def disk(self) -> float:
        """Bytes."""
        return sum(part.disk for part in self.parts)


@dataclass(frozen=True)
class Texts:
    """Sizes of conversations: their turns in all, those still to be answered, mean tokens of a turn and its answer."""

    conversations: float
    turns: float
    waiting: float
    prompt: float
    response: float

    @property
    def tokens(self) -> float:
        """Of a conversation."""
        return self.turns / max(1, self.conversations) * (self.prompt + self.response)

    @property
    def context(self) -> float:
        """Tokens before a response, on average over turns: those of its own turn and of the earlier ones."""
        turns = self.turns / max(1, self.conversations)
        return self.prompt * (turns + 1) / 2 + self.response * (turns - 1) / 2


@dataclass(frozen=True)
class Rates:
    """Of one target. `steps`: (sequences, seconds of a decoding step of so many), ascending; `memory`: most bytes in
    use when it was loaded and decoded."""

    load: float
    prefill: float  # tokens per second, logits of half of them included, as training's features need them
    steps: list[tuple[int, float]]
    ended: float  # replies that ended, per token
    parameters: int
    memory: float

    def step(self, sequences: float) -> float:
        """Seconds of a decoding step, linear between the measured ones and beyond the last."""
        if len(self.steps) == 1:
            return self.steps[0][1] * max(1.0, sequences)
        above = next((i for i, (rows, _) in enumerate(self.steps) if rows >= sequences), len(self.steps) - 1)
        (low, first), (high, second) = self.steps[max(0, above - 1) : max(0, above - 1) + 2]
        return max(first + (second - first) * (sequences - low) / (high - low), self.steps[0][1])

    def reply_tokens(self, most: int) -> float:
        """Expected length of a reply of at most so many tokens."""
        return (1 - math.exp(-self.ended * most)) / self.ended if self.ended else float(most)

    def batch(self, sequences: int, most: int) -> float:
        """Seconds to decode a batch to its end, sequences leaving it as they end."""
        alive = [sequences * math.exp(-self.ended * token) for token in range(most)]
        return sum(self.step(max(1.0, rows)) for rows in alive if rows >= 0.5)


@dataclass(frozen=True)
class StepCost:
    """Of one recipe: seconds of a step without features, seconds of the held-out metrics per conversation."""

    seconds: float
    held_out: float
    parameters: int
    aux_layers: int
    memory: float


@dataclass
class MeasuredTarget:
    """The rates of a target on this machine.

    Args:
        say: told before what takes seconds.
        brief: time one training step, of few conversations (`_BRIEF_SEQUENCES`); its memory is that of so many.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    say: Callable[[str], None] = field(default=lambda line: None)
    brief: bool = False
    _texts: dict[object, Texts] = field(default_factory=dict)

    @cached_property
    def target(self) -> Target:
        """Loaded when something has to be measured, and only then."""
        self.say(f"loading {self.name}: it is measured once")
        return load_target(self.name, self.dtype, self.device)

    @cached_property
    def chat(self) -> Chat:
        return Chat.load(self.name)

    @cached_property
    def config(self) -> Any:
        """Of the language model, in transformers' words."""
        return model_config(resolve_model(self.name, weights=False)).get_text_config()

    @cached_property
    def rates(self) -> Rates:
        return self._recall(Rates, (), lambda: _measure_rates(self))

    def step(self, recipe: Recipe, texts: Texts) -> StepCost:
        """The cost of a step of a recipe on such texts."""
        length = _rounded(texts.tokens)
        response = min(length - 1, _rounded(texts.response * texts.turns / max(1, texts.conversations)))
        optimizer = recipe.optimizer.model_dump(include=_STEP_FIELDS)
        about = [recipe.drafter, recipe.start_from, recipe.objective, optimizer, length, response]
        about += ["brief"] if self.brief else []
        return self._recall(StepCost, about, lambda: measure_step(self, recipe, length - response, response=response))

    def texts(self, about: object, count: Callable[[], Texts]) -> Texts:
        """The sizes that were counted before for the same prompts, settings and answers (`about`), else `count()`."""
        if about not in self._texts:
            self._texts[about] = count()
        return self._texts[about]

    def _recall(self, kind: type[Kind], about: Sequence[object], measure: Callable[[], Kind]) -> Kind:
        config = (resolve_model(self.name, weights=False) / "config.json").read_bytes()
        place = describe_machine()
        key: list[object] = [kind.__name__, canonical_id(self.name), hashlib.sha256(config).hexdigest()[:16], *about]
        key += [self.device.type, place.get("gpu", place["cpu"]), place["threads"], dtype_name(self.dtype)]
        key += versions().values()
        names = " | ".join(map(str, key))
        return kind(**machine.remembered(RATES, names, lambda: asdict(measure()), kind=dict, keep=self._steady))

    def _steady(self) -> bool:
        """Whether what was measured just now may be kept."""
        if busy := machine.is_busy():
            self.say("other programs use this processor: the figures are too slow, and are not kept")
        return not busy


@dataclass
class Measurements:
    """The measurements that the parts of one command share, so that a target is loaded and its prompts counted once.

    Only those of the last target, device and precision are kept: two would take the memory of both.

    Args:
        say, brief: of the `MeasuredTarget`.
    """

    say: Callable[[str], None] = field(default=lambda line: None)
    brief: bool = False
    _last: MeasuredTarget | None = None

    def of(self, name: str, device: torch.device, dtype: torch.dtype) -> MeasuredTarget:
        last = self._last
        if last is None or (last.name, last.device, last.dtype) != (name, device, dtype):
            last = self._last = MeasuredTarget(name, device, dtype, say=self.say, brief=self.brief)
        return last


_STEP_FIELDS = {
    *("sequences_per_step", "anchors_per_step", "anchors_per_sequence", "anchors"),
    *("max_anchors_per_forward", "max_context_per_forward", "checkpoint_activations"),
}


def _rounded(tokens: float) -> int:
    """At least 2, to about one part in eight: lengths that are alike share a measurement."""
    unit = 2 ** max(0, int(tokens).bit_length() - 3)
    return max(2, round(tokens / unit) * unit)


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    clock = Clock(device)
    with clock:
        run()
    return clock.take()


def _random_sample(target: Target, prompt: int, response: int) -> Sample:
    tokens = torch.randint(target.vocab_size, (prompt + response,), generator=torch.Generator().manual_seed(0))
    return Sample("random", tokens.tolist(), ((prompt, prompt + response),))


def _measure_rates(measured: MeasuredTarget) -> Rates:
    began = time.perf_counter()
    target = measured.target
    load = time.perf_counter() - began
    measured.say("measuring prefill and decoding, about fifteen seconds")
    assert target.tokenizer is not None
    longest = target.max_context // 4
    conversations = [c for name, count in _SAMPLE_PROMPTS.items() for c in load_prompts(name, count)]
    prompts = [render(target.tokenizer, c.turns[:1], [])[-longest:] for c in conversations]
    params, steps = SamplingParams(), []
    for rows in _BATCHES:
        short = [prompt[-16:] for prompt in islice(cycle(prompts), rows)]
        batch = decode_batch(target, short, 6, params=[params] * rows)
        next(batch)  # the prefill
        times = [_seconds(target.device, partial(next, batch, None)) for _ in range(4)]
        steps.append((rows, min(times)))  # what other processes take is no rate of this machine
        if steps[-1][1] > _SLOW_STEP:
            break
    ended = tokens = 0
    alive, began = len(prompts), time.perf_counter()
    for found in decode_batch(target, prompts, min(_REPLY_TOKENS, longest), params=[params] * alive):
        tokens += alive
        alive -= len(found)
        ended += sum(reply.finished for reply in found.values())
        if time.perf_counter() - began > _REPLY_SECONDS:
            break
    half = min(_PREFILL_TOKENS, target.max_context) // 2
    samples, layer = [_random_sample(target, half, half)], (target.num_layers // 2 - 1,)
    scale_L = torch.ones(1, device=target.device)
    seconds = [
        _seconds(target.device, lambda: list(compute_features(target, samples, layer, aux_scale_L=scale_L)))
        for _ in range(2)  # the first sets up kernels
    ]
    return Rates(
        load=load,
        prefill=2 * half / seconds[1],
        steps=steps,
        ended=ended / tokens,
        parameters=sum(p.numel() for p in target.model.parameters()),
        memory=peak_memory_gib(target.device) * 2**30,
    )


def measure_step(measured: MeasuredTarget, recipe: Recipe, prompt: int, response: int) -> StepCost:
    target, conversations = measured.target, math.ceil(sequences_per_step(recipe, response))
    taken = min(conversations, _BRIEF_SEQUENCES) if measured.brief else conversations
    timed, held_out = (1, 1) if measured.brief else (_STEPS, _HELD_OUT)
    measured.say(f"measuring {timed + 1} training steps of {recipe.drafter.algorithm}")
    optimizer = recipe.optimizer.model_copy(update={"sequences_per_step": taken, "anchors_per_step": None})
    recipe = recipe.model_copy(update={"optimizer": optimizer, "compile": bool(recipe.compile)})  # takes minutes
    torch.manual_seed(recipe.seed)
    if recipe.start_from is None:
        drafter = new_drafter(recipe, target).to(target.device)
        ids = torch.arange(drafter.config.draft_vocab_size, device=target.device)
    else:
        start = with_draft_vocabulary(load_start(recipe, target), recipe, target)
        drafter, ids = start.drafter, start.draft_ids_Vd
    sample = _random_sample(target, prompt, response)
    run = Run(
        target=target,
        drafter=drafter,
        objective=BlockObjective(target, ids, recipe.objective, precision=training_precision(recipe, target)),
        draft_ids_Vd=ids,
        reduced=len(ids) < target.vocab_size,
        samples=[sample] * taken,
        held_out=[sample] * held_out,
    )
    figures = Trainer(recipe, run, Ranks(device=target.device)).rehearse(
        timed, _random_features(target, drafter, sample)
    )
    update = figures["optimizer_seconds"]
    return StepCost(
        seconds=conversations / taken * (figures["step_seconds"] - update) + update,
        held_out=figures["evaluation_seconds"] / held_out,
        parameters=sum(p.numel() for p in drafter.parameters()),
        aux_layers=len(drafter.config.target_layer_ids),
        memory=figures["peak_memory_gib"] * 2**30,
    )


def _random_features(target: Target, drafter: DraftModule, sample: Sample) -> Features:
    """Features of such a sample without a prefill: what a step costs does not depend on their values."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    aux_SLD = draw(len(sample.tokens) - 1, len(drafter.config.target_layer_ids), target.hidden_size)
    hidden_RD = draw(sample.num_supervised, target.hidden_size)
    hidden_RD = hidden_RD.to(torch.float16)
    summary = logit_summary(target, hidden_RD.to(target.device))
    return Features(aux_SLD.to(torch.float16), hidden_RD, *to_host(summary))


def sequences_per_step(recipe: Recipe, response: float) -> float:
    """Conversations of a step."""
    config = recipe.optimizer
    if config.anchors_per_step is None:
        return config.sequences_per_step
    return max(1.0, config.anchors_per_step / min(config.anchors_per_sequence, max(1.0, response)))


def run_steps(recipe: Recipe, conversations: float, response: float) -> int:
    """Steps of the whole run: the recipe's, or those of its epochs over so many conversations.

    Args:
        response: supervised tokens of a conversation.
    """
    config = recipe.optimizer
    if config.epochs is None:
        return config.steps
    return config.epochs * max(1, int(conversations / sequences_per_step(recipe, response)))


# ----------------------------------------------------------------------------
# Sizes of the texts at hand.
# ----------------------------------------------------------------------------


class _KnownReply(NamedTuple):
    """A reply that is there: tokens of its prompt and of its response."""

    id: str
    turn: int
    prompt: int
    response: int


def _known_replies(path: Path) -> Iterator[_KnownReply]:
    for reply, _ in open_responses(path)[1]:
        yield _KnownReply(reply.id, reply.turn, prompt=len(reply.prompt), response=len(reply.response))


def measure_texts(
    measured: MeasuredTarget, conversations: Sequence[Conversation], data: DataSection, known: Path | None = None
) -> Texts:
    """Sizes of conversations that are answered as `data` says; of `known` itself where there are none.

    Args:
        known: a file of responses, which are not made again; where there are some, their mean length counts.
    """
    replies = list(_known_replies(known)) if known is not None and known.is_file() else []
    if len(replies) >= _KNOWN_REPLIES:
        response = sum(reply.response for reply in replies) / len(replies)
    else:
        response = measured.rates.reply_tokens(data.max_new_tokens)
    if not conversations:
        prompt = sum(reply.prompt for reply in replies) / max(1, len(replies))
        return Texts(len({reply.id for reply in replies}), len(replies), 0, prompt=prompt, response=response)
    some = conversations[:: math.ceil(len(conversations) / _RENDERED)]
    lengths = [
        len(render(measured.chat.tokenizer, c.turns[:1], [], tools=c.tools, thinking=data.thinking)) for c in some
    ]
    fitting = [length for length in lengths if length <= data.max_prompt_tokens]
    share = len(fitting) / len(lengths)
    turns = share * sum(len(c.turns) for c in conversations)
    wanted = {(c.id, turn) for c in conversations for turn in range(len(c.turns))}
    waiting = max(0.0, turns - len(wanted & {(reply.id, reply.turn) for reply in replies}))
    prompt = sum(fitting) / max(1, len(fitting))
    return Texts(share * len(conversations), turns, waiting, prompt=prompt, response=response)


# ----------------------------------------------------------------------------
# Parts of runs.
# ----------------------------------------------------------------------------


def loading(measured: MeasuredTarget) -> Part:
    """Loading the target."""
    rates = measured.rates
    return Part("load", f"{rates.parameters / 1e6:.0f}M parameters, measured", rates.load, memory=rates.memory)


def responding(measured: MeasuredTarget, texts: Texts, data: DataSection) -> tuple[Part, Texts]:
    """Answering what waits, in batches; and the texts that are there afterwards."""
    rates, waiting = measured.rates, round(texts.waiting)
    disk = waiting * (texts.context + texts.response) * TOKEN_BYTES
    answered = replace(texts, waiting=0.0)
    if data.base_urls or not waiting:
        source = f"{waiting} by servers, whose speed is not known" if waiting else "all there"
        return Part("responses", source, disk=disk), answered
    batches, rest = divmod(waiting, data.batch_size)
    seconds = batches * rates.batch(data.batch_size, data.max_new_tokens) + waiting * texts.context / rates.prefill
    seconds += rates.batch(rest, data.max_new_tokens) if rest else 0
    source = f"{waiting} of about {texts.response:.0f} tokens: {waiting * texts.response / seconds:.0f} tokens/s"
    if data.max_minutes is not None and seconds > 60 * data.max_minutes:
        share, seconds = 60 * data.max_minutes / seconds, 60 * data.max_minutes
        source += f"; max_minutes ends it at {share:.0%}"
        made = (texts.turns - (1 - share) * waiting) / texts.turns
        answered = replace(answered, conversations=made * texts.conversations, turns=made * texts.turns)
        disk *= share
    slots = min(waiting, data.batch_size) * (texts.context + data.max_new_tokens)
    memory = rates.memory + slots * cache_bytes(measured)
    return Part("responses", source, seconds=seconds, memory=memory, disk=disk), answered


def cache_bytes(measured: MeasuredTarget) -> float:
    """Of the keys and values of one token."""
    config = measured.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return float(2 * config.num_hidden_layers * heads * width * measured.dtype.itemsize)


def decoding(measured: MeasuredTarget, name: str, texts: Texts, *, times: int, at_once: int = 1) -> Part:
    """Decoding every turn `times` times, with a drafter no faster than without."""
    rates = measured.rates
    step = rates.step(at_once) / at_once
    each = texts.context / rates.prefill + texts.response * step
    often = f" {times} times" if times > 1 else ""
    source = (
        f"{texts.turns:.0f} turns{often}, about {texts.response:.0f} tokens at {1 / step:.0f}/s, as without a drafter"
    )
    return Part(name, source, seconds=times * texts.turns * each, memory=rates.memory)


def training(measured: MeasuredTarget, recipe: Recipe, texts: Texts, first_step: int = 0) -> list[Part]:
    """Features, steps and checks of a recipe from a step on, and what the run leaves on disk."""
    rates, cost = measured.rates, measured.step(recipe, texts)
    held_out = min(recipe.data.held_out, texts.conversations)
    trained = max(1.0, texts.conversations - held_out)
    last_step = run_steps(recipe, trained, texts.response)
    steps = last_step - first_step

    stored = recipe.features.mode == "store"
    row = measured.config.hidden_size * (1 if stored and recipe.features.dtype != "bf16" else 2)
    layers = len((stored and recipe.features.aux_layers) or ()) or cost.aux_layers
    parts = texts.tokens * layers * row, texts.turns / max(1.0, texts.conversations) * texts.response * row
    size = held = sum(parts)  # of a conversation, on disk and in memory
    if not stored and measured.device.type == "cuda":
        held = float(sum(pinned_bytes(int(part)) for part in parts))
    budget = machine.feature_cache_bytes(recipe.feature_cache_gb)
    visits = steps * sequences_per_step(recipe, texts.response)
    missed = max(0.0, 1 - budget / (trained * held))
    window = None if recipe.features.max_gb is None else recipe.features.max_gb * 2**30
    fetched = trained if stored else min(trained, visits) + max(0.0, visits - trained) * missed
    times = f"{fetched / trained:.1f} times, as memory holds a part" if missed else "once, kept in memory"
    source = f"{trained * texts.tokens:.0f} tokens {'once, stored' if stored else times}; {rates.prefill:.0f} tokens/s"
    disk = min(trained * size, window or math.inf) if stored else 0.0
    features = Part("features", source, fetched * texts.tokens / rates.prefill, memory=rates.memory, disk=disk)

    memory = cost.memory + min(budget, trained * held) + min(budget, held_out * held)
    weights = 4 * cost.parameters
    leaves = 2 * weights + _STATE_BYTES * cost.parameters  # OUT/drafter, OUT/best and OUT/state
    source = f"{steps} of {cost.seconds:.2f} s, measured; {cost.parameters / 1e6:.1f}M parameters"
    stepping = Part("steps", source, steps * cost.seconds, memory=memory, disk=leaves)

    ends = range(first_step + 1, last_step + 1)
    every = recipe.watch.decode_every
    looks = sum(step % every == 0 or step == last_step for step in ends) if every else 0
    due = {recipe.eval_every, every or recipe.eval_every}
    evaluations = sum(step == last_step or any(step % number == 0 for number in due) for step in ends)
    if recipe.start_from is not None and not first_step:
        looks, evaluations = looks + bool(every), evaluations + 1
    reply = texts.prompt / rates.prefill + rates.reply_tokens(recipe.watch.decode_tokens) * rates.step(1)
    seconds = evaluations * held_out * cost.held_out + looks * min(recipe.watch.decode_prompts, held_out) * reply
    source = f"{evaluations} times {held_out:.0f} held-out conversations; {looks} times some are decoded"
    return [features, stepping, Part("checks", source, seconds, memory=memory)]


def estimate(recipe: Recipe, known: Measurements | None = None) -> Estimate:
    """What `outrider train` of a recipe takes here, from where its run is now; no parts where it is finished.

    Args:
        known: measurements of other parts of the same command, to which these are added.

    Raises:
        ValueError: the recipe contradicts its run, its prompts or target cannot be read, or its drafter does not fit.
    """
    began = saved_run(recipe)
    first_step = int(began.get("step", 0))
    if began and first_step >= began["settings"]["optimizer"]["steps"]:
        return Estimate(())
    device = usable_device(recipe.device)
    precision = began.get("settings", {}).get("precision") if recipe.precision == "auto" else recipe.precision
    dtype = machine.training_dtype(device)[0] if precision is None else getattr(torch, precision)
    measured, data = (known or Measurements()).of(recipe.target, device, dtype), recipe.data
    path = responses_path(recipe)
    texts = measured.texts(
        (data.model_dump_json(), path),
        lambda: measure_texts(measured, recipe_prompts(data) if data.prompts else [], data, known=path),
    )
    if began:  # its samples are fixed
        texts = replace(texts, waiting=0.0)
    answers, there = responding(measured, texts, data)
    return Estimate((loading(measured), answers, *training(measured, recipe, there, first_step=first_step)))


def drafter_share(measured: MeasuredTarget, drafter: DraftModule) -> float:
    """Multiplications of a row of a drafter and of both heads, as a share of the target's."""
    heads = measured.config.hidden_size * (measured.config.vocab_size + drafter.config.draft_vocab_size)
    rows = sum(p.numel() * drafter.active_share(name) for name, p in drafter.named_parameters())
    return (rows + heads) / measured.rates.parameters


def drafting(measured: MeasuredTarget, drafter: DraftModule, rows: float, source: str) -> Part:
    """So many rows of a drafter and of both heads, at the target's multiplications per second."""
    rates = measured.rates
    return Part("drafts", source, rows * drafter_share(measured, drafter) / rates.prefill, memory=rates.memory)
