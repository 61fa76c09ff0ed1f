"""The feature store: exact sizes, killed writers that go on, damage that is named, windows of any size, prefetching."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from outrider.data.responses import Sample
from outrider.target.model import Target
from outrider.training.feature_store import (
    FeatureStore,
    FeatureWindow,
    StoreDtype,
    StorePlan,
    begin_store,
    check_store,
    check_store_space,
    decode,
    encode,
    missing_bytes,
    open_features,
    plan_store,
    recipe_plan,
    write_store,
)
from outrider.training.features import FeatureCache, Features, FeatureSource, measure_aux_scale, step_features
from outrider.training.recipe import Recipe
from tests.toys.stores import AUX_LAYERS, SCALE, plan_of
from tests.toys.targets import toy_samples, toy_target

DTYPES: tuple[StoreDtype, ...] = ("bf16", "int8", "fp8")
FIELDS = ("aux_SLD", "hidden_RD", "lse_R", "argmax_R")


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def run_of(target: Target, samples: list[Sample], aux_layers: tuple[int, ...], scale_L: torch.Tensor) -> Any:
    """A run as far as its features depend on it."""
    config = SimpleNamespace(target_layer_ids=aux_layers)
    drafter = SimpleNamespace(config=config, aux_scale_L=scale_L)
    return SimpleNamespace(target=target, samples=samples, drafter=drafter)


def write_all(directory: Path, target: Target, samples: Sequence[Sample], dtype: StoreDtype = "int8") -> StorePlan:
    plan = begin_store(directory, plan_of(target, samples, dtype))
    write_store(directory, plan, target, samples, range(len(plan.shards)))
    return plan


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir())}


def same(a: Features, b: Features) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in FIELDS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 9])
def test_the_plan_is_the_size_on_disk_to_the_byte(
    tmp_path: Path, target: Target, dtype: StoreDtype, count: int
) -> None:
    samples = toy_samples(count)
    plan = plan_of(target, samples, dtype)
    assert not list(tmp_path.iterdir()) and missing_bytes(tmp_path, plan) == plan.bytes
    write_all(tmp_path, target, samples, dtype)
    assert plan.bytes == sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))
    assert missing_bytes(tmp_path, plan) == 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [s["bytes"] for s in manifest["shards"]] == [
        (tmp_path / s["file"]).stat().st_size for s in manifest["shards"]
    ]
    assert sum(s["samples"] for s in manifest["shards"]) == count


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_features_are_the_online_ones_up_to_the_dtype(tmp_path: Path, target: Target, dtype: StoreDtype) -> None:
    samples = toy_samples(9)
    plan = write_all(tmp_path, target, samples, dtype)
    store = FeatureStore(tmp_path, plan, samples, 2**30)
    online = FeatureSource(target, samples, AUX_LAYERS, SCALE, 2**30)
    for index in (8, 0, 4, 3):
        stored, exact = store[index], online[index]
        for name in ("aux_SLD", "hidden_RD"):
            a, b = getattr(stored, name), getattr(exact, name)
            assert a.dtype == torch.float16 and a.shape == b.shape
            row = b.float().abs().amax(-1, keepdim=True)
            # half a step: of 256 per octave, of 127 per row, of 16 per octave
            bound = {"bf16": b.float().abs() / 256, "int8": row / 254, "fp8": b.float().abs() / 16 + row / 2**15}[dtype]
            assert ((a.float() - b.float()).abs() <= bound * 1.01 + row / 2**11).all()
            assert not torch.equal(a, b), "the dtype must leave a trace, or nothing was tested"
        assert torch.equal(stored.argmax_R, exact.argmax_R) and stored.argmax_R.dtype == torch.int64
        logits = stored.hidden_RD.float() @ target.head_VD.T
        torch.testing.assert_close(stored.lse_R, logits.logsumexp(-1), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_and_of_the_largest_numbers_survive(target: Target, dtype: StoreDtype) -> None:
    rows = torch.zeros(3, 32, dtype=torch.float16)
    rows[1], rows[2, 5] = 65504.0, -65504.0
    features = Features(rows[:, None], rows, torch.zeros(3), torch.tensor([1, 2, 3]))
    back = decode(encode(target, features, dtype))
    assert torch.equal(back.aux_SLD[:, 0], back.hidden_RD) and back.hidden_RD.isfinite().all()
    torch.testing.assert_close(back.hidden_RD, rows, rtol=1e-3, atol=0)


WRITER = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
sys.path.insert(0, {tests!r})
import torch
from outrider.target.model import Target
from tests.toys.targets import toy_samples
from tests.toys.stores import plan_of
from transformers import AutoModelForCausalLM
from outrider.training.feature_store import begin_store, write_store
torch.set_num_threads(1)
target = Target(AutoModelForCausalLM.from_pretrained({target!r}), None, "toy")
samples = toy_samples(80)
for line in sys.stdin:
    directory, number, of = line.split()
    plan = plan_of(target, samples)
    pid = os.fork()
    if pid == 0:
        plan = begin_store(Path(directory), plan)
        write_store(Path(directory), plan, target, samples, range(int(number), len(plan.shards), int(of)))
        os._exit(0)
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("ended", flush=True)
"""


