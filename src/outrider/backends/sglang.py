"""SGLang 0.5.23: dialects of the methods' makers, `--speculative-*` flags, and the files its DSpark scheduler reads.

    dflash  dflash2     z-lab            \
    dspark              DeepSpec         / every field of the block also in `dflash_config`
    eagle3              EAGLE-3
    K drafts            --speculative-dspark-block-size K, --speculative-dflash-block-size K + 1,
                        or --speculative-num-draft-tokens K + 1

    Qwen3-Next, Qwen3.5 and later
                        --mamba-scheduler-strategy extra_buffer: a rejected draft takes back the recurrent state
    Gemma 4             --attention-backend triton: its heads of 512 are too large for FlashInfer

SGLang counts the rows that are verified, the anchor among them; a DSpark block alone counts drafts. DFlash 2 is in it
since 0.5.19, under DFlash's name: the checkpoint's architecture says so.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from outrider.backends.base import (
    NO_PENALTIES,
    Counts,
    ExternalEngine,
    Launch,
    MetricNames,
    Speculation,
    at_positions,
    check_sequential_head,
    require,
)
from outrider.checkpoints.dialects.base import ExportedCheckpoint
from outrider.checkpoints.dialects.deepspec import DeepSpec
from outrider.checkpoints.dialects.eagle3 import FLAGS, Eagle3Dialect
from outrider.checkpoints.dialects.zlab import ZLab, ZLab2
from outrider.checkpoints.registry import Export
from outrider.drafters.base import DrafterWeights

# By how the architectures in the target's config.json begin. Backends that depend on the GPU (fa3, trtllm_mha) are
# the user's choice. Sources: z-lab's dflash README, SGLang's tests of Qwen3-Next and its pull request 24985.
_FAMILY_FLAGS: dict[tuple[str, ...], list[str]] = {
    ("Qwen3Next", "Qwen3_5"): ["--mamba-scheduler-strategy", "extra_buffer"],
    ("Gemma4",): ["--attention-backend", "triton"],
}
CALIBRATION_FILE, TABLE_FILE = "confidence_sts.json", "sps_table.json"
_IN_SECTION = (
    *("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)


class SGLang(ExternalEngine):
    """SGLang, by `python -m sglang.launch_server`."""

    name = "sglang"
    takes = {
        "dflash": Export(ZLab(), "DFLASH", whole_vocabulary=True, scales_embeddings=True, targets_vocabulary=True),
        "dflash2": Export(ZLab2(), "DFLASH", whole_vocabulary=True, scales_embeddings=True, targets_vocabulary=True),
        "dspark": Export(DeepSpec(), "DSPARK", widens=True, scales_embeddings=True, targets_vocabulary=True),
        "eagle3": Export(Eagle3Dialect(), "EAGLE3"),
    }
    also_drafts = {"ngram": "NGRAM", "lm": "STANDALONE"}
    calibration = (
        "reads the file that outrider calibrate --export-sglang DIR writes (--speculative-dspark-confidence-sts-path)"
    )
    metrics = MetricNames(length="sglang:spec_accept_length")
    request_fields = {"repetition_penalty": 1.0, **NO_PENALTIES}

    def check(self, parts: DrafterWeights) -> list[str]:
        config = parts.config
        if parts.algorithm == "eagle3":
            for name in (*FLAGS, "qk_norm"):
                if getattr(config, name):
                    raise ValueError(f"{name} true has no place in its EAGLE-3 model: train without it.")
            if len(config.target_layer_ids) != 3:
                raise ValueError(f"target_layer_ids {list(config.target_layer_ids)} must be three: train with three.")
            return []
        check_sequential_head(parts)
        if parts.algorithm == "dspark":
            require(parts, "sample_from_anchor", True, reason="its DSpark blocks draft from the anchor")
        if any(pattern.causal != (pattern.window is not None) for pattern in getattr(config, "attention_patterns", ())):
            raise ValueError(
                f"is_causal {config.is_causal} is not heeded there: rows see later ones in layers without window alone."
            )
        if not getattr(config, "plain_logits", True):
            raise ValueError("whether output_multiplier and final_logit_softcapping are heeded is not known.")
        return []

    def finish(self, written: ExportedCheckpoint) -> ExportedCheckpoint:
        """Every field of the block in `dflash_config` too: SGLang looks there first, other readers at the top."""
        config = written.config
        if "block_size" not in config:
            return written
        section = {**config.get("dflash_config", {}), **{name: config[name] for name in _IN_SECTION if name in config}}
        return replace(written, config={**config, "dflash_config": section})

    def serve(self, parts: DrafterWeights, directory: str, target: str) -> list[str]:
        words = ["python", "-m", "sglang.launch_server", "--model-path", target]
        return [shlex.join([*words, *self._flags(Speculation.of(parts, directory))])]

    def command(self, launch: Launch) -> list[str]:
        """See `ExternalEngine`; a part of the answer is sent for every step."""
        command = [launch.executable] if launch.executable else [launch.python, "-m", "sglang.launch_server"]
        command += ["--model-path", launch.target, *launch.flags(host="--host", port="--port", dtype="--dtype")]
        command += launch.flags(
            name="--served-model-name", positions="--context-length", users="--max-running-requests"
        )
        command += ["--enable-metrics", "--stream-interval", "1"]
        command += [] if launch.prompt_cache else ["--disable-radix-cache"]
        if launch.speculation:
            command += [*self._flags(launch.speculation), *self.family_flags(launch.architectures)]
        return [*command, *launch.extra]

    def family_flags(self, architectures: Sequence[str]) -> list[str]:
        known = _FAMILY_FLAGS.items()
        return [flag for names, flags in known if any(one.startswith(names) for one in architectures) for flag in flags]

    def counts(self, answer: Mapping[str, Any], tokens: int) -> Counts | None:
        """See `ExternalEngine`; in the answer or its first choice, as `sglext` or `meta_info`."""
        for holder in (answer["choices"][0], answer):
            for name in ("sglext", "meta_info"):
                record = holder.get(name) or {}
                record = record.get("spec_tokens_details") or record
                if not record.get("spec_verify_ct") or "spec_num_correct_drafts" not in record:
                    continue
                names = ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")
                rounds, accepted, drafted = (int(record[name]) for name in names)
                histogram = record.get("spec_correct_drafts_histogram") or ()
                slots = len(histogram) - 1 if histogram else None
                return Counts(rounds, accepted, at_positions(histogram) or None, drafted=drafted, slots=slots)
        return None

    def _flags(self, speculation: Speculation) -> list[str]:
        """Trees have a width of 1 here: chains."""
        name, rows = self.name_of(speculation.method), speculation.drafts + 1
        flags = ["--speculative-draft-model-path", speculation.drafter] if speculation.drafter else []
        flags += ["--speculative-algorithm", name]
        export = self.exports().get(speculation.method)
        if export is not None and not export.states_length:
            return flags
        if name == "DSPARK":
            return [*flags, "--speculative-dspark-block-size", str(speculation.drafts)]
        if name == "DFLASH":
            return [*flags, "--speculative-dflash-block-size", str(rows)]
        if name in ("EAGLE3", "STANDALONE"):
            flags += ["--speculative-num-steps", str(speculation.drafts), "--speculative-eagle-topk", "1"]
        return [*flags, "--speculative-num-draft-tokens", str(rows)]


# ----------------------------------------------------------------------------
# The two JSON files that SGLang's DSpark scheduler reads.
#
#     --speculative-dspark-confidence-sts-path
#         {"temperatures": [T_1 .. T_gamma], "dataset", "num_samples", "ece_before": [..], "ece_after": [..]}
#     --speculative-dspark-sps-table-path
#         {"sample_batch_tokens": [..], "sample_steps_per_sec": [..], "max_batch_tokens"}
#
# Its calibration is sigmoid(logit(c_k) / T_k): it has no place for offsets.
# ----------------------------------------------------------------------------


def write_confidence_sts(
    path: Path,
    temperatures: Sequence[float],
    offsets: Sequence[float],
    dataset: str,
    num_samples: int,
    ece_before: Sequence[float],
    ece_after: Sequence[float],
) -> None:
    """Write the calibration file.

    Args:
        offsets: must all be 0; fit temperatures alone for this file (evaluation/calibration/fit.py).
        ece_before: of the raw survival per position; `ece_after` with these temperatures.
    """
    if any(offsets):
        raise ValueError(f"offsets {list(offsets)} cannot be expressed for SGLang: fit temperatures alone.")
    if not temperatures or min(temperatures) <= 0:
        raise ValueError(f"temperatures {list(temperatures)} must be numbers above 0, one per draft position.")
    fields = {"temperatures": list(temperatures), "dataset": dataset, "num_samples": num_samples}
    _write(path, {**fields, "ece_before": list(ece_before), "ece_after": list(ece_after)})


def write_sps_table(path: Path, curve: Sequence[tuple[int, float]]) -> None:
    """Write the cost table.

    Args:
        curve: (tokens in a target forward, seconds it takes), tokens strictly increasing from 1 or more.
    """
    tokens, seconds = [n for n, _ in curve], [s for _, s in curve]
    if not curve or tokens[0] < 1 or any(b <= a for a, b in pairwise(tokens)):
        raise ValueError(f"tokens {tokens} must be strictly increasing and at least 1.")
    if not all(s > 0 and math.isfinite(s) for s in seconds):
        raise ValueError(f"seconds {seconds} must be finite numbers above 0.")
    rates = [1 / s for s in seconds]
    _write(path, {"sample_batch_tokens": tokens, "sample_steps_per_sec": rates, "max_batch_tokens": tokens[-1]})


def _write(path: Path, fields: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
