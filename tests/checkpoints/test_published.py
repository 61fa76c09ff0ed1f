"""Published drafters: the catalogue, `--drafter auto`, and thinking with a drafter that was trained without it."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
from huggingface_hub.utils import LocalEntryNotFoundError
from typer.testing import CliRunner

import outrider.checkpoints.published as published
import outrider.checkpoints.published as shipped
from outrider.api.drafter import DrafterChoice, choose_drafter, require_directory, require_drafter, warn_of_thinking
from outrider.checkpoints.checkpoint import add_metadata
from outrider.checkpoints.published import PUBLISHED, fetch, published_by, published_for
from outrider.checkpoints.registry import dialects
from outrider.cli.main import app
from outrider.target import hub
from tests.toys.command_line import Run

DSPARK = "deepseek-ai/dspark_qwen3_4b_block7"
ZLAB = "z-lab/Qwen3-4B-DFlash-b16"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets' own files are looked for on this machine only."""

    def offline(repo: str, local_files_only: bool = False, allow_patterns: object = None) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(hub, "snapshot_download", offline)


def test_the_catalogue() -> None:
    repos = [entry.repo for entry in PUBLISHED]
    assert len(set(repos)) == len(repos) and all("/" in entry.repo and "/" in entry.target for entry in PUBLISHED)
    assert [entry.repo for entry in published_for("qwen/qwen3-4b")][:2] == [DSPARK, DSPARK.replace("dspark", "dflash")]
    assert published_for("Qwen/Qwen3-4B", thinking=True)[0].repo == "AngelSlim/Qwen3-4B_eagle3", "not made without"
    assert [e.repo for e in published_for("meta-llama/Llama-3.3-70B-Instruct")] == [], "pickles are not read"
    entry = published_by(DSPARK)
    assert entry is not None and (entry.rows, entry.thinking, entry.dialect) == (7, False, "DeepSpec")
    both = published_by("deepseek-ai/DeepSeek-V4-Flash-DSpark")
    assert both is not None and both.dialect == "DeepSeek-V4" and published_for(both.repo) == [both]
    assert published_by("nobody/nothing") is None


def test_auto_offers_what_a_dialect_reads() -> None:
    """Every entry's architecture is asked of the readers; `algorithm` must be one that the dialect carries."""
    carried = {dialect.name: set(dialect.methods) for dialect in dialects() if dialect.name != "Outrider"}
    carried["z-lab"] = {"dflash", "dflash2"}  # two dialects of one name
    carried["DeepSpec"] |= {"dflash"}  # as DSpark without heads
    for entry in PUBLISHED:
        if entry.obstacle is None:
            assert entry.dialect is not None and entry.algorithm in carried[entry.dialect], entry.repo
    unread = {entry.repo: entry.obstacle for entry in PUBLISHED if entry.obstacle is not None}
    names = ("dspark_gemma4_12b_block7", "dflash_gemma4_12b_block7", "eagle3_gemma4_12b_ttt7")
    gemma = {f"deepseek-ai/{name}" for name in names}
    assert {repo for repo, obstacle in unread.items() if obstacle == "layers"} == gemma
    assert unread["yuhuili/EAGLE3-Vicuna1.3-13B"] == "pickle"
    assert published_for("google/gemma-4-12B-it") == [] and choose_drafter("auto", "google/gemma-4-12B-it") is None
    assert any(entry.repo.endswith("eagle3_qwen3_4b_ttt7") for entry in published_for("Qwen/Qwen3-4B"))
    for repo in unread:
        found = published_by(repo)
        assert found is not None
        with pytest.raises(ValueError, match=f"the drafter {repo} cannot be read: "):
            fetch(found)


def test_auto_downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, bool]] = []

    def snapshot(repo: str, local_files_only: bool = False, allow_patterns: object = None) -> str:
        asked.append((repo, local_files_only))
        if local_files_only:
            raise LocalEntryNotFoundError("not cached")
        return str(tmp_path)

    monkeypatch.setattr(published, "snapshot_download", snapshot)
    found = choose_drafter("auto", "Qwen/Qwen3-4B")
    assert found == DrafterChoice("directory", str(tmp_path), repo=DSPARK) and found.knows_thinking is False
    assert asked == [(DSPARK, True), (DSPARK, False)]
    assert require_drafter("auto", "Qwen/Qwen3-4B", thinking=True).repo == "AngelSlim/Qwen3-4B_eagle3"
    assert choose_drafter("auto", "nobody/model") is None
    assert choose_drafter(ZLAB, "Qwen/Qwen3-4B") == DrafterChoice("directory", str(tmp_path), repo=ZLAB)
    assert choose_drafter("nobody/drafter", "Qwen/Qwen3-4B") == DrafterChoice("directory", "nobody/drafter")

    def offline(repo: str, local_files_only: bool = False, allow_patterns: object = None) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(published, "snapshot_download", offline)
    with pytest.raises(
        ValueError, match=rf"{DSPARK} for Qwen/Qwen3-4B is not in .*hf download {DSPARK}.*--drafter DIR"
    ):
        choose_drafter("auto", "Qwen/Qwen3-4B")


def test_half_a_download_is_taken_up_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[bool] = []

    def snapshot(repo: str, local_files_only: bool = False, allow_patterns: object = None) -> str:
        asked.append(local_files_only)
        return str(tmp_path)

    monkeypatch.setattr(published, "snapshot_download", snapshot)
    for name, wanted in (("config.json", [True, False]), ("model.safetensors", [True])):
        (tmp_path / name).touch()
        asked.clear()
        assert fetch(PUBLISHED[0]) == tmp_path and asked == wanted