@pytest.fixture
def writer(tmp_path: Path, target: Target) -> Iterator[subprocess.Popen[str]]:
    """A process that starts store writers on request, each a process of its own to be killed."""
    target.model.save_pretrained(tmp_path / "target")
    tests = Path(__file__).parents[2]
    code = WRITER.format(tests=str(tests), target=str(tmp_path / "target"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.kill()


def start(process: subprocess.Popen[str], directory: Path, number: int = 0, of: int = 1) -> int:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{directory} {number} {of}\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def wait(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None and process.stdout.readline() == "ended\n"


def written(directory: Path) -> int:
    return len(list(directory.glob("shard-*.json")))


@pytest.mark.slow
def test_writers_killed_ten_times_end_in_the_same_bytes(tmp_path: Path, writer: subprocess.Popen[str]) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    start(writer, whole)
    began = time.monotonic()
    wait(writer)
    a_shard = (time.monotonic() - began) / written(whole)
    rng = random.Random(0)
    seen = [0]
    for kill in range(10):
        if seen[-1] > written(whole) - 4:  # a busy machine kills late
            break
        pid = start(writer, parts, kill % 2, 2)  # now this process's shards, now the other's
        deadline = time.monotonic() + 120
        while written(parts) == seen[-1] and time.monotonic() < deadline:
            time.sleep(a_shard / 50)
        if kill % 2:  # while a file is being written
            while not list(parts.glob(".*.tmp")) and time.monotonic() < deadline:
                time.sleep(0.0002)
        else:  # anywhere in computing, writing or naming the next one
            time.sleep(rng.uniform(0, a_shard))
        with contextlib.suppress(ProcessLookupError):  # it may have ended already
            os.kill(pid, signal.SIGKILL)
        wait(writer)
        seen.append(written(parts))
    assert seen == sorted(seen) and len(seen) > 4, f"{seen}: a resumed writer loses nothing"
    assert not (parts / "manifest.json").exists() or seen[-1] == written(whole)
    for number in range(3):
        start(writer, parts, number, 3)
        wait(writer)
    assert contents(parts) == contents(whole)


def test_resuming_writes_only_what_is_missing(tmp_path: Path, target: Target) -> None:
    samples = toy_samples(9)
    plan = write_all(tmp_path, target, samples)
    before = contents(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / plan.shards[1].file).unlink()
    (tmp_path / "shard-00002.json").write_text("{")
    (tmp_path / f".plan.json.outrider-{'0a' * 16}.tmp").write_text("left by a killed process")
    assert write_store(tmp_path, plan, target, samples, range(len(plan.shards))) == [1, 2]
    assert contents(tmp_path) == before


def test_the_manifest_is_made_by_the_first_reader_when_nobody_else_did(tmp_path: Path, target: Target) -> None:
    samples = toy_samples(9)
    plan = write_all(tmp_path, target, samples)
    before = contents(tmp_path)
    (tmp_path / "manifest.json").unlink()
    FeatureStore(tmp_path, plan, samples, 0)
    assert contents(tmp_path) == before


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(path: Path) -> None:
    tensors = load_file(path)
    save_file({**tensors, "lse": tensors["lse"] + 1}, path)  # another store's shard of the same size


@pytest.mark.parametrize(
    ("damage", "named"),
    [(truncate, "truncated"), (alter, "altered"), (Path.unlink, "missing"), (swap, "foreign")],
)
def test_a_damaged_shard_is_named_with_its_remedy(tmp_path: Path, target: Target, damage: object, named: str) -> None:
    samples = toy_samples(9)
    plan = write_all(tmp_path, target, samples)
    whole = contents(tmp_path)
    path = tmp_path / plan.shards[1].file
    assert callable(damage)
    damage(path)
    store = FeatureStore(tmp_path, plan, samples, 0)
    store[0]  # another shard: fine
    with pytest.raises(ValueError, match=rf"shard-00001\.safetensors is .*{named}.*write RECIPE --only 1"):
        store[plan.shards[1].first]
    found = check_store(tmp_path, plan)
    assert len(found) == 1 and named in found[0] and "shard-00001" in found[0]
    write_store(tmp_path, plan, target, samples, [1])
    assert check_store(tmp_path, plan) == [] and contents(tmp_path) == whole


def test_other_damage_is_named(tmp_path: Path, target: Target) -> None:
    samples = toy_samples(9)
    plan = write_all(tmp_path, target, samples)
    shutil.copy(tmp_path / "shard-00000.safetensors", tmp_path / "shard-00099.safetensors")
    assert ["shard-00099.safetensors is foreign" in line for line in check_store(tmp_path, plan)] == [True]
    (tmp_path / "shard-00099.safetensors").unlink()

    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=match):
            FeatureStore(tmp_path, plan, samples, 0)

    manifest = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(manifest[:-9])
    refused(r"manifest\.json is damaged")
    (tmp_path / "manifest.json").write_text(manifest.replace('"end": ', '"end": 1'))
    refused(r"manifest\.json does not fit plan\.json")
    (tmp_path / "manifest.json").unlink()
    entry = json.loads((tmp_path / "shard-00001.json").read_text())
    (tmp_path / "shard-00001.json").write_text(json.dumps({**entry, "key": "0" * 64}))
    refused(r"not complete: .*shard-00001\.safetensors is foreign.*--only 1")
    for suffix in (".safetensors", ".json"):
        shutil.copy(tmp_path / f"shard-00000{suffix}", tmp_path / f"shard-00001{suffix}")
    refused(r"shard-00001\.safetensors is foreign: shard-00001\.json belongs to another shard")
    (tmp_path / "shard-00001.json").unlink()
    refused(r"shard-00001\.safetensors has not been written")
    (tmp_path / "plan.json").unlink()
    refused(r"holds no feature store: `outrider features write RECIPE`")


def test_a_store_of_another_run_is_refused(tmp_path: Path, target: Target) -> None:
    samples = toy_samples(9)
    plan = write_all(tmp_path, target, samples)
    others = {
        "target_sha256": plan_of(toy_target(seed=1), samples),  # the same config, other weights
        "samples_sha256": plan_of(target, toy_samples(9, seed=1)),
        "dtype": plan_of(target, samples, "fp8"),
        "aux_layers": plan_store(target, samples, (0, 1, 3), SCALE, "int8", 60),
        "aux_scale": plan_store(target, samples, AUX_LAYERS, SCALE * 1.01, "int8", 60),
    }
    for name, other in others.items():
        with pytest.raises(ValueError, match=rf"made for another run \(.*{name}"):
            FeatureStore(tmp_path, other, samples, 0)
    rounded = plan_store(target, samples, AUX_LAYERS, SCALE * (1 + 1e-7), "int8", 60)
    assert FeatureStore(tmp_path, rounded, samples, 0).plan == plan


def test_a_full_disk_is_an_error_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.utils.files.free_bytes", lambda directory: 999)
    check_store_space(tmp_path / "store", 999)
    with pytest.raises(ValueError, match=r"needs 1000 bytes .*has 999 .*nothing was written"):
        check_store_space(tmp_path / "store", 1000)
    assert list(tmp_path.iterdir()) == []


VISITS = random.Random(5).choices(range(12), k=60)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 2.0])
def test_a_window_of_any_size_gives_the_numbers_of_a_complete_store(
    tmp_path: Path, target: Target, share: float
) -> None:
    samples = toy_samples(12)
    plan = write_all(tmp_path / "store", target, samples)
    store = FeatureStore(tmp_path / "store", plan, samples, 0)
    budget = int(share * plan.bytes)
    computed = 0
    for part in (VISITS[:30], VISITS[30:]):  # a second process takes over what the first one left
        window = FeatureWindow(tmp_path / "window", plan, target, samples, 1, budget, 60)
        for first in range(0, len(part), 3):
            for index, features in zip(part[first : first + 3], window.gather(part[first : first + 3]), strict=True):
                assert same(features, store[index])
            on_disk = sum(p.stat().st_size for p in (tmp_path / "window").glob("*.safetensors"))
            assert window.bytes == on_disk <= budget
        window.close()
        computed += window.computed
    if share == 2.0:
        assert computed == len(set(VISITS)), "what is on disk is not computed again"
    else:
        assert computed > len(set(VISITS))


