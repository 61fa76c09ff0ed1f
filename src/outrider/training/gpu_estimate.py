"""What a training would take on GPUs that are not here, from the target's config and tokenizer alone.

    seconds of a step = multiplications and additions / (GPUs * utilisation * peak) + optimizer + gradients' exchange

Per conversation of L tokens with A anchors, blocks of K drafts, T active parameters in the layers of the target, P
parameters of the drafter that block rows and P_c that context rows are multiplied with, and heads of V and Vd tokens:

    features    2 T L + 2 L^2 (query width) (layers) + 2 V D (response)     forward of the target, float32 logits' sums
    drafter     6 (P A K + P_c L), 8 where activations are recomputed       forward and backward
                + 14 A K (context or window) (query width) (layers)         its attention
    objective   6 A K Vd (H + rank)                                         both logits, and the gradients back

It is a model, compared with no device yet: conversations are taken to have `TOKENS` tokens, nothing overlaps, and
features are made anew at every visit. Of experts P counts those that a row takes. Targets of `TARGETS` need no file.
Shapes: D target hidden, H draft hidden.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerFast

from outrider.data.sources import iterate_prompts
from outrider.drafters.base import DraftModule
from outrider.drafters.layers import layer_shapes
from outrider.target.loading import outline_model
from outrider.target.model import Target, outline_target
from outrider.training.dataset import known_samples
from outrider.training.estimate import run_steps, sequences_per_step
from outrider.training.loss import GPU_CHUNK_BYTES
from outrider.training.recipe import Recipe
from outrider.training.setup import new_drafter

UTILISATION = 0.4  # of the peak, that products of a training reach; assumed
TOKENS = 1500  # of a conversation, where the recipe allows as many; assumed
_BFLOAT16, _FLOAT32 = 2, 4
_CONTEXT = re.compile(r"(^|\.)(fc|k_proj|v_proj|wkv)\.weight$")
_NOT_OF_ROWS = re.compile(r"(^|\.)(fc|markov_w2)\.weight$")  # of context alone; part of the objective


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU: bytes of memory, dense bfloat16 operations, bytes of memory and of links (one way) a second.

    Source: NVIDIA's data sheets of the SXM boards.
    """

    memory: float
    operations: float
    bandwidth: float
    links: float


GPUS = {
    "a100": Gpu(memory=80e9, operations=312e12, bandwidth=2.0e12, links=300e9),
    "h100": Gpu(memory=80e9, operations=989e12, bandwidth=3.35e12, links=450e9),
    "h200": Gpu(memory=141e9, operations=989e12, bandwidth=4.8e12, links=450e9),
    "b200": Gpu(memory=180e9, operations=2250e12, bandwidth=8.0e12, links=900e9),
}


# What a plan needs of config.json. Sources: the models' pages on the hub; of Gemma 4 12B what SGLang's test of its
# config holds. tests/training/test_gpu_estimate.py compares the parameters with the published counts.
_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
TARGETS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-14B": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama",
        "head_dim": 128,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "google/gemma-4-12B-it": {
        "model_type": "gemma4_unified_text",
        "head_dim": 256,
        "global_head_dim": 512,
        "vocab_size": 262144,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class GpuEstimate:
    """Of a recipe on `count` GPUs: bytes on each GPU and seconds of a step, by what takes them; `steps` of the run."""

    gpu: Gpu
    count: int
    steps: int
    memory: dict[str, float]
    seconds: dict[str, float]

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def hours(self) -> float:
        return self.steps * self.step_seconds / 3600


def parse_gpus(text: str) -> tuple[int, Gpu]:
    """`8xh100` -> (8, what an H100 is).

    Raises:
        ValueError: not of that form, or a GPU that is not known.
    """
    found = re.fullmatch(r"([1-9]\d*)x(\w+)", text.lower())
    if found is None or found[2] not in GPUS:
        raise ValueError(f"--gpus {text!r} is not a number and a GPU, as 8xh100; known are {', '.join(GPUS)}.")
    return int(found[1]), GPUS[found[2]]


def planned_target(name: str, mask_token: str) -> Target:
    """A target without weights: one of `TARGETS` from its shapes alone, another one from its config and tokenizer.

    Args:
        mask_token: the one token of the tokenizer that stands in where there are shapes alone.

    Raises:
        ValueError: see `outline_target`.
    """
    if name not in TARGETS:
        return outline_target(name)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({mask_token: 0})), mask_token=mask_token)
    return Target(outline_model(AutoConfig.for_model(**TARGETS[name]), Path(name)), tokenizer, name=name)


def _conversations(recipe: Recipe) -> float:
    """Those that are trained on: each source's limit, or what is in it; without sources those of the responses.

    Raises:
        ValueError: a source cannot be read.
    """
    data = recipe.data
    if not data.prompts:
        return float(len({sample.id for sample in known_samples(recipe)}))
    sizes = (
        sum(1 for _ in iterate_prompts(source.path, data.directory)) if source.limit is None else source.limit
        for source in data.prompts
    )
    return float(sum(sizes) - data.held_out)


def active_parameters(target: Target) -> float:
    """Parameters of the decoder layers that a token is multiplied with: of experts those that are chosen for it."""
    config = target.config
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    share = (getattr(config, "num_experts_per_tok", None) or 1) / experts if experts else 1.0
    layers = target.decoder.layers.named_parameters()
    return sum(p.numel() * (share if ".experts." in name else 1.0) for name, p in layers)


