"""`outrider demo` on a toy target: the race, packaged responses, budgets, and the files it leaves."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import outrider
import outrider.checkpoints.published as published
from outrider.cli import demo
from outrider.data.responses import read_responses
from outrider.evaluation.html_report import find_sources
from outrider.target.model import load_target
from outrider.training.logging import sparkline
from outrider.training.recipe import load_recipe
from outrider.utils.files import file_sha256, weight_files
from tests.toys.browser import browsing
from tests.toys.command_line import Run
from tests.toys.target_directory import save_toy_recipe

RECIPE = "optimizer: {steps: 4, sequences_per_step: 2, anchors_per_sequence: 2}\nprecision: float32\neval_every: 4\n"


@pytest.fixture
def directory(tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target, its drafter as a packaged one, a recipe, and responses to its prompts as packaged ones."""
    (tmp_path / "target").symlink_to(toy / "target")
    save_toy_recipe(tmp_path, RECIPE)
    monkeypatch.setattr(published, "shipped_drafter", lambda target: toy / "drafter")
    monkeypatch.setattr(demo, "RESPONSES", tmp_path / "packaged.jsonl")
    monkeypatch.setattr(demo, "_TASKS", [str(tmp_path / "prompts.jsonl")])
    return tmp_path


def package_responses(directory: Path, run: Run, digests: list[str]) -> None:
    path = directory / "packaged.jsonl"
    assert run("prepare", "--recipe", directory / "recipe.yaml", "--out", path)[0] == 0
    first, *others = path.read_text().splitlines()
    header = json.loads(first)
    header["settings"]["target_sha256"] = digests
    path.write_text("\n".join([json.dumps(header), *others]) + "\n")


def overrides(directory: Path) -> list[str]:
    fields = yaml.safe_load((directory / "recipe.yaml").read_text())
    fields["data"]["prompts"] = [{"path": str(directory / "prompts.jsonl")}]
    return [f"{name}={json.dumps(value)}" for name, value in fields.items() if name != "out"]


def drafter_of(trace: Path) -> object:
    (source,) = find_sources([trace])
    return source.content.settings["drafter"]


def test_the_whole_demo(directory: Path, toy: Path, run: Run) -> None:
    digests = [file_sha256(file) for file in weight_files(directory / "target")]
    package_responses(directory, run, digests)
    out = directory / "out"
    status, said, errors = run("demo", *overrides(directory), "--out", out, "--eval-samples", 1, "--eval-tokens", 6)
    assert status == 0, errors
    assert re.search(r"^plain: \S+ tokens/s, 1.00 tokens per .*; drafter: .*x, the same text$", said, re.MULTILINE)
    assert "4 prompts answered here, 4 of which the package has too: 4 token for token; 6 answers taken" in said
    assert read_responses(out / "responses.jsonl")[1] == read_responses(directory / "packaged.jsonl")[1]
    for file in ("drafter/config.json", "eval/results.json", "answer.json", "report.html"):
        assert (out / file).is_file()
    assert drafter_of(out / "answer.json") == str(toy / "drafter"), "the packaged one, whose page is shown"
    assert said.index("race") < said.index("answered here") < said.index("held-out") < said.index("demo finished in")


