"""What `outrider inspect` shows is what the loss mask says: every token once, generated ones marked, text escaped."""

from __future__ import annotations

import json
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.data import inspect
from outrider.cli.main import app
from outrider.data.config import InspectConfig
from outrider.data.inspection import STYLES, html_page, pieces, rows_of, terminal_text
from outrider.data.responses import FORMAT, Reply, Sample
from tests.toys.tokenizer import byte_tokenizer, ids

TOKENIZER = byte_tokenizer()
START = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
assert isinstance(START, int) and isinstance(END, int)
FIRST = Reply("a", 0, [START, *ids("hé <b>&\n")], [*ids("€!"), END], True)
SECOND = Reply("a", 1, [*FIRST.prompt, *FIRST.response, *ids("?")], ids("no"), False, exact=False)
OTHER = Reply("b", 0, ids("x"), ids("yz"), True)
REPLIES = [FIRST, OTHER, SECOND]


def write(path: Path, target: Path | None = None) -> Path:
    lines = [{"format": FORMAT, "settings": {"target": str(target or "nowhere")}}, *map(asdict, REPLIES)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A directory with a tokenizer, which is all that is needed of the target."""
    (tmp_path / "target").mkdir()
    TOKENIZER.save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path / "target"


def test_rows_know_how_each_response_ended() -> None:
    rows = rows_of(REPLIES)
    assert [row.sample.id for row in rows] == ["a", "b"]
    assert rows[0].finished == (True, False) and rows[0].exact == (True, False)
    size, start = len(rows[0].sample.tokens), len(FIRST.prompt)
    assert rows[0].caption == (
        f"a: {size} tokens, 7 supervised ({7 / size:.0%}); [{start}, {start + 5}) finished, "
        f"[{size - 2}, {size}) cut off, tokens guessed"
    )


def test_pieces_are_all_tokens_in_whole_characters_that_never_mix_roles() -> None:
    sample = rows_of(REPLIES)[0].sample
    found = list(pieces(sample, TOKENIZER))
    assert [t for piece in found for t in piece.tokens] == sample.tokens
    flags = [piece.supervised for piece in found for _ in piece.tokens]
    assert [i for i, flag in enumerate(flags) if flag] == sample.supervised_positions
    texts = [piece.text for piece in found]
    assert "é" in texts and "€" in texts and "".join(texts) == TOKENIZER.decode(sample.tokens)
    assert [piece.text for piece in found if piece.special] == ["<|im_start|>", "<|im_end|>"]
    euro = ids("€")
    split = list(pieces(Sample("s", [*ids("a"), *euro], ((2, 4),)), TOKENIZER))
    assert [piece.supervised for piece in split] == [False, False, True], "half a character stays in its role"
    assert [piece.text for piece in pieces(Sample("s", [euro[0], START], ((1, 2),)), TOKENIZER)][1] == "<|im_start|>"


def test_the_terminal_shows_roles_by_style_and_boundaries_on_demand() -> None:
    row = rows_of(REPLIES)[0]
    text = terminal_text(row, TOKENIZER)
    assert text.plain == TOKENIZER.decode(row.sample.tokens)
    green = {STYLES[True, False], STYLES[True, True]}
    assert "".join(text.plain[s.start : s.end] for s in text.spans if s.style in green) == "€!<|im_end|>no"
    bounded = terminal_text(row, TOKENIZER, boundaries=True).plain
    assert bounded.startswith("<|im_start|>|h|é| |<|b|>|&|\\n\n|€|!|<|im_end|>|?|n|o")


class Page(HTMLParser):
    """Checks nesting, collects the text of supervised spans and everything that would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.supervised, self.everything, self.loads = "", "", []  # type: ignore[var-annotated]
        self.kinds: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        self.loads += [tag] if tag in ("script", "link", "img", "iframe") else []
        if tag not in ("meta", "input"):
            self.open.append(tag)
            self.kinds.append((found.get("class") or "") if tag == "span" else "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.kinds.pop()

    def handle_data(self, data: str) -> None:
        if "pre" in self.open:
            self.everything += data
            self.supervised += data if self.kinds[-1].startswith("s") else ""


def test_the_page_is_self_contained_escaped_and_marks_the_generated_tokens() -> None:
    rows = rows_of(REPLIES)
    source = html_page("<title>", [("target", "a & <b>")], rows, TOKENIZER)
    page = Page()
    page.feed(source)
    assert not page.open and not page.loads and "url(" not in source and "@import" not in source
    assert page.supervised == "€!<|im_end|>no" + "yz"
    assert page.everything == "".join(TOKENIZER.decode(row.sample.tokens) for row in rows)
    assert "&lt;title&gt;" in source and "a &amp; &lt;b&gt;" in source and "light dark" in source
    assert "Legend" in source and source.count("<section>") == 2
    tokens = [span for span in source.split("<span")[1:] if "title=" in span]
    assert f'title="0: {START}"' in tokens[0]


def test_the_command(tmp_path: Path, toy: Path) -> None:
    runner = CliRunner()
    path = write(tmp_path / "r.jsonl", toy)
    found = runner.invoke(app, ["inspect", str(path)])
    assert found.exit_code == 0, found.output
    assert "row 0  a:" in found.output and "row 1  b:" in found.output and "<|im_start|>hé <b>&" in found.output
    assert "rows: 2 of 2 conversations" in found.output and "responses: 3, 2 finished by themselves" in found.output
    assert "inexact: 1" in found.output
    one = runner.invoke(app, ["inspect", str(path), "--row", "1", "--tokens"])
    assert "row 1  b:" in one.output and "row 0" not in one.output and "x|y|z" in one.output
    page = tmp_path / "deep" / "page.html"
    written = runner.invoke(app, ["inspect", str(path), "--html", str(page), "--limit", "1"])
    assert "1 of 2 rows in" in written.output and page.read_text().count("<section>") == 1


def test_mistakes(tmp_path: Path, toy: Path) -> None:
    path = write(tmp_path / "r.jsonl")
    with pytest.raises(ValueError, match="model 'nowhere' was found in none of three places"):
        inspect(InspectConfig(path=path))
    with pytest.raises(ValueError, match="has 2 rows, numbered from 0; there is no row 2"):
        inspect(InspectConfig(path=path, row=2))
    with pytest.raises(ValueError, match="no responses file"):
        inspect(InspectConfig(path=tmp_path / "x.jsonl"))
    with pytest.raises(ValueError, match="is not a drafter dialect Outrider reads"):
        inspect(InspectConfig(path=toy))
