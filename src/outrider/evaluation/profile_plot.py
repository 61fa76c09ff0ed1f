"""A profile as pictures: forwards by tokens, and what a step costs besides."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from outrider.scheduling.profile import Profile


def plot_profile(profile: Profile, context: int, path: Path) -> None:
    """Left: forwards at one context, quartiles shaded, the additive form dashed; right: the rest, by requests."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    fit = profile.fit
    for requests in profile.table.requests:
        cells = [c for c in profile.cells if (c.requests, c.context) == (requests, context)]
        tokens = [c.tokens for c in cells]
        (line,) = left.plot(tokens, [1e3 * c.median for c in cells], marker=".", label=f"{requests}")
        low, high = [1e3 * c.low for c in cells], [1e3 * c.high for c in cells]
        left.fill_between(tokens, low, high, alpha=0.2, color=line.get_color())
        fixed = fit.bias + fit.alpha * requests + fit.sigma * requests * context
        left.plot(tokens, [1e3 * (fixed + fit.theta * b) for b in tokens], "--", lw=0.8, color=line.get_color())
    left.set(xlabel="tokens of a forward", ylabel="ms", xscale="log", yscale="log")
    left.set_title(f"Target forward after {context} tokens (dashed: additive form)")
    left.legend(title="requests", frameon=False)
    curves = {"draft": profile.draft, "drafter reads": profile.extend, "other": profile.other}
    for label, curve in curves.items():
        if curve is not None:
            right.plot(curve.requests, [1e3 * median for _, median, _ in curve.seconds], marker="o", label=label)
    right.set(xlabel="requests", ylabel="ms", title="Besides the target")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
