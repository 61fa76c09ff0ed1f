"""llama.cpp, build 11434: DFlash, DFlash 2 and DSpark converted to GGUF, `--spec-*` flags, counters on /metrics.

    dflash  dflash2     z-lab             convert_hf_to_gguf.py makes drafter.gguf of them
    dspark              DeepSpec
    K drafts            --spec-draft-n-max K

DFlash 2 runs under DFlash's name: the file's tensors tell. docs/engines.md holds the rest of what it does.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.backends.base import (
    NO_PENALTIES,
    Counts,
    ExternalEngine,
    Launch,
    MetricNames,
    Speculation,
    causal_in_sliding_layers_alone,
    check_targets_vocabulary,
    check_vanilla_head,
)
from outrider.checkpoints.dialects.base import ExportedCheckpoint
from outrider.checkpoints.dialects.deepspec import DeepSpec
from outrider.checkpoints.dialects.zlab import ZLab, ZLab2
from outrider.checkpoints.registry import Export
from outrider.drafters.base import DrafterWeights


class LlamaCpp(ExternalEngine):
    """llama.cpp, by its command `llama-server`."""

    name = "llama.cpp"
    takes = {
        "dflash": Export(ZLab(), "draft-dflash", whole_vocabulary=True, scales_embeddings=True),
        "dflash2": Export(ZLab2(), "draft-dflash", whole_vocabulary=True, scales_embeddings=True),
        "dspark": Export(DeepSpec(), "draft-dspark", scales_embeddings=True),
    }
    calibration = "reads no confidences unless it is told to (--spec-draft-p-min), and then as they are"
    also_drafts = {"eagle3": "draft-eagle3", "lm": "", "ngram": "ngram-simple"}  # "": a language model is its default
    gguf = True
    metrics = MetricNames.counters("llamacpp")
    request_fields = {"repeat_penalty": 1.0, **NO_PENALTIES}

    def check(self, parts: DrafterWeights) -> list[str]:
        """See `ExternalEngine`; its loaders take a lone embedding for the head too."""
        check_vanilla_head(parts)
        check_targets_vocabulary(parts if parts.draft_ids_Vd is None else replace(parts, head_VdH=None))
        config = parts.config
        if max(config.target_layer_ids) >= config.num_target_layers - 1:
            raise ValueError(
                f"target_layer_ids {list(config.target_layer_ids)} reach the last layer: train with earlier ones."
            )
        if config.rope_scaling is not None:
            raise ValueError(
                f"rope_type {config.rope_scaling.rope_type!r}: nobody has seen its converter write the scaling of a "
                "drafter. Use vLLM or SGLang, or train for a target without scaling."
            )
        if getattr(config, "enable_confidence_head", False) and not config.confidence_head_with_markov:
            raise ValueError("confidence_head_with_markov false has no place there: train with it true.")
        if causal_in_sliding_layers_alone(parts):
            raise ValueError("is_causal null (sliding layers alone) has no place there: train with false or true.")
        if parts.algorithm == "dflash2":
            pairs = config.selector_top_k * (config.selector_top_k + 1)
            if pairs > config.hidden_size:
                raise ValueError(
                    f"selector_top_k {config.selector_top_k} does not fit; its selector keeps {pairs} numbers in a row "
                    f"of hidden_size {config.hidden_size}: train with a smaller drafter.selector_top_k."
                )
        return []

    def finish(self, written: ExportedCheckpoint) -> ExportedCheckpoint:
        """Without the target's head and embedding: llama.cpp has them, and takes a lone embedding for both."""
        kept = {"lm_head.weight"} if "d2t" in written.tensors else set()
        dropped = {"lm_head.weight", "embed_tokens.weight"} - kept
        return replace(written, tensors={name: t for name, t in written.tensors.items() if name not in dropped})

    def serve(self, parts: DrafterWeights, directory: str, target: str) -> list[str]:
        """See `ExternalEngine`; its converter takes the target's directory, not a hub id."""
        local, quoted = Path(target).is_dir(), shlex.quote(target)
        where = quoted if local else "TARGET"
        download = [] if local else [f"# TARGET: the directory that this prints: hf download {quoted}"]
        return [
            *download,
            f"python convert_hf_to_gguf.py {where} --outtype f16 --outfile target.gguf",
            f"python convert_hf_to_gguf.py {shlex.quote(directory)} --target-model-dir {where} --outtype f16 "
            "--outfile drafter.gguf",
            shlex.join(["llama-server", "-m", "target.gguf", *self._flags(Speculation.of(parts, "drafter.gguf"))]),
        ]

    def command(self, launch: Launch) -> list[str]:
        """See `ExternalEngine`; the context is that of all users together."""
        for path in (launch.target, launch.speculation.drafter if launch.speculation else None):
            if path is not None and not path.endswith(".gguf"):
                raise ValueError(
                    f"llama.cpp reads GGUF files, not {path}: convert it (outrider export DIR --to llama.cpp --out OUT "
                    "says how), and give --engine-target T.gguf --engine-drafter D.gguf."
                )
        command = [launch.executable or "llama-server", "-m", launch.target, "--metrics"]
        command += launch.flags(host="--host", port="--port", name="--alias", users="-np")
        if launch.users is not None and launch.positions is not None:
            command += ["-c", str(launch.users * launch.positions)]
        command += [] if launch.prompt_cache else ["--no-cache-prompt"]
        if launch.speculation:
            command += self._flags(launch.speculation)
        return [*command, *launch.extra]

    def accepted_length(self, event: Mapping[str, Any]) -> float | None:
        """From `timings` of the last event, which count drafts: each round gives one token that is no draft."""
        timings = event.get("timings") or {}
        if not timings.get("draft_n"):
            return None
        return float(timings["predicted_n"] / (timings["predicted_n"] - timings["draft_n_accepted"]))

    def counts(self, answer: Mapping[str, Any], tokens: int) -> Counts | None:
        """See `ExternalEngine`; sums alone, which mlx-vlm reports in the same fields."""
        timings = answer.get("timings") or {}
        if not timings.get("draft_n"):
            return None
        accepted = int(timings["draft_n_accepted"])
        # mlx-vlm reports its rounds. llama.cpp does not: the difference includes the first token and draftless steps.
        rounds = int(timings.get("draft_rounds") or int(timings["predicted_n"]) - accepted)
        return Counts(rounds, accepted, drafted=int(timings["draft_n"]))

    def _flags(self, speculation: Speculation) -> list[str]:
        name = self.name_of(speculation.method)
        flags = ["-md", speculation.drafter] if speculation.drafter else []
        return [*flags, *(["--spec-type", name] if name else []), "--spec-draft-n-max", str(speculation.drafts)]
