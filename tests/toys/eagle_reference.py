"""EAGLE-3 written a second time, in numpy and float64: one pair after the other, no cache, no batch, no packing.

Positions count from the feature (pair i stands at i), as in the official code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from outrider.drafters.eagle3 import Eagle3
from outrider.target.model import Target

Array = np.ndarray[Any, np.dtype[np.float64]]


def array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


class EagleReference:
    """Reads the module's parameters and aux layer scales by name, and the target's embedding."""

    def __init__(self, module: Eagle3, target: Target) -> None:
        self.config = module.config
        self.weights = {name: array(parameter) for name, parameter in module.named_parameters()}
        self.scale_L = array(module.aux_scale_L)
        self.embed_VH, self.embed_scale = array(target.embed_VD), target.embed_scale
        self.head_VH = array(target.head_VD)

    def norm(self, x: Array, name: str) -> Array:
        rms = np.sqrt((x**2).mean() + self.config.rms_norm_eps)
        return x / rms * self.weights[name + ".weight"]

    def rotated(self, x: Array, position: int) -> Array:
        half = len(x) // 2
        angles = position * self.config.rope_theta ** (-np.arange(half) / half)
        first, second = x[:half], x[half:]
        return np.concatenate(
            (first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles))
        )

    def heads(self, pair: Array, name: str) -> Array:
        return (self.weights[f"midlayer.self_attn.{name}_proj.weight"] @ pair).reshape(-1, self.config.head_dim)

    def pair(self, feature: Array, token: int) -> Array:
        embedded = self.norm(self.embed_VH[token] * self.embed_scale, "midlayer.input_layernorm")
        return np.concatenate((embedded, self.norm(feature, "midlayer.hidden_norm")))

    def chain(self, aux_aLD: Tensor, tokens: Sequence[int], drafted: Sequence[int]) -> list[Array]:
        """What the head reads for draft 1, 2, ..., len(drafted) + 1.

        Args:
            aux_aLD: raw aux hidden states of the tokens before the anchor.
            tokens: x_0 .. x_a, the last is the anchor.
            drafted: x_{a+1} ...
        """
        assert len(tokens) == len(aux_aLD) + 1
        fused = [self.weights["fc.weight"] @ self.inputs_of_fc(aux_LD) for aux_LD in array(aux_aLD)]
        inputs = [(feature, tokens[i + 1]) for i, feature in enumerate(fused)]
        outputs = []
        for k in range(len(drafted) + 1):
            state = self.last_output(inputs)
            outputs.append(self.norm(state, "norm"))
            if k < len(drafted):
                inputs.append((outputs[-1] if self.config.norm_output else state, drafted[k]))
        return outputs

    def inputs_of_fc(self, aux_LD: Array) -> Array:
        if self.config.fc_norm:
            return np.concatenate([self.norm(aux_D, f"fc_norm.{i}") for i, aux_D in enumerate(aux_LD)])
        if self.config.norm_before_fc:
            return self.norm(aux_LD.reshape(-1), "input_norm")
        scaled: Array = (aux_LD / self.scale_L[:, None]).reshape(-1)
        return scaled

    def last_output(self, inputs: Sequence[tuple[Array, int]]) -> Array:
        """The layer's output, before the final norm, for the last of these pairs."""
        pairs = [self.pair(*one) for one in inputs]
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        keys = [[self.rotated(head, i) for head in self.heads(pair, "k")] for i, pair in enumerate(pairs)]
        values = [self.heads(pair, "v") for pair in pairs]
        attended = []
        for h, query in enumerate(self.heads(pairs[-1], "q")):
            query = self.rotated(query, len(pairs) - 1)
            scores = np.array([key[h // group] @ query for key in keys]) / np.sqrt(self.config.head_dim)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            attended.append(sum(w * value[h // group] for w, value in zip(weights, values, strict=True)))
        feature = pairs[-1][len(pairs[-1]) // 2 :] if self.config.norm_before_residual else inputs[-1][0]
        state = feature + self.weights["midlayer.self_attn.o_proj.weight"] @ np.concatenate(attended)
        x = self.norm(state, "midlayer.post_attention_layernorm")
        gate, up = (self.weights[f"midlayer.mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
        return state + self.weights["midlayer.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)

    def log_probs(self, hidden: Array) -> Array:
        """Of the next token, [V], with the whole vocabulary."""
        logits = self.head_VH @ hidden
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
