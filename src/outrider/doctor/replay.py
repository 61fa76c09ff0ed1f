"""Acceptance that a correct implementation has on the text that a server produced, and that one with a fault has.

    text         y_1 .. y_R of the server, continued greedily by K tokens: engines count drafts after the end, too
    q_nk         probability that draft k after y_1 .. y_n is accepted if those before it are: one training forward
                 of the drafter for all n, the drafts before k taken from the text
    walk         P(a accepted at n) = prod_{k <= a} q_nk (1 - q_n,a+1),  next round at n + a + 1
    counts       rounds that reach position k, and drafts accepted there, per answer

q follows from the drafter's likeliest token d, its probability p_d and the target's p_t of the text's token y:

    chosen       [d = y]                      drafts are the likeliest tokens, which engines draft at any temperature
    sampled      min(1, p_d(y) / p_t(y))      drafts are drawn, and verified by rejection sampling
    compared     p_d(y)                       drafts are drawn, and compared with the target's token: acceptance is lost

A hypothesis is a way of drafting with one fault. Its counts are compared with the server's, answer by answer and
position by position, by the beta-binomial distribution: a binomial one with room for ties and rounding. If a server
describes every round, its accepted drafts are compared with q there. At temperature 0 the true hypothesis agrees but
for ties, so a few hundred rounds tell hypotheses apart that have almost the same accepted length.

Shapes: N positions of a response, K draft positions, R answers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from outrider.backends.base import Counts, Round
from outrider.data.responses import Sample
from outrider.doctor.probe import Probe, Variant, neighbouring_layers, other_bases, other_masks, other_orders
from outrider.drafters.base import DrafterWeights, DraftModule
from outrider.drafters.dflash import DFlash
from outrider.drafters.fused_loss import HeadProducts
from outrider.drafters.layers import Attention
from outrider.drafters.rope import Rope
from outrider.target.model import Target

Floats = NDArray[np.float64]

# Concentration of the beta distribution of a count's rate: room for ties, rounding and the ends of responses. Greedy
# drafts are accepted or not whatever is drawn, so they get less room.
_CONCENTRATION, _EXACT = 20.0, 60.0
_SLIPS = 0.03  # share of rounds that end anyhow: ties, rounding
_SHRINKAGE = 1.0  # rounds with the hypothesis' mean rate that are added to those of an answer
_SURE = 0.98  # no rate is nearer to 0 or 1 than 1 - this
# All hypotheses are compared on two answers, the likeliest on a few, and of these the best variants of faults on all.
_LIKELIEST, _SCREENED, _KEPT = 20, 5, 8
_WINDOWS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_SCALINGS = (2, 4, 8)
_BITS = 4
_ROWS = 64  # of logits over the whole vocabulary at once
_DOUBT = 4.0  # log-likelihoods are divided by it: rounds of one answer are not independent


@dataclass(frozen=True)
class Text:
    """One answer of a server as the replay needs it. `sample`: prompt, response and continuation, in one span."""

    sample: Sample
    response: int
    temperature: float
    counts: Counts

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the response, as it was split here."""
        start = self.sample.spans[0][0]
        return tuple(self.sample.tokens[start : start + self.response])

    @property
    def drafting(self) -> list[Round]:
        """The rounds that the server described and drafted in."""
        return [one for one in self.counts.described if one.verified and one.start < self.response]

    @property
    def starts(self) -> list[int]:
        """Places in the response after which drafts are replayed: those where the server drafted, or all."""
        return [one.start for one in self.drafting] if self.counts.described else list(range(self.response))

    @property
    def anchors(self) -> list[int]:
        """Positions of the tokens before `starts` in the sample."""
        return [self.sample.spans[0][0] - 1 + start for start in self.starts]


@dataclass(frozen=True)
class Expected:
    """Expected counts of one answer: rounds, and by position rounds that reach it and drafts accepted there."""

    rounds: float
    reached_K: Floats
    accepted_K: Floats