def test_a_window_drops_the_shard_that_was_needed_longest_ago(tmp_path: Path, target: Target) -> None:
    samples = toy_samples(12)
    plan = plan_of(target, samples)
    window = FeatureWindow(tmp_path, plan, target, samples, 1, plan.bytes // 2, 1)  # one sample a shard
    index = 0
    while window.bytes + max(s.bytes for s in plan.shards) < window.max_bytes:
        window[index]
        index += 1
    window[0]
    while 1 in window._where:
        window[index]
        index += 1
    assert 0 in window._where and window.bytes <= window.max_bytes


def test_a_damaged_window_is_reported_and_healed(tmp_path: Path, target: Target) -> None:
    samples = toy_samples(6)
    plan = plan_of(target, samples)
    window = FeatureWindow(tmp_path, plan, target, samples, 1, 2**30, 1)
    expected = window.gather(range(6))
    window.close()
    truncate(tmp_path / "window-000001.safetensors")
    alter(tmp_path / "window-000002.safetensors")
    (tmp_path / "window-000003.json").unlink()
    with pytest.warns(UserWarning, match="window-000003.safetensors has not been written"):
        again = FeatureWindow(tmp_path, plan, target, samples, 1, 2**30, 1)
    with pytest.warns(UserWarning, match=r"window-00000[12].safetensors is (truncated|altered)"):
        assert all(map(same, again.gather(range(6)), expected))
    assert again.computed == 3


class Recorded(FeatureCache):
    """A source that notes in which thread it was asked, and can fail."""

    def __init__(self, inner: FeatureCache, background: bool, fail_at: int | None = None) -> None:
        super().__init__(inner.samples, 0)
        self.inner, self.background, self.fail_at = inner, background, fail_at
        self.threads: set[str] = set()
        self.asked: list[int] = []

    def _fetch(self, indices: Sequence[int]) -> list[Features]:
        self.threads.add(threading.current_thread().name)
        self.asked += indices
        if self.fail_at in indices:
            raise ValueError(f"no features of {self.fail_at}")
        return self.inner.gather(indices)


STEPS = [[0, 3], [1, 2], [4, 0], [5, 1], [2, 4], [3, 5], [0, 1]]


@pytest.mark.parametrize("background", [True, False])
def test_prefetching_changes_no_number(target: Target, background: bool) -> None:
    samples = toy_samples(6)
    direct = FeatureSource(target, samples, AUX_LAYERS, SCALE, 2**30)
    source = Recorded(FeatureSource(target, samples, AUX_LAYERS, SCALE, 2**30), background)
    with step_features(source, iter(STEPS)) as steps:
        for indices, features in zip(STEPS, steps, strict=True):
            assert all(same(found, direct[i]) for i, found in zip(indices, features, strict=True))
    assert source.threads == {"features_0" if background else "MainThread"}


@pytest.mark.parametrize("background", [True, False])
def test_an_error_surfaces_in_the_step_it_belongs_to(target: Target, background: bool) -> None:
    samples = toy_samples(6)
    source = Recorded(FeatureSource(target, samples, AUX_LAYERS, SCALE, 2**30), background, fail_at=4)
    done = 0
    with pytest.raises(ValueError, match="no features of 4"), step_features(source, STEPS) as steps:
        for _ in steps:
            done += 1
    assert done == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("features")]


