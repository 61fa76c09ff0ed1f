"""Training states that would go on as another run: each is refused with the file and what is wrong with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.training.trainer import Trainer, saved_run
from tests.toys.targets import toy_target
from tests.toys.training import make_run, recipe

FC = "fc.weight"  # [32, 96]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after two steps."""
    out = tmp_path_factory.mktemp("run")
    Trainer(recipe(out), make_run(toy_target())).train(stop_after=2)
    return out


def put(name: str, change: Callable[[Tensor], Tensor] | None) -> Callable[[Path], None]:
    """Another tensor in the state; None takes it out."""

    def damage(state: Path) -> None:
        found = load_file(state / "state.safetensors")
        tensor = found.pop(name)
        if change is not None:
            found[name] = change(tensor).contiguous()
        save_file(found, state / "state.safetensors")

    return damage


def added(state: Path) -> None:
    save_file({**load_file(state / "state.safetensors"), "weight.x": torch.ones(1)}, state / "state.safetensors")


def about(**fields: object) -> Callable[[Path], object]:
    """Other fields of state.json."""
    return lambda state: (state / "state.json").write_text(
        json.dumps({**json.loads((state / "state.json").read_text()), **fields})
    )


def content(name: str, text: bytes) -> Callable[[Path], object]:
    return lambda state: (state / name).write_bytes(text)


def row(tensor: Tensor) -> Tensor:
    """A row of it, which would be broadcast over the others."""
    return tensor[:1]


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    **{
        f"{name}, a row of it": (put(f"{name}.{FC}", row), rf"{name}\.fc\.weight has shape \[1, 96\], .*\[32, 96\]")
        for name in ("weight", "exp_avg", "exp_avg_sq")
    },
    "moment of one number": (put(f"exp_avg.{FC}", lambda t: t[0, 0]), r"exp_avg\.fc\.weight has shape \[\], "),
    "steps of one parameter": (put(f"step.{FC}", lambda t: t.expand(3)), r"step\.fc\.weight has shape \[3\], .*\[\]"),
    **{
        f"{name} as {kind}": (put(f"{name}.{FC}", lambda t, kind=kind: t.to(kind)), rf"{name}\.fc\.weight is of type")
        for name in ("weight", "exp_avg", "exp_avg_sq", "step")
        for kind in (torch.bfloat16, torch.float64, torch.int64)
    },
    **{
        f"no {name}": (put(f"{name}.{FC}", None), rf"state\.safetensors: .*missing {name}\.fc\.weight")
        for name in ("weight", "exp_avg", "exp_avg_sq", "step")
    },
    "a tensor more": (added, r"state\.safetensors: .*unknown weight\.x"),
    "NaN": (put(f"weight.{FC}", lambda t: t * torch.nan), r"weight\.fc\.weight has NaN or infinity"),
    "infinite moment": (put(f"exp_avg_sq.{FC}", lambda t: t + torch.inf), r"exp_avg_sq\.fc\.weight has NaN or inf"),
    "truncated tensors": (content("state.safetensors", b"\x10\0\0\0\0\0\0\0{"), r"safetensors is not a readable"),
    "no tensors": (lambda state: (state / "state.safetensors").unlink(), r"state\.safetensors is missing"),
    "half of state.json": (content("state.json", b'{"step": 2, '), r"state\.json: not valid JSON"),
    "deep state.json": (content("state.json", b"[" * 10**5), r"state\.json: not valid JSON"),
    "list as state.json": (content("state.json", b"[1]"), r"state\.json: not a JSON mapping"),
    **{
        f"{name} {value!r}": (
            about(**{name: value}),
            rf"state\.json is damaged \(.*{name} is .*delete .*state to start",
        )
        for name, values in {
            "step": (None, "2", 2.5, -1, True, [2]),
            "threads": (None, "1", 0),
            "settings": (None, [], "x"),
            "watch": (None, [], 3),
        }.items()
        for value in values
    },
    "half a memory": (about(watch={"measure": 1, "best": 2.0}), r"damaged \(watch\.best_step is None, watch\.mark is"),
    "best as text": (about(watch={"best": "2"}), r"damaged \(watch\.best is '2', "),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_state_is_refused_by_name(stopped: Path, tmp_path: Path, case: str) -> None:
    damage, message = DAMAGED[case]
    out = tmp_path / "out"
    shutil.copytree(stopped, out)
    damage(out / "state")

    def go_on() -> Any:
        saved_run(recipe(out))
        Trainer(recipe(out), make_run(toy_target())).train()

    with pytest.raises(ValueError, match=message) as caught:
        go_on()
    assert str(out) in str(caught.value) and len(str(caught.value).splitlines()) == 1
