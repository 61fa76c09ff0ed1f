"""What engines cannot serve: one check each, a ValueError that names the field, and sentences on what they do without.

Versions: as in formats/engines.py.
"""

from __future__ import annotations

from outrider.formats.dialect import Dialect, Parts
from outrider.formats.dialects.eagle3 import FLAGS


def _vanilla(engine: str, parts: Parts) -> None:
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


def _whole_vocabulary(engine: str, parts: Parts, *methods: str) -> None:
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


def _from_anchor(engine: str, parts: Parts) -> None:
    """DSpark's own block layout.

    Raises:
        ValueError: the drafter has DFlash's.
    """
    if parts.method.name == "dspark" and not parts.config.sample_from_anchor:
        raise ValueError(
            f"--to {engine}: sample_from_anchor false is not served there; its DSpark blocks draft from the anchor."
        )


def _sliding_is_causal(engine: str, parts: Parts) -> None:
    """Sliding layers are causal inside a block there, full ones are not, whatever the config says.

    Raises:
        ValueError: the drafter's are otherwise.
    """
    sights = getattr(parts.config, "sights", ())
    if any(sight.causal != (sight.window is not None) for sight in sights):
        raise ValueError(
            f"--to {engine}: is_causal {parts.config.is_causal} is not heeded there; block rows see those after them "
            "in layers without a window, and only there: train like that, or serve with Outrider."
        )


def check_vllm(parts: Parts) -> list[str]:
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


def check_vllm_dialect(parts: Parts, dialect: Dialect) -> None:
    """vLLM takes what speculators says of DFlash's sliding layers for all of them.

    Raises:
        ValueError: that would make the full layers causal.
    """
    if dialect.name == "speculators" and parts.method.name != "dspark" and _sliding_alone(parts):
        raise ValueError(
            "vllm: is_causal null (sliding layers alone) would become true for all layers in speculators' dialect; "
            "z-lab's is the one that vLLM reads right (outrider export DIR --to zlab --out OUT)."
        )


def _sliding_alone(parts: Parts) -> bool:
    return getattr(parts.config, "is_causal", False) is None


def check_sglang(parts: Parts) -> list[str]:
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


def check_llama_cpp(parts: Parts) -> list[str]:
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
            "graphs do not give: tap earlier layers."
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


def check_zlab(parts: Parts) -> list[str]:
    _whole_vocabulary("zlab", parts, "dflash", "dflash2")
    return []


def check_deepspec(parts: Parts) -> list[str]:
    if parts.config.is_causal is not False:
        raise ValueError(
            "--to deepspec: is_causal must be false; rows of its blocks see each other in both directions."
        )
    if parts.draft_ids_Vd is not None:
        raise ValueError("--to deepspec: draft_vocab_size must be the target's; its classes have no d2t.")
    return []
