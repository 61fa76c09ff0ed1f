"""How an engine is told to draft: its own name for a method, and the flags, for `export` and for `bench --launch`.

             drafts of K tokens
vllm         --speculative-config {"num_speculative_tokens": K}
sglang       --speculative-dspark-block-size K, --speculative-dflash-block-size or --speculative-num-draft-tokens K + 1
llama.cpp    --spec-draft-n-max K

SGLang counts the rows that are verified, the anchor among them; a DSpark block alone counts drafts. DFlash 2 runs under
DFlash's name everywhere. Versions: as in backends/base.py.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from outrider.checkpoints.dialects.base import Dialect, DrafterWeights, ExportedCheckpoint, TargetFacts
from outrider.checkpoints.dialects.deepspec import DeepSpec
from outrider.checkpoints.dialects.eagle3 import FLAGS, Eagle3Dialect
from outrider.checkpoints.dialects.medusa import MedusaDialect
from outrider.checkpoints.dialects.speculators import Speculators
from outrider.checkpoints.dialects.zlab import ZLab, ZLab2
from outrider.engine.batch import Output, Request, StepRecord

_VLLM = {name: name for name in ("dflash", "dspark", "eagle3", "medusa", "ngram")}
_SGLANG = {name: name.upper() for name in ("dflash", "dspark", "eagle3", "ngram")}
_LLAMA_CPP = {name: f"draft-{name}" for name in ("dflash", "dspark", "eagle3")}

# Beside the methods of drafters/registry.py: `lm`, a smaller language model, and `ngram`, which needs no weights.
NAMES: Mapping[str, Mapping[str, str]] = {
    "vllm": {**_VLLM, "dflash2": "dflash", "lm": "draft_model"},
    "sglang": {**_SGLANG, "dflash2": "DFLASH", "lm": "STANDALONE"},
    "llama.cpp": {**_LLAMA_CPP, "dflash2": "draft-dflash", "lm": "", "ngram": "ngram-simple"},
}
_V2_RUNNER = ("dspark", "dflash2")  # in vLLM's model runner V2 alone
_NGRAM_MAX = 4  # tokens that vLLM looks for


@dataclass(frozen=True)
class Drafting:
    """What an engine shall draft with.

    Attributes:
        method: of drafters/registry.py, lm or ngram.
        drafts: tokens per draft.
        drafter: what the engine loads; None: the method needs nothing.
        reduced_vocabulary: whether it drafts from a part of the target's tokens.
        mixed: whether some of its layers have a sliding window and some have none.
    """

    method: str
    drafts: int
    drafter: str | None = None
    reduced_vocabulary: bool = False
    mixed: bool = False


def name_in(engine: str, method: str) -> str:
    """What the engine calls the method.

    Raises:
        ValueError: it has none of that kind.
    """
    names = NAMES[engine]
    if method not in names:
        raise ValueError(f"{engine} has no drafters of kind {method}; it knows {', '.join(names)}.")
    return names[method]


def vllm_flags(drafting: Drafting) -> list[str]:
    """For Medusa with a reduced vocabulary vLLM's loader makes token_map a parameter after the fact, then misses it
    among those that it filled: its check is turned off.

    Raises:
        ValueError: no such drafters there.
    """
    config: dict[str, Any] = {"method": name_in("vllm", drafting.method)}
    config |= {"model": drafting.drafter} if drafting.drafter else {"prompt_lookup_max": _NGRAM_MAX}
    flags = ["--speculative-config", json.dumps(config | {"num_speculative_tokens": drafting.drafts})]
    if drafting.method == "medusa" and drafting.reduced_vocabulary:
        flags += ["--model-loader-extra-config", json.dumps({"enable_weights_track": False})]
    return flags


def vllm_environment(drafting: Drafting) -> dict[str, str]:
    """Variables that vLLM needs for a drafter."""
    return {"VLLM_USE_V2_MODEL_RUNNER": "1"} if drafting.mixed or drafting.method in _V2_RUNNER else {}


def sglang_flags(drafting: Drafting) -> list[str]:
    """Trees have a width of 1 here: chains.

    Raises:
        ValueError: no such drafters there.
    """
    name, rows = name_in("sglang", drafting.method), drafting.drafts + 1
    flags = ["--speculative-draft-model-path", drafting.drafter] if drafting.drafter else []
    flags += ["--speculative-algorithm", name]
    if name == "DSPARK":
        return [*flags, "--speculative-dspark-block-size", str(drafting.drafts)]
    if name == "DFLASH":
        return [*flags, "--speculative-dflash-block-size", str(rows)]
    if name in ("EAGLE3", "STANDALONE"):
        flags += ["--speculative-num-steps", str(drafting.drafts), "--speculative-eagle-topk", "1"]
    return [*flags, "--speculative-num-draft-tokens", str(rows)]


def llama_cpp_flags(drafting: Drafting) -> list[str]:
    """A language model is what it drafts with anyway, so that kind has no name.

    Raises:
        ValueError: no such drafters there.
    """
    name = name_in("llama.cpp", drafting.method)
    flags = ["-md", drafting.drafter] if drafting.drafter else []
    return [*flags, *(["--spec-type", name] if name else []), "--spec-draft-n-max", str(drafting.drafts)]


# ----------------------------------------------------------------------------
# What engines cannot serve: one check each, a ValueError that names the field, and sentences on what they do without.
#
# Versions: as in backends/base.py.
# ----------------------------------------------------------------------------


def _vanilla(engine: str, parts: DrafterWeights) -> None:
    """Engines have the first of the three sequential heads.

    Raises:
        ValueError: the drafter has another one, or none.
    """
    if parts.method.name != "dspark":
        return
    config = parts.config
    if config.markov_rank == 0:
        raise ValueError(f"--to {engine}: markov_rank 0 has no place there; its DSpark needs a sequential head.")
    if config.markov_head_type != "vanilla":
        raise ValueError(
            f"--to {engine}: markov_head_type {config.markov_head_type!r} is not served there, only 'vanilla': train "
            "with that head, or serve with Outrider."
        )


def _whole_vocabulary(engine: str, parts: DrafterWeights, *methods: str) -> None:
    """These methods draft from the target's vocabulary there.

    Raises:
        ValueError: the drafter has one of its own.
    """
    config = parts.config
    if parts.method.name in methods and config.draft_vocab_size != config.vocab_size:
        raise ValueError(
            f"--to {engine}: draft_vocab_size {config.draft_vocab_size} and its tensor d2t have no place there; its "
            f"{parts.method.name} drafts from the target's whole vocabulary, {config.vocab_size}: train with that, or "
            "serve with Outrider."
        )


def _from_anchor(engine: str, parts: DrafterWeights) -> None:
    """DSpark's own block layout.

    Raises:
        ValueError: the drafter has DFlash's.
    """
    if parts.method.name == "dspark" and not parts.config.sample_from_anchor:
        raise ValueError(
            f"--to {engine}: sample_from_anchor false is not served there; its DSpark blocks draft from the anchor."
        )


def _sliding_is_causal(engine: str, parts: DrafterWeights) -> None:
    """Sliding layers are causal inside a block there, full ones are not, whatever the config says.

    Raises:
        ValueError: the drafter's are otherwise.
    """
    attention_patterns = getattr(parts.config, "sights", ())
    if any(pattern.causal != (pattern.window is not None) for pattern in attention_patterns):
        raise ValueError(
            f"--to {engine}: is_causal {parts.config.is_causal} is not heeded there; block rows see those after them "
            "in layers without a window, and only there: train like that, or serve with Outrider."
        )


def check_vllm(parts: DrafterWeights) -> list[str]:
    _vanilla("vllm", parts)
    if parts.method.name == "dflash" and parts.config.sample_from_anchor:
        raise ValueError("--to vllm: sample_from_anchor true is not served there; its DFlash drafts from masks alone.")
    if parts.method.name == "dflash" and not parts.config.plain_logits:
        raise ValueError(
            "--to vllm: output_multiplier and final_logit_softcapping are not heeded there; its DFlash drafts with the "
            "head's own logits: serve it with Outrider, llama.cpp or z-lab's package."
        )
    if getattr(parts.config, "layer_types", ()):
        return ["vLLM mixes sliding and full layers in its model runner V2 alone (VLLM_USE_V2_MODEL_RUNNER=1)."]
    if parts.method.name == "medusa":
        return ["vLLM drafts one greedy chain from Medusa heads, no tree."]
    return []


def check_vllm_dialect(parts: DrafterWeights, dialect: Dialect) -> None:
    """vLLM takes what speculators says of DFlash's sliding layers for all of them.

    Raises:
        ValueError: that would make the full layers causal.
    """
    if dialect.name == "speculators" and parts.method.name != "dspark" and _sliding_alone(parts):
        raise ValueError(
            "vllm: is_causal null (sliding layers alone) would become true for all layers in speculators' dialect; "
            "z-lab's is the one that vLLM reads right (outrider export DIR --to zlab --out OUT)."
        )


def _sliding_alone(parts: DrafterWeights) -> bool:
    return getattr(parts.config, "is_causal", False) is None


def check_sglang(parts: DrafterWeights) -> list[str]:
    _from_anchor("sglang", parts)
    _sliding_is_causal("sglang", parts)
    if not getattr(parts.config, "plain_logits", True):
        raise ValueError("--to sglang: whether output_multiplier and final_logit_softcapping are heeded is not known.")
    _whole_vocabulary("sglang", parts, "dflash", "dflash2")
    if parts.method.name != "eagle3":
        return []
    config = parts.config
    for name in (*FLAGS, "qk_norm"):
        if getattr(config, name):
            raise ValueError(f"--to sglang: {name} true has no place in its EAGLE-3 model.")
    if len(config.target_layer_ids) != 3:
        raise ValueError(
            f"--to sglang: target_layer_ids {list(config.target_layer_ids)} must be three; its EAGLE-3 fuses three."
        )
    return []


def check_llama_cpp(parts: DrafterWeights) -> list[str]:
    """Its loaders take a lone embedding for the head too, and the heads of whole vocabularies are not converted."""
    _vanilla("llama.cpp", parts)
    config = parts.config
    if parts.embedding_VH is not None or (parts.head is not None and parts.draft_ids_Vd is None):
        raise ValueError(
            "--to llama.cpp: lm_head.weight and embed_tokens.weight of the drafter's own have no place there, but for "
            "the head of a reduced vocabulary: serve it with Outrider."
        )
    if max(config.target_layer_ids) >= config.num_target_layers - 1:
        raise ValueError(
            f"--to llama.cpp: target_layer_ids {list(config.target_layer_ids)} reach the last layer, whose output its "
            "graphs do not give: aux layer earlier layers."
        )
    if getattr(config, "enable_confidence_head", False) and not config.confidence_head_with_markov:
        raise ValueError("--to llama.cpp: confidence_head_with_markov false has no place in its confidence head.")
    if _sliding_alone(parts):
        raise ValueError(
            "--to llama.cpp: is_causal null (sliding layers alone) has no place there; it has one answer for all "
            "layers: train with true or false, or serve with Outrider."
        )
    _whole_vocabulary("llama.cpp", parts, "dflash", "dflash2")
    if parts.method.name == "dflash2":
        pairs = config.selector_top_k * (config.selector_top_k + 1)
        if pairs > config.hidden_size:
            raise ValueError(
                f"--to llama.cpp: selector_top_k {config.selector_top_k} does not fit; its selector keeps {pairs} "
                f"numbers a position in a row of hidden_size {config.hidden_size}."
            )
    return []


def check_zlab(parts: DrafterWeights) -> list[str]:
    _whole_vocabulary("zlab", parts, "dflash", "dflash2")
    return []


def check_deepspec(parts: DrafterWeights) -> list[str]:
    if parts.config.is_causal is not False:
        raise ValueError(
            "--to deepspec: is_causal must be false; rows of its blocks see each other in both directions."
        )
    if parts.draft_ids_Vd is not None:
        raise ValueError("--to deepspec: draft_vocab_size must be the target's; its classes have no d2t.")
    return []


# ----------------------------------------------------------------------------
# Which dialect an engine reads each method in, what it cannot serve, and the command that serves it.
#
#     --to          dflash        dflash2       dspark        eagle3        medusa     mtp
#     vllm          speculators   speculators   speculators   speculators   Medusa     -
#     sglang        z-lab *       z-lab *       DeepSpec *    EAGLE-3       -          -       * block in dflash_config
#     llama.cpp     z-lab         z-lab         DeepSpec      -             -          -       by its converter to GGUF
#     zlab          z-lab         z-lab
#     deepspec      DeepSpec      -             DeepSpec
#     speculators   speculators   speculators   speculators   speculators   -          speculators
#
# vLLM also loads DFlash, DSpark and EAGLE-3 as their makers publish them (`Engine.also`). Every engine runs DFlash 2
# under DFlash's name: the checkpoint's architecture tells. None of them has it with a reduced draft vocabulary.
# Embeddings that the target multiplies (Gemma's) reach a drafter only where `Engine.scaled` says so.
#
# Versions looked at: vLLM 0.32, SGLang 0.5.23 (DFlash 2 is in it since 0.5.19), llama.cpp of build 11434, dflash 0.1.0,
# speculators 0.9.0.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """One `--to`.

    Attributes:
        dialects: of each method it serves.
        serve: (parts, drafter directory, target) -> the commands, one a line.
        check: raises ValueError where the engine would not serve this drafter; returns what it does without, a
            sentence each.
        check_dialect: raises ValueError where the engine reads such a drafter of that dialect otherwise than its maker.
        finish: what the engine reads otherwise than the dialect's maker.
        calibration: what becomes of a DSpark drafter's calibrated confidences, the end of a sentence.
        scaled: methods that are given a target's embeddings with the factor that the target multiplies them by.
        also: further dialects of its methods, which it loads as their makers wrote them.
    """

    name: str
    dialects: Mapping[str, Dialect]
    serve: Callable[[DrafterWeights, str, str], list[str]]
    check: Callable[[DrafterWeights], list[str]] = lambda parts: []
    check_dialect: Callable[[DrafterWeights, Dialect], None] = lambda parts, dialect: None
    finish: Callable[[ExportedCheckpoint], ExportedCheckpoint] = lambda written: written
    calibration: str = "reads them as they are"
    scaled: Collection[str] = ()
    also: Mapping[str, Dialect] = field(default_factory=dict)

    def limits(self, parts: DrafterWeights, factor: float) -> list[str]:
        """What it does without, a sentence each.

        Args:
            factor: by which the target multiplies its embeddings.

        Raises:
            ValueError: it has no such method, or cannot serve this drafter; the message names the field.
        """
        name = parts.method.name
        if name not in self.dialects:
            able = ", ".join(self.dialects)
            raise ValueError(f"--to {self.name}: no dialect there carries a {name} drafter; it reads {able}.")
        if factor != 1.0 and name not in self.scaled and name not in _NO_EMBEDDING:
            raise ValueError(
                f"--to {self.name}: input_embedding_scale {factor:g} has no place there: the target multiplies "
                f"embeddings by it, the drafter was trained with that, and its {name} would not be given it."
            )
        return self.check(parts)

    def check_loads(self, parts: DrafterWeights, dialect: Dialect, factor: float) -> None:
        """A checkpoint can be given to it as it is.

        Args:
            factor: as in `limits`.

        Raises:
            ValueError: it cannot serve this drafter, or must have it in another dialect.
        """
        self.limits(parts, factor)
        name = parts.method.name
        known = [each.name for each in (self.dialects[name], self.also.get(name)) if each is not None]
        if dialect.name not in known:
            raise ValueError(
                f"{self.name} does not load {name} drafters in the dialect {dialect.name}, only in "
                f"{' or '.join(known)}: export it first (outrider export DIR --to {self.name} --out OUT)."
            )
        self.check_dialect(parts, dialect)

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        """The checkpoint this engine loads.

        Raises:
            ValueError: it has no such method, or cannot serve this drafter; the message names the field.
        """
        left_out = self.limits(parts, 1.0 if target is None else target.embedding_scale)
        dialect = self.dialects[parts.method.name]
        self.check_dialect(parts, dialect)
        written = self.finish(dialect.write(parts, target))
        return replace(written, fallbacks=[*written.fallbacks, *left_out])


_NO_EMBEDDING = ("medusa",)


def drafting_of(parts: DrafterWeights, drafter: str) -> Drafting:
    """What an engine is told of a trained drafter that it finds at `drafter`."""
    mixed = bool(getattr(parts.config, "layer_types", ()))
    return Drafting(parts.method.name, parts.config.gamma, drafter, parts.draft_ids_Vd is not None, mixed)


def _serve_vllm(parts: DrafterWeights, directory: str, target: str) -> list[str]:
    drafting = drafting_of(parts, directory)
    variables = [f"{name}={value} " for name, value in vllm_environment(drafting).items()]
    return ["".join(variables) + shlex.join(["vllm", "serve", target, *vllm_flags(drafting)])]


_IN_SECTION = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


def _nested(written: ExportedCheckpoint) -> ExportedCheckpoint:
    """SGLang looks into `dflash_config` first, other readers at the top: every field of the block in both."""
    config = written.config
    if "block_size" not in config:
        return written
    section = {**config.get("dflash_config", {}), **{name: config[name] for name in _IN_SECTION if name in config}}
    return replace(written, config={**config, "dflash_config": section})


def _without_the_targets(written: ExportedCheckpoint) -> ExportedCheckpoint:
    """llama.cpp takes the target's embedding and head where a file has neither, and a lone embedding for both."""
    kept = {"lm_head.weight"} if "d2t" in written.tensors else set()
    dropped = {"lm_head.weight", "embed_tokens.weight"} - kept
    return replace(written, tensors={name: t for name, t in written.tensors.items() if name not in dropped})