def test_the_queue_is_bounded_and_leaving_early_ends_the_thread(target: Target) -> None:
    samples = toy_samples(6)
    source = Recorded(FeatureSource(target, samples, AUX_LAYERS, SCALE, 2**30), background=True)
    endless = ([i % 6] for i in range(10**9))
    with step_features(source, endless, ahead=2) as steps:
        next(steps)
        time.sleep(0.3)
    assert len(source.asked) <= 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("features")]


def test_the_recipe_chooses_the_source(tmp_path: Path, target: Target) -> None:
    samples = toy_samples(9)

    def opened(**features: object) -> FeatureCache:
        fields = {"target": "toy", "out": str(tmp_path), "data": {"prompts": [{"path": "x"}]}, "features": features}
        return open_features(Recipe.model_validate(fields), run_of(target, samples, AUX_LAYERS, SCALE))

    assert isinstance(opened(), FeatureSource)
    with pytest.raises(ValueError, match="holds no feature store"):
        opened(mode="store")
    plan = plan_store(target, samples, AUX_LAYERS, SCALE, "fp8", 60)
    begin_store(tmp_path / "features", plan)
    write_store(tmp_path / "features", plan, target, samples, range(len(plan.shards)))
    store = opened(mode="store", dtype="fp8", shard_tokens=60)
    window = opened(mode="store", dtype="fp8", max_gb=0.001, directory=str(tmp_path / "elsewhere"))
    assert isinstance(store, FeatureStore) and isinstance(window, FeatureWindow)
    assert all(map(same, store.gather(range(9)), window.gather(range(9))))
    window.close()
    with safe_open(next((tmp_path / "elsewhere" / "window-0-of-1").glob("*.safetensors")), "pt") as file:
        assert file.get_slice("aux").get_dtype() == "F8_E4M3"


