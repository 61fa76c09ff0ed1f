"""What a drafter is to the rest of the house: one `Method`, a line of drafters/catalogue.py.

    recipe section --configure--> config --module--> DraftModule --rows--> objective        (training)
                                                     DraftModule --serve--> Drafter          (decoding)

Training knows a drafter by `DraftModule` alone, decoding by `Drafter` (drafters/base.py) alone, checkpoints by the
fields of `config` and the tensors of the module. Embedding and LM head are the target's, frozen, never the module's.

Shapes: S context slots of all sequences, N anchors (one draft each), K = gamma draft positions, L taps, D target hidden
size, H draft hidden size (= D, because the head is the target's), V vocabulary, Vd draft vocabulary, r rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from outrider.drafters.attention import BlockLayout
from outrider.drafters.base import Drafter, TreeDrafter
from outrider.drafters.serving import Serving, check_fits
from outrider.drafters.tree_size import TreeSize
from outrider.target import Target

__all__ = ["BlockInputs", "DraftModule", "DraftRows", "Method", "MethodSection", "Serving", "check_fits"]


@dataclass(frozen=True)
class BlockInputs:
    """One training forward.

    Context slots are those of each sequence before its last anchor, one sequence after the other. An anchor at
    position a may use slots 0 .. a-1 of its own sequence: the taps there, and the tokens after them, the last of which
    is itself.

    Attributes:
        taps_SLD: raw float32 taps, in the order of `config.target_layer_ids`.
        next_tokens_S: token i + 1 of its sequence, for slot i.
        layout: slots per sequence, positions of the anchors, whose anchors they are.
        previous_NK: x_{k-1} for draft position k = 1..gamma; column 0 holds the anchors.
        embed: the target's frozen, scaled embedding, int64 [...] -> float32 [..., D].
    """

    taps_SLD: Tensor
    next_tokens_S: Tensor
    layout: BlockLayout
    previous_NK: Tensor
    embed: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DraftRows:
    """What the objective reads: draft logits are head(hidden) + w2 latent.

    With `candidates` they are so for the likeliest tokens of head(hidden) only, that many, and no other can be drafted;
    head(hidden) is then trained beside them, so that the right ones are among them.

    Attributes:
        hidden_NKH: normed hidden states; row (n, k) predicts x_k and may depend on previous_NK[n, :k+1] only.
        latent_NKr, w2_Vr: a sequential head's latents and its output matrix [Vd, r]; None without one.
        embedding_NKr: what `confidence` reads beside the hidden state; None if nothing.
        confidence: (hidden [M, H], embedding [M, r] or None) -> logits of c [M], asked of supervised rows, in float32.
        candidates: how many tokens of the draft vocabulary can be drafted at a position; None: all of them.
    """

    hidden_NKH: Tensor
    latent_NKr: Tensor | None = None
    w2_Vr: Tensor | None = None
    embedding_NKr: Tensor | None = None
    confidence: Callable[[Tensor, Tensor | None], Tensor] | None = None
    candidates: int | None = None


class DraftModule(nn.Module, ABC):
    """A trainable drafter: `config`, parameters, and the training forward `rows`.

    Taps differ in size by orders of magnitude, so training measures `tap_scale_L` and a module that needs taps of order
    one divides them by it. The constants fold into the weight named by `tap_weight` when weights are saved. A module
    whose first act is to norm its taps may leave the scale alone: `tap_weight` is then None.

    Attributes:
        algorithm: the method's name, as in a recipe's `drafter.algorithm`.
        final_tap: whether the target's last hidden state (after its final norm) may be one of the taps.
        tap_weight: name of the weight [out, L * D (+ more)] whose first columns read the flattened taps / tap_scale.
        config: a frozen dataclass with at least hidden_size, vocab_size, draft_vocab_size, target_layer_ids,
            num_target_layers and gamma (a field or a property).
        tap_scale_L: ones unless training set it.
    """

    algorithm: ClassVar[str]
    final_tap: ClassVar[bool] = False
    tap_weight: str | None = None
    config: Any
    tap_scale_L: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("tap_scale_L", torch.ones(len(config.target_layer_ids)), persistent=False)

    @abstractmethod
    def rows(self, inputs: BlockInputs) -> DraftRows:
        """The training forward: all draft positions of all anchors, given the true previous tokens."""

    def _tap_columns(self) -> Tensor:
        return self.tap_scale_L.repeat_interleave(self.config.hidden_size)

    def folded_state_dict(self) -> dict[str, Tensor]:
        """Weights that take raw taps: `tap_scale_L` divided out of the columns that read them. What is saved."""
        state = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        if self.tap_weight is not None:
            scale = self._tap_columns()
            weight = state[self.tap_weight].clone()
            weight[:, : len(scale)] /= scale
            state[self.tap_weight] = weight
        return {name: tensor.contiguous() for name, tensor in state.items()}

    @torch.no_grad()
    def rescale_taps(self, scale_L: Tensor) -> None:
        """Divide taps by `scale_L` [L] from now on, in place, without changing what is computed from raw ones."""
        before = self._tap_columns()
        self.tap_scale_L.copy_(scale_L)
        if self.tap_weight is not None:
            self.get_parameter(self.tap_weight)[:, : len(before)].mul_(self._tap_columns() / before)


class MethodSection(BaseModel):
    """What a recipe's `drafter:` may set for every method; subclasses narrow `algorithm` to a Literal with a default.

    With `start_from`, fields that are not set are those of the checkpoint, and those that are must agree with it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    automatic: ClassVar[frozenset[str]] = frozenset({"target_layer_ids"})  # fields that null leaves to the method

    algorithm: str
    start_from: str | None = None  # a drafter directory to go on from, relative to the recipe or to where you are
    draft_vocab_size: int | None = Field(None, ge=2)  # null: the target's
    initialize_from_target: bool = True  # where the method knows how; noise otherwise

    def draft_vocab(self, target: Target) -> int:
        """Tokens that can be drafted."""
        return min(self.draft_vocab_size or target.vocab_size, target.vocab_size)

    def beside(self, config: Any, target: Target) -> dict[str, tuple[object, object]]:
        """{field: (what the recipe sets it to, what a checkpoint with this config has)}, in comparable terms.

        Fields that the config has under the same name need nothing more; a subclass adds those it turns into others.
        """
        set_here = {name: getattr(self, name) for name in self.model_fields_set - {"start_from", "algorithm"}}
        asked = {name: value for name, value in set_here.items() if value is not None or name not in self.automatic}
        pairs = {name: (value, getattr(config, name, None)) for name, value in asked.items()}
        if "target_layer_ids" in pairs:
            pairs["target_layer_ids"] = (sorted(asked["target_layer_ids"]), sorted(config.target_layer_ids))
        if "draft_vocab_size" in pairs:
            pairs["draft_vocab_size"] = (self.draft_vocab(target), config.draft_vocab_size)
        if "initialize_from_target" in pairs:
            pairs["initialize_from_target"] = (self.initialize_from_target, False)
        return pairs