def _serve_sglang(parts: DrafterWeights, directory: str, target: str) -> list[str]:
    words = ["python", "-m", "sglang.launch_server", "--model-path", target]
    return [shlex.join([*words, *sglang_flags(drafting_of(parts, directory))])]


def _serve_llama_cpp(parts: DrafterWeights, directory: str, target: str) -> list[str]:
    """Its converter takes the tokenizer from the target's directory, so `target` must be one, not a hub id."""
    return [
        "# TARGET: the target's Hugging Face directory; a hub id is downloaded with: hf download "
        + shlex.quote(target),
        "python convert_hf_to_gguf.py TARGET --outtype f16 --outfile target.gguf",
        f"python convert_hf_to_gguf.py {shlex.quote(directory)} --target-model-dir TARGET --outtype f16 "
        "--outfile drafter.gguf",
        shlex.join(["llama-server", "-m", "target.gguf", *llama_cpp_flags(drafting_of(parts, "drafter.gguf"))]),
    ]


def _serve_speculators(parts: DrafterWeights, directory: str, target: str) -> list[str]:
    if parts.method.name == "mtp":
        return [
            "# for exchange: vLLM 0.32 reads no MTP in this dialect; Outrider does",
            f"outrider generate PROMPT --target {shlex.quote(target)} --drafter {shlex.quote(directory)}",
        ]
    return _serve_vllm(parts, directory, target)


