"""vLLM 0.32: speculators' dialect, `--speculative-config`, counters of drafts on /metrics.

    dflash  dflash2  dspark  eagle3    speculators; DFlash, DSpark and EAGLE-3 also as their makers publish them
    medusa                             Medusa
    K drafts                           --speculative-config {"num_speculative_tokens": K}

DFlash 2 runs under DFlash's name: the checkpoint's architecture tells. DSpark, DFlash 2, and sliding layers mixed with
full ones are in model runner V2 alone (VLLM_USE_V2_MODEL_RUNNER=1). docs/engines.md holds the rest of what it does.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from outrider.backends.base import (
    NO_PENALTIES,
    Counts,
    ExternalEngine,
    Launch,
    MetricNames,
    Round,
    Speculation,
    at_positions,
    causal_in_sliding_layers_alone,
    check_vanilla_head,
    require,
)
from outrider.checkpoints.dialects.base import Dialect
from outrider.checkpoints.dialects.deepspec import DeepSpec
from outrider.checkpoints.dialects.eagle3 import Eagle3Dialect
from outrider.checkpoints.dialects.medusa import MedusaDialect
from outrider.checkpoints.dialects.speculators import Speculators
from outrider.checkpoints.dialects.zlab import ZLab, ZLab2
from outrider.checkpoints.registry import Export
from outrider.drafters.base import DrafterWeights

_V2_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
_NGRAM_MAX = 4  # tokens that prompt lookup matches


class VLLM(ExternalEngine):
    """vLLM, by its command `vllm serve`."""

    name = "vllm"
    takes = {
        "dflash": Export(Speculators(), "dflash", also_reads=ZLab()),
        "dflash2": Export(Speculators(), "dflash", also_reads=ZLab2(), whole_vocabulary=True, environment=_V2_RUNNER),
        "dspark": Export(Speculators(), "dspark", also_reads=DeepSpec(), environment=_V2_RUNNER),
        "eagle3": Export(Speculators(), "eagle3", also_reads=Eagle3Dialect()),
        "medusa": Export(MedusaDialect(), "medusa", scales_embeddings=True),  # its drafters read no embedding
    }
    also_drafts = {"ngram": "ngram", "lm": "draft_model"}
    metrics = MetricNames.counters("vllm")
    key_variable = "VLLM_API_KEY"
    request_fields = {"return_token_ids": True, "repetition_penalty": 1.0, **NO_PENALTIES}

    def check(self, parts: DrafterWeights) -> list[str]:
        check_vanilla_head(parts)
        if parts.algorithm == "dflash":
            require(parts, "sample_from_anchor", False, reason="its DFlash drafts from masks alone")
        if not getattr(parts.config, "plain_logits", True):
            raise ValueError("output_multiplier and final_logit_softcapping are not heeded there.")
        if getattr(parts.config, "layer_types", ()):
            return ["vLLM mixes sliding and full layers in its model runner V2 alone (VLLM_USE_V2_MODEL_RUNNER=1)."]
        if parts.algorithm == "medusa":
            return ["vLLM drafts one greedy chain from Medusa heads, no tree."]
        return []

    def check_dialect(self, parts: DrafterWeights, dialect: Dialect) -> None:
        """Refuse speculators' dialect for causal sliding layers alone: vLLM applies its flag to all layers."""
        causal_sliding = parts.algorithm != "dspark" and causal_in_sliding_layers_alone(parts)
        if dialect.name == "speculators" and causal_sliding:
            raise ValueError(
                "is_causal null (sliding layers alone) would become true for all layers there: export it --to zlab."
            )

    def serve(self, parts: DrafterWeights, directory: str, target: str) -> list[str]:
        speculation = Speculation.of(parts, directory)
        variables = "".join(f"{name}={value} " for name, value in self._runner(speculation).items())
        return [variables + shlex.join(["vllm", "serve", target, *self._flags(speculation)])]

    def command(self, launch: Launch) -> list[str]:
        """See `ExternalEngine`; the module is the same server as `vllm serve`, which some wheels cannot start."""
        if launch.executable:
            command = [launch.executable, "serve", launch.target]
        else:
            command = [launch.python, "-m", "vllm.entrypoints.openai.api_server", "--model", launch.target]
        command += launch.flags(host="--host", port="--port", name="--served-model-name", dtype="--dtype")
        command += launch.flags(positions="--max-model-len", users="--max-num-seqs")
        command += [] if launch.prompt_cache else ["--no-enable-prefix-caching"]
        if launch.speculation:
            command += [*self._flags(launch.speculation), "--per-request-spec-decode-metrics", "summary"]
        return [*command, *launch.extra]

    def environment(self, launch: Launch) -> dict[str, str]:
        runner = self._runner(launch.speculation) if launch.speculation else {}
        return {"VLLM_NO_USAGE_STATS": "1"} | runner

    def accepted_length(self, event: Mapping[str, Any]) -> float | None:
        """From `metrics` of the last event, with --per-request-spec-decode-metrics summary."""
        record = (event.get("metrics") or {}).get("speculative_decoding")
        return float(record["mean_acceptance_length"]) if record and record["num_spec_steps"] else None

    def counts(self, answer: Mapping[str, Any], tokens: int) -> Counts | None:
        """See `ExternalEngine`; with --per-request-spec-decode-metrics summary, or detailed: then every round."""
        record = (answer.get("metrics") or {}).get("speculative_decoding") or {}
        if not (histogram := record.get("acceptance_histogram")):
            return None
        names = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens")
        rounds, accepted, drafted = (int(record[name]) for name in names)
        slots, described = record.get("num_spec_tokens") or len(histogram) - 1, _described(record, tokens)
        return Counts(rounds, accepted, at_positions(histogram), drafted=drafted, slots=slots, described=described)

    def _flags(self, speculation: Speculation) -> list[str]:
        config: dict[str, Any] = {"method": self.name_of(speculation.method)}
        config |= {"model": speculation.drafter} if speculation.drafter else {"prompt_lookup_max": _NGRAM_MAX}
        flags = ["--speculative-config", json.dumps(config | {"num_speculative_tokens": speculation.drafts})]
        if speculation.method == "medusa" and speculation.reduced_vocabulary:
            # Its loader makes token_map a parameter after the fact, then misses it among those that it filled.
            flags += ["--model-loader-extra-config", json.dumps({"enable_weights_track": False})]
        return flags

    def _runner(self, speculation: Speculation) -> dict[str, str]:
        export = self.exports().get(speculation.method)
        needed = {} if export is None else export.environment
        return {**needed, **(_V2_RUNNER if speculation.mixed_layers else {})}


def _described(record: Mapping[str, Any], tokens: int) -> tuple[Round, ...]:
    """The rounds of a detailed record; none if steps without drafts are missing, so that places are unknown.

    The first token comes with the prefill; the last round may go on after the answer's end.
    """
    rounds, start = list[Round](), 1
    steps = zip(record.get("per_step_drafted") or (), record.get("per_step_accepted") or (), strict=True)
    for verified, accepted in steps:
        rounds.append(Round(start, int(verified), int(accepted), tokens=min(int(accepted) + 1, tokens - start)))
        start += int(accepted) + 1
    return tuple(rounds) if rounds and rounds[-1].start < tokens <= start else ()