def test_drafters_with_different_aux_layers_share_a_store(tmp_path: Path, target: Target) -> None:
    samples = toy_samples(9)
    fields = {"target": "toy", "out": str(tmp_path), "data": {"prompts": [{"path": "x"}]}}

    def recipe(**features: object) -> Recipe:
        return Recipe.model_validate({**fields, "features": {"mode": "store", "aux_layers": [3, 1, 0], **features}})

    def scale(aux_layers: tuple[int, ...]) -> torch.Tensor:
        return measure_aux_scale(target, samples, aux_layers)

    plan = recipe_plan(recipe(), run_of(target, samples, (3,), scale((3,))))
    assert plan.aux_layers == (0, 1, 3)
    begin_store(tmp_path / "features", plan)
    write_store(tmp_path / "features", plan, target, samples, range(len(plan.shards)))
    for aux_layers in ((3,), (0, 3), (0, 1, 3)):
        source = open_features(recipe(), run_of(target, samples, aux_layers, scale(aux_layers)))
        online = FeatureSource(target, samples, aux_layers, scale(aux_layers), 0, torch.bfloat16)
        for stored, computed in zip(source.gather(range(9)), online.gather(range(9)), strict=True):
            torch.testing.assert_close(stored.aux_SLD.float(), computed.aux_SLD.float(), rtol=0.02, atol=0.02)
    with pytest.raises(ValueError, match=r"features\.aux_layers \[3, 1, 0\] lacks \[2\], which the drafter reads"):
        open_features(recipe(), run_of(target, samples, (1, 2), scale((1, 2))))
    with pytest.raises(ValueError, match="aux_scale differ"):
        open_features(recipe(), run_of(target, samples, (3,), 2 * scale((3,))))
    with pytest.raises(ValueError, match="aux_layers is for a complete store"):
        recipe(max_gb=1.0)


def test_shards_are_a_pure_function_of_the_samples(target: Target) -> None:
    samples = toy_samples(30)
    plan = plan_of(target, samples)
    assert plan == plan_of(target, samples) and plan.key == plan_of(target, samples).key
    assert [s.first for s in plan.shards[1:]] == [s.end for s in plan.shards[:-1]] and plan.shards[-1].end == 30
    for shard in plan.shards[:-1]:
        tokens = [len(s.tokens) for s in samples[shard.first : shard.end]]
        assert sum(tokens) >= 60 > sum(tokens[:-1])
    assert replace(plan, dtype="fp8").key != plan.key