def along(q_NK: Floats, text: Text) -> Expected:
    """Expected counts of the rounds that the server described, each begun where it began."""
    slots = q_NK.shape[1]
    reached_K, accepted_K = np.zeros(slots), np.zeros(slots)
    for one, q_K in zip(text.drafting, q_NK, strict=True):
        through = np.concatenate(([1.0], np.cumprod(q_K[: one.verified])))
        reached_K[: len(through) - 1] += through[:-1]
        accepted_K[: len(through) - 1] += through[1:]
    return Expected(float(len(q_NK)), reached_K, accepted_K)


def walk(q_NK: Floats, response: int, start: int, cut: bool) -> Expected:
    """Expected counts of an answer whose rounds are not described.

    Args:
        response: its tokens.
        start: 1 if the first token comes with the prefill and is not drafted, else 0.
        cut: drafts are cut so that a round ends with the response at the latest; otherwise the last round counts all.
    """
    slots = q_NK.shape[1]
    reach_N = np.zeros(response + slots + 2)
    reach_N[start] = 1.0
    rounds, reached_K, accepted_K = 0.0, np.zeros(slots), np.zeros(slots)
    for n in range(start, response):
        here, limit = reach_N[n], min(slots, response - n - 1) if cut else slots
        if here == 0.0:
            continue
        if limit == 0:
            reach_N[n + 1] += here
            continue
        through = np.concatenate(([1.0], np.cumprod(q_NK[n, :limit])))
        rounds += here
        reached_K[:limit] += here * through[:-1]
        accepted_K[:limit] += here * through[1:]
        reach_N[n + 1 : n + limit + 2] += here * (through - np.append(through[1:], 0.0))
    return Expected(rounds, reached_K, accepted_K)


def log_likelihood(expected: Sequence[Expected], texts: Sequence[Text], acceptance: Sequence[Floats]) -> float:
    """Log-likelihood of the server's counts, given what a hypothesis expects of the same answers.

    Args:
        acceptance: q [N, K] of each answer, by which rounds that the server described are judged one by one.
    """
    total = sum(_of_rounds(t, q) for t, q in zip(texts, acceptance, strict=True) if t.counts.described)
    counted = [(e, t) for e, t in zip(expected, texts, strict=True) if not t.counts.described]
    if not counted:
        return total
    counts = [text.counts for _, text in counted]
    slots = max(max(len(e.accepted_K), len(c.accepted_K or ())) for (e, _), c in zip(counted, counts, strict=True))
    hits = np.array([_wide(e.accepted_K, slots) for e, _ in counted])
    tries = np.array([_wide(e.reached_K, slots) for e, _ in counted])
    if all(c.accepted_K is not None for c in counts):
        seen = np.array([_wide(c.accepted_K or (), slots) for c in counts])
        reached = np.array([_wide(c.reached_K, slots) for c in counts])
    else:  # of every draft that could have been accepted: rounds times slots
        seen = np.array([[float(c.accepted)] for c in counts])
        reached = np.array([[float(c.rounds * slots)] for c in counts])
        hits, tries = hits.sum(1, keepdims=True), np.array([[e.rounds * slots] for e, _ in counted])
    pooled_K = (hits.sum(0) + 0.5) / (tries.sum(0) + 1.0)
    rate = np.clip((hits + _SHRINKAGE * pooled_K) / (tries + _SHRINKAGE), 1 - _SURE, _SURE)
    size = np.array([[_EXACT if text.temperature == 0 else _CONCENTRATION] for _, text in counted])
    alpha, beta = torch.tensor(rate * size), torch.tensor((1 - rate) * size)
    yes, no = torch.tensor(seen), torch.tensor(np.maximum(reached - seen, 0.0))
    both = torch.lgamma(yes + alpha) + torch.lgamma(no + beta) - torch.lgamma(yes + no + alpha + beta)
    prior = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
    return total + float((both - prior).sum())


def _of_rounds(text: Text, q_NK: Floats) -> float:
    """Log-likelihood of the accepted drafts of every round that the server described.

    A round that ends the response shows only that so many were accepted at least.
    """
    total = 0.0
    for one, q_K in zip(text.drafting, q_NK, strict=True):
        verified = min(one.verified, len(q_K))
        through = np.concatenate(([1.0], np.cumprod(q_K[:verified]), [0.0]))
        accepted = min(one.accepted, verified)
        ends = one.start + one.tokens >= text.response
        likely = through[accepted] - (0.0 if ends else through[accepted + 1])
        total += math.log((1 - _SLIPS) * likely + _SLIPS / (one.verified + 1))
    return total