def test_thinking_with_a_drafter_that_has_never_seen_it(tmp_path: Path) -> None:
    def drafter(data: dict[str, bool] | None) -> DrafterChoice:
        add_metadata(tmp_path, recipe={} if data is None else {"data": data})
        return DrafterChoice("directory", str(tmp_path))

    for choice, known in ((drafter({}), False), (drafter({"thinking": False}), False)):
        assert choice.knows_thinking is known
        with pytest.warns(UserWarning, match="trained on responses without thinking"):
            warn_of_thinking(choice, thinking=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_thinking(drafter({}), thinking=False)
        warn_of_thinking(drafter({"thinking": True}), thinking=True)
        warn_of_thinking(drafter(None), thinking=True)
        warn_of_thinking(DrafterChoice("ngram", ""), thinking=True)


def test_the_verb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = CliRunner()
    monkeypatch.setattr(shipped, "_places", lambda: [tmp_path, tmp_path])
    for name, target in (("a", "some/target-small"), ("b", "gpt-oss-local")):
        (tmp_path / name).mkdir()
        add_metadata(tmp_path / name, target=target)
    every = run.invoke(app, ["models"], env={"COLUMNS": "80"})
    assert every.exit_code == 0 and all(entry.repo in every.output for entry in PUBLISHED)
    assert all(len(line) <= 80 for line in every.output.splitlines() if str(tmp_path) not in line)
    assert every.output.count(str(tmp_path / "a")) == every.output.count(str(tmp_path / "b")) == 1
    assert "(layers)" in every.output and "(pickle)" in every.output
    local = run.invoke(app, ["models", "TARGET"], env={"COLUMNS": "80"})
    assert "some/target-small" in local.output and "published" not in local.output and "gpt-oss" not in local.output
    some = run.invoke(app, ["models", "gpt-oss"], env={"COLUMNS": "80"})
    assert "z-lab/gpt-oss-20b-DFlash" in some.output and "Qwen" not in some.output
    assert str(tmp_path / "b") in some.output
    none = run.invoke(app, ["models", "gpt-9"])
    assert isinstance(none.exception, ValueError) and "no published one for a target like" in str(none.exception)


def fine_tune(toy: Path, place: Path, card: str) -> str:
    """A copy of the toy target whose card says this."""
    shutil.copytree(toy / "target", place)
    (place / "README.md").write_text(f"---\n{card}\n---\n")
    return str(place)


def test_auto_follows_a_fine_tune_to_its_base(
    run: Run, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    base, drafter = str(toy / "target"), tmp_path / "models" / "a"
    shutil.copytree(toy / "drafter", drafter)
    add_metadata(drafter, target=base)
    monkeypatch.setattr(shipped, "_places", lambda: [tmp_path / "models"])
    assert choose_drafter("auto", base) == DrafterChoice("directory", str(drafter))
    named = fine_tune(toy, tmp_path / "named", f"base_model: {base}")
    second = fine_tune(toy, tmp_path / "second", f"base_model: {named}")
    for target in (named, second):
        assert choose_drafter("auto", target) == DrafterChoice("directory", str(drafter), base=base)
        assert capfd.readouterr().err == f"{target} is a fine-tune of {base}: drafter {drafter}\n"
    with pytest.raises(ValueError, match=rf"made for {base}: copy it \(cp -r {drafter} mine\)"):
        require_directory("auto", named)
    silent = fine_tune(toy, tmp_path / "silent", "license: mit")
    assert choose_drafter("auto", silent) == DrafterChoice("directory", str(drafter), base=base)
    assert f"{silent} has the shapes and vocabulary of {base}: drafter" in capfd.readouterr().err
    answers = [
        run("generate", "ab", "--target", named, "--max-new-tokens", 12, "--drafter", d) for d in ("auto", "none")
    ]
    assert answers[0][:2] == (0, answers[1][1]) and f"drafter {drafter}" in answers[0][2], "the output is the target's"
    shown = CliRunner().invoke(app, ["models", named], env={"COLUMNS": "400"})
    assert str(drafter) in shown.output and f"{named} is a fine-tune of {base}" in shown.output


def test_auto_leaves_out_what_does_not_fit(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(toy / "target")
    for name in ("a", "b"):
        (tmp_path / "models" / name).mkdir(parents=True)
        add_metadata(tmp_path / "models" / name, target=base)
    monkeypatch.setattr(shipped, "_places", lambda: [tmp_path / "models"])
    for number, card in enumerate((f"base_model: {base}", "license: mit")):
        wider = Path(fine_tune(toy, tmp_path / str(number), card))
        fields = json.loads((wider / "config.json").read_text())
        (wider / "config.json").write_text(json.dumps({**fields, "hidden_size": 64}))
        assert choose_drafter("auto", str(wider)) is None
        said = f"{wider} is a fine-tune of {base}, whose drafters do not fit it: hidden_size is 64, there 32\n"
        assert capsys.readouterr().err == ("" if number else said)


def test_auto_follows_a_fine_tune_to_a_published_drafter(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "_places", lambda: [])
    monkeypatch.setattr(published, "snapshot_download", lambda repo, **_: str(toy / "drafter"))
    target = fine_tune(toy, tmp_path / "mine", "base_model: Qwen/Qwen3-4B")
    wanted = DrafterChoice("directory", str(toy / "drafter"), repo=DSPARK, base="Qwen/Qwen3-4B")
    assert choose_drafter("auto", target) == wanted
