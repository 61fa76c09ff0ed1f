"""FILE.npz: collected rounds, so that fits and sweeps can be repeated without decoding.

    about            JSON: what they were collected with; another drafter's rounds are refused
    task, conversation, turn   [N]     accepted, admitted   [N]     confidences   [N, K]     features   [N, K, 2]

Shapes: N rounds, K gamma.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from outrider.formats.files import write_atomically
from outrider.scheduling.calibration import Rounds

Conversations = Sequence[Sequence[Rounds]]  # rounds of every turn of every conversation


def save_rounds(path: Path, tasks: Mapping[str, Conversations], about: Mapping[str, Any]) -> None:
    """Write the rounds of all `tasks`; `about` must be JSON."""
    places = [
        (task, conversation, turn, rounds)
        for task, conversations in enumerate(tasks.values())
        for conversation, turns in enumerate(conversations)
        for turn, rounds in enumerate(turns)
    ]
    joined = Rounds.joined([rounds for *_, rounds in places])
    counts = [len(rounds.accepted_N) for *_, rounds in places]
    arrays: dict[str, Any] = {
        name: np.repeat([place[column] for place in places], counts)
        for column, name in enumerate(("task", "conversation", "turn"))
    }
    arrays |= {"accepted": joined.accepted_N, "admitted": joined.admitted_N, "confidences": joined.confidences_NK}
    if joined.features_NKF is not None:
        arrays["features"] = joined.features_NKF
    path.parent.mkdir(parents=True, exist_ok=True)
    described = json.dumps({**about, "names": list(tasks)})
    write_atomically(path, lambda file: np.savez_compressed(file, about=described, **arrays))


def load_rounds(path: Path, about: Mapping[str, Any]) -> dict[str, list[list[Rounds]]]:
    """Rounds of `save_rounds`, by task.

    Raises:
        ValueError: not such a file, or collected with something else than `about`.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            found = json.loads(str(file["about"]))
            arrays = {name: file[name] for name in file.files if name != "about"}
        everything = Rounds(arrays["confidences"], arrays["accepted"], arrays["admitted"], arrays.get("features"))
        keys = np.stack([arrays[name] for name in ("task", "conversation", "turn")], axis=1)
    except (OSError, KeyError, ValueError, TypeError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path}: not a file of rounds ({error}); remove it to collect again.") from error
    tasks: list[str] = found["names"]
    for name, wanted in json.loads(json.dumps(dict(about))).items():
        if found.get(name) != wanted:
            raise ValueError(
                f"{path} was collected with {name} {found.get(name)!r}, not {wanted!r}: remove it to collect again, "
                "or name another file (--rounds)."
            )
    result: dict[str, list[list[Rounds]]] = {task: [] for task in tasks}
    places, starts = np.unique(keys, axis=0, return_index=True)  # sorted as they were written
    for (task, conversation, _), part in zip(places, np.split(np.arange(len(keys)), starts[1:]), strict=True):
        conversations = result[tasks[task]]
        if len(conversations) <= conversation:
            conversations += [[] for _ in range(conversation + 1 - len(conversations))]
        conversations[conversation].append(everything.chosen(part))
    return result
