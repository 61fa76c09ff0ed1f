"""Every engine beside Outrider's own: one line each (docs/add-an-engine.md). Those that serve no HTTP are here as well:

--to zlab           dflash, dflash2                               z-lab's dflash 0.1.0
--to deepspec       dspark                                        DeepSpec
--to speculators    dflash, dflash2, dspark, eagle3, mtp          the speculators library 0.9.0
"""

from __future__ import annotations

import shlex

from outrider.backends.base import ExternalEngine, require
from outrider.backends.llama_cpp import LlamaCpp
from outrider.backends.openai import OpenAICompatible
from outrider.backends.sglang import SGLang
from outrider.backends.vllm import VLLM
from outrider.checkpoints.dialects.deepspec import DeepSpec
from outrider.checkpoints.dialects.speculators import Speculators
from outrider.checkpoints.dialects.zlab import ZLab, ZLab2
from outrider.checkpoints.registry import Export, methods
from outrider.drafters.base import DrafterWeights


class ZLabPackage(ExternalEngine):
    """z-lab's own package, by its command `dflash`, which takes the first CUDA device."""

    name = "zlab"
    takes = {
        name: Export(dialect, whole_vocabulary=True, scales_embeddings=True, targets_vocabulary=True)
        for name, dialect in (("dflash", ZLab()), ("dflash2", ZLab2()))
    }
    over_http = False

    def serve(self, parts: DrafterWeights, directory: str, target: str) -> list[str]:
        return [f"dflash generate transformers --model {shlex.quote(target)} --draft {shlex.quote(directory)} PROMPT"]


class DeepSpecCode(ExternalEngine):
    """DeepSpec's repository, whose eval.py decodes its benchmarks: every row of a block drafts, the anchor's too."""

    name = "deepspec"
    takes = {"dspark": Export(DeepSpec(), widens=True)}
    over_http = False

    def check(self, parts: DrafterWeights) -> list[str]:
        require(parts, "is_causal", False, reason="rows of its blocks see each other in both directions")
        require(parts, "sample_from_anchor", True, reason="its blocks draft from the anchor")
        return []

    def serve(self, parts: DrafterWeights, directory: str, target: str) -> list[str]:
        return [
            "# in a checkout of DeepSpec, which decodes its benchmarks",
            f"python eval.py --target_name_or_path {shlex.quote(target)} --draft_name_or_path {shlex.quote(directory)}",
        ]


class SpeculatorsLibrary(ExternalEngine):
    """The speculators library, whose checkpoints vLLM serves."""

    name = "speculators"
    takes = {name: Export(Speculators(), whole_vocabulary=name in ("dflash2", "mtp")) for name in Speculators.methods}
    over_http = False

    def serve(self, parts: DrafterWeights, directory: str, target: str) -> list[str]:
        if parts.algorithm == "mtp":
            return [
                "# for exchange: vLLM 0.32 reads no MTP in this dialect; Outrider does",
                f"outrider generate PROMPT --target {shlex.quote(target)} --drafter {shlex.quote(directory)}",
            ]
        return VLLM().serve(parts, directory, target)


_SERVERS: tuple[ExternalEngine, ...] = (VLLM(), SGLang(), LlamaCpp())
ENGINES = (OpenAICompatible(_SERVERS), *_SERVERS, ZLabPackage(), DeepSpecCode(), SpeculatorsLibrary())


def exporters() -> list[ExternalEngine]:
    """The engines and packages that drafters can be written for (`--to`)."""
    return [engine for engine in ENGINES if engine.takes]


def servers() -> list[ExternalEngine]:
    """The engines that serve over HTTP (`--backend`)."""
    return [engine for engine in ENGINES if engine.over_http]


MARKS = "*: with the whole vocabulary only (drafter.draft_vocab_size=null). +: a reduced one is widened on export."


def export_table() -> list[list[str]]:
    """The dialect in which each engine is given each method's drafters, with `MARKS`, headings first; "-": in none."""
    rows = [["drafter", *(engine.name for engine in exporters())]]
    for method in methods():
        cells = []
        for engine in exporters():
            export = engine.exports().get(method.name)
            mark = "" if export is None else "*" * export.whole_vocabulary + "+" * export.widens
            cells.append("-" if export is None else export.dialect.name + mark)
        rows.append([method.name, *cells])
    return rows


def engine_of(name: str) -> ExternalEngine:
    """The engine of that name that drafters can be written for, as in `--to`."""
    return _named(exporters(), "--to", name)


def server_of(name: str) -> ExternalEngine:
    """The engine of that name that serves over HTTP, as in `--backend`."""
    return _named(servers(), "--backend", name)


def _named(engines: list[ExternalEngine], option: str, name: str) -> ExternalEngine:
    by_name = {engine.name: engine for engine in engines}
    if name not in by_name:
        raise ValueError(f"{option} {name} is none of {', '.join(by_name)}.")
    return by_name[name]
