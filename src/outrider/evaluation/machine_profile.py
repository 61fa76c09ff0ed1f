"""The machine's profile: what a step costs here, measured in seconds on first use and kept in the user's cache.

    $OUTRIDER_CACHE/profiles/TARGET-HASH.json        a `Profile` of the shapes in `QUICK` (evaluation/profile.py)

The hash is of all that step costs follow from: the `Setting`, the shapes of the target's weights, the instructions that
PyTorch and oneDNN may use, and versions. The values of weights and a drafter's calibration are not in it: they change
what is accepted, and no time. What was measured with something else therefore has another name; a file that is damaged,
or that was copied from another machine, is measured again.

A machine that does other work measures too long and unevenly. Policies weigh costs against each other, so a machine
that is slower in everything changes nothing; uneven times do. A profile states its spread (`Profile.spread`): an uneven
one is used, but only for an hour before it is measured again; a steady one is used for a month.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch

from outrider.drafters.base import Drafter
from outrider.evaluation.profile import QUICK, ProfileConfig, measure_profile, setting_of
from outrider.scheduling.cost import Profile, Setting
from outrider.target.model import Target
from outrider.utils.files import cache_dir
from outrider.utils.locks import sole_process
from outrider.utils.measure import versions

STEADY = 0.2  # most spread of a profile that is kept for long
_KEPT = {True: 30 * 86400.0, False: 3600.0}  # seconds, by whether it is steady


@dataclass(frozen=True)
class MachineProfile:
    """A profile of this machine. `path`: its file, None where the cache cannot be written; `seconds`: that measuring it
    took just now, None where it was read.
    """

    profile: Profile
    path: Path | None
    seconds: float | None

    @property
    def facts(self) -> str:
        """`step costs measured on 2026-11-23, spread 4 %`"""
        when = f"on {self.profile.date}" if self.seconds is None else f"now in {self.seconds:.1f} s"
        return f"step costs measured {when}, spread {100 * self.profile.spread:.0f} %"


def machine_profile(
    target: Target, drafter: Drafter | None, say: Callable[[str], None] = lambda line: None
) -> MachineProfile:
    """Read the machine's profile, or measure and keep it. Of several processes one measures and the others wait.

    Args:
        say: told in one line before anything is measured.

    Raises:
        ValueError: the target cannot be measured: the engine does not batch its family, or its layers are sharded.
    """
    if target.sharded:
        raise ValueError(f"{target.name} is sharded over processes, which would have to measure it together.")
    setting = setting_of(target, drafter)
    path = profile_path(target, setting)
    known = _read(path, setting)
    if known is not None:
        return MachineProfile(known, path, None)
    with ExitStack() as stack:
        with suppress(OSError):  # a read-only home: measured by every process, for itself
            stack.enter_context(sole_process(path.with_suffix(".lock")))
        known = _read(path, setting)
        if known is not None:
            return MachineProfile(known, path, None)
        say(f"measuring what a step of {setting.target} costs here, to choose draft lengths by; kept in {path}")
        started = time.perf_counter()
        measured = measure_profile(target, drafter, _fitting(target.max_context))
        seconds = time.perf_counter() - started
        try:
            measured.save(path)
        except OSError:
            return MachineProfile(measured, None, seconds)
        return MachineProfile(measured, path, seconds)


def _fitting(max_context: int) -> ProfileConfig:
    """`QUICK`, with the contexts that a target of so many positions has."""
    there = [context for context in QUICK.contexts if context + QUICK.max_tokens <= max_context]
    return replace(QUICK, contexts=tuple(there) or (max(1, max_context - QUICK.max_tokens),))


def profile_path(target: Target, setting: Setting) -> Path:
    """Where the profile of a target in this setting is kept."""
    shapes = sorted((name, tuple(weight.shape)) for name, weight in target.model.named_parameters())
    instructions = torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    # "plain": what a step does besides is measured on plain steps; profiles kept from before are measured again.
    about = [setting.model_dump(), shapes, instructions, versions(), "plain"]
    name = re.sub(r"[^\w.-]+", "-", setting.target.split(" (")[0])[:64]
    return cache_dir() / "profiles" / f"{name}-{sha256(json.dumps(about).encode()).hexdigest()[:16]}.json"


def _read(path: Path, setting: Setting) -> Profile | None:
    """The profile that is kept there; None where there is none, or none to be used any more."""
    try:
        profile = Profile.load(path)
        profile.check(setting)
        age = time.time() - path.stat().st_mtime
    except (OSError, ValueError):
        return None
    return profile if 0 <= age < _KEPT[profile.spread <= STEADY] else None
