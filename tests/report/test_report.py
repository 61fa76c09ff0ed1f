"""`outrider report`: what the page holds, what it is made of, what is refused, and the page in a browser."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outrider
from outrider.data.sources import TaskSettings
from outrider.evaluation.calibration.fit import Calibration, Rounds, calibrate
from outrider.evaluation.figures import speedups
from outrider.evaluation.html_report import find_sources, render
from outrider.evaluation.results import Results
from outrider.evaluation.verdict import pooled
from outrider.sampling import SamplingParams
from outrider.utils.files import file_sha256
from tests.toys.browser import browsing
from tests.toys.command_line import Run, check_error
from tests.toys.serving import serving

MEASURED = Path(__file__).parents[2] / "docs" / "results"
HOSTILE = "</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """The texts, ids and addresses of a page; scripts apart."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.ids: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.tags: Counter[str] = Counter()
        self._open = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids[value or ""] += 1
            if name in ("src", "href", "action", "srcset"):
                self.addresses.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        (self.scripts if self._open in ("script", "style") else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def answer(toy: Path) -> dict[str, Any]:
    """A toy server's answer with its trace, in whose first token is what would end a script."""
    with serving(outrider.load(toy / "target", str(toy / "drafter"))) as served:
        asked = {"prompt": "ab", "max_tokens": 24, "temperature": 1, "seed": 0, "trace": True}
        found: dict[str, Any] = served.post("/v1/completions", **asked).json()
    found["choices"][0]["trace"][0]["tokens"][0]["text"] = HOSTILE
    return found


def calibrated() -> Calibration:
    """A calibration of 200 random rounds of 2 conversations, whose bins are recorded."""
    random = np.random.default_rng(0)
    confidences_NK = random.uniform(0.3, 1.0, (200, 3))
    agreed_NK = random.random((200, 3)) < confidences_NK**2
    accepted_N = np.logical_and.accumulate(agreed_NK, axis=1).sum(axis=1)
    rounds = Rounds(confidences_NK, accepted_N, np.full(200, 3))
    conversations = [[rounds.chosen(np.arange(half * 100, half * 100 + 100))] for half in (0, 1)]
    settings = TaskSettings(None, 8, SamplingParams(temperature=1.0))
    found = calibrate({"toy": conversations}, ["toy"], [], settings=settings, versions={"torch": "2"})
    return found.calibration


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, answer: dict[str, Any]) -> Path:
    """A directory of one file of several kinds, and of others that are none."""
    directory = tmp_path_factory.mktemp("measured")
    shutil.copytree(MEASURED / "shipped-greedy", directory / "eval")
    (directory / "calibration.json").write_text(calibrated().model_dump_json())
    shutil.copy(MEASURED / "simulated" / "validation.json", directory)
    (directory / "run").mkdir()
    lines = [
        {"step": step, "group": "held_out", "loss": 5 - step, "expected_length_greedy": 1 + step} for step in (1, 2)
    ]
    (directory / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "answer.json").write_text(json.dumps(answer))
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "points.jsonl").write_text("not ours\n")
    (directory / ".cache").mkdir()
    (directory / ".cache" / "results.json").write_text("not to be read")
    return directory


