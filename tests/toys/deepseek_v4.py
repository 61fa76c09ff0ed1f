"""A DeepSeek-V4 checkpoint with DSpark at toy size, and its draft layers written again in loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4Config

RAW: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 10,
    "o_lora_rank": 7,
    "o_groups": 2,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.7,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "swiglu_limit": 0.9,
    "num_hash_layers": 1,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 777.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"type": "yarn", "factor": 16},
    "sliding_window": 8,
    "max_position_embeddings": 256,
    "compress_ratios": [0, 4, 4, 4, 4, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 3,
    "dspark_target_layer_ids": [2, 3, 4],
    "dspark_markov_rank": 6,
    "hidden_act": "silu",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]},
}
STAGES = 3


def target_config(**changes: Any) -> DeepseekV4Config:
    """The target of that checkpoint, with every kind of layer; texts of tests leave its windows and fill its entries.

    The indexer picks 3 entries. It has 8 heads, so that entries whose products are all negative do not tie.
    """
    not_its = ("architectures", "model_type", "quantization_config", "compress_ratios", "rope_scaling")
    shared = {name: value for name, value in RAW.items() if name not in not_its}
    own: dict[str, Any] = {
        "compress_ratios": [0, 4, 128, 4, 128],
        "compress_rate_hca": 8,
        "index_n_heads": 8,
        "index_head_dim": 6,
        "index_topk": 3,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
        "eos_token_id": 1,
        "bos_token_id": 2,
        "pad_token_id": 0,
    }
    return DeepseekV4Config(**{**shared, **own, **changes})


def published(seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under the published names: DSpark's, and some of the target's own."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return 0.25 * torch.randn(shape, generator=generator)

    H, Q, E, n = RAW["hidden_size"], RAW["num_attention_heads"], RAW["head_dim"], RAW["hc_mult"]
    q, groups, low = RAW["q_lora_rank"], RAW["o_groups"], RAW["o_lora_rank"]
    inner, V, r = RAW["moe_intermediate_size"], RAW["vocab_size"], RAW["dspark_markov_rank"]
    tensors = {"embed.weight": draw(V, H), "head.weight": draw(V, H), "layers.0.attn.wq_a.weight": draw(q, H)}
    for stage in range(STAGES):
        own = {
            "attn_norm.weight": 1 + draw(H),
            "ffn_norm.weight": 1 + draw(H),
            "attn.wq_a.weight": draw(q, H),
            "attn.q_norm.weight": 1 + draw(q),
            "attn.wq_b.weight": draw(Q * E, q),
            "attn.wkv.weight": draw(E, H),
            "attn.kv_norm.weight": 1 + draw(E),
            "attn.attn_sink": draw(Q),
            "attn.wo_a.weight": draw(groups * low, Q * E // groups),
            "attn.wo_b.weight": draw(H, groups * low),
            "ffn.gate.weight": draw(RAW["n_routed_experts"], H),
            "ffn.gate.bias": draw(RAW["n_routed_experts"]),
        }
        experts = [f"experts.{e}" for e in range(RAW["n_routed_experts"])]
        for expert in ("shared_experts", *experts):
            own |= {f"ffn.{expert}.w{i}.weight": draw(inner, H) for i in (1, 3)}
            own[f"ffn.{expert}.w2.weight"] = draw(H, inner)
        for place in ("attn", "ffn"):
            own |= {f"hc_{place}_fn": draw((2 + n) * n, n * H), f"hc_{place}_base": draw((2 + n) * n)}
            own[f"hc_{place}_scale"] = 1 + draw(3)
        tensors |= {f"mtp.{stage}.{name}": tensor for name, tensor in own.items()}
    tensors |= {"mtp.0.main_proj.weight": draw(H, 3 * H), "mtp.0.main_norm.weight": 1 + draw(H)}
    last = {
        "norm.weight": 1 + draw(H),
        "hc_head_fn": draw(n, n * H),
        "hc_head_base": draw(n),
        "hc_head_scale": 1 + draw(1),
        "markov_head.markov_w1.weight": draw(V, r),
        "markov_head.markov_w2.weight": draw(V, r),
        "confidence_head.proj.weight": draw(1, H + r),
    }
    return tensors | {f"mtp.{STAGES - 1}.{name}": tensor for name, tensor in last.items()}


def write(directory: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    """The target's checkpoint directory, weights in two files."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = {**RAW, **changes}
    (directory / "config.json").write_text(
        json.dumps({name: value for name, value in raw.items() if value is not None})
    )
    names, files = sorted(tensors), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    placed = {name: files[number % 2] for number, name in enumerate(names)}
    for file in files:
        save_file({name: tensors[name].contiguous() for name in names if placed[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return directory


# ----------------------------------------------------------------------------
# The draft layers row by row, float64.
# ----------------------------------------------------------------------------


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softmax(x: Any) -> Any:
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


class Reference:
    """DSpark of a checkpoint by the tensors' published names."""

    def __init__(self, tensors: dict[str, Tensor], raw: dict[str, Any] = RAW) -> None:
        self.raw, self.w = raw, {name: tensor.double().numpy() for name, tensor in tensors.items()}

    def rms(self, x: Any, gain: Any = 1.0) -> Any:
        return x / np.sqrt((x * x).mean() + self.raw["rms_norm_eps"]) * gain

    def rotate(self, x: Any, position: int) -> Any:
        """The last dims, neighbours together."""
        width, out = self.raw["qk_rope_head_dim"], x.copy()
        for pair in range(width // 2):
            angle = position * self.raw["rope_theta"] ** (-2 * pair / width)
            i = len(x) - width + 2 * pair
            out[i] = x[i] * np.cos(angle) - x[i + 1] * np.sin(angle)
            out[i + 1] = x[i + 1] * np.cos(angle) + x[i] * np.sin(angle)
        return out

    def maps(self, name: str, streams: Any) -> tuple[Any, Any, Any]:
        n, eps = self.raw["hc_mult"], self.raw["hc_eps"]
        mixes = self.w[f"{name}_fn"] @ self.rms(streams.reshape(-1))
        scale, base = self.w[f"{name}_scale"], self.w[f"{name}_base"]
        reading = sigmoid(mixes[:n] * scale[0] + base[:n]) + eps
        writing = 2 * sigmoid(mixes[n : 2 * n] * scale[1] + base[n : 2 * n])
        matrix = (mixes[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)
        matrix = np.stack([softmax(row) for row in matrix]) + eps
        for step in range(2 * self.raw["hc_sinkhorn_iters"] - 1):
            for i in range(n):
                if step % 2 == 0:
                    matrix[:, i] /= matrix[:, i].sum() + eps
                else:
                    matrix[i] /= matrix[i].sum() + eps
        return reading, writing, matrix

    def connected(self, name: str, rows: list[Any], sublayer: Any) -> list[Any]:
        maps = [self.maps(name, streams) for streams in rows]
        inputs = [sum(a * x for a, x in zip(m[0], streams, strict=True)) for m, streams in zip(maps, rows, strict=True)]
        out = []
        for (_, writing, matrix), streams, y in zip(maps, rows, sublayer(inputs), strict=True):
            n = len(streams)
            out.append(np.stack([writing[j] * y + sum(matrix[i, j] * streams[i] for i in range(n)) for j in range(n)]))
        return out

    def latent(self, stage: int, x: Any, position: int) -> Any:
        w, name = self.w, f"mtp.{stage}.attn"
        return self.rotate(self.rms(w[f"{name}.wkv.weight"] @ x, w[f"{name}.kv_norm.weight"]), position)

    def attention(self, stage: int, rows: list[Any], context: list[Any]) -> list[Any]:
        w, name, raw = self.w, f"mtp.{stage}.attn", self.raw
        Q, E, groups, start = raw["num_attention_heads"], raw["head_dim"], raw["o_groups"], len(context)
        first = max(0, start - raw["sliding_window"])
        seen = [self.latent(stage, context[p], p) for p in range(first, start)]
        seen += [self.latent(stage, x, start + k) for k, x in enumerate(rows)]
        out = []
        for k, x in enumerate(rows):
            q = self.rms(w[f"{name}.wq_a.weight"] @ x, w[f"{name}.q_norm.weight"])
            heads = (w[f"{name}.wq_b.weight"] @ q).reshape(Q, E)
            mixed = []
            for head in range(Q):
                query = self.rotate(self.rms(heads[head]), start + k)
                scores = np.array([query @ key / np.sqrt(E) for key in seen] + [w[f"{name}.attn_sink"][head]])
                value = sum(p * key for p, key in zip(softmax(scores)[:-1], seen, strict=True))
                mixed.append(self.rotate(value, -(start + k)))
            low, width = [], Q // groups
            for group in range(groups):
                part = np.concatenate(mixed[group * width : (group + 1) * width])
                rank = raw["o_lora_rank"]
                low.append(w[f"{name}.wo_a.weight"][group * rank : (group + 1) * rank] @ part)
            out.append(w[f"{name}.wo_b.weight"] @ np.concatenate(low))
        return out

    def expert(self, name: str, x: Any) -> Any:
        limit = self.raw["swiglu_limit"]
        gate = np.minimum(self.w[f"{name}.w1.weight"] @ x, limit)
        up = np.clip(self.w[f"{name}.w3.weight"] @ x, -limit, limit)
        return self.w[f"{name}.w2.weight"] @ (gate * sigmoid(gate) * up)

    def experts(self, stage: int, x: Any) -> Any:
        name = f"mtp.{stage}.ffn"
        scores = np.sqrt(np.log1p(np.exp(self.w[f"{name}.gate.weight"] @ x)))
        ranked = sorted(range(len(scores)), key=lambda e: -(scores[e] + self.w[f"{name}.gate.bias"][e]))
        chosen = ranked[: self.raw["num_experts_per_tok"]]
        total = sum(scores[e] for e in chosen)
        routed = sum(scores[e] / total * self.expert(f"{name}.experts.{e}", x) for e in chosen)
        return self.raw["routed_scaling_factor"] * routed + self.expert(f"{name}.shared_experts", x)

    def hidden(self, features_TD: Any, embedded_KH: Any) -> Any:
        """Hidden states of a block behind these committed tokens, before the final norm: [K, H]."""
        w = self.w
        context = [self.rms(w["mtp.0.main_proj.weight"] @ x, w["mtp.0.main_norm.weight"]) for x in features_TD]
        rows = [np.stack([x] * self.raw["hc_mult"]) for x in embedded_KH]
        for stage in range(STAGES):

            def attend(xs: list[Any], stage: int = stage) -> list[Any]:
                return self.attention(stage, [self.rms(x, w[f"mtp.{stage}.attn_norm.weight"]) for x in xs], context)

            def choose(xs: list[Any], stage: int = stage) -> list[Any]:
                return [self.experts(stage, self.rms(x, w[f"mtp.{stage}.ffn_norm.weight"])) for x in xs]

            rows = self.connected(f"mtp.{stage}.hc_attn", rows, attend)
            rows = self.connected(f"mtp.{stage}.hc_ffn", rows, choose)
        head, found = f"mtp.{STAGES - 1}.hc_head", []
        for streams in rows:
            mixes = w[f"{head}_fn"] @ self.rms(streams.reshape(-1))
            reading = sigmoid(mixes * w[f"{head}_scale"] + w[f"{head}_base"]) + self.raw["hc_eps"]
            found.append(sum(a * x for a, x in zip(reading, streams, strict=True)))
        return np.stack(found)

    def logits(self, hidden_KH: Any, previous: list[int], head_VH: Any) -> tuple[Any, Any]:
        """Draft logits [K, V] and logits of the confidences [K], given the token before each position."""
        w, last = self.w, f"mtp.{STAGES - 1}"
        rows, confidences = [], []
        for x, token in zip(hidden_KH, previous, strict=True):
            embedding = w[f"{last}.markov_head.markov_w1.weight"][token]
            rows.append(head_VH @ self.rms(x, w[f"{last}.norm.weight"]))
            rows[-1] = rows[-1] + w[f"{last}.markov_head.markov_w2.weight"] @ embedding
            confidences.append(w[f"{last}.confidence_head.proj.weight"][0] @ np.concatenate([x, embedding]))
        return np.stack(rows), np.array(confidences)
