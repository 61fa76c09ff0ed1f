"""Run jobs in the real vLLM and write down what it did. Runs in the engine's environment, without Outrider.

    vllm_worker.py JOBS.json RESULTS.json            lists of the same length: imports cost more than an engine's start

    job     {model, speculative: {...} | null, prompts: [[id]], new, max_num_seqs, max_model_len,
             loader: {...}, repair: bool}
    result  outputs   per prompt, the response's ids
            rounds    per prompt, [committed so far, [draft ids]]: what was drafted after that many response tokens
            loads     per model loaded: tensors given by the files, those found in no parameter (ignored), parameters
                      that no file filled (missing)
            shared    which of the drafter's matrices are the target's own
            metrics   vLLM's own counters of speculation

"Ignored" and "missing" are judged by values, since a loader's own report may be silent about what it skips: before
loading every parameter is filled with a number that no checkpoint has, afterwards each tensor of the files is looked
for, as rows of some parameter (q, k and v become rows of one).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

if os.environ.get("TRITON_INTERPRET") == "1":
    # On a CPU vLLM takes Triton only with a backend for CPUs, which the usual Triton has not. Interpreted kernels
    # need no backend, so an entry of that name is enough; it is looked at when vLLM is imported.
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))

from vllm import LLM, SamplingParams
from vllm import _custom_ops as ops
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

Drafts = Tensor | list[list[int]]
UNTOUCHED = -12345  # in an integer parameter that nothing was loaded into; NaN in the others


class Record:
    """What the hooks saw."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[tuple[int, list[int]]]] = defaultdict(list)
        self.committed: dict[str, int] = defaultdict(int)
        self.loads: list[dict[str, object]] = []
        self.shared: dict[str, bool] = {}


def untouched(parameter: Tensor) -> bool:
    """Whether some number of it is still what `fill` put there."""
    if parameter.is_floating_point():
        return bool(parameter.isnan().any())
    return bool((parameter == UNTOUCHED).any())