def _wide(values: Sequence[float] | Floats, slots: int) -> Floats:
    return np.pad(np.asarray(values, dtype=np.float64), (0, slots - len(values)))


# ----------------------------------------------------------------------------
# Faults: each a small change of the drafter or of what it is given, its cause and its fix.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A kind of fault and its variants; `mode`: how drafts are drawn (see above); None: "chosen" or "sampled"."""

    name: str
    variants: Sequence[Variant]
    meaning: str
    remedy: str
    mode: str | None = None


HEALTHY = Fault("none", (Variant("as trained"),), "", remedy="")


def faults(probe: Probe, others: Mapping[str, DrafterWeights], slots: int) -> list[Fault]:
    """All faults that this drafter can have in a server.

    Args:
        others: further checkpoints that the server may have loaded, by name.
        slots: drafts of a round there.
    """
    backbone = probe.drafter.block_backbone()
    blocks = [] if backbone is None else _of_blocks(probe, backbone, slots)
    rows = [*_of_features(probe), *_of_vocabulary(probe), *blocks, *_of_weights(probe, others)]
    return [Fault(*row) for row in rows if row[1]]


_Row = tuple[Any, ...]  # the fields of a Fault; without variants the drafter cannot have it


def _of_features(probe: Probe) -> list[_Row]:
    layers = probe.aux_layers
    if not layers:
        return []
    shifted = (
        Variant("features one token late", features=lambda aux, _: torch.cat((aux[:1], aux[:-1]))),
        Variant("features one token early", features=lambda aux, _: torch.cat((aux[1:], aux[-1:]))),
        Variant("nothing of the prompt (prefix cache)", features=_without_prompt),
        Variant("features of zeros", features=lambda aux, _: torch.zeros_like(aux)),
        Variant("features of other tokens", shuffled=True),
    )
    return [
        ("aux layers", neighbouring_layers(layers, probe.target),
         "The server takes the hidden states of neighbouring layers: conventions differ by one.",
         f"Make the server read the outputs of decoder layers {list(layers)}, counted from 0 (outrider export)."),
        ("order of aux layers", other_orders(layers),
         "The hidden states of the aux layers reach the drafter in another order than in training.",
         f"Concatenate them in the order {list(layers)}."),
        ("features", shifted,
         "The drafter's context is not the text's hidden states: shifted, missing, or without a cached prompt.",
         "Switch the prefix cache off and ask again (vLLM --no-enable-prefix-caching, SGLang --disable-radix-cache); "
         "else compare the rows that reach the drafter with the tokens."),
    ]  # fmt: skip


def _of_vocabulary(probe: Probe) -> list[_Row]:
    ids_Vd = probe.weights.draft_ids_Vd
    if ids_Vd is None:
        return []
    plain_Vd = torch.arange(len(ids_Vd))
    changed = {
        "d2t read as ids, not offsets": (ids_Vd - plain_Vd).clamp(0, probe.target.vocab_size - 1),
        "d2t left out": plain_Vd,
        "d2t in ascending order": ids_Vd.sort().values,
        "d2t moved by one row": ids_Vd.roll(1),
    }
    variants = [
        Variant(label + ("" if keeps_head else ", the head rows with it"), draft_ids_Vd=ids, keeps_head=keeps_head)
        for label, ids in changed.items()
        if not torch.equal(ids, ids_Vd) and len(ids.unique()) == len(ids)
        for keeps_head in (True, False)
    ]
    return [
        ("reduced vocabulary", variants,
         "The server takes rows of the draft head for other tokens than they stand for.",
         "Export the drafter again (outrider export): d2t holds offsets in one dialect, ids in another."),
    ]  # fmt: skip


