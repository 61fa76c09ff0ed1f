"""The real vLLM as a function of jobs, and what our drafters do at the same places, for every engine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from outrider.backends.export import export_drafter, target_facts
from outrider.backends.registry import engine_of
from outrider.checkpoints.checkpoint import Checkpoint
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.drafters.base import DraftCall, Drafter
from outrider.evaluation.loadtest.load import mixed_prompts
from outrider.sampling import SamplingParams, SeededSource, SeenTokens
from outrider.target.model import Target
from outrider.utils.packaged import PACKAGE

# Drafters for SmolLM2 that are there already: the packaged ones and others that are named, separated as in PATH.
MODELS = PACKAGE / "models"
NAMED = [Path(name) for name in os.environ.get("OUTRIDER_DRAFTERS", "").split(os.pathsep) if name]
DIRECTORIES = [*sorted(MODELS.glob("*/")), *NAMED]
WORKER = Path(__file__).with_name("vllm_worker.py")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or it takes all cores for itself, busy ones too
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # hooks work in this process only
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# DSpark is in model runner V2 alone, which is made of Triton kernels: slow, for toys and for a few tokens of others.
INTERPRETED = {**ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
ALWAYS_SHARED = {"model.mask_embedding", "model.embed_tokens.weight"}  # parameters that no file of ours fills
UNREAD = {"t2d"}  # for the speculators library; engines skip it by its name


@dataclass(frozen=True)
class Job:
    """One engine's work: greedy responses of `new` tokens, whatever they are.

    `speculative` and `loader` are vLLM's speculative_config and model_loader_extra_config; None: no drafter.
    `repair` DFlash's key norms, which this build for CPUs gets wrong from the second draft layer on (vllm_worker.py).
    """

    model: Path
    prompts: list[list[int]]
    new: int
    max_num_seqs: int
    speculative: dict[str, Any] | None = None
    loader: dict[str, Any] = field(default_factory=dict)
    max_model_len: int = 512
    repair: bool = True

    def drafted(self, checkpoint: Checkpoint, directory: Path, to: str = "vllm") -> Job:
        """The same work with a drafter, exported to `directory` and served as the export says.

        `to`: of `outrider export --to`. vLLM reads the dialects of others too, but their commands do not start it.
        """
        facts = target_facts(str(self.model), torch.float32)
        commands = export_drafter(checkpoint, engine_of(to), directory, facts).commands
        if to != "vllm":
            drafter = checkpoint.weights.module
            named = {"method": drafter.algorithm, "model": str(directory)}
            return replace(self, speculative={**named, "num_speculative_tokens": drafter.config.gamma})
        words = shlex.split(commands[0])
        options = {name: json.loads(value) for name, value in pairwise(words) if name.startswith("--")}
        loader = options.get("--model-loader-extra-config", {})
        return replace(self, speculative=options["--speculative-config"], loader=loader)


@dataclass(frozen=True)
class Load:
    """What one loader did with the tensors of the files, and which parameters were left."""

    model: str
    given: list[str]
    missing: list[str]
    ignored: list[str]


@dataclass(frozen=True)
class Answer:
    """See vllm_worker.py; `rounds` per prompt: (response tokens so far, drafts)."""

    outputs: list[list[int]]
    rounds: list[list[tuple[int, list[int]]]]
    loads: list[Load]
    shared: dict[str, bool]
    metrics: dict[str, Any]

    def blocks(self, target: Target, drafter: Drafter, prompts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
        """(the engine's draft, ours) at every place where the engine drafted."""
        pairs = []
        for prompt, response, rounds in zip(prompts, self.outputs, self.rounds, strict=True):
            inside = [(count, drafts) for count, drafts in rounds if count <= len(response)]
            ours = our_rounds(target, drafter, prompt, response, [count for count, _ in inside])
            pairs += [(drafts, proposal) for (_, drafts), proposal in zip(inside, ours, strict=True)]
        return pairs

    @property
    def accepted_length(self) -> float:
        """By the engine's own counters, bonus token included."""
        prefix = "vllm:spec_decode_num_"
        return 1 + self.metrics[f"{prefix}accepted_tokens"] / self.metrics[f"{prefix}drafts"]


def run_vllm(jobs: list[Job], directory: Path, variables: Mapping[str, str] = ENVIRONMENT) -> list[Answer]:
    """Run jobs one after another in the engine's own environment."""
    directory.mkdir(parents=True, exist_ok=True)
    given, made = directory / "jobs.json", directory / "results.json"
    raw = [{**asdict(job), "model": str(job.model)} for job in jobs]
    given.write_text(json.dumps(raw))
    command = [os.environ["VLLM_PYTHON"], str(WORKER), str(given), str(made)]
    environment = {**os.environ, **variables}
    environment.pop("PYTHONPATH", None)  # our packages are other versions
    log = directory / "log.txt"
    with log.open("w") as file:
        code = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    assert code == 0, f"{log}: ...{log.read_text()[-3000:]}"
    answers = []
    for result in json.loads(made.read_text()):
        rounds = [[(count, drafts) for count, drafts in steps] for steps in result["rounds"]]
        answers.append(Answer(**{**result, "rounds": rounds, "loads": [Load(**load) for load in result["loads"]]}))
    return answers


@torch.inference_mode()
def our_rounds(
    target: Target, drafter: Drafter, prompt: list[int], response: list[int], counts: list[int]
) -> list[list[int]]:
    """What our drafter proposes greedily after so many response tokens, its session grown as in serving."""
    text = torch.tensor([prompt + response])
    aux_TLD = target.forward(text, target.new_cache(text.shape[1]), drafter.aux_layers, logits=0).aux_BTLD
    assert aux_TLD is not None
    session, source, known = drafter.new_session(text.shape[1]), SeededSource(0), 0
    proposals = []
    for count in counts:
        anchor = len(prompt) + count - 1
        drafter.extend([session], [text[0, known:anchor].tolist()], aux_TLD[0, known:anchor])
        known = anchor
        seen = SeenTokens(target.vocab_size)
        call = DraftCall(session, int(text[0, anchor]), SamplingParams(), seen, source)
        proposals.append(drafter.propose([call])[0].tokens)
    return proposals


def smollm_prompts(target: Target, count: int) -> list[list[int]]:
    """Prompts of the shipped sets, all sets alike."""
    assert target.tokenizer is not None
    tasks = ["eval_math", "eval_code", "eval_chat"]
    return [list(prompt.tokens) for prompt in mixed_prompts(target.tokenizer, tasks, count, seed=0)]


def our_acceptance(
    target: Target, drafter: Drafter, prompts: list[list[int]], responses: list[list[int]], new: int, cut: bool = False
) -> list[tuple[int, int]]:
    """(drafted, accepted) in every round that an engine counts for these responses, which must be ours too.

    The engine's first token is not drafted: it comes with the prefill.

    Args:
        new: response tokens that were asked for; a response that ended of itself has fewer.
        cut: drafts are cut so that a round ends with the response at the latest. Otherwise the last round counts all.
    """
    counted = []
    for prompt, response in zip(prompts, responses, strict=True):
        ours = generate(target, prompt + response[:1], drafter, rules=StopRules(new + drafter.gamma, stop_ids=()))
        assert ours.tokens[: len(response) - 1] == response[1:]
        committed = 1
        for stats in ours.rounds:
            drafted = min(drafter.gamma, new - committed - 1) if cut else drafter.gamma
            if committed < len(response) and drafted > 0:
                counted.append((drafted, min(stats.accepted, drafted)))
                committed += len(stats.tokens)
    return counted
