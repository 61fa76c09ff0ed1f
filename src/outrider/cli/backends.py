"""`--backend KIND`: which engine is measured, under which variants.

local                          our engine; variants as in benchmark/variants.py
transformers                   none, prompt-lookup; assisted where --assistant names a model
openai, vllm, sglang, ...      none (--baseline-url) and speculative (--base-url): servers that run already;
                               with --launch none and fixed-K: started here, one at a time (bench_servers.py)
mlx                            none, speculative
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import AutoConfig

from outrider.benchmark.backends.mlx import mlx_source
from outrider.benchmark.backends.sources import ASSISTED, PROMPT_LOOKUP, SPECULATIVE, Source, transformers_source
from outrider.benchmark.backends.transformers_models import load_causal_lm
from outrider.benchmark.variants import NO_SPECULATION
from outrider.cli.drafters import DrafterChoice
from outrider.cli.runtime import default_dtype
from outrider.data.chat import Chat
from outrider.target.resolve import dtype_name, resolve_model

Kind = Literal["local", "transformers", "openai", "vllm", "sglang", "llama.cpp", "mlx"]
ONE_AT_A_TIME = ("transformers", "mlx")


@dataclass(frozen=True)
class Chosen:
    """A source and the variants it is measured under; `grouped` where changing the variant is expensive.

    `settings` name what else decides, and the type of the weights (`dtype`) where it is known.
    """

    source: Source
    variants: list[str]
    grouped: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def choose_transformers(
    target: str, chat: Chat, assistant: str | None, drafts: int, names: list[str] | None, device: str
) -> Chosen:
    """transformers' generate.

    Raises:
        ValueError: no such model or variant.
    """
    dtype = default_dtype(device)
    model = load_causal_lm(target, device, dtype)
    helper = None if assistant is None else load_causal_lm(assistant, device, dtype)
    there = [NO_SPECULATION, PROMPT_LOOKUP, *([] if helper is None else [ASSISTED])]
    source = transformers_source(model, sorted(chat.eos_ids), drafts, helper)
    settings = {"assistant": assistant, "prompt_lookup": drafts, "dtype": dtype_name(dtype)}
    return Chosen(source, among(names, there), settings=settings)


def choose_mlx(target: str, choice: DrafterChoice, names: list[str] | None) -> Chosen:
    """Apple's MLX.

    Raises:
        ValueError: it is not installed, or there is no trained drafter.
    """
    if choice.directory is None:
        raise ValueError(f"--backend mlx decodes with a trained drafter, not with {choice.kind}: give its directory.")
    source = mlx_source(target, choice.directory)
    stored = AutoConfig.from_pretrained(resolve_model(target)).get_text_config().dtype  # what mlx-lm computes in
    settings = {"dtype": None if stored is None else dtype_name(stored)}
    return Chosen(source, among(names, [NO_SPECULATION, SPECULATIVE]), settings=settings)


def among(names: list[str] | None, there: list[str]) -> list[str]:
    """The variants asked for, all that there are by default."""
    if names is None:
        return there
    if unknown := [name for name in names if name not in there]:
        raise ValueError(f"no variant {unknown[0]!r} here; there are {', '.join(there)}.")
    return list(dict.fromkeys([*there[:1], *names])) if there[0] == NO_SPECULATION else names