def is_part_of(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether the tensor is all of a parameter or neighbouring rows of it."""
    if tensor.shape == parameter.shape:
        return torch.equal(tensor, parameter)
    if tensor.ndim < 1 or tensor.ndim != parameter.ndim or tensor.shape[1:] != parameter.shape[1:]:
        return False
    corner = (0,) * (tensor.ndim - 1)  # one number a row tells where to look closely
    starts = (parameter[(slice(None), *corner)] == tensor[(0, *corner)]).nonzero().flatten().tolist()
    return any(torch.equal(parameter[start : start + len(tensor)], tensor) for start in starts)


def watched_loading(record: Record, load: Callable[..., None]) -> Callable[..., None]:
    """`load_weights` that judges every load by the values that arrive."""

    def load_weights(self: DefaultModelLoader, model: nn.Module, config: object) -> None:
        given: dict[str, Tensor] = {}

        def get_all_weights(*arguments: object) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in DefaultModelLoader.get_all_weights(self, *arguments):
                given[name] = tensor.clone()
                yield name, tensor

        before = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data.fill_(math.nan if parameter.is_floating_point() else UNTOUCHED)
        self.get_all_weights = get_all_weights
        load(self, model, config)
        del self.get_all_weights
        parameters = dict(model.named_parameters())
        missing = [name for name, parameter in parameters.items() if untouched(parameter.data)]
        for name in missing:
            parameters[name].data.copy_(before[name])
        ignored = [
            name
            for name, tensor in given.items()
            if not any(is_part_of(tensor.to(p.dtype), p.data) for p in parameters.values())
        ]
        entry = {"model": type(model).__name__, "given": sorted(given), "missing": missing, "ignored": ignored}
        record.loads.append(entry)

    return load_weights


def watched_drafting(record: Record, propose: Callable[..., Drafts]) -> Callable[..., Drafts]:
    """`propose_draft_token_ids` that writes down what was committed and drafted in every step, by request."""

    def propose_draft_token_ids(
        self: GPUModelRunner, scheduled: object, sampled: Tensor | list[list[int]], *arguments: object
    ) -> Drafts:
        drafts = propose(self, scheduled, sampled, *arguments)
        rows = drafts.tolist() if isinstance(drafts, Tensor) else drafts
        new = sampled.tolist() if isinstance(sampled, Tensor) else sampled
        skipped = self.discard_request_mask.np  # requests in the middle of their prefill
        for i, (request, tokens, draft) in enumerate(zip(self.input_batch.req_ids, new, rows, strict=False)):
            if skipped[i]:
                continue
            record.committed[request] += sum(0 <= token < self.input_batch.vocab_size for token in tokens)
            record.rounds[request].append((record.committed[request], [int(token) for token in draft]))
        model = getattr(self.drafter, "model", None)
        for name in ("embed_tokens", "lm_head"):
            holders = [model, getattr(model, "model", None)]
            own = next((getattr(holder, name) for holder in holders if hasattr(holder, name)), None)
            theirs = {"embed_tokens": self.model.model.embed_tokens, "lm_head": self.model.lm_head}[name]
            record.shared[name] = own is theirs
        return drafts

    return propose_draft_token_ids


def watched_blocks(record: Record, propose: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same for model runner V2: `propose` of a speculator."""

    def watched(self: DSparkSpeculator, input_batch: Any, *arguments: Any, **named: Any) -> Tensor:
        drafts = propose(self, input_batch, *arguments, **named)
        if named.get("dummy_run"):
            return drafts
        sampled = arguments[4].tolist()  # tokens; none in the middle of a prefill
        for request, new, draft in zip(input_batch.req_ids, sampled, drafts.tolist(), strict=True):
            if new:
                record.committed[request] += new
                record.rounds[request].append((record.committed[request], draft))
        return drafts

    return watched


def watched_sharing(record: Record, load: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`load_draft_model` of a speculator that writes down which matrices it took from the target."""

    def load_draft_model(self: DSparkSpeculator, target: nn.Module, names: set[str]) -> nn.Module:
        drafter = load(self, target, names)
        record.shared["embed_tokens"] = drafter.model.embed_tokens is target.model.embed_tokens
        record.shared["lm_head"] = drafter.lm_head is target.lm_head
        return drafter

    return load_draft_model


def norm_layer_by_layer(self: DFlashQwen3Model, all_k: Tensor) -> Tensor:
    """The key norms of context features, [layers, T, heads, head size], as they are meant.

    vLLM gives all layers' weights [layers, head size] to one call of `rms_norm`; the CPU's reads the first row alone,
    so that every layer's context keys get the first layer's weights.
    """
    normed = torch.empty_like(all_k)
    for layer, weight in enumerate(self._k_norm_weights):
        ops.rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
    return normed


def counters(llm: LLM) -> dict[str, object]:
    """vLLM's counters of speculation, by their Prometheus names."""
    found: dict[str, object] = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            found[metric.name] = metric.values if hasattr(metric, "values") else metric.value
    return found


def run(job: dict[str, Any], record: Record) -> dict[str, object]:
    """One engine from start to end; the hooks write into `record`."""
    llm = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        max_num_seqs=job["max_num_seqs"],
        max_model_len=job["max_model_len"],
        speculative_config=job["speculative"],
        model_loader_extra_config=job["loader"],
        seed=0,
    )
    params = SamplingParams(temperature=0.0, max_tokens=job["new"], ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], params, use_tqdm=False)
    # A request's id inside the engine has the id outside as its first part.
    rounds = {request.split("-")[0]: steps for request, steps in record.rounds.items()}
    result = {
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "rounds": [rounds.get(output.request_id, []) for output in outputs],
        "loads": record.loads,
        "shared": record.shared,
        "metrics": counters(llm),
    }
    del llm
    cleanup_dist_env_and_memory()
    return result


def main(jobs_path: Path, results_path: Path) -> None:
    jobs = json.loads(jobs_path.read_text())
    originals = DefaultModelLoader.load_weights, GPUModelRunner.propose_draft_token_ids
    blocks = DSparkSpeculator.propose, DSparkSpeculator.load_draft_model
    norm_at_once = DFlashQwen3Model._normalize_context_k
    results = []
    for job in jobs:
        record = Record()
        DefaultModelLoader.load_weights = watched_loading(record, originals[0])
        GPUModelRunner.propose_draft_token_ids = watched_drafting(record, originals[1])
        DSparkSpeculator.propose = watched_blocks(record, blocks[0])
        DSparkSpeculator.load_draft_model = watched_sharing(record, blocks[1])
        DFlashQwen3Model._normalize_context_k = norm_layer_by_layer if job["repair"] else norm_at_once
        results.append(run(job, record))
    results_path.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