@pytest.fixture(scope="module")
def page(measured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of it."""
    from outrider.evaluation.html_report import render

    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(find_sources([measured]), "My <report>"), encoding="utf-8")
    return path


def test_a_report_holds_what_was_measured(page: Path, measured: Path, answer: dict[str, Any]) -> None:
    html = page.read_text(encoding="utf-8")
    found, results = Page(html), Results.load(measured / "eval" / "results.json")
    assert "My <report>" in found.text and "from 5 files" in found.text
    ratio, turns = pooled(speedups(results))[0], sum(task.turns for task in results.tasks)
    assert f"{ratio:.2f}x plain over {turns} turns" in found.text, "the verdict of outrider eval, in the summary"
    for task in results.tasks:
        for figure in (f"{task.accepted_length:.2f}", f"{task.speedup:.2f}x", task.task):
            assert figure in found.text
    for name in ("eval/results.json", "calibration.json", "validation.json", "run/metrics.jsonl", "answer.json"):
        assert str(measured / name) in found.text and file_sha256(measured / name) in found.text
    for recorded in (results.versions["torch"], str(results.machine["cpu"]), "outrider eval --target"):
        assert recorded in found.text, "settings, machine, versions and command to measure the same again"
    assert "2 steps; the best held-out expected length is 3.00, at step 2" in found.text
    assert "worst: fixed-7 at 8, +24.3 %" in found.text
    for gone in ("config.json", "points.jsonl"):
        assert gone not in found.text
    assert found.tags["img"] == 5, "two of the evaluation, two of the calibration, one of the training"
    assert "Predicted against observed survival, a panel per draft position" in found.text
    rounds = answer["choices"][0]["trace"]
    tokens = sum(len(one["tokens"]) for one in rounds)
    assert tokens > len(rounds)
    assert f"{tokens} tokens in {len(rounds)} rounds, {tokens / len(rounds):.2f} a round" in found.text
    calibration = calibrated()
    before, after = (sum(quality.ece) / 3 for quality in (calibration.before, calibration.after))
    assert before > after + 0.01, "the random confidences are the square roots of what is accepted"
    assert f"{before:.3f} before, {after:.3f} after" in found.text and f"{before:.3f} to {after:.3f}" in found.text
    places = [found.text.index(f"{kind} ") for kind in ("Evaluation", "Simulated load", "Calibration", "Training")]
    assert places == sorted(places), "the summary and the sections have the order of the kinds, whatever the paths are"


def test_a_report_is_one_file_that_loads_nothing(page: Path, answer: dict[str, Any]) -> None:
    html = page.read_text(encoding="utf-8")
    found = Page(html)
    assert all(address.startswith(("#", "data:")) for address in found.addresses)
    assert {address[1:] for address in found.addresses if address.startswith("#")} <= found.ids.keys()
    assert set(found.ids.values()) == {1}, "every id is one element's"
    assert "@import" not in html and not re.search(r"url\((?!['\"]?data:)", html)
    assert "default-src 'none'" in html
    traces = next(json.loads(script) for script in found.scripts if script.lstrip().startswith("{"))
    assert list(traces.values()) == [[answer["choices"][0]["trace"]]], "texts that would end the script are data"
    assert HOSTILE not in html


def test_both_calibrations_of_a_drafter_are_shown(tmp_path: Path) -> None:
    """Those of greedy and of sampled requests, each in a section that says whose it is, or the one that is there."""
    sampled = calibrated().model_dump(mode="json")
    greedy = {**sampled, "fit_rounds": 7, "sampling": {"temperature": 0.0}}
    (tmp_path / "outrider.json").write_text(json.dumps({"calibration": greedy, "calibration_sampled": sampled}))
    both = find_sources([tmp_path])
    assert [source.content.fit_rounds for source in both] == [7, 100]
    html = render(both, "Both")
    assert all(f"confidences of {whose} requests on toy" in html for whose in ("greedy", "sampled"))
    (tmp_path / "outrider.json").write_text(json.dumps({"calibration_sampled": sampled}))
    (found,) = find_sources([tmp_path])
    assert found.kind.heading == "Calibration" and found.content.fit_rounds == 100


def test_a_traced_generation_is_in_the_report(run: Run, toy: Path, tmp_path: Path) -> None:
    """`outrider generate --trace` writes what the page shows; the answer on standard output is the same without."""
    command = (
        "generate",
        "ab",
        "--raw",
        "--target",
        toy / "target",
        "--drafter",
        toy / "drafter",
        "--max-new-tokens",
        20,
    )
    options = (*command, "--confidence-threshold", 0.1, "--temperature", 1, "--seed", 3, "--top-k", 50, "--min-p", 0.01)
    options += ("--top-p", 0.99, "--repetition-penalty", 1.1, "--stop", "never in the text")
    plain, traced = run(*options), run(*options, "--trace", tmp_path / "new" / "answer.json")
    assert traced[0] == 0 and traced[1] == plain[1] and str(tmp_path / "new" / "answer.json") in traced[2]
    (source,) = find_sources([tmp_path])
    (rounds,) = source.content.traces
    tokens = [token for one in rounds for token in one["tokens"]]
    assert "".join(token["text"] for token in tokens if token["in_text"]) + "\n" == plain[1] and len(tokens) == 20
    assert {draft["outcome"] for one in rounds for draft in one["drafts"]} >= {"rejected"}
    recorded = source.content.settings
    asked = {"prompt": "ab", "raw": True, "thinking": False, "max_new_tokens": 20, "temperature": 1, "seed": 3}
    asked |= {"top_k": 50, "top_p": 0.99, "min_p": 0.01, "repetition_penalty": 1.1, "stop": ["never in the text"]}
    assert recorded | asked | {"confidence_threshold": 0.1} == recorded and source.content.versions["torch"]
    found = run("report", tmp_path, "--out", tmp_path / "report.html")
    assert (tmp_path / "report.html").resolve().as_uri() in found[1].replace("\n", "")
    assert f"20 tokens in {len(rounds)} rounds" in Page((tmp_path / "report.html").read_text()).text
    check_error(run(*command, "--trace", tmp_path), "is a directory: name a file")


def spoil(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def change_file(path: Path) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return change_file


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("shipped-greedy/results.json", lambda path: path.write_text("{"), "results.json is not a results.json"),
        ("shipped-greedy/results.json", spoil(lambda d: d.update(tasks=[])), "results.json has no tasks"),
        ("shipped-greedy/results.json", spoil(lambda d: d["tasks"][0].pop("rounds")), "results.json is not a results"),
        ("shipped-greedy/results.json", spoil(lambda d: d["tasks"][0].update(rounds=0)), "results.json cannot be"),
        ("poisson/frontier.json", spoil(lambda d: d.update(points=[])), "frontier.json has no points"),
        ("poisson/frontier.json", spoil(lambda d: d.update(arrivals="x")), "frontier.json cannot be shown"),
        (
            "drafters/comparison.json",
            spoil(lambda d: d["groups"][0]["entries"][0]["figures"][0].pop("speedup_quartiles")),
            "comparison.json has no quartiles",
        ),
        ("simulated/validation.json", lambda path: path.write_text("[]"), "validation.json: not a JSON mapping"),
        ("calibration-gsm8k/calibration.json", spoil(lambda d: d.update(before=1)), "calibration.json: not a cal"),
        ("calibration-gsm8k/sweep.json", lambda path: path.write_bytes(b"\xff\x00"), "sweep.json: not valid JSON"),
        ("load/profile.json", spoil(lambda d: d.update(cells=[])), "profile.json: not a profile this version reads"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_by_its_name(
    run: Run, tmp_path: Path, file: str, damage: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / Path(file).name
    shutil.copy(MEASURED / file, path)
    damage(path)
    out = tmp_path / "out" / "report.html"
    check_error(run("report", tmp_path, "--out", out), message)
    assert not out.exists()


def test_what_no_report_is_made_of(run: Run, tmp_path: Path, answer: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_error(
        run("report", tmp_path), f"{tmp_path}: nothing that a report is made of. Give directories that outrider"
    )
    shutil.copy(MEASURED / "shipped-greedy" / "results.json", tmp_path)
    check_error(run("report", *map(tmp_path.joinpath, ("results.json", "config.json"))), "config.json: nothing that")
    (tmp_path / "results.json").unlink()
    check_error(run("report", tmp_path / "absent"), "no file or directory")
    untraced = json.loads(json.dumps(answer))
    del untraced["choices"][0]["trace"]
    (tmp_path / "answer.json").write_text(json.dumps(untraced))
    check_error(run("report", tmp_path), 'answer.json: an answer without a trace: ask with "trace": true')
    (tmp_path / "answer.json").write_text(json.dumps(answer | {"choices": [{"trace": [{"round": 1}]}]}))
    check_error(run("report", tmp_path), "answer.json: not a trace of outrider serve")


def test_results_of_a_comparison_are_shown_in_it(tmp_path: Path) -> None:
    from outrider.evaluation.html_report import is_within, render

    shutil.copy(MEASURED / "drafters" / "comparison.json", tmp_path)
    shutil.copy(MEASURED / "drafters" / "draft_cost.json", tmp_path)
    shutil.copy(MEASURED / "drafters" / "dspark-1.json", tmp_path)
    shutil.copy(MEASURED / "shipped-greedy" / "results.json", tmp_path)
    comparison, *others = (source.content for source in find_sources([tmp_path]))
    assert [is_within(content, [comparison]) for content in others] == [True, False, True]
    found = Page(render(find_sources([tmp_path]), "r"))
    assert "1.42x plain decoding with ngram, the fastest of 17 drafters" in found.text
    assert "Files that are shown in a comparison (2)" in found.text and "from 4 files" in found.text
    assert found.tags["section"] == 4, "summary, comparison, the results of another run, what reproduces them"


@pytest.mark.browser
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_the_page_in_a_browser(page: Path, answer: dict[str, Any], width: int, height: int) -> None:
    with browsing(width, height) as browser:
        browser.page.goto(page.as_uri())
        spans = browser.page.locator(".token[role=option]")
        assert spans.count() == sum(len(one["tokens"]) for one in answer["choices"][0]["trace"])
        assert spans.first.text_content() == HOSTILE
        spans.first.click()
        assert "Round 1" in browser.page.locator(".detail").text_content()
        browser.page.keyboard.press("ArrowRight")
        assert spans.nth(1).get_attribute("aria-selected") == "true"
        opened = browser.page.evaluate("[...document.querySelectorAll('details')].map(one => one.open = true).length")
        assert opened > 5
        browser.picture(f"report-{width}")
        assert browser.console == [] and [url for url in browser.asked if not url.startswith("data:")] == [
            page.as_uri()
        ]
        assert browser.width_of_content() <= width and browser.serious_findings() == []
