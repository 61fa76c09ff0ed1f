"""Which dialect an engine reads each method in, what it cannot serve, and the command that serves it.

    --to          dflash        dflash2       dspark        eagle3        medusa     mtp
    vllm          speculators   speculators   speculators   speculators   Medusa     -
    sglang        z-lab *       z-lab *       DeepSpec *    EAGLE-3       -          -       * block in dflash_config
    llama.cpp     z-lab         z-lab         DeepSpec      -             -          -       by its converter to GGUF
    zlab          z-lab         z-lab
    deepspec      DeepSpec      -             DeepSpec
    speculators   speculators   speculators   speculators   speculators   -          speculators

vLLM also loads DFlash, DSpark and EAGLE-3 as their makers publish them (`Engine.also`). Every engine runs DFlash 2
under DFlash's name: the checkpoint's architecture tells. None of them has it with a reduced draft vocabulary.
Embeddings that the target multiplies (Gemma's) reach a drafter only where `Engine.scaled` says so.

Versions looked at: vLLM 0.32, SGLang 0.5.23 (DFlash 2 is in it since 0.5.19), llama.cpp of build 11434, dflash 0.1.0,
speculators 0.9.0.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from outrider.formats import engine_limits as limits
from outrider.formats.dialect import Dialect, Parts, TargetFacts, Written
from outrider.formats.dialects.deepspec import DeepSpec
from outrider.formats.dialects.eagle3 import Eagle3Dialect
from outrider.formats.dialects.medusa import MedusaDialect
from outrider.formats.dialects.speculators import Speculators
from outrider.formats.dialects.zlab import ZLab
from outrider.formats.dialects.zlab2 import ZLab2
from outrider.formats.drafting_flags import Drafting, llama_cpp_flags, sglang_flags, vllm_environment, vllm_flags


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
    serve: Callable[[Parts, str, str], list[str]]
    check: Callable[[Parts], list[str]] = lambda parts: []
    check_dialect: Callable[[Parts, Dialect], None] = lambda parts, dialect: None
    finish: Callable[[Written], Written] = lambda written: written
    calibration: str = "reads them as they are"
    scaled: Collection[str] = ()
    also: Mapping[str, Dialect] = field(default_factory=dict)

    def limits(self, parts: Parts, factor: float) -> list[str]:
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

    def check_loads(self, parts: Parts, dialect: Dialect, factor: float) -> None:
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

    def write(self, parts: Parts, target: TargetFacts | None) -> Written:
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


def drafting_of(parts: Parts, drafter: str) -> Drafting:
    """What an engine is told of a trained drafter that it finds at `drafter`."""
    mixed = bool(getattr(parts.config, "layer_types", ()))
    return Drafting(parts.method.name, parts.config.gamma, drafter, parts.draft_ids_Vd is not None, mixed)


def _serve_vllm(parts: Parts, directory: str, target: str) -> list[str]:
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


def _nested(written: Written) -> Written:
    """SGLang looks into `dflash_config` first, other readers at the top: every field of the block in both."""
    config = written.config
    if "block_size" not in config:
        return written
    section = {**config.get("dflash_config", {}), **{name: config[name] for name in _IN_SECTION if name in config}}
    return replace(written, config={**config, "dflash_config": section})


def _without_the_targets(written: Written) -> Written:
    """llama.cpp takes the target's embedding and head where a file has neither, and a lone embedding for both."""
    kept = {"lm_head.weight"} if "d2t" in written.tensors else set()
    dropped = {"lm_head.weight", "embed_tokens.weight"} - kept
    return replace(written, tensors={name: t for name, t in written.tensors.items() if name not in dropped})


def _serve_sglang(parts: Parts, directory: str, target: str) -> list[str]:
    words = ["python", "-m", "sglang.launch_server", "--model-path", target]
    return [shlex.join([*words, *sglang_flags(drafting_of(parts, directory))])]


def _serve_llama_cpp(parts: Parts, directory: str, target: str) -> list[str]:
    """Its converter takes the tokenizer from the target's directory, so `target` must be one, not a hub id."""
    return [
        "# TARGET: the target's Hugging Face directory; a hub id is downloaded with: hf download "
        + shlex.quote(target),
        "python convert_hf_to_gguf.py TARGET --outtype f16 --outfile target.gguf",
        f"python convert_hf_to_gguf.py {shlex.quote(directory)} --target-model-dir TARGET --outtype f16 "
        "--outfile drafter.gguf",
        shlex.join(["llama-server", "-m", "target.gguf", *llama_cpp_flags(drafting_of(parts, "drafter.gguf"))]),
    ]


def _serve_speculators(parts: Parts, directory: str, target: str) -> list[str]:
    if parts.method.name == "mtp":
        return [
            "# for exchange: vLLM 0.32 reads no MTP in this dialect; Outrider does",
            f"outrider generate PROMPT --target {shlex.quote(target)} --drafter {shlex.quote(directory)}",
        ]
    return _serve_vllm(parts, directory, target)


def _serve_zlab(parts: Parts, directory: str, target: str) -> list[str]:
    """z-lab's own package; its command line takes the first CUDA device."""
    return [f"dflash generate transformers --model {shlex.quote(target)} --draft {shlex.quote(directory)} PROMPT"]


def _serve_deepspec(parts: Parts, directory: str, target: str) -> list[str]:
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
        limits.check_vllm,
        limits.check_vllm_dialect,
        also={**_ZLAB, "dspark": _DEEPSPEC, "eagle3": Eagle3Dialect()},
    ),
    Engine(
        "sglang",
        {**_ZLAB, "dspark": _DEEPSPEC, "eagle3": Eagle3Dialect()},
        _serve_sglang,
        limits.check_sglang,
        finish=_nested,
        calibration="reads the file that outrider calibrate --export-sglang DIR writes "
        "(--speculative-dspark-confidence-sts-path)",
        scaled=("dflash", "dflash2", "dspark"),
    ),
    Engine(
        "llama.cpp",
        {**_ZLAB, "dspark": _DEEPSPEC},
        _serve_llama_cpp,
        limits.check_llama_cpp,
        finish=_without_the_targets,
        calibration="reads no confidences unless it is told to (--spec-draft-p-min), and then as they are",
        scaled=("dflash", "dflash2", "dspark"),
    ),
    Engine("zlab", _ZLAB, _serve_zlab, limits.check_zlab, scaled=tuple(_ZLAB)),
    Engine("deepspec", {"dspark": _DEEPSPEC, "dflash": _DEEPSPEC}, _serve_deepspec, limits.check_deepspec),
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
