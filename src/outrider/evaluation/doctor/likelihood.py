"""Is the data the target's own? Text it did not write has a likelihood it would not give itself.

    nll_T      = mean of -log p_T(x)            over response tokens, p_T the target's distribution at temperature T
    entropy_T  = mean of the entropy of p_T     what nll_T comes to on text drawn from p_T
    agreement  = share of tokens that are the target's argmax     all of them, ties apart, at temperature 0

Sampling with top-p or top-k only lowers nll_T, so the test is one-sided. It is made on all responses together, where a
small shift shows, and on each, where a few foreign ones do. A drafter trained on foreign text learns to continue what
the target would not say. Shapes: R response tokens, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.data.samples import Sample
from outrider.evaluation.doctor.case import Case
from outrider.evaluation.doctor.finding import Result, fault, ok, warning
from outrider.target import Target

_HEAD_CHUNK = 64
_GREEDY = (0.98, 0.9)  # agreement at temperature 0: below the first a warning, below the second a fault
_EXCESS = (0.1, 0.3)  # nats a token above the entropy, likewise
_FOREIGN = 0.2  # share of responses that are worse than the second limit: a fault above it, a warning below
_WORST = 3
_STANDARD_ERRORS = 4.0


@dataclass(frozen=True)
class Likelihood:
    """Per response token of one sample."""

    id: str
    nll_R: torch.Tensor
    entropy_R: torch.Tensor
    agreement_R: torch.Tensor

    def level(self, temperature: float | None) -> int:
        """0 on-policy, 1 doubtful, 2 foreign; at a recorded temperature or, None, at any up to 1."""
        if temperature == 0:
            return sum(self.agreement_R.mean().item() < limit for limit in _GREEDY)
        excess_R = self.nll_R - self.entropy_R
        noise = _STANDARD_ERRORS * excess_R.std().item() / len(excess_R) ** 0.5 if len(excess_R) > 1 else float("inf")
        return sum(excess_R.mean().item() > max(limit, noise) for limit in _EXCESS)


@torch.inference_mode()
def likelihood(target: Target, sample: Sample, temperature: float) -> Likelihood:
    """How likely the target finds a sample's responses at a temperature above 0."""
    tokens = torch.tensor([sample.tokens[:-1]], device=target.device)
    output = target.forward(tokens, target.new_cache(tokens.shape[1]), logits=0)
    hidden_RD = output.hidden_BTD[0, sample.anchors]
    said_R = torch.tensor(sample.supervised_tokens, device=target.device)
    nll, entropy, agreement = [], [], []
    for rows, said in zip(hidden_RD.split(_HEAD_CHUNK), said_R.split(_HEAD_CHUNK), strict=True):
        logits = target.logits(rows).float()
        log_p = (logits / temperature).log_softmax(-1)
        nll.append(-log_p.gather(1, said[:, None])[:, 0])
        entropy.append(-(log_p.exp() * log_p).sum(-1))
        agreement.append((logits.argmax(-1) == said).float())
    return Likelihood(sample.id, torch.cat(nll), torch.cat(entropy), torch.cat(agreement))


def on_policy(case: Case) -> Result:
    """Did the target write these responses?"""
    recorded: float | None = case.settings.get("temperature")
    temperature = recorded or 1.0  # not recorded: drawn at 1 or below, where nll_1 <= entropy_1
    found = [likelihood(case.target, sample, temperature) for sample in case.chosen]
    names = ("nll_R", "entropy_R", "agreement_R")
    whole = Likelihood("all", *(torch.cat([getattr(f, name) for f in found]) for name in names))
    figure = (
        f"{whole.agreement_R.mean():.1%} of {len(whole.nll_R)} tokens are the target's first choice; "
        f"{whole.nll_R.mean():.2f} nats a token, {whole.entropy_R.mean():.2f} expected at temperature {temperature:g}"
    )
    foreign = sum(f.level(recorded) == 2 for f in found)
    level = max(whole.level(recorded), (foreign > 0) + (foreign > _FOREIGN * len(found)))
    if level == 0:
        return ok(figure)
    worst = sorted(found, key=lambda f: (f.nll_R - f.entropy_R).mean().item(), reverse=True)[:_WORST]
    listed = "; ".join(f"{f.id}: {f.agreement_R.mean():.0%}, {f.nll_R.mean():.2f} nats" for f in worst)
    figure += f"; {foreign} of {len(found)} responses are foreign"
    drawn = f"temperature {recorded:g}" if recorded is not None else "any temperature up to 1"
    return (fault if level == 2 else warning)(
        figure,
        f"The responses are not what this target says at {drawn}: another model, a person, another template or another "
        f"precision wrote them. Worst: {listed}.",
        "Regenerate the responses with this target (outrider train does when data.responses names a new file).",
    )
