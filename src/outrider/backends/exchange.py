"""Packages that exchange drafters and serve no HTTP: z-lab's dflash 0.1.0, DeepSpec, the speculators library 0.9.0.

--to zlab           dflash, dflash2                               z-lab
--to deepspec       dspark                                        DeepSpec
--to speculators    dflash, dflash2, dspark, eagle3, mtp          speculators
"""

from __future__ import annotations

import shlex

from outrider.backends.base import ExternalEngine, check_targets_vocabulary
from outrider.backends.vllm import VLLM
from outrider.checkpoints.dialects.deepspec import DeepSpec
from outrider.checkpoints.dialects.speculators import Speculators
from outrider.checkpoints.dialects.zlab import ZLab, ZLab2
from outrider.drafters.base import DrafterWeights


class ZLabPackage(ExternalEngine):
    """z-lab's own package, by its command `dflash`, which takes the first CUDA device."""

    name = "zlab"
    dialects = {"dflash": ZLab(), "dflash2": ZLab2()}
    whole_vocabulary = scales_embeddings = tuple(dialects)
    over_http = False

    def check(self, parts: DrafterWeights) -> list[str]:
        check_targets_vocabulary(parts)
        return []

    def serve(self, parts: DrafterWeights, directory: str, target: str) -> list[str]:
        return [f"dflash generate transformers --model {shlex.quote(target)} --draft {shlex.quote(directory)} PROMPT"]


class DeepSpecCode(ExternalEngine):
    """DeepSpec's repository, whose eval.py decodes its benchmarks: every row of a block drafts, the anchor's too."""

    name = "deepspec"
    dialects = {"dspark": DeepSpec()}
    widens = ("dspark",)
    over_http = False

    def check(self, parts: DrafterWeights) -> list[str]:
        if parts.config.is_causal is not False:
            raise ValueError(
                "is_causal must be false; rows of its blocks see each other in both directions: train with "
                "drafter.is_causal=false."
            )
        if not parts.config.sample_from_anchor:
            raise ValueError(
                "sample_from_anchor false is not heeded there; its blocks draft from the anchor: train with "
                "drafter.sample_from_anchor=true."
            )
        return []

    def serve(self, parts: DrafterWeights, directory: str, target: str) -> list[str]:
        return [
            "# in a checkout of DeepSpec, which decodes its benchmarks",
            f"python eval.py --target_name_or_path {shlex.quote(target)} --draft_name_or_path {shlex.quote(directory)}",
        ]


class SpeculatorsLibrary(ExternalEngine):
    """The speculators library, whose checkpoints vLLM serves."""

    name = "speculators"
    dialects = dict.fromkeys(Speculators.methods, Speculators())
    whole_vocabulary = ("dflash2", "mtp")
    over_http = False

    def serve(self, parts: DrafterWeights, directory: str, target: str) -> list[str]:
        if parts.algorithm == "mtp":
            return [
                "# for exchange: vLLM 0.32 reads no MTP in this dialect; Outrider does",
                f"outrider generate PROMPT --target {shlex.quote(target)} --drafter {shlex.quote(directory)}",
            ]
        return VLLM().serve(parts, directory, target)
