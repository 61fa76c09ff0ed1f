"""DFlash with context rows against its equations in one dense attention; trained equals served; text is the target's.

How its blocks are drawn and verified is DFlash's, which tests/proof enumerates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.contrib.dflash_input import DFlashInput, DFlashInputConfig
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.drafters.base import DrafterWeights
from outrider.target.model import Target
from tests.toys.alignment import check_alignment
from tests.toys.dialects import config_of, made
from tests.toys.eagle3 import inputs_for
from tests.toys.targets import toy_samples, toy_target, with_mask_token

TOLERANCE = 1e-4
BOTH = pytest.mark.parametrize("features", [True, False])


def make(**changes: Any) -> DFlashInput:
    module = made("dflash_input", **changes).weights.module
    assert isinstance(module, DFlashInput)
    return module


class Reference:
    """Context and block as rows of one sequence in float64, each pair of rows visible or not by the equations."""

    def __init__(self, module: DFlashInput, target: Target) -> None:
        self.config, self.target = module.config, target
        self.weights = {name: tensor.double() for name, tensor in module.folded_state_dict().items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x / (mean + self.config.rms_norm_eps).sqrt() * self.weights[name]

    def rotated(self, x_SQE: Tensor) -> Tensor:
        half = self.config.head_dim // 2
        speed = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turn = torch.polar(torch.ones(()).double(), torch.arange(len(x_SQE)).double()[:, None] * speed)[:, None]
        turned = torch.complex(x_SQE[..., :half], x_SQE[..., half:]) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    def heads(self, x_SH: Tensor, layer: str, kind: str) -> Tensor:
        found = (x_SH @ self.weights[f"{layer}.self_attn.{kind}_proj.weight"].T).unflatten(
            -1, (-1, self.config.head_dim)
        )
        if kind != "v":
            found = self.rotated(self.norm(found, f"{layer}.self_attn.{kind}_norm.weight"))
        shared = self.config.num_attention_heads // self.config.num_key_value_heads
        return found if kind == "q" else found.repeat_interleave(shared, dim=1)

    def hidden(self, tokens: list[int], aux_aLD: Tensor, anchor: int) -> Tensor:
        """Normed hidden states of the drafting rows behind `tokens` and their aux hidden states."""
        config, length = self.config, len(tokens)
        block = [anchor] + (config.block_size - 1) * [config.mask_token_id]
        x_SH = self.target.embed_VD[[*tokens, *block]].double() * self.target.embed_scale
        if config.target_features:
            features = self.norm(aux_aLD.double().flatten(-2) @ self.weights["fc.weight"].T, "hidden_norm.weight")
            context = torch.cat((x_SH[:length], features), dim=-1) @ self.weights["context_in.weight"].T
            x_SH = torch.cat((context, x_SH[length:]))
        sees_SS = torch.ones(len(x_SH), len(x_SH), dtype=torch.bool).tril()
        sees_SS[length:] = True
        for i in range(config.num_hidden_layers):
            name = f"layers.{i}"
            normed = self.norm(x_SH, f"{name}.input_layernorm.weight")
            q, k, v = (self.heads(normed, name, kind) for kind in "qkv")
            scores = torch.einsum("sqe,tqe->qst", q, k) / config.head_dim**0.5
            attended = scores.masked_fill(~sees_SS, -torch.inf).softmax(-1) @ v.transpose(0, 1)
            x_SH = x_SH + attended.transpose(0, 1).flatten(1) @ self.weights[f"{name}.self_attn.o_proj.weight"].T
            normed = self.norm(x_SH, f"{name}.post_attention_layernorm.weight")
            gate, up = (normed @ self.weights[f"{name}.mlp.{kind}_proj.weight"].T for kind in ("gate", "up"))
            x_SH = x_SH + (gate * gate.sigmoid() * up) @ self.weights[f"{name}.mlp.down_proj.weight"].T
        return self.norm(x_SH, "norm.weight")[-config.gamma :]


@BOTH
@torch.no_grad()
def test_the_training_forward_equals_the_reference(features: bool) -> None:
    target, module = toy_target(), make(target_features=features)
    reference = Reference(module, target)
    lengths, anchors, sequence = [9, 12], [4, 9, 2, 12], [0, 0, 1, 1]
    inputs = inputs_for(target, lengths, anchors, sequence, module.config.gamma)
    rows = module.rows(inputs)
    for n, (anchor, number) in enumerate(zip(anchors, sequence, strict=True)):
        context = slice(lengths[0] * number, lengths[0] * number + anchor)
        tokens = inputs.tokens_S[context].tolist()
        expected = reference.hidden(tokens, inputs.aux_SLD[context], int(inputs.previous_NK[n, 0]))
        torch.testing.assert_close(rows.hidden_NKH[n].double(), expected, atol=TOLERANCE, rtol=0)


@BOTH
@torch.no_grad()
def test_served_blocks_equal_the_reference_over_rounds(features: bool) -> None:
    """Two requests whose caches grow by different numbers of tokens."""
    target, module = toy_target("qwen3"), make(target_features=features)
    reference, served = Reference(module, target), DrafterWeights(module).serve(target)
    generator = torch.Generator().manual_seed(5)
    sessions = [served.new_session(64) for _ in range(2)]
    tokens: list[list[int]] = [[], []]
    aux: list[list[Tensor]] = [[], []]
    for counts in ((7, 3), (1, 4), (5, 1)):
        new = [torch.randint(4, 97, (count,), generator=generator).tolist() for count in counts]
        states = [5 * torch.randn(count, 3, 32, generator=generator) for count in counts]
        served.extend(sessions, new, torch.cat(states))
        for i in range(2):
            tokens[i] += new[i]
            aux[i].append(states[i])
        hidden_RKH = served.block_hidden(sessions, [11, 12])
        for i, anchor in enumerate((11, 12)):
            expected = reference.hidden(tokens[i], torch.cat(aux[i]), anchor)
            torch.testing.assert_close(hidden_RKH[i].double(), expected, atol=TOLERANCE, rtol=0)


@BOTH
@pytest.mark.parametrize("draft_vocab", [97, 40])
def test_trained_equals_served(features: bool, draft_vocab: int) -> None:
    weights = made("dflash_input", target_features=features, draft_vocab_size=draft_vocab).weights
    ids = torch.arange(97) if weights.draft_ids_Vd is None else weights.draft_ids_Vd
    assert check_alignment(toy_target("qwen3"), weights.module, toy_samples(4), ids) > 20


@BOTH
def test_saved_and_served_its_text_is_the_targets(tmp_path: Path, features: bool) -> None:
    target, module = toy_target(), make(target_features=features)
    save_drafter(Checkpoint(DrafterWeights(module)), tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert loaded.weights.config == module.config
    assert ("fc.weight" in loaded.weights.module.state_dict()) == features
    prompt, rules = [5, 17, 23, 40], StopRules(24, stop_ids=())
    plain = generate(target, prompt, rules=rules)
    drafted = generate(target, prompt, loaded.serve(target), rules=rules)
    assert drafted.tokens == plain.tokens


def test_it_begins_with_the_targets_layers_and_both_inputs() -> None:
    target = with_mask_token(toy_target())
    config = DFlashInputConfig.from_target(target, num_aux_layers=2, num_hidden_layers=2)
    module = DFlashInput(config)
    module.initialize_from(target, [[5, 6, 7, 8]])
    embedded, aux = torch.randn(3, 32), torch.randn(3, 2, 32)
    torch.testing.assert_close(module.context_rows(embedded, aux), embedded + module.context(aux))
    theirs = target.decoder.layers[-2].mlp.up_proj.weight
    assert torch.equal(module.layers[0].get_parameter("mlp.up_proj.weight"), theirs)


@pytest.mark.parametrize("changes", [{"sliding_window": 7}, {"is_causal": True}])
def test_other_patterns_of_attention_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sliding_window, layer_types and is_causal have no place here"):
        config_of("dflash_input", **changes)
