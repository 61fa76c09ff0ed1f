"""Saves and restores the state of a training: weights, optimizer moments and step, as safetensors.

    ranks' shards --gather--> whole tensors --main rank--> OUT/state --every rank--> its own shards

Full tensors do not depend on the number of ranks, so a run may go on with another number of them, or under
another kind of parallelism. Data order and anchors are functions of (seed, step) (training/batches.py) and nothing else
is drawn during training, so these tensors and one integer are all that an exact resume needs.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from outrider.target.model import full_tensor
from outrider.training.parallel import Ranks
from outrider.utils.documents import read_mapping
from outrider.utils.files import (
    atomic_directory,
    check_finite,
    check_tensors,
    read_tensors,
    recover_interrupted_write,
)

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save_state(
    directory: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    settings: dict[str, Any],
    ranks: Ranks,
    watch: dict[str, Any],
) -> None:
    """Write the state atomically; a collective.

    Args:
        settings: must be the same on resume.
        watch: the state of training/watch.py.
    """
    sharded: dict[str, Tensor] = {f"buffer.{name}": b for name, b in module.named_buffers()}
    for name, parameter in module.named_parameters():
        sharded[f"weight.{name}"] = parameter.detach()
        if parameter in optimizer.state:
            sharded |= {f"{moment}.{name}": optimizer.state[parameter][moment] for moment in _MOMENTS}
    tensors: dict[str, Tensor] = {}
    for name, tensor in sharded.items():  # gathered one by one into the main rank's host memory
        gathered = full_tensor(tensor)
        if ranks.main:
            tensors[name] = gathered.cpu().contiguous()
    if ranks.main:
        with atomic_directory(directory) as staging:
            save_file(tensors, staging / "state.safetensors")
            about = {"step": step, "threads": torch.get_num_threads(), "watch": watch, "settings": settings}
            (staging / "state.json").write_text(json.dumps(about, indent=1))
    ranks.wait()


def load_state(directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> int:
    """Restore the state in place, and return the step to go on from: 0 if there is no state.

    Raises:
        ValueError: the state belongs to another recipe, or a tensor is missing, unknown, not finite, or of another
            shape or type.
    """
    stored = read_run(directory)
    if not stored:
        return 0
    check_settings(directory, stored["settings"], settings)
    path = directory / "state.safetensors"
    tensors = read_tensors(path)
    wanted: dict[str, Tensor] = {f"weight.{name}": parameter for name, parameter in module.named_parameters()}
    wanted |= {f"buffer.{name}": buffer for name, buffer in module.named_buffers()}
    for name, parameter in module.named_parameters():
        if any(f"{moment}.{name}" in tensors for moment in _MOMENTS):  # none of a parameter without gradients
            wanted |= {f"{moment}.{name}": parameter for moment in _MOMENTS} | {f"step.{name}": torch.zeros(())}
    check_tensors(path, tensors, wanted, source="the recipe", exact_types=True)
    check_finite(path, tensors)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(_placed(tensors[f"weight.{name}"], parameter))
            if f"exp_avg.{name}" in tensors:
                optimizer.state[parameter] = {m: _placed(tensors[f"{m}.{name}"], parameter) for m in _MOMENTS}
        for name, buffer in module.named_buffers():
            buffer.copy_(tensors[f"buffer.{name}"])
    return int(stored["step"])


_FIELDS = {"step": int, "threads": int, "settings": dict, "watch": dict}
_MEMORY = {"best": float, "best_step": int, "mark": float, "failed": int}  # of `watch`, empty before the first check


def read_run(directory: Path) -> dict[str, Any]:
    """Read `step`, `threads`, `settings` and `watch` of a saved state; {} if there is none."""
    recover_interrupted_write(directory)
    path = directory / "state.json"
    if not path.is_file():
        return {}
    found = read_mapping(path)
    wrong = {name: found.get(name) for name, kind in _FIELDS.items() if type(found.get(name)) is not kind}
    if not wrong:
        wrong |= {name: found[name] for name, least in (("step", 0), ("threads", 1)) if found[name] < least}
        memory = found["watch"]
        wrong |= {
            f"watch.{n}": memory.get(n) for n, kind in _MEMORY.items() if memory and type(memory.get(n)) is not kind
        }
    if wrong:
        named = ", ".join(f"{name} is {value!r}" for name, value in wrong.items())
        raise ValueError(f"{path} is damaged ({named}); delete {directory} to start again.")
    return found


def check_settings(directory: Path, stored: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse to resume a run with other settings."""
    different = list(_differences(stored, settings))
    if different:
        raise ValueError(
            f"{directory} was written by another recipe or version: {'; '.join(different)}. "
            f"Choose another out=... (start_from={directory.parent / 'drafter'} there trains that drafter further), "
            "or delete that directory to start again."
        )


def _differences(stored: Mapping[str, Any], settings: Mapping[str, Any], section: str = "") -> Iterator[str]:
    absent = "left out" if section else None  # a whole section that the state does not have was off
    for name in sorted({*settings, *(stored if section else ())}):
        old, new = stored.get(name, absent), settings.get(name, absent)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{section}{name}.")
        elif old != new and name.endswith("_sha256"):
            yield f"{section}{name} differs"
        elif old != new:
            yield f"{section}{name} was {old}, is now {new}"


def _placed(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The full tensor on its parameter's device, sharded like it."""
    tensor = tensor.to(parameter.device)
    if isinstance(parameter, DTensor) and tensor.dim():  # AdamW's step count is a number on every rank
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return tensor


# ----------------------------------------------------------------------------
# SIGINT and SIGTERM end a run after the current step, with its state saved: pre-empted machines send them.
# ----------------------------------------------------------------------------


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Catches the first SIGINT or SIGTERM in a `with` block; `received` is its number, or 0."""

    def __init__(self) -> None:
        self.received = 0
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            self._former = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}

    def __exit__(self, *_: object) -> None:
        self._restore()