def _serve_zlab(parts: DrafterWeights, directory: str, target: str) -> list[str]:
    """z-lab's own package; its command line takes the first CUDA device."""
    return [f"dflash generate transformers --model {shlex.quote(target)} --draft {shlex.quote(directory)} PROMPT"]


def _serve_deepspec(parts: DrafterWeights, directory: str, target: str) -> list[str]:
    return [
        "# in a checkout of DeepSpec, which decodes its benchmarks",
        f"python eval.py --target_name_or_path {shlex.quote(target)} --draft_name_or_path {shlex.quote(directory)}",
    ]


_SPECULATORS, _DEEPSPEC = Speculators(), DeepSpec()
_ZLAB: dict[str, Dialect] = {"dflash": ZLab(), "dflash2": ZLab2()}

ENGINES: tuple[Engine, ...] = (
    Engine(
        "vllm",
        {**dict.fromkeys(("dflash", "dflash2", "dspark", "eagle3"), _SPECULATORS), "medusa": MedusaDialect()},
        _serve_vllm,
        check_vllm,
        check_vllm_dialect,
        also={**_ZLAB, "dspark": _DEEPSPEC, "eagle3": Eagle3Dialect()},
    ),
    Engine(
        "sglang",
        {**_ZLAB, "dspark": _DEEPSPEC, "eagle3": Eagle3Dialect()},
        _serve_sglang,
        check_sglang,
        finish=_nested,
        calibration="reads the file that outrider calibrate --export-sglang DIR writes "
        "(--speculative-dspark-confidence-sts-path)",
        scaled=("dflash", "dflash2", "dspark"),
    ),
    Engine(
        "llama.cpp",
        {**_ZLAB, "dspark": _DEEPSPEC},
        _serve_llama_cpp,
        check_llama_cpp,
        finish=_without_the_targets,
        calibration="reads no confidences unless it is told to (--spec-draft-p-min), and then as they are",
        scaled=("dflash", "dflash2", "dspark"),
    ),
    Engine("zlab", _ZLAB, _serve_zlab, check_zlab, scaled=tuple(_ZLAB)),
    Engine("deepspec", {"dspark": _DEEPSPEC, "dflash": _DEEPSPEC}, _serve_deepspec, check_deepspec),
    Engine("speculators", dict.fromkeys(Speculators.methods, _SPECULATORS), _serve_speculators),
)


