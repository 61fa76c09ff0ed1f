"""speculators 0.9: one envelope for several algorithms, the dialect vLLM reads by itself.

    speculators_model_type    eagle3, dflash, dflash2, dspark, mtp
    transformer_layer_config  the draft layers, as transformers names them; no model_type beside it
    speculators_config        algorithm, how many tokens to propose, and the verifier (the target)
    taps                      hidden states, one more than our ids (dialects/speculators_parts.py)

Library and vLLM default several fields differently, so every one is written. Embedding and head come from the verifier,
but for the two that the library's own checkpoints store: the head of EAGLE-3 and that of a reduced draft vocabulary.
Sources: speculators 0.9.0; vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from outrider.formats.dialect import Parts, Source, TargetFacts, Written
from outrider.formats.dialects import speculators_parts as parts_of
from outrider.formats.dialects.extras import target_depth, write_extras
from outrider.formats.fields import MOST_DRAFTS, MOST_LAYERS, Fields
from outrider.target.resolve import dtype_name

VERSION = "0.9.0"


@dataclass(frozen=True)
class _Algorithm:
    """One `speculators_model_type`.

    Attributes:
        read: (its fields, target depth, drafts a block, tensors, source) -> parts.
        write: parts, with the target's tensors where stored -> (its fields, transformer_layer_config, tensors).
        stores_head: whether lm_head.weight is always in the checkpoint.
        layers_are_the_targets: transformer_layer_config counts the target's layers, not the drafter's.
    """

    architecture: str
    read: Callable[[Fields, int, int | None, Mapping[str, Tensor], Source], Parts]
    write: Callable[[Parts], tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]]
    stores_head: bool = False
    layers_are_the_targets: bool = False


_ALGORITHMS = {
    "eagle3": _Algorithm("Eagle3Speculator", parts_of.read_eagle3, parts_of.write_eagle3, stores_head=True),
    "dflash": _Algorithm("DFlashSpeculator", parts_of.read_dflash, parts_of.write_dflash),
    "dflash2": _Algorithm("DFlash2DraftModel", parts_of.read_dflash2, parts_of.write_dflash2),
    "dspark": _Algorithm("DSparkSpeculator", parts_of.read_dspark, parts_of.write_dspark),
    "mtp": _Algorithm("MTPDraftModel", parts_of.read_mtp, parts_of.write_mtp, layers_are_the_targets=True),
}


class Speculators:
    """The speculators library's dialect; its algorithms have our methods' names."""

    name = "speculators"
    spelling = "speculators_model_type"
    methods: tuple[str, ...] = tuple(_ALGORITHMS)

    def reads(self, raw: Mapping[str, Any]) -> bool:
        return "speculators_model_type" in raw

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> Parts:
        fields = Fields(raw, source.where, self.name)
        algorithm = _ALGORITHMS.get(fields.text("speculators_model_type"))
        if algorithm is None:
            raise fields.refuse("speculators_model_type", f"one of {', '.join(_ALGORITHMS)}")
        if algorithm.layers_are_the_targets and source.num_target_layers is None:
            depth = fields.section("transformer_layer_config").integer("num_hidden_layers", high=MOST_LAYERS)
            source = replace(source, num_target_layers=depth)
        return algorithm.read(fields, target_depth(fields, source), _proposed(fields), tensors, source)

    def write(self, parts: Parts, target: TargetFacts | None) -> Written:
        algorithm, config = _ALGORITHMS[parts.method.name], parts.config
        if target is None:
            raise ValueError("the speculators dialect names its verifier: say which target this is for (--target).")
        if algorithm.stores_head or parts.draft_ids_Vd is not None:
            parts = parts_of.with_target_tensors(parts, target, embedding=False)
        fields, layers, tensors = algorithm.write(parts)
        dtype = dtype_name(next(iter(parts.tensors.values())).dtype)
        proposal = {"proposal_type": "greedy", "speculative_tokens": config.gamma, "verifier_accept_k": 1}
        proposal["accept_tolerance"] = 0.0
        envelope = {
            "architectures": [algorithm.architecture],
            "speculators_model_type": parts.method.name,
            "speculators_version": VERSION,
            "speculators_config": {
                "algorithm": parts.method.name,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": target.name_or_path, "architectures": list(target.architectures)},
            },
            "transformer_layer_config": {**layers, "dtype": dtype},
            "tie_word_embeddings": False,
            "dtype": dtype,
        }
        return Written({**envelope, **fields, **write_extras(config)}, tensors)


def _proposed(fields: Fields) -> int | None:
    """How many tokens a round proposes; None where the config does not say."""
    methods = fields.section("speculators_config", {}).raw("proposal_methods")
    if methods is None:
        return None
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], Mapping):
        raise ValueError(
            f"{fields.where}: speculators_config.proposal_methods is {methods!r}; it must be a list of mappings."
        )
    first = Fields(methods[0], fields.where, fields.dialect, "speculators_config.proposal_methods[0].")
    return first.integer("speculative_tokens", high=MOST_DRAFTS)