def estimate_on_gpus(recipe: Recipe, count: int, gpu: Gpu) -> GpuEstimate:
    """What `outrider train` of a recipe takes on so many of these GPUs, one rank each, in bfloat16.

    Raises:
        ValueError: the target cannot be found, its family or the drafter's fields do not fit, or the recipe goes on
            from another drafter.
    """
    if recipe.start_from is not None:
        raise ValueError("--gpus plans new drafters: leave start_from out.")
    target = planned_target(recipe.target, getattr(recipe.drafter, "mask_token", None) or "<mask>")
    with torch.device("meta"):
        drafter = new_drafter(recipe, target)
    load = _Load.of(recipe, drafter)
    conversations = 0.0 if recipe.optimizer.epochs is None else _conversations(recipe)
    work = _operations(recipe, target, drafter, load=load)
    trained = float(sum(p.numel() for p in drafter.parameters()))
    shards = count if recipe.parallel == "fsdp" else 1
    seconds = {name: operations / (count * UTILISATION * gpu.operations) for name, operations in work.items()}
    seconds["optimizer"] = 8 * _FLOAT32 * trained / shards / gpu.bandwidth  # four tensors read, four written
    if count > 1:
        seconds["gradients' exchange"] = 2 * _FLOAT32 * trained / gpu.links
    memory = _memory(recipe, target, drafter, load=load, count=count)
    return GpuEstimate(gpu, count, run_steps(recipe, conversations, load.response), memory=memory, seconds=seconds)


@dataclass(frozen=True)
class _Load:
    """Of a step, on average: conversations, tokens of one and those of its responses, its anchors, drafts of each."""

    sequences: float
    tokens: float
    response: float
    anchors: float
    drafts: int

    @staticmethod
    def of(recipe: Recipe, drafter: DraftModule) -> _Load:
        data = recipe.data
        longest = data.max_prompt_tokens + data.max_new_tokens
        tokens = min(TOKENS, longest)
        response = tokens * data.max_new_tokens / longest
        anchors = min(recipe.optimizer.anchors_per_sequence, response)
        sequences = sequences_per_step(recipe, response)
        return _Load(sequences, tokens, response, anchors=anchors, drafts=drafter.config.gamma)


def _operations(recipe: Recipe, target: Target, drafter: DraftModule, load: _Load) -> dict[str, float]:
    """Of a step, all GPUs together."""
    S, L, rows = load.sequences, load.tokens, load.anchors * load.drafts
    hidden, config = target.hidden_size, drafter.config
    tables = {id(module.weight) for module in drafter.modules() if isinstance(module, nn.Embedding)}
    parameters = [(name, p.numel()) for name, p in drafter.named_parameters() if id(p) not in tables]
    products = sum(size * drafter.active_share(name) for name, size in parameters if not _NOT_OF_ROWS.search(name))
    context = sum(size for name, size in parameters if _CONTEXT.search(name))
    width = _query_width(target)
    passes = 8 if recipe.optimizer.checkpoint_activations else 6
    window = None if getattr(config, "layer_types", ()) else getattr(config, "sliding_window", None)
    attended = 14 * rows * min(L - load.response / 2, window or L) * width * _layers(drafter)
    rank = getattr(config, "markov_rank", 0) or 0
    return {
        "features": S * (2 * active_parameters(target) * L + 2 * L**2 * width * target.num_layers)
        + S * 2 * target.vocab_size * hidden * load.response,
        "drafter": S * (passes * (products * rows + context * L) + attended),
        "objective": S * 6 * rows * config.draft_vocab_size * (hidden + rank),
    }


def _memory(recipe: Recipe, target: Target, drafter: DraftModule, load: _Load, count: int) -> dict[str, float]:
    """Bytes on one GPU."""
    config, optimizer, hidden = drafter.config, recipe.optimizer, target.hidden_size
    trained = sum(p.numel() for p in drafter.parameters())
    whole = sum(p.numel() for p in target.model.parameters())
    layers = sum(p.numel() for p in target.decoder.layers.parameters())
    own = whole - layers + layers / count if recipe.shard_target and count > 1 else whole
    reduced = config.draft_vocab_size < target.vocab_size
    share = load.sequences / count
    anchors = min(share * load.anchors, optimizer.max_anchors_per_forward or share * load.anchors)
    anchors = max(anchors, load.anchors)  # one conversation is never divided
    tokens = max(load.tokens, anchors / load.anchors * load.tokens)
    rows, width = anchors * load.drafts, _query_width(target)
    experts = 1 + getattr(config, "num_experts_per_tok", 0)  # the shared one, or the only one
    inner = experts * getattr(config, "intermediate_size", 4 * hidden)
    # Of a row and layer: the residual stream twice in float32, what linears and attention read in bfloat16.
    layer = 2 * _FLOAT32 * hidden + _BFLOAT16 * (2 * hidden + 3 * width + 3 * inner)
    kept = _FLOAT32 * hidden if optimizer.checkpoint_activations else layer
    activations = rows * (kept * _layers(drafter) + layer) + 3 * _FLOAT32 * rows * hidden
    return {
        "drafter, gradients, moments": 16 * trained / (count if recipe.parallel == "fsdp" else 1),
        "target": _BFLOAT16 * own,
        "head of the draft vocabulary": _BFLOAT16 * config.draft_vocab_size * hidden if reduced else 0.0,
        "features of a forward": tokens * (len(config.target_layer_ids) * (_BFLOAT16 + _FLOAT32)) * hidden,
        "activations": activations,
        "logits of a chunk": float(GPU_CHUNK_BYTES),
    }


def _query_width(target: Target) -> int:
    shapes = layer_shapes(target)
    return int(shapes["num_attention_heads"] * shapes["head_dim"])


def _layers(drafter: DraftModule) -> int:
    return int(getattr(drafter.config, "num_hidden_layers", 1))
