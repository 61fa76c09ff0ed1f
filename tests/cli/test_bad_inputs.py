"""Bad inputs end with one line, status 2 and the name of the file or option: no traceback, no hang, nothing taken."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import outrider.cli.main as main
from outrider.checkpoints.checkpoint import add_metadata
from outrider.evaluation.draft_cost import DraftCosts
from outrider.evaluation.loadtest.config import Traffic
from outrider.evaluation.loadtest.metrics import Frontier, Metrics, PointSummary
from outrider.evaluation.loadtest.traces import Response, Traces
from tests.toys.bad_inputs import Case, every_case
from tests.toys.evaluations import results
from tests.toys.profiles import cells_of, linear, profile_of
from tests.toys.target_directory import save_toy_drafter, save_toy_recipe, save_toy_target

_SECONDS = 60  # a hang, on any machine: a case takes under a second on a quiet one
_RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # no terminal here: what is left of these came from the input


class _Late(BaseException):
    """Not an Exception: nothing that guards against those may hold up the clock."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of valid files of every kind that a verb reads."""
    here = tmp_path_factory.mktemp("pristine")
    vocab = save_toy_target(here / "target", layers=5)
    save_toy_drafter(here / "drafter", vocab)
    temperatures = {"temperatures": [1.0] * 7, "offsets": [0.0] * 7}
    add_metadata(here / "drafter", target=str(here / "target"), step=1, calibration=temperatures)
    save_toy_recipe(here)
    (here / "table.yaml").write_text("out: out\nrecipe: recipe.yaml\ntasks: [prompts.jsonl]\nrows: {a: {}}\n")
    (here / "options.yaml").write_text("{seed: 1}\n")
    settings = {"target": str(here / "target"), "max_new_tokens": 4}
    reply = {"id": "a", "turn": 0, "prompt": [5, 6], "response": [7], "finished": True, "exact": True}
    lines = [{"format": 2, "settings": settings, "summary": {}}, reply, {**reply, "id": "b"}]
    (here / "responses.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    profile = profile_of(cells_of(linear))
    profile.save(here / "profile.json")
    responses = [Response((1, 2), [3, 4, 5, 6], True, start=0)]
    counts = np.zeros(4, dtype=np.int64)
    about = {"setting": profile.setting.model_dump(), "threshold": 0.5, "traffic": asdict(Traffic())}
    Traces(responses, np.full((4, 3), 0.5, dtype=np.float32), counts, counts, about).save(here / "traces.npz")
    np.savez(here / "rounds.npz", about="{}")
    (here / "eval").mkdir()
    (here / "eval/results.json").write_text(results("dspark").model_dump_json())
    costs = DraftCosts(target="toy", context=8, repeats=3, drafters=[], machine={}, versions={})
    (here / "costs.json").write_text(costs.model_dump_json())
    figures = dict.fromkeys(Metrics.model_fields, (1.0, 1.0, 1.0))
    point = PointSummary(variant="none", level=1, repeats=1, quartiles=figures, same=1, ties=0, mismatches=0)
    frontier = Frontier(
        arrivals="closed", points=[point], levels=[], overall=[], settings={"backend": "x"}, machine={}, versions={}
    )
    frontier.save(here / "bench")
    (here / "bench/settings.json").write_text("{}")
    state = {"step": 1, "settings": {"target": "t", "optimizer": {"steps": 2}, "drafter": {"algorithm": "dspark"}}}
    (here / "runs/one/state").mkdir(parents=True)
    (here / "runs/one/drafter").mkdir()
    (here / "runs/one/state/state.json").write_text(json.dumps({**state, "watch": {"best": 1.5, "measure": {}}}))
    (here / "runs/one/metrics.jsonl").write_text('{"step": 1, "group": "train", "loss": 1.0}\n')
    (here / "runs/one/drafter/outrider.json").write_text('{"format": 1}')
    (here / "runs/one/results.json").write_text(results("dspark").model_dump_json())
    return here


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads and the hub are left alone; templates may take half a second."""
    monkeypatch.setattr("outrider.utils.measure.set_up", lambda threads: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("outrider.data.chat._TEMPLATE_SECONDS", 0.5)


def outcome(case: Case, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What is wrong with how an input is met; "" if it is refused as it should be. `here`: the directory it is in."""
    monkeypatch.setattr(sys, "argv", ["outrider", *(word.replace("{here}", str(here)) for word in case.args)])

    def late(*_: object) -> None:
        raise _Late

    former = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS, 1)  # every second: one alarm alone did not end all of them
    status: object = 0
    try:
        main.main()
    except SystemExit as exit_:
        status = exit_.code or 0
    except _Late:
        return f"hang: longer than {_SECONDS} s"
    except Exception as error:  # whatever it is, a user would see its traceback
        return f"traceback: {type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    out, err = capfd.readouterr()
    if status not in case.statuses:
        return f"accepted: status {status}: {(err or out)[-200:]!r}"
    if found := _RAW.search(out + err):
        return f"raw: {found[0]!r} is printed"
    if status == 2:
        lines = err.strip().splitlines()
        if "Traceback" in err or not lines or not lines[-1].startswith("error: ") or len(lines) > 4:
            return f"not one line: {err[-300:]!r}"
        if len(lines[-1]) > 2000:
            return f"long: {len(lines[-1])} characters"
        if case.named.replace("_", "-").lower() not in err.replace("_", "-").lower():
            return f"unnamed: {case.named} is not in {err[-200:]!r}"
    return ""


def _parameters() -> list[object]:
    """Every fourth case, and the others for `make test-all`."""
    return [
        pytest.param(case, id=ascii(case.name)[1:-1], marks=[pytest.mark.slow] if number % 4 else [])
        for number, case in enumerate(every_case())
    ]


@pytest.mark.parametrize("case", _parameters())
def test_refused(
    case: Case, pristine: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = pristine
    if case.spoil is not None:
        here = Path(shutil.copytree(pristine, tmp_path / "here"))
        case.spoil(here)
    monkeypatch.chdir(tmp_path)
    if wrong := outcome(case, here, capfd, monkeypatch):
        pytest.fail(wrong, pytrace=False)