@dataclass(frozen=True)
class Method:
    """One line of the catalogue.

    Attributes:
        name: in recipes (`drafter.algorithm`) and in config.json.
        section: what a recipe may set.
        configure: (section, target) -> config; ValueError where they do not go together.
        config: the frozen dataclass, saved field by field.
        module: config -> module, with fresh weights.
        serve: the module, ready to draft for a target. It copies what it needs: training goes on with the module.
        initialize: sets fresh weights from the target's, given a few token sequences; None: noise is all there is.
            Called only for targets with Llama-shaped layers (`target.family.lean`).
        branch: (what `serve` made, size) -> the same, drafting trees of that size; ValueError where it has no such
            trees. None: it drafts chains only.
    """

    name: str
    section: type[MethodSection]
    configure: Callable[[Any, Target], Any]
    config: type[Any]
    module: Callable[[Any], DraftModule]
    serve: Callable[[Any, Target, Serving], Drafter]
    initialize: Callable[[Any, Target, Sequence[Sequence[int]]], None] | None = None
    branch: Callable[[Any, TreeSize], TreeDrafter] | None = None

    def defaults(self) -> dict[str, Any]:
        """What a recipe's section says where it says nothing, as JSON."""
        return self.section(algorithm=self.name).model_dump(mode="json")
