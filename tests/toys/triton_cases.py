"""Kernel against reference on a device; with TRITON_INTERPRET=1, which Triton reads at import, "cpu" is one."""

from __future__ import annotations

import sys
from itertools import product

import torch

import outrider.drafters.fused_loss_triton as objective_triton
from outrider.drafters.fused_loss import RowInputs, reduce_rows


def compare(rows: int, vocab: int, softcap: float | None, dtype: torch.dtype, device: str) -> float:
    """The largest difference between kernel and reference, relative to each output's largest entry."""
    generator = torch.Generator().manual_seed(rows * vocab)
    logits = torch.randn(rows, vocab + 5, generator=generator) * 3  # five tokens lie outside the draft vocabulary
    capped = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    z = logits[:, :vocab] + torch.randn(rows, vocab, generator=generator)
    shift = logits.amax(-1).to(dtype).float()
    t = logits[:, :vocab] - shift[:, None]
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[::3] = -1
    argmax = z.argmax(-1)
    argmax[1::3] = 0
    argmax[2::3] = -1
    weights = torch.rand(4, rows, generator=generator)
    given = RowInputs(shift, capped.logsumexp(-1), labels, argmax, *weights)
    whole = RowInputs(*(None if values is None else values.to(device) for values in given))
    worst = 0.0
    terms = (whole, whole._replace(kl_C=None, soft_C=None), whole._replace(kl_C=None))
    for needs_grad, scalars in product((False, True), terms):
        found = []
        for reduce in (reduce_rows, objective_triton.reduce_rows_triton):
            z_CV, t_CV = z.to(device, dtype, copy=True), t.to(device, dtype, copy=True)
            ce_C, distance_C, kl_C, soft_C, agreement_C = reduce(z_CV, t_CV, scalars, softcap, needs_grad)
            assert 0 < agreement_C.sum() < rows
            results = [ce_C, distance_C, agreement_C]
            results += [] if scalars.kl_C is None else [kl_C]
            results += [] if scalars.soft_C is None else [soft_C]
            found.append([x.double() for x in [*results, *([z_CV] if needs_grad else [])]])
        for expected, got in zip(*found, strict=True):
            worst = max(worst, ((expected - got).abs().max() / expected.abs().max()).item())
    return worst


CASES = ((6, 29, None), (7, 64, None), (5, 301, 5.0), (4, 130, 30.0))


def main(device: str) -> None:
    objective_triton._BLOCK = 64  # one, several and partly filled blocks
    for rows, vocab, softcap in CASES:
        for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            worst = compare(rows, vocab, softcap, dtype, device)
            assert worst <= limit, f"{rows} x {vocab}, softcap {softcap}, {dtype}: {worst:.1e} above {limit:.0e}"
            print(f"{rows} x {vocab}, softcap {softcap}, {dtype}: {worst:.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
