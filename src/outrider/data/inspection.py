"""Show training samples token by token and mark the tokens that the loss supervises.

    tokens  ->  pieces: text, token ids, supervised or not, special or not     (a character may need several tokens)
    pieces  ->  terminal text, or one HTML file without outside parts

A token is supervised if generation produced it. The colours come from `Sample.spans`, as the loss mask does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from outrider.data.responses import Reply, Sample, join_turns
from outrider.utils.terminal import printable

_UNFINISHED_CHARACTER = "\ufffd"
_LONGEST_CHARACTER = 8  # tokens
STYLES = {(True, False): "green", (True, True): "bold green", (False, False): "dim", (False, True): "dim magenta"}


@dataclass(frozen=True)
class Row:
    """A sample, and for each span whether the response is finished and whether its tokens are exact."""

    sample: Sample
    finished: tuple[bool, ...]
    exact: tuple[bool, ...]

    @property
    def caption(self) -> str:
        sample = self.sample
        share = sample.num_supervised / len(sample.tokens)
        spans = ", ".join(
            f"[{start}, {end}) {'finished' if done else 'cut off'}{'' if exact else ', tokens guessed'}"
            for (start, end), done, exact in zip(sample.spans, self.finished, self.exact, strict=True)
        )
        return f"{sample.id}: {len(sample.tokens)} tokens, {sample.num_supervised} supervised ({share:.0%}); {spans}"


@dataclass(frozen=True)
class Piece:
    """A shortest run of tokens of one role that decodes to whole characters."""

    text: str
    tokens: tuple[int, ...]
    supervised: bool
    special: bool


def rows_of(replies: Sequence[Reply]) -> list[Row]:
    """Return the samples that training would use, in the order of the file."""
    replies_of: dict[str, list[Reply]] = {}
    for reply in sorted(replies, key=lambda r: r.turn):
        if reply.response:
            replies_of.setdefault(reply.id, []).append(reply)
    rows = []
    for sample in join_turns(replies):
        turns = [replies_of[sample.id].pop(0) for _ in sample.spans]
        rows.append(Row(sample, tuple(t.finished for t in turns), tuple(t.exact for t in turns)))
    return rows


def pieces(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """Split all tokens of a sample, in order, into pieces."""
    supervised = set(sample.supervised_positions)
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    start = 0
    while start < len(sample.tokens):
        end = start + 1
        text = _text(tokenizer, sample.tokens[start:end])
        while (
            text.endswith(_UNFINISHED_CHARACTER)
            and end < min(len(sample.tokens), start + _LONGEST_CHARACTER)
            and (end in supervised) == (start in supervised)
            and sample.tokens[end] not in special
        ):
            end += 1
            text = _text(tokenizer, sample.tokens[start:end])
        tokens = tuple(sample.tokens[start:end])
        yield Piece(text, tokens, start in supervised, special=tokens[0] in special)
        start = end


def _text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def terminal_text(row: Row, tokenizer: PreTrainedTokenizerBase, boundaries: bool = False) -> Text:
    """Colour supervised tokens green, prompts dim, special tokens magenta; `boundaries` puts bars between tokens."""
    text = Text()
    for piece in pieces(row.sample, tokenizer):
        if boundaries and len(text):
            text.append("|", style="dim cyan")
        whole = printable(piece.text)
        shown = whole.replace("\n", "\\n\n") if boundaries else whole
        text.append(shown, style=STYLES[piece.supervised, piece.special])
    return text


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --said: light-dark(#c8f0d0, #1d4d2b); --special: light-dark(#8a2be2, #d7a6ff);
  --dim: light-dark(#666, #999); --line: light-dark(#ddd, #444); }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
td, th {{ padding: .1rem 1rem .1rem 0; text-align: left; font-weight: normal; }} th {{ color: var(--dim); }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; border-top: 1px solid var(--line); padding-top: .5rem; }}
.p {{ color: var(--dim); }} .s {{ background: var(--said); }} .x {{ color: var(--special); font-weight: bold; }}
#bounds:checked ~ section span {{ outline: 1px solid var(--line); }}
</style></head><body>
<h1>{title}</h1>
<table>{summary}</table>
<p>Legend: <span class="s">supervised: the target generated it</span> <span class="p">prompt: not supervised</span>
<span class="p x">special token</span>. Hover over a token for its position and id.</p>
<input type="checkbox" id="bounds"><label for="bounds"> token boundaries</label>
{rows}
</body></html>
"""


def html_page(
    title: str, summary: Sequence[tuple[str, str]], rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase
) -> str:
    """Write a self-contained page: summary, legend, and every row with its tokens."""
    table = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in summary)
    sections = "\n".join(_html_row(row, tokenizer) for row in rows)
    return _PAGE.format(title=escape(title), summary=table, rows=sections)


def _html_row(row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    parts, position = [], 0
    for piece in pieces(row.sample, tokenizer):
        kind = ("s" if piece.supervised else "p") + (" x" if piece.special else "")
        ids = " ".join(map(str, piece.tokens))
        parts.append(f'<span class="{kind}" title="{position}: {ids}">{escape(piece.text)}</span>')
        position += len(piece.tokens)
    return f"<section><h3>{escape(row.caption)}</h3><pre>{''.join(parts)}</pre></section>"