def engine_of(name: str) -> Engine:
    """The engine of that name, as in `--to`.

    Raises:
        ValueError: there is none.
    """
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise ValueError(f"--to {name} is none of {', '.join(engine.name for engine in ENGINES)}.")


class Backend(Protocol):
    """What takes the load: an `Engine`, a simulated one, or a client of a server.

    `step` returns what came since the last call; if nothing did, it waits, but not long where requests may come
    meanwhile. `last` is None where the inside is not to be seen; then only what users see is measured, and what a
    `ReportsAcceptance` backend says of itself.
    """

    @property
    def idle(self) -> bool: ...

    @property
    def last(self) -> StepRecord | None: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, id: str) -> bool: ...

    def step(self) -> list[Output]: ...


@dataclass(frozen=True)
class Acceptance:
    """Of one window: tokens per round, bonus included, and accepted drafts per verified one; None: not told."""

    accepted_length: float | None
    acceptance: float | None = None
    rounds: float | None = None


@dataclass(frozen=True)
class RequestStats:
    """Of one finished request: its response where the outputs were parts of a text, and its accepted length."""

    tokens: list[int] | None
    accepted_length: float | None


@runtime_checkable
class ReportsAcceptance(Protocol):
    """A backend without step records that says what it knows of its rounds."""

    def mark(self) -> None:
        """A window opens."""
        ...

    def acceptance(self) -> Acceptance:
        """Of all requests since the mark."""
        ...

    def told(self, id: str) -> RequestStats:
        """Once, of a request that has finished."""
        ...


