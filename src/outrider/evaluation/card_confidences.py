"""outrider.json's `calibration` -> the card's section on confidences.

    served:  sigmoid(logit(c_k) / T_k + b_k),    c_k of the drafter's head, or of an estimator where it has none

How they were fitted: evaluation/calibrate.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from outrider.evaluation.calibrate import Calibration


def confidences(stored: object) -> str:
    """The section.

    Raises:
        ValueError: `stored` is no calibration; names the field.
    """
    try:
        found = Calibration.model_validate(stored)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ValueError(
            f"outrider.json: calibration.{where}: {error.errors()[0]['msg']}; run outrider calibrate again."
        ) from error
    parts = ["## Confidences", *_estimator(found.estimator), _scaling(found), _table(found), _measured(found)]
    return "\n\n".join(parts)


def _estimator(estimator: Mapping[str, Sequence[float]] | None) -> list[str]:
    """Nothing where a confidence head speaks."""
    if estimator is None:
        return []
    certainty, entropy = estimator["weights"]
    biases = ", ".join(f"{bias:+.2f}" for bias in estimator["biases"])
    return [
        "The drafter has no confidence head. Its confidences are a logistic regression on its own distribution p_k:\n"
        f"c_k = sigmoid({certainty:.2f} logit(max p_k) {entropy:+.2f} entropy(p_k) + bias_k), biases {biases}."
    ]


def _scaling(found: Calibration) -> str:
    what, how = "A temperature per position", "is applied when the drafter is served."
    if _offsets(found):
        what = "A temperature and an offset per position"
        how = "are applied when the drafter\nis served: sigmoid(logit(c) / temperature + offset)."
    return (
        f"{what} (Sequential Temperature Scaling) {how}\n"
        "Survival to position k against what was accepted, 20 bins, before -> after:"
    )


def _offsets(found: Calibration) -> list[float] | None:
    """None where there are none, or all are 0."""
    return found.offsets if found.offsets and any(found.offsets) else None


def _table(found: Calibration) -> str:
    offsets = _offsets(found)
    lines = [
        f"| k | temperature |{' offset |' if offsets else ''} ECE | ECE by chance | Brier | ROC-AUC after |",
        f"|---:|---:|{'---:|' if offsets else ''}---:|---:|---:|---:|",
    ]
    for i, t in enumerate(found.temperatures):
        auc = found.after.roc_auc[i]
        offset = f" {offsets[i]:+.2f} |" if offsets else ""
        errors = f"{found.before.ece[i]:.3f} -> {found.after.ece[i]:.3f}"
        squares = f"{found.before.brier[i]:.3f} -> {found.after.brier[i]:.3f}"
        noise, area = f"{found.after.ece_noise[i]:.3f}", "-" if auc is None else f"{auc:.3f}"
        lines.append(f"| {i + 1} | {t:.2f} |{offset} {errors} | {noise} | {squares} | {area} |")
    return "\n".join(lines)


def _measured(found: Calibration) -> str:
    return (
        f"Fitted on {found.fit_rounds:,} rounds of {', '.join(found.fitted_on)}; measured on "
        f"{found.measured_rounds:,} other rounds of {', '.join(found.measured_on)};\n"
        f"decoding at temperature {found.sampling['temperature']}. By chance: what as many rounds would show of "
        "perfect confidences."
    )