def _of_blocks(probe: Probe, drafter: DFlash, slots: int) -> list[_Row]:
    target = probe.target
    config, longest = drafter.config, max(len(sample.tokens) for sample in probe.samples)
    flipped, causal = not config.sample_from_anchor, not config.is_causal
    layout = {"sample_from_anchor": flipped, "block_size": slots if flipped else slots + 1}
    widths = _WINDOWS if config.layer_types else (None, *_WINDOWS)
    windows = [w for w in widths if w != config.sliding_window and (w is None or config.block_size <= w < longest)]
    first_norm = [Variant("the first layer's k_norm in all layers", module=_with_first_norm)]
    bases = (
        *other_bases(target, config.rope_theta),
        *([] if config.rope_scaling is None else [Variant("no scaling", {"rope_scaling": None})]),
        *(Variant(f"linear scaling by {factor}", stretch=1 / factor) for factor in _SCALINGS),
        Variant("pairs of neighbours rotated (interleaved), not halves", module=_interleaved),
    )
    return [
        ("mask token", other_masks(target, config.mask_token_id),
         "The masked rows of a block are filled with another token than in training.",
         f"Set mask_token_id to {config.mask_token_id} in the config.json that the server loads."),
        ("block layout", [Variant(f"sample_from_anchor={flipped}", layout)],
         "Every draft is read from the neighbouring row of the block.",
         f"Set sample_from_anchor to {str(config.sample_from_anchor).lower()}, or name the method with this layout."),
        ("attention inside the block", [Variant("causal" if causal else "bidirectional", {"is_causal": causal})],
         "Rows of a block see other rows than in training (causal against bidirectional attention).",
         f"Set is_causal to {str(config.is_causal).lower()} in its config.json, and choose an attention backend that "
         "honours it (docs/engines.md: attention-in-a-block)."),
        ("position ids", [Variant(f"positions of the block {step:+d}", offset=step) for step in (-1, 1)],
         "Rows of a block stand at other positions than their tokens, relative to the context.",
         "Give the anchor's row the anchor's position in the text, counted from 0, and each row the next one."),
        ("RoPE base", bases,
         "Rotary positions have another base, scaling or layout than in training: worse the longer the context.",
         f"Set rope_theta to {config.rope_theta:g} (also inside rope_parameters) in the config.json that the server "
         "loads; no loader checks it (docs/engines.md: wrong-shapes-load)."),
        ("window", [Variant(f"window {w or 'none'}", {"sliding_window": w}) for w in windows],
         "The drafter sees another stretch of the context than in training.",
         f"Set sliding_window to {config.sliding_window or 'null'} in the config.json that the server loads."),
        ("norms of context keys", first_norm if len(drafter.layers) > 1 else (),
         "Context keys of all layers are normed with the first layer's weights, as in vLLM 0.32's DFlash on CPUs.",
         "Use a drafter of one layer there, or an engine whose kernel reads every row (docs/engines.md: "
         "vllm-dflash-cpu-norms); the text is right all the same."),
    ]  # fmt: skip


def _of_weights(probe: Probe, others: Mapping[str, DrafterWeights]) -> list[_Row]:
    scale = probe.target.embed_scale
    factor = 1 / scale if scale != 1.0 else probe.target.hidden_size**0.5
    headless = [Variant("without the sequential head", module=_without_sequential_head)]
    weights = (
        Variant(f"weights rounded to {_BITS} bits", module=_rounded),
        *(Variant(name, module=partial(_other, weights.module)) for name, weights in others.items()),
        Variant(f"LM head rounded to {_BITS} bits", head=_rounded_rows),
        Variant("last draft layer not loaded", module=_without_last_layer),
        *_of_tensors(probe),
    )
    return [
        ("sequential head", headless if getattr(probe.drafter, "markov_head", None) is not None else (),
         "The engine drafts with the parallel logits alone: it took the drafter for DFlash, or dropped markov_w1, "
         "markov_w2.",
         "Name the method dspark, in an engine that knows the head (docs/engines.md)."),
        ("embedding scale", [Variant(f"embeddings times {factor:g}", embedding=factor)],
         "Embeddings have another factor than in training (Gemma's sqrt(hidden_size) is the usual one).",
         "Export the drafter again (outrider export): input_embedding_scale is written, and must be read."),
        ("weights", weights,
         "The server drafts with other weights: another checkpoint, a quantised copy, or tensors that its loader "
         "skipped (docs/engines.md: vllm-medusa-biases, llama-cpp-dspark-head).",
         "Compare the server's directory with this one (dates, hashes), and look in its log for tensors not loaded."),
        ("sampling on one side", [Variant("drafts drawn, the target's token compared")],
         "Drafts drawn from p_d are compared with the target's token: acceptance is sum p_d p_t instead of sum "
         "min(p_d, p_t).",
         "Draft greedily (the likeliest token), or verify with min(1, p_t / p_d) and the residual.",
         "compared"),
    ]  # fmt: skip