# ----------------------------------------------------------------------------
# What an engine counts, from its /metrics page (Prometheus text format).
#
# vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 17.0        name, labels, value
#
# accepted length   1 + accepted / rounds         acceptance   accepted / drafted         of two readings' difference
# ----------------------------------------------------------------------------


_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)")


@dataclass(frozen=True)
class MetricNames:
    """Under which names an engine counts rounds, drafted and accepted tokens, or shows its accepted length itself.

    `length` is a gauge over a time of the engine's choosing: of a window it tells less than counters do.
    """

    rounds: str | None = None
    drafted: str | None = None
    accepted: str | None = None
    length: str | None = None


def read_metrics(text: str) -> dict[str, list[float]]:
    """Values by name, one for every set of labels; lines that are none are passed over."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            with suppress(ValueError):
                value = float(match[2])
                found.setdefault(match[1], []).append(value)
    return found


def acceptance_between(
    names: MetricNames, before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]
) -> Acceptance:
    """What happened between two readings; None where the engine does not tell, or nothing was drafted."""

    def grown(name: str | None) -> float | None:
        return None if name is None or name not in after else sum(after[name]) - sum(before.get(name, ()))

    rounds, drafted, accepted = grown(names.rounds), grown(names.drafted), grown(names.accepted)
    shown = [] if names.length is None else [value for value in after.get(names.length, ()) if value > 0]
    length = sum(shown) / len(shown) if shown else None
    if accepted is not None and rounds:
        length = 1 + accepted / rounds
    return Acceptance(length, accepted / drafted if accepted is not None and drafted else None, rounds)


# ----------------------------------------------------------------------------
# Engines that serve drafters over HTTP: how each is started, how it is asked, and under which names it counts.
#
#              started with                      counts drafts on /metrics
# vllm         --no-enable-prefix-caching        vllm:spec_decode_num_{drafts,draft_tokens,...}_total
# sglang       --disable-radix-cache             sglang:spec_accept_length (a gauge)
# llama.cpp    --no-cache-prompt                 llamacpp:spec_decode_num_{drafts,...}_total
#
# Counted prompts are asked for several times, and a cached one has no prefill: caches are off, as in engines that have
# none. All three take penalties from the model's own files where a request names none; decoding here has no penalties.
# Speculative flags are those of backends/base.py. Sources: vllm 0.32.0, sglang 0.5.23 and llama.cpp b11434.
# ----------------------------------------------------------------------------


_NO_PENALTY = {"presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True)
class Launch:
    """One engine to be started.

    Args:
        target: a directory or id that the engine can load; for llama.cpp a .gguf file.
        drafter: the same, in the engine's dialect; None: what `algorithm` needs none for (ngram).
        algorithm: a name of backends/base.py.
        drafts: tokens per draft; 0 starts the engine without speculation.
        reduced_vocabulary, mixed: as in `Drafting`.
        python: of the environment the engine is installed in.
        executable: instead of it, the engine's own command.
        users: requests at once; `context`: tokens of the longest of them.
        extra: further flags.
    """

    target: str
    drafter: str | None
    algorithm: str
    drafts: int
    port: int
    dtype: str
    users: int
    context: int
    python: str = sys.executable
    executable: str | None = None
    extra: tuple[str, ...] = ()
    reduced_vocabulary: bool = False
    mixed: bool = False

    @property
    def positions(self) -> int:
        """Of one request. Where rows and next draft of the longest have no room, vLLM drafts for none in the batch."""
        return self.context + 2 * (self.drafts + 1)

    @property
    def drafting(self) -> Drafting:
        return Drafting(self.algorithm, self.drafts, self.drafter, self.reduced_vocabulary, self.mixed)


@dataclass(frozen=True)
class Server:
    """A kind of engine. `extra` are fields of every request, `command` and `environment` start it."""

    name: str
    metrics: MetricNames
    command: Callable[[Launch], list[str]]
    extra: dict[str, Any] = field(default_factory=dict)
    environment: Callable[[Launch], dict[str, str]] = lambda launch: {}
    health: str = "/health"


def vllm_command(launch: Launch) -> list[str]:
    """The module is the same server as `vllm serve`, which some wheels cannot start by name."""
    command = [launch.executable, "serve"] if launch.executable else [launch.python, "-m"]
    command += [] if launch.executable else ["vllm.entrypoints.openai.api_server"]
    command += [launch.target] if launch.executable else ["--model", launch.target]
    command += ["--host", "127.0.0.1", "--port", str(launch.port), "--dtype", launch.dtype]
    command += ["--max-model-len", str(launch.positions), "--max-num-seqs", str(launch.users)]
    command += ["--no-enable-prefix-caching"]
    if launch.drafts:
        command += [*vllm_flags(launch.drafting), "--per-request-spec-decode-metrics", "summary"]
    return [*command, *launch.extra]


def _vllm_environment(launch: Launch) -> dict[str, str]:
    return {"VLLM_NO_USAGE_STATS": "1"} | (vllm_environment(launch.drafting) if launch.drafts else {})


def sglang_command(launch: Launch) -> list[str]:
    """A part is sent for every step."""
    command = [launch.executable] if launch.executable else [launch.python, "-m", "sglang.launch_server"]
    command += ["--model-path", launch.target, "--host", "127.0.0.1", "--port", str(launch.port)]
    command += ["--dtype", launch.dtype, "--context-length", str(launch.positions), "--enable-metrics"]
    command += ["--max-running-requests", str(launch.users), "--stream-interval", "1", "--disable-radix-cache"]
    if launch.drafts:
        command += sglang_flags(launch.drafting)
    return [*command, *launch.extra]


def llama_cpp_command(launch: Launch) -> list[str]:
    """Its context is that of all users together."""
    for path in (launch.target, launch.drafter if launch.drafts else None):
        if path is not None and not path.endswith(".gguf"):
            raise ValueError(
                f"llama.cpp reads GGUF files, not {path}: convert target and drafter (outrider export DIR --to "
                "llama.cpp --out OUT says how) and name them: --engine-target T.gguf --engine-drafter D.gguf."
            )
    command = [launch.executable or "llama-server", "-m", launch.target, "--host", "127.0.0.1"]
    command += ["--port", str(launch.port), "--metrics", "-np", str(launch.users)]
    command += ["-c", str(launch.users * launch.positions), "--no-cache-prompt"]
    if launch.drafts:
        command += llama_cpp_flags(launch.drafting)
    return [*command, *launch.extra]


def _cannot_launch(launch: Launch) -> list[str]:
    raise ValueError("--launch: how to start an engine is known for vllm, sglang and llama.cpp; start it yourself.")


def _counters(prefix: str) -> MetricNames:
    name = prefix + ":spec_decode_num_{}_total"
    return MetricNames(name.format("drafts"), name.format("draft_tokens"), name.format("accepted_tokens"))


SERVERS = (
    Server("openai", MetricNames(), _cannot_launch),
    Server(
        "vllm",
        _counters("vllm"),
        vllm_command,
        {"return_token_ids": True, "repetition_penalty": 1.0, **_NO_PENALTY},
        _vllm_environment,
    ),
    Server(
        "sglang",
        MetricNames(length="sglang:spec_accept_length"),
        sglang_command,
        {"repetition_penalty": 1.0, **_NO_PENALTY},
    ),
    Server("llama.cpp", _counters("llamacpp"), llama_cpp_command, {"repeat_penalty": 1.0, **_NO_PENALTY}),
)