def test_without_a_packaged_drafter_there_is_no_race(
    directory: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trained one is measured and shown."""
    package_responses(directory, run, [file_sha256(file) for file in weight_files(directory / "target")])
    monkeypatch.setattr(published, "shipped_drafter", lambda target: None)
    out = directory / "out"
    status, said, errors = run("demo", *overrides(directory), "--out", out, "--eval-samples", 1, "--eval-tokens", 6)
    assert status == 0 and "race" not in said and "demo finished in" in said, errors
    assert drafter_of(out / "answer.json") == str(out / "drafter")
    assert json.loads((out / "eval" / "results.json").read_text())["settings"]["drafter"] == str(out / "drafter")


@pytest.mark.browser
def test_the_report_is_where_the_demo_says(directory: Path, run: Run) -> None:
    """The address that the demo prints opens in a browser: the report, with the trace of an answer to look into."""
    package_responses(directory, run, ["0" * 64])
    status, said, errors = run("demo", *overrides(directory), "--out", directory / "out", "--eval-samples", 1)
    assert status == 0, errors
    (address,) = re.findall(r"^  (file://\S+)$", said, re.MULTILINE)
    with browsing(390, 844) as browser:
        page = browser.page
        page.goto(address)
        assert page.title() == "outrider demo"
        linked = page.eval_on_selector_all("nav a", "all => all.map(one => one.hash.slice(1))")
        assert all(page.locator(f"[id={name}]").count() == 1 for name in linked) and len(linked) >= 4
        page.locator(".token[role=option]").first.click()
        assert "Why it stopped there" in page.inner_text(".detail") and page.locator(".rounds .round").count() > 1
        assert browser.console == [] and browser.serious_findings() == [] and browser.width_of_content() == 390
        assert [url for url in browser.asked if not url.startswith("data:")] == [address]
        browser.picture("demo-report-390")


def test_responses_are_added_once_and_those_of_other_weights_never(directory: Path, run: Run) -> None:
    """What training then reads: the file alone, with packaged responses to some prompts; else every prompt."""
    package_responses(directory, run, ["0" * 64])
    target, recipe = load_target(str(directory / "target")), load_recipe(directory / "recipe.yaml")
    said = io.StringIO()
    assert demo.add_packaged_responses(recipe, target, Console(file=said, width=1000)) == recipe
    assert "packaged responses are not used: " in said.getvalue() and "by other weights" in said.getvalue()
    file = directory / "out" / "responses.jsonl"
    assert len(read_responses(file)[1]) == 4
    assert demo.add_packaged_responses(recipe, target, Console(quiet=True)) == recipe

    file.unlink()
    package_responses(directory, run, [file_sha256(path) for path in weight_files(directory / "target")])
    lines = (directory / "packaged.jsonl").read_text().splitlines()
    (directory / "packaged.jsonl").write_text("\n".join(lines[:-2]) + "\n")  # not all prompts have a packaged answer
    answered = demo.add_packaged_responses(recipe, target, Console(quiet=True))
    assert answered.data.prompts == [] and answered.data.responses == str(file)
    assert len(read_responses(file)[1]) == 8
    assert demo.add_packaged_responses(recipe, target, Console(quiet=True)) == answered, "as a second run finds it"


def test_a_race_is_lossless_and_its_clocks_are_apart(
    toy: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner whose clock is behind moves next, and rates count a runner's own seconds alone."""
    now = 0.0
    monkeypatch.setattr(demo.time, "perf_counter", lambda: now)
    model = outrider.load(str(toy / "target"), drafter=str(toy / "drafter"))
    moved: list[tuple[str, float]] = []
    move = demo.Runner.move

    def slow(self: demo.Runner, target: object) -> None:
        nonlocal now
        moved.append((self.name, self.seconds))
        started = self.seconds
        move(self, target)  # type: ignore[arg-type]
        now += {"plain": 1.0, "drafter": 3.0}[self.name]
        self.seconds = started + {"plain": 1.0, "drafter": 3.0}[self.name]

    monkeypatch.setattr(demo.Runner, "move", slow)
    assert demo.race(model, Console(quiet=True)) == pytest.approx(64 / 65)  # a last move finds the end
    both = [name for name, _ in moved]
    assert both[:5] == ["plain", "drafter", "plain", "plain", "plain"]


def test_budgets_shorten_what_is_slow(directory: Path) -> None:
    console = Console(quiet=True)
    turns = 3
    assert demo.fit_evaluation(96, turns, 1000.0, console=console) == (96, 96 * 2 * turns / 1000)
    assert demo.fit_evaluation(96, turns, 2.0, console=console)[0] == 150 * 2 // (2 * turns)
    assert demo.fit_evaluation(96, turns, 0.1, console=console)[0] == 24


def test_a_curve_in_characters() -> None:
    assert sparkline([]) == "" and sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([3.0, 1.0, 2.0]) == "█▁▅" and len(sparkline(range(1000))) == 16
    assert sparkline([0.0, 0.0, 7.0, 7.0], width=2) == "▁█"
