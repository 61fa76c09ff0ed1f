"""Several drafters in one sweep: which variants are measured, what may grow, and the verb on toys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import Result

from outrider.backends.local import Kinds, NamedDrafter, choose_variants, is_adaptive, match_variants
from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_drafter
from outrider.decoding.config import ProfileConfig
from outrider.decoding.profile import measure_profile
from outrider.drafters.base import DrafterWeights
from outrider.drafters.ngram import NgramDrafter
from outrider.evaluation.loadtest.metrics import Frontier, Journal
from outrider.target.model import load_target
from tests.toys.command_line import invoke
from tests.toys.drafters import make_mtp

DRAFTERS = {
    "d": Kinds(4, ["none", "fixed-1", "fixed-2", "fixed-3", "threshold", "prefix", "look-ahead", "look-ahead+skip"]),
    "mtp": Kinds(1, ["none", "fixed-1"]),
    "runs/n": Kinds(10, ["none", "fixed-1", "fixed-7"]),
}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["none", "fixed-1"], [("d", "fixed-1"), ("mtp", "fixed-1"), ("runs/n", "fixed-1")]),
        (["fixed-4"], [("d", "fixed-4"), ("runs/n", "fixed-4")]),
        (["fixed-*"], [("d", "fixed-1"), ("d", "fixed-2"), ("d", "fixed-3"), ("mtp", "fixed-1"),
                       ("runs/n", "fixed-1"), ("runs/n", "fixed-7")]),
        (["mtp/fixed-*", "runs/n/fixed-7"], [("mtp", "fixed-1"), ("runs/n", "fixed-7")]),
        (["look-ahead+skip", "prefix+skip"], [("d", "look-ahead+skip"), ("d", "prefix+skip")]),
        (["d/fixed-2", "fixed-2"], [("d", "fixed-2"), ("runs/n", "fixed-2")]),
        (["fixed-11"], [("d", "fixed-11"), ("mtp", "fixed-11"), ("runs/n", "fixed-11")]),
    ],
)  # fmt: skip
def test_which_variants_are_meant(names: list[str], found: list[tuple[str, str]]) -> None:
    assert match_variants(names, DRAFTERS) == found


def test_all_variants_by_default_and_no_unknown_drafters() -> None:
    everything = match_variants(None, DRAFTERS)
    assert everything == [(name, kind) for name, kinds in DRAFTERS.items() for kind in kinds.defaults if kind != "none"]
    with pytest.raises(ValueError, match=r"variant e/fixed-1: no drafter is called e; there are d, mtp, runs/n\."):
        match_variants(["e/fixed-1"], DRAFTERS)
    assert is_adaptive("d/look-ahead+skip") and is_adaptive("runs/n/async") and not is_adaptive("prefix/fixed-1")


def test_variants_are_built_of_their_drafters() -> None:
    short, long = NgramDrafter(), NgramDrafter()
    short.gamma = 2
    found = choose_variants([NamedDrafter("s", short), NamedDrafter("l", long)], ["fixed-1", "fixed-3"])
    assert [(drafter, variant.name, variant.drafts) for drafter, variant in found] == [
        (short, "none", 0), (short, "s/fixed-1", 1), (long, "l/fixed-1", 1), (long, "l/fixed-3", 3),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"drafter s: variant fixed-30: this drafter drafts 1 to 2"):
        choose_variants([NamedDrafter("s", short), NamedDrafter("l", long)], ["fixed-30"])
    alone = choose_variants([NamedDrafter("", long)], ["fixed-3"])
    assert [variant.name for _, variant in alone] == ["none", "fixed-3"]
    with pytest.raises(ValueError, match=r"^variant fixed-30"):
        choose_variants([NamedDrafter("", long)], ["fixed-30"])


def test_drafters_may_join_a_sweep_and_none_may_change(tmp_path: Path) -> None:
    first = {"seed": 0, "drafters": {"d": {"sha256": "1"}, "e": {"sha256": "2"}}}
    Journal(tmp_path, first)._path.write_text("")
    (tmp_path / "points.jsonl").write_text("")
    measured = Journal(tmp_path, first)
    measured.points.append(None)  # type: ignore[arg-type]
    assert measured._checked(first) == first
    joined = measured._checked({"seed": 0, "drafters": {"f": {"sha256": "3"}}})
    assert joined["drafters"] == first["drafters"] | {"f": {"sha256": "3"}}  # type: ignore[operator]
    assert json.loads((tmp_path / "settings.json").read_text()) == joined
    for changed, message in (
        ({"seed": 0, "drafters": {"d": {"sha256": "9"}}}, r"drafter d was \{'sha256': '1'\}, now"),
        ({"seed": 1, "drafters": {"d": {"sha256": "1"}}}, "seed was 0, now 1"),
    ):
        with pytest.raises(ValueError, match=message):
            measured._checked(changed)


def run(toy: Path, out: Path, *more: object) -> Result:
    command = ["--target", toy / "target", "--tasks", toy / "tasks.jsonl", "--out", out, "--concurrency", "1,2"]
    command += ["--requests-per-point", 3, "--max-new-tokens", 8, "--repeats", 2]
    return invoke("bench", *command, *more)


@pytest.mark.slow
def test_the_verb_measures_several_drafters_in_one_run(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.utils.measure.set_up", lambda threads: None)
    loaded = load_target(str(toy / "target"))
    save_drafter(Checkpoint(DrafterWeights(make_mtp(loaded, 1, 1, loaded.vocab_size))), tmp_path / "mtp")
    config = ProfileConfig(max_requests=2, max_tokens=16, contexts=(16,), repeats=1, seconds=0.1)
    measure_profile(loaded, load_checkpoint(toy / "drafter").serve(loaded), config).save(tmp_path / "d.json")
    drafters = ["--drafter", f"d={toy / 'drafter'}", "--drafter", f"mtp={tmp_path / 'mtp'}"]
    out, chosen = tmp_path / "out", ["--variants", "none,fixed-1,d/fixed-3,look-ahead+skip"]
    refused = run(toy, out, *drafters, *chosen)
    assert isinstance(refused.exception, ValueError) and "drafter d: variant look-ahead+skip" in str(refused.exception)
    assert not out.exists()
    done = run(toy, out, *drafters, *chosen, "--profile", tmp_path / "d.json")
    assert done.exit_code == 0, (done.output, done.exception)
    frontier = Frontier.load(out / "frontier.json")
    variants = ["none", "d/fixed-1", "mtp/fixed-1", "d/fixed-3", "d/look-ahead+skip"]
    assert {p.variant for p in frontier.points} == set(variants) and len(frontier.points) == 2 * len(variants)
    assert all(p.repeats == 2 and p.same + p.ties == 6 and p.mismatches == 0 for p in frontier.points)
    assert {gain.against for gain in frontier.gains} == {"mtp/fixed-1"}, "MTP-1 is what gains are over"
    assert {gain.variant for gain in frontier.gains} == set(variants) - {"mtp/fixed-1"}
    assert "throughput over that of mtp/fixed-1" in done.output
    assert {name: one["algorithm"] for name, one in frontier.settings["drafters"].items()} == {
        "d": "dspark", "mtp": "mtp",
    }  # fmt: skip
    before = (out / "points.jsonl").read_bytes()
    joined = run(toy, out, *drafters, "--drafter", "n=ngram@3", "--variants", "n/fixed-3", "--profile",
                 tmp_path / "d.json", "--against", "none", "--user-speeds", "1,2")  # fmt: skip
    assert joined.exit_code == 0, (joined.output, joined.exception)
    after = (out / "points.jsonl").read_bytes()
    assert after.startswith(before) and after.count(b"n/fixed-3") == 4 and after.count(b"\n") == 24
    frontier = Frontier.load(out / "frontier.json")
    assert list(frontier.settings["drafters"]) == ["d", "mtp", "n"] or set(frontier.settings["drafters"]) == {
        "d", "mtp", "n",
    }  # fmt: skip
    assert {gain.against for gain in frontier.gains} == {"none"}
    assert {gain.at for gain in frontier.gains if gain.figure == "throughput"} == {1.0, 2.0}


def test_drafters_that_cannot_be_measured_together(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.utils.measure.set_up", lambda threads: None)
    two = ["--drafter", "a=ngram", "--drafter", "b=ngram@3"]
    for more, message in (
        (["--drafter", "ngram", "--drafter", "ngram"], "two drafters have the name ngram"),
        ([*two, "--backend", "transformers"], "are for --backend local"),
        ([*two, "--tree", "9"], "without --tree"),
        ([*two, "--variants", "c/fixed-1"], "no drafter is called c; there are a, b"),
        ([*two, "--variants", "fixed-1", "--against", "a/fixed-3"], "--against a/fixed-3: not among"),
    ):
        found = run(toy, tmp_path / "x", *more)
        assert isinstance(found.exception, ValueError) and message in str(found.exception), (more, found.exception)
    assert not (tmp_path / "x").exists()