def _of_tensors(probe: Probe) -> list[Variant]:
    """Tensors that engines are known to leave out or to take for others."""
    variants = []
    if any(name.endswith("bias") and bool(bias.any()) for name, bias in probe.drafter.named_parameters()):
        variants.append(Variant("biases not loaded", module=_without_biases))
    head, embedding_VH = probe.objective.head_VH, probe.objective.embed_VH
    rows_VdH = embedding_VH[probe.draft_ids_Vd.to(embedding_VH.device)]
    if rows_VdH.shape == head.shape and not torch.equal(rows_VdH.to(head.dtype), head):
        variants.append(
            Variant("the embedding in place of the LM head", head=lambda head_VdH: rows_VdH.to(head_VdH.dtype))
        )
    return variants


def _without_prompt(aux_SLD: Tensor, prompt: int) -> Tensor:
    return torch.cat((torch.zeros_like(aux_SLD[: prompt - 1]), aux_SLD[prompt - 1 :]))


def _without_sequential_head(drafter: DraftModule) -> DraftModule:
    changed: Any = copy.copy(drafter)
    changed._modules = dict(drafter._modules)
    changed.markov_head, changed.confidence_head = None, None
    return cast(DraftModule, changed)


def _other(module: DraftModule, drafter: DraftModule) -> DraftModule:
    return module


def _on_a_copy(change: Callable[[Any], None]) -> Callable[[DraftModule], DraftModule]:
    """A change in place, made on a copy of the drafter."""

    def changed(drafter: DraftModule) -> DraftModule:
        drafter = copy.deepcopy(drafter)
        change(drafter)
        return drafter

    return changed


