"""How an engine is told to draft: its own name for a method, and the flags, for `export` and for `bench --launch`.

             drafts of K tokens
vllm         --speculative-config {"num_speculative_tokens": K}
sglang       --speculative-dspark-block-size K, --speculative-dflash-block-size or --speculative-num-draft-tokens K + 1
llama.cpp    --spec-draft-n-max K

SGLang counts the rows that are verified, the anchor among them; a DSpark block alone counts drafts. DFlash 2 runs under
DFlash's name everywhere. Versions: as in formats/engines.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_VLLM = {name: name for name in ("dflash", "dspark", "eagle3", "medusa", "ngram")}
_SGLANG = {name: name.upper() for name in ("dflash", "dspark", "eagle3", "ngram")}
_LLAMA_CPP = {name: f"draft-{name}" for name in ("dflash", "dspark", "eagle3")}

# Beside the methods of drafters/catalogue.py: `lm`, a smaller language model, and `ngram`, which needs no weights.
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
        method: of drafters/catalogue.py, lm or ngram.
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
