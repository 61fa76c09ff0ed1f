"""What drafters made of heads on the target's last hidden state share (Medusa, Hydra).

    x_{n-2} -> target -> f_{n-2} --LM head-->      x_{n-1}   the anchor: the target's own, committed
                            |----- draft head 1 -> x_1       (position n)
                            |----- draft head K -> x_K       (position n + K - 1)

The target has not read the anchor when a block is drafted, so the newest feature is that of the token before it. That
is Medusa's situation too: there the anchor is what the LM head itself says at f. An anchor at position a reads slot
a - 1; a lone first token has nothing before it and its feature is zero, in training as in serving. f is taken after the
final norm, where the LM head reads it, so taps need no scale. Draft head k gives a hidden state; the target's frozen LM
head (or its rows of a reduced draft vocabulary) makes the logits.

    x = f + SiLU(W_0 z + b_0),  then  x + SiLU(W_l x + b_l)  for l = 1 .. num_layers - 1;    W = 0 at the start

Sources: Medusa, arXiv 2401.10774, section 2.1; Hydra, arXiv 2402.05109.
Shapes: R requests, N anchors, T new tokens, S context slots, L = 1 tap, K heads, H hidden, Z inputs of the first layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from outrider.drafters.base import DraftCall, Proposal
from outrider.drafters.candidates import Level
from outrider.drafters.method import DraftModule, MethodSection, Serving, check_fits
from outrider.target import Target
from outrider.target.linear import PackedLinear


@dataclass(frozen=True)
class HeadsConfig:
    """K = `num_heads` draft heads of `num_layers` residual layers each."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_target_layers: int
    num_heads: int
    num_layers: int

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1.")

    @property
    def gamma(self) -> int:
        """Draft tokens per block."""
        return self.num_heads

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The last hidden state, after the final norm."""
        return (self.num_target_layers - 1,)


class HeadsSection(MethodSection):
    """A recipe's choices; the paper's have one layer and 5 heads."""

    num_heads: int = Field(5, ge=1)
    num_layers: int = Field(1, ge=1)


def configure_heads(section: HeadsSection, target: Target) -> HeadsConfig:
    """The target's shapes, the recipe's choices."""
    return HeadsConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=section.draft_vocab(target),
        num_target_layers=target.num_layers,
        num_heads=section.num_heads,
        num_layers=section.num_layers,
    )


class DraftHead(nn.Module):
    """The residual layers of one head. Zero weights make it hand on its hidden state: it starts as the LM head."""

    def __init__(self, inputs: int, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        sizes = [inputs] + [hidden_size] * (num_layers - 1)
        self.layers = nn.ModuleList(nn.Linear(size, hidden_size) for size in sizes)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden_NH: Tensor, inputs_NZ: Tensor) -> Tensor:
        return residual_layers(list(self.layers), hidden_NH, inputs_NZ)


def residual_layers(layers: Sequence[Callable[[Tensor], Tensor]], hidden_NH: Tensor, inputs_NZ: Tensor) -> Tensor:
    """The formula of the module's docstring; the residual stream keeps the type of `hidden_NH`."""
    x_NH = hidden_NH + F.silu(layers[0](inputs_NZ))
    for layer in layers[1:]:
        x_NH = x_NH + F.silu(layer(x_NH))
    return x_NH


class HeadsModule(DraftModule):
    """K draft heads, the trainable part. Parameter names are those of Medusa checkpoints."""

    final_tap = True
    config: HeadsConfig

    def __init__(self, config: HeadsConfig, inputs: Sequence[int]) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(DraftHead(size, config.hidden_size, config.num_layers) for size in inputs)


class LastHidden:
    """The memory of one request: the last hidden state of its newest committed token but the anchor."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        self.hidden_H = torch.zeros(hidden_size, device=device)


class ServedHeads(ABC):
    """The serving side: no cache, one vector per request.

    Weights are copied; train the module, then build this again.
    """

    def __init__(self, module: HeadsModule, target: Target, serving: Serving) -> None:
        config = module.config
        check_fits(config, target, module.final_tap)
        serving.check(config)
        self.config = config
        self.taps, self.gamma, self.accuracy = config.target_layer_ids, config.gamma, serving.accuracy
        self.device = target.device
        self.head, self.heads = serving.head(target), serving.chain_heads(target)
        state = {
            name: tensor.to(target.device, torch.float32, copy=True)
            for name, tensor in module.folded_state_dict().items()
        }
        self.layers = [
            [
                PackedLinear(state[f"blocks.{k}.layers.{i}.weight"], state[f"blocks.{k}.layers.{i}.bias"])
                for i in range(config.num_layers)
            ]
            for k in range(config.num_heads)
        ]

    def new_session(self, capacity: int) -> LastHidden:
        return LastHidden(self.config.hidden_size, self.device)

    def extend(self, sessions: Sequence[LastHidden], tokens: Sequence[Sequence[int]], taps_TLD: Tensor | None) -> None:
        """Remember the last of each session's new taps."""
        assert taps_TLD is not None
        end = 0
        for session, part in zip(sessions, tokens, strict=True):
            end += len(part)
            if part:
                session.hidden_H = taps_TLD[end - 1, -1].float().clone()  # not a view that keeps a prefill alive

    @abstractmethod
    def propose(self, calls: Sequence[DraftCall], floor: float = 0.0) -> list[Proposal]:
        """A chain per call."""

    @abstractmethod
    def levels(self, calls: Sequence[DraftCall], depth: int) -> Level:
        """Draft logits for a tree of that depth, level by level; temperatures and penalties left out."""

    def newest(self, calls: Sequence[DraftCall]) -> Tensor:
        """The features that a block reads, [R, H]."""
        return torch.stack([call.session.hidden_H for call in calls])