@_on_a_copy
def _without_last_layer(drafter: DraftModule) -> None:
    """The layer's output matrices are zeros, so that it adds nothing."""
    blocks = [name.rsplit(".", 3)[0] for name, _ in drafter.named_parameters() if name.endswith("o_proj.weight")]
    for name, parameter in drafter.named_parameters():
        if blocks and name.startswith(f"{blocks[-1]}.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()


@_on_a_copy
def _without_biases(drafter: DraftModule) -> None:
    for name, parameter in drafter.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()


@_on_a_copy
def _interleaved(drafter: DFlash) -> None:
    """Rotating neighbours is rotating halves of heads whose even dimensions come first, in queries and keys alike."""
    for attention in drafter.attentions:
        size = attention.head_dim
        order = torch.cat((torch.arange(0, size, 2), torch.arange(1, size, 2)))
        for projection, name in ((attention.q_proj, "q_norm"), (attention.k_proj, "k_norm")):
            for parameter in projection.parameters():
                heads = parameter.data.unflatten(0, (-1, size))
                parameter.data = heads[:, order.to(parameter.device)].flatten(0, 1)
            if attention.qk_norm:
                norm = getattr(attention, name)
                norm.weight.data = norm.weight.data[order.to(norm.weight.device)]


@_on_a_copy
def _rounded(drafter: DraftModule) -> None:
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = _rounded_rows(module.weight.data)


def _rounded_rows(matrix: Tensor) -> Tensor:
    """A matrix rounded to `_BITS` bits, symmetric, one scale a row."""
    scale = matrix.float().abs().amax(-1, keepdim=True).clamp(min=1e-8) / (2 ** (_BITS - 1) - 1)
    return ((matrix / scale).round() * scale).to(matrix.dtype)


@_on_a_copy
def _with_first_norm(drafter: DFlash) -> None:
    attentions: list[Any] = drafter.attentions
    for attention in attentions[1:]:
        attention.keys_values = partial(_first_normed, attention, Attention.keys_values, attentions[0].k_norm)


def _first_normed(
    attention: Attention, keys_values: Any, norm: nn.RMSNorm, k: Tensor, v: Tensor, rope: Rope
) -> tuple[Tensor, Tensor]:
    """Keys and values with another layer's norm for the context's keys, [S, G E]; blocks have [N, K, G E]."""
    own, attention.k_norm = attention.k_norm, norm if k.dim() == 2 else attention.k_norm
    try:
        return cast(tuple[Tensor, Tensor], keys_values(attention, k, v, rope))
    finally:
        attention.k_norm = own


# ----------------------------------------------------------------------------
# The comparison of all hypotheses.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Hypothesis:
    """A way of drafting, and how well it explains the server's counts.

    Attributes:
        log_likelihood: of the counts; comparable between hypotheses on the same answers.
        expected: of each answer.
        probability: among all hypotheses, faults of equal prior probability and no fault of as much as all of them;
            flattened by `_DOUBT`.
    """

    fault: Fault
    variant: Variant
    log_likelihood: float
    expected: tuple[Expected, ...] = field(repr=False)
    probability: float = 0.0

    @property
    def length(self) -> float:
        """Expected accepted length."""
        return length_of(self.expected)

    @property
    def rates_K(self) -> list[float]:
        """Expected acceptance at each position, of the rounds that reach it."""
        reached_K = np.sum([e.reached_K for e in self.expected], axis=0)
        accepted_K = np.sum([e.accepted_K for e in self.expected], axis=0)
        return [float(a / r) if r else 0.0 for a, r in zip(accepted_K, reached_K, strict=True)]


def length_of(expected: Sequence[Expected]) -> float:
    """Accepted length of several answers together."""
    return 1 + sum(e.accepted_K.sum() for e in expected) / max(sum(e.rounds for e in expected), 1e-9)


class Replay:
    """The server's answers under one drafter and its faults."""

    def __init__(self, target: Target, weights: DrafterWeights, texts: Sequence[Text]) -> None:
        self.texts = list(texts)
        config = weights.config
        self.slots = max((text.counts.slots or 0 for text in texts), default=0) or config.gamma
        if self.slots < config.gamma:
            weights = replace(weights, module=weights.module.of_length(self.slots))
        self.probe = Probe(target, weights, [text.sample for text in texts])
        self._target_log_p: dict[int, Floats] = {}

    def gaps(self, index: int) -> list[float]:
        """By how much the target's largest logit is above that of the text's token, at each of its positions."""
        return [max(0.0, gap) for gap in (self._logits(index, likeliest=True) - self._logits(index)).tolist()]

    def surprise(self, index: int) -> tuple[float, float]:
        """How much less likely a sampled response is than draws of the target: sum of -log p_t - H, and its variance.

        H: entropy of p_t at the answer's temperature. The sum over drawn tokens has an expectation of 0.
        """
        text, target = self.texts[index], self.probe.target
        hidden_RD = self.probe.features[index].hidden_RD[: text.response].to(target.device)
        tokens_R = torch.tensor(text.tokens, device=target.device)
        excess, variance = 0.0, 0.0
        for hidden_CD, tokens_C in zip(hidden_RD.split(_ROWS), tokens_R.split(_ROWS), strict=True):
            log_p_CV = (target.logits(hidden_CD.float()).float() / text.temperature).log_softmax(-1)
            p_CV = log_p_CV.exp()
            entropy_C = -(p_CV * log_p_CV).sum(-1)
            excess += float((-log_p_CV.gather(1, tokens_C[:, None])[:, 0] - entropy_C).sum())
            variance += float(((p_CV * log_p_CV.square()).sum(-1) - entropy_C.square()).sum())
        return excess, variance

    def likeliest(self, index: int, place: int) -> int:
        """The target's likeliest token at a place of the response."""
        return int(self.probe.features[index].argmax_R[place])

    def _logits(self, index: int, likeliest: bool = False) -> Tensor:
        """The target's logits [R] of the tokens of a response and its continuation, or of its likeliest tokens."""
        target, features = self.probe.target, self.probe.features[index]
        tokens_R = features.argmax_R if likeliest else torch.tensor(self.texts[index].sample.supervised_tokens)
        head, hidden_RD = HeadProducts(target.head_VD, torch.float32), features.hidden_RD.to(target.device)
        logits_R = head.logits_at(hidden_RD, tokens_R.to(target.device)[:, None])[:, 0]
        return (logits_R if target.softcap is None else torch.tanh(logits_R / target.softcap) * target.softcap).cpu()

    def _log_p(self, index: int) -> Floats:
        """log p_t of the tokens of a response and its continuation, at temperature 1."""
        if index not in self._target_log_p:
            log_p_R = self._logits(index) - self.probe.features[index].lse_R
            self._target_log_p[index] = log_p_R.double().numpy()
        return self._target_log_p[index]

    def try_on(self, fault: Fault, variant: Variant, chosen: Sequence[int]) -> Hypothesis:
        """How a hypothesis explains these answers, at the conventions of counting that suit it best."""
        labels = [self.probe.labels(index, self.texts[index].anchors, variant) for index in chosen]
        texts = [self.texts[index] for index in chosen]
        best: tuple[float, tuple[Expected, ...]] | None = None
        for mode in ["chosen", "sampled"] if fault.mode is None else [fault.mode]:
            q = [self._acceptance(index, *label, mode=mode) for index, label in zip(chosen, labels, strict=True)]
            for start in (0, 1):
                for cut in (False, True):
                    expected = tuple(
                        along(q_NK, text) if text.counts.described else walk(q_NK, text.response, start, cut=cut)
                        for q_NK, text in zip(q, texts, strict=True)
                    )
                    likelihood = log_likelihood(expected, texts, q)
                    if best is None or likelihood > best[0]:
                        best = likelihood, expected
        assert best is not None
        return Hypothesis(fault, variant, best[0], expected=best[1])

    def _acceptance(self, index: int, likely: Tensor, first: Tensor, *, mode: str) -> Floats:
        """q [N, K] of one answer; `likely` and `first`: see `Probe.labels`."""
        first_NK, likely_NK = (x[:, : self.slots].double().numpy() for x in (first, likely))
        if mode == "chosen" or self.texts[index].temperature == 0:  # draws at 0 are the likeliest tokens
            return cast(Floats, first_NK)
        if mode == "compared":
            return cast(Floats, likely_NK)
        log_p_R = self._log_p(index)
        places_NK = np.array(self.texts[index].starts)[:, None] + np.arange(first_NK.shape[1])
        target_NK = np.exp(np.append(log_p_R, 0.0)[np.minimum(places_NK, len(log_p_R))])
        return cast(Floats, np.minimum(1.0, likely_NK / np.maximum(target_NK, 1e-30)))

    def diagnose(
        self,
        every: Sequence[int],
        others: Mapping[str, DrafterWeights],
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Hypothesis]:
        """No fault, and the likeliest variant of each likely fault; the likeliest first.

        Args:
            every: the answers whose counts are compared.
            others: see `faults`.
        """
        few = every[:: max(1, len(every) // _SCREENED)][:_SCREENED]
        trials = [(fault, variant) for fault in faults(self.probe, others, self.slots) for variant in fault.variants]
        steps = len(trials) + min(_LIKELIEST, len(trials)) + _KEPT + 1
        done = 0

        def tried(these: Sequence[tuple[Fault, Variant]], answers: Sequence[int]) -> list[Hypothesis]:
            nonlocal done
            hypotheses = []
            for fault, variant in these:
                on_progress(done, steps)
                hypotheses.append(self.try_on(fault, variant, answers))
                done += 1
            return sorted(hypotheses, key=lambda h: -h.log_likelihood)

        glanced = tried(trials, [few[0], few[-1]] if len(few) > 2 else few)[:_LIKELIEST]
        screened: dict[str, Hypothesis] = {}
        for one in tried([(h.fault, h.variant) for h in glanced], few):
            screened.setdefault(one.fault.name, one)
        kept = [(h.fault, h.variant) for h in list(screened.values())[:_KEPT]]
        final = tried([(HEALTHY, HEALTHY.variants[0]), *kept], every)
        prior = [0.0 if h.fault is HEALTHY else -math.log(len(trials)) for h in final]
        scores = np.array([h.log_likelihood / _DOUBT + p for h, p in zip(final, prior, strict=True)])
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        ranked = [replace(h, probability=float(share)) for h, share in zip(final, shares, strict=True)]
        return sorted(ranked, key=lambda h: -h.probability)
