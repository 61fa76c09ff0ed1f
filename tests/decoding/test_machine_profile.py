"""The machine's profile: measured once, kept by what costs follow from, measured again where it cannot be trusted."""

from __future__ import annotations

import copy
import os
import threading
import time
from pathlib import Path

import pytest
import torch

import outrider.decoding.profile as module
from outrider.decoding.config import ProfileConfig
from outrider.decoding.cost import Curve, Profile
from outrider.decoding.profile import QUICK, grid, machine_profile, profile_path, setting_of
from outrider.drafters.base import Drafter
from outrider.drafters.ngram import NgramConfig, NgramDrafter
from outrider.target.model import Target
from tests.toys.profiles import cells_of, linear, profile_of
from tests.toys.targets import TOY_CONFIGS, random_target, toy_target

DAY = 86400.0


class Measuring:
    """Counts what is measured, and gives profiles of a formula with this spread instead."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self.spread = self.draft_spread = 0.02

    def __call__(self, target: Target, drafter: Drafter | None, config: ProfileConfig) -> Profile:
        self.count += 1
        time.sleep(self.seconds)
        cells = [
            c.model_copy(update={"low": c.median * (1 - self.spread / 2), "high": c.median * (1 + self.spread / 2)})
            for c in cells_of(linear)
        ]
        low, high = 0.01 * (1 - self.draft_spread / 2), 0.01 * (1 + self.draft_spread / 2)
        draft = Curve(requests=[1], seconds=[(low, 0.01, high)])
        setting = setting_of(target, drafter)
        return profile_of(cells).model_copy(update={"setting": setting, "draft": draft, "draft_one": draft})


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measuring:
    """An empty cache, and measurements that are counted."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    found = Measuring()
    monkeypatch.setattr(module, "measure_profile", found)
    return found


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target("qwen3")


def changed_toy(**changes: int) -> Target:
    """The toy with another config and the same name."""
    config = copy.deepcopy(TOY_CONFIGS["qwen3"])
    config.update(changes)
    return random_target(config, "toy-qwen3")


NGRAM = NgramDrafter(NgramConfig(4))


def test_it_is_measured_once_and_read_ever_after(measuring: Measuring, target: Target) -> None:
    said: list[str] = []
    first = machine_profile(target, NGRAM, said.append)
    again = machine_profile(target, NGRAM, said.append)
    assert measuring.count == 1 and again.profile == first.profile
    assert first.path == again.path is not None and first.path.is_file()
    assert first.seconds is not None and again.seconds is None
    assert len(said) == 1 and "costs here" in said[0] and str(first.path) in said[0]
    assert first.facts.startswith("step costs measured now in ") and first.facts.endswith(", spread 2 %")
    assert again.facts.startswith("step costs measured on ")


def test_what_costs_follow_from_has_a_file_of_its_own(
    measuring: Measuring, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads, another drafter or none, weights of other shapes under the same name, other instructions, versions."""
    paths = [machine_profile(target, drafter).path for drafter in (NGRAM, NgramDrafter(NgramConfig(5)), None)]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    paths.append(machine_profile(target, NGRAM).path)
    torch.set_num_threads(threads)
    wider = changed_toy(intermediate_size=40)
    assert setting_of(wider, NGRAM) == setting_of(target, NGRAM)
    paths.append(machine_profile(wider, NGRAM).path)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    paths.append(machine_profile(target, NGRAM).path)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr(module, "versions", lambda: {"torch": "3"})
    paths.append(machine_profile(target, NGRAM).path)
    assert measuring.count == len(set(paths)) == 7


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', b"\xff\xfe", None])
def test_a_damaged_or_foreign_file_is_measured_again(
    measuring: Measuring, target: Target, content: bytes | None
) -> None:
    """None: the profile of another processor, copied here."""
    kept = machine_profile(target, NGRAM)
    assert kept.path is not None
    if content is None:
        setting = kept.profile.setting.model_copy(update={"processor": "another"})
        kept.profile.model_copy(update={"setting": setting}).save(kept.path)
    else:
        kept.path.write_bytes(content)
    again = machine_profile(target, NGRAM)
    assert measuring.count == 2 and again.profile == kept.profile == Profile.load(kept.path)


@pytest.mark.parametrize(
    ("spreads", "age", "again"),
    [
        ((0.02, 0.02), 20 * DAY, False),
        ((0.02, 0.02), 40 * DAY, True),
        ((0.5, 0.02), 60.0, False),
        ((0.5, 0.02), 2 * 3600.0, True),
        ((0.02, 0.5), 2 * 3600.0, True),
    ],
)
def test_it_is_kept_by_its_spread(
    measuring: Measuring, target: Target, spreads: tuple[float, float], age: float, again: bool
) -> None:
    """A steady one for a month. One of uneven forwards or drafts is used, too, but measured again an hour later."""
    measuring.spread, measuring.draft_spread = spreads
    path = machine_profile(target, NGRAM).path
    assert path is not None
    os.utime(path, (time.time() - age,) * 2)
    assert (machine_profile(target, NGRAM).seconds is not None) == again and measuring.count == 1 + again


def test_of_several_processes_one_measures(measuring: Measuring, target: Target) -> None:
    """Locks are of open files, so threads stand for processes."""
    measuring.seconds = 0.3
    threads = [threading.Thread(target=machine_profile, args=(target, NGRAM)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert measuring.count == 1


def test_without_a_cache_it_is_measured_and_not_kept(
    measuring: Measuring, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    found = [machine_profile(target, NGRAM) for _ in range(2)]
    assert measuring.count == 2 and all(one.path is None for one in found)


def test_a_real_measurement_of_a_short_context_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    target = changed_toy(max_position_embeddings=100)
    found = machine_profile(target, NGRAM)
    assert found.seconds is not None and {c.context for c in found.profile.cells} == {68}
    assert {c.tokens for c in found.profile.cells if c.requests == 1} == {1, 4, 5, 16, 32}
    assert profile_path(target, found.profile.setting) == found.path
    assert machine_profile(target, NGRAM).profile == found.profile


def test_a_sparse_grid_has_few_shapes_and_its_table_the_steps_of_the_first_row() -> None:
    shapes = grid(QUICK, width=8)
    assert len(shapes) == 10 and {(r, s) for r, _, s in shapes} == {(1, 128), (1, 512), (4, 128), (4, 512)}
    assert {b for r, b, s in shapes if (r, s) == (1, 128)} == {1, 4, 8, 16, 32}

    def stairs(requests: float, tokens: float, context: float) -> float:
        return linear(requests, 0, context) + 0.01 * (tokens > 8)

    cells = [c for c in cells_of(stairs, (1, 4), (128, 512)) if (c.requests, c.tokens, c.context) in shapes]
    table = profile_of(cells).table
    for context in (128, 300, 512):
        low, high = table.seconds(torch.tensor([8, 16]).numpy(), 1, context).tolist()
        assert low == pytest.approx(stairs(1, 8, context)) and high == pytest.approx(stairs(1, 16, context))


def test_measuring_is_refused_where_requests_cannot_be_batched(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "sharded", True)
    with pytest.raises(ValueError, match="sharded"):
        machine_profile(target, NGRAM)
