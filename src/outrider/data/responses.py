"""Read and write responses files, and make training samples: tokens and the spans that the target generated.

    tokens   [system, user 1, RESPONSE 1, user 2, RESPONSE 2]        spans = ranges of the responses, [start, end)

A position is supervised if and only if generation produced its token; rendered text is not searched. Training keeps the
tokens in the file, which is mapped into memory (`StoredSample`): a Python list would take some 36 bytes per token in
every rank.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from outrider.target.hub import canonical_id
from outrider.utils.documents import parse_json
from outrider.utils.files import write_atomically
from outrider.utils.locks import sole_process

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Sample:
    """A training sequence. `spans` of generated tokens are ascending, disjoint, not empty, and start at 1 or later."""

    id: str
    tokens: list[int]
    spans: Spans

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def supervised_positions(self) -> list[int]:
        """Positions of generated tokens, ascending."""
        return [p for start, end in self.spans for p in range(start, end)]

    @property
    def supervised_tokens(self) -> list[int]:
        return [token for start, end in self.spans for token in self.tokens[start:end]]

    @property
    def anchors(self) -> list[int]:
        """Positions whose next token was generated: the last prompt token of each turn, then tokens of its response."""
        return [p - 1 for p in self.supervised_positions]

    @property
    def num_supervised(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True)
class Reply:
    """A generated turn: prompt tokens, and response tokens with the stop token, if any.

    `exact` is false if a server returned only text, so that its tokens are guessed by tokenising it.
    """

    id: str
    turn: int
    prompt: list[int]
    response: list[int]
    finished: bool
    exact: bool = True


TOKEN_BYTES = 7  # average size of a token in a responses file, with its comma
TRUNCATED_SHARE = 0.2  # above it a warning: the drafter would rarely see how responses end


def truncation_warning(finished: Sequence[bool], max_new_tokens: int) -> str | None:
    """Return a warning if more than a fifth of the responses were cut off at max_new_tokens."""
    cut = finished.count(False)
    if cut <= TRUNCATED_SHARE * len(finished):
        return None
    return (
        f"warning: {cut} of {len(finished)} responses ({cut / len(finished):.0%}) were cut off at max_new_tokens "
        f"{max_new_tokens}: raise data.max_new_tokens (--max-new-tokens), which takes another responses file"
    )


def join_turns(replies: Iterable[Reply]) -> list[Sample]:
    """Join the turns of conversations into samples, if each prompt begins with the tokens so far.

    If a chat template rewrites earlier turns (for example drops thinking), the turn starts a new sample. Samples are in
    the order of their first replies.
    """
    turns: dict[str, list[Reply]] = {}
    for reply in replies:
        turns.setdefault(reply.id, []).append(reply)
    return [
        Sample(name, last.prompt + last.response, spans)
        for name, conversation in turns.items()
        for last, spans in _joined(conversation)
    ]


def _joined(conversation: Iterable[Reply]) -> Iterator[tuple[Reply, Spans]]:
    """Yield the samples of one conversation: the last reply, which holds all tokens, and the spans."""
    last: Reply | None = None
    tokens: list[int] = []
    spans: list[tuple[int, int]] = []
    for reply in sorted(conversation, key=lambda r: r.turn):
        if spans and reply.prompt[: len(tokens)] != tokens:
            assert last is not None
            yield last, tuple(spans)
            spans = []
        last, tokens = reply, reply.prompt + reply.response
        if reply.response:
            spans.append((len(reply.prompt), len(tokens)))
    if spans:
        assert last is not None
        yield last, tuple(spans)


# ----------------------------------------------------------------------------
# Samples whose tokens stay in the file.
# ----------------------------------------------------------------------------


class Line(NamedTuple):
    """The place of a line in a file, in bytes."""

    start: int
    size: int


class MappedResponses:
    """The lines of a responses file, mapped into memory; unpickling in another process maps the file again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._version = self._current_version()
        self._map()

    def _current_version(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns

    def _map(self) -> None:
        with self.path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __getstate__(self) -> tuple[Path, tuple[int, int]]:
        return self.path, self._version

    def __setstate__(self, state: tuple[Path, tuple[int, int]]) -> None:
        self.path, self._version = state
        if self._current_version() != self._version:
            raise ValueError(f"{self.path} changed while this run started: start it again.")
        self._map()

    def reply(self, line: Line) -> Reply:
        """Parse the reply of a line."""
        return _reply(parse_json(self._bytes[line.start : line.start + line.size]))


class StoredSample(Sample):
    """A sample whose tokens are read from the responses file at each access."""

    _length: int
    _line: Line
    _text: MappedResponses

    def __init__(self, name: str, spans: Spans, *, length: int, line: Line, text: MappedResponses) -> None:
        for field, value in (("id", name), ("spans", spans), ("_length", length), ("_line", line), ("_text", text)):
            object.__setattr__(self, field, value)

    @property
    def length(self) -> int:
        return self._length

    @property
    def tokens(self) -> list[int]:  # type: ignore[override]
        reply = self._text.reply(self._line)
        return reply.prompt + reply.response


def stored_samples(path: Path, replies: Iterable[tuple[Reply, Line]]) -> list[Sample]:
    """Apply `join_turns` to the replies of a file (`open_responses`) without keeping their tokens in memory."""
    text = MappedResponses(path)
    turns: dict[str, list[tuple[Line, int, int]]] = {}
    for reply, line in replies:
        turns.setdefault(reply.id, []).append((line, len(reply.prompt), len(reply.prompt) + len(reply.response)))
    samples: list[Sample] = []
    for name, lengths_of in turns.items():
        if len(lengths_of) > 1:  # only the tokens show whether a turn continues the previous one
            conversation = [(text.reply(line), line) for line, _, _ in lengths_of]
            lines = {id(reply): line for reply, line in conversation}
            joined = [(lines[id(last)], spans) for last, spans in _joined(reply for reply, _ in conversation)]
            lengths = {line: length for line, _, length in lengths_of}
            parts = [(line, spans, lengths[line]) for line, spans in joined]
        else:
            ((line, start, end),) = lengths_of
            parts = [(line, ((start, end),), end)] if end > start else []
        samples += [StoredSample(name, spans, length=length, line=line, text=text) for line, spans, length in parts]
    return samples


# ----------------------------------------------------------------------------
# Regenerated responses: the on-policy text that a drafter learns from, stored as tokens in a JSON Lines file.
#
#     FILE.jsonl          line 1   {"format": 2, "settings": {...}, "summary": {...}}   settings and counts of the run
#                         others   {"id", "turn", "prompt": [tokens], "response": [tokens], "finished", "exact"}
#     FILE.journal.jsonl  line 1   {"format": 2, "settings": {...}}          only during a run
#                         others   {"replies": [...]}                        one commit: replies finished in one step
#     FILE.failed.jsonl   each     {"id", "turn", "reason"}                  only if servers failed
#
# A commit is one line, which is cut off if it has no newline, so a process may die at any time. At the end the file is
# rewritten in the order of the conversations and renamed into place; its bytes do not depend on interruptions. It holds
# tokens, not text, so that the boundary of the loss mask is exact.
# ----------------------------------------------------------------------------


FORMAT = 2  # 1 had no number, and ids of conversations that were lines of their file


def _check_format(path: Path, header: Mapping[str, Any]) -> None:
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {header.get('format', 1)!r}; this version reads format {FORMAT}. Delete it to "
            "regenerate, or write to another file (data.responses, --out)."
        )


@dataclass(frozen=True)
class Failure:
    """A turn that a server could not answer."""

    id: str
    turn: int
    reason: str


def open_responses(path: Path) -> tuple[dict[str, Any], Iterator[tuple[Reply, Line]]]:
    """Open a responses file: return its settings, and an iterator of replies with their lines.

    A last line that a crash cut off is ignored.

    Raises:
        ValueError: the file is missing, no responses file, or has another format; or a line is malformed (named in the
            message).
    """
    if not path.is_file():
        begun = companion_file(path, "journal").is_file()
        how = "an `outrider prepare` is unfinished: run it again." if begun else "`outrider prepare` makes one."
        raise ValueError(f"no responses file {path}; {how}")
    with path.open("rb") as file:
        first = file.readline()
    if not first:
        raise ValueError(f"{path} is empty; `outrider prepare` makes a responses file.")
    try:
        header = parse_json(first)
        if not isinstance(settings := header["settings"], dict):
            raise TypeError("settings are no mapping")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is not a responses file: its first line has no settings. Make one with `outrider prepare` under "
            "another name."
        ) from error
    _check_format(path, header)
    return settings, _replies(path, start=len(first))


def _replies(path: Path, start: int) -> Iterator[tuple[Reply, Line]]:
    with path.open("rb") as file:
        file.seek(start)
        for number, text in enumerate(file, start=2):
            line, start = Line(start, len(text)), start + len(text)
            if text == b"\n":
                continue
            try:
                reply = _reply(parse_json(text))
            except (ValueError, TypeError, KeyError) as error:
                if not text.endswith(b"\n"):
                    return  # the process died while writing this line
                raise ValueError(
                    f"{path}:{number}: not a responses line ({error}). Delete the file to regenerate."
                ) from error
            yield reply, line


def read_responses(path: Path) -> tuple[dict[str, Any], list[Reply]]:
    """Read settings and replies of a responses file into memory; see `open_responses`."""
    settings, replies = open_responses(path)
    return settings, [reply for reply, _ in replies]


def _reply(entry: Mapping[str, Any]) -> Reply:
    reply = Reply(**entry)
    if not _are_tokens(reply.prompt) or not reply.prompt or not _are_tokens(reply.response):
        raise TypeError("prompt and response must be lists of token ids, the prompt's not empty")
    kinds = (("id", str), ("turn", int), ("finished", bool), ("exact", bool))
    if wrong := [name for name, kind in kinds if type(getattr(reply, name)) is not kind]:
        raise TypeError(f"{wrong[0]} is {getattr(reply, wrong[0])!r}")
    if reply.turn < 0:
        raise ValueError(f"turn is {reply.turn}")
    return reply


def _are_tokens(ids: object) -> bool:
    """Return whether these are possible token ids; a float or bool would pass for another token."""
    return isinstance(ids, list) and {*map(type, ids)} <= {int} and (not ids or (min(ids) >= 0 and max(ids) < 2**31))


def companion_file(path: Path, kind: str) -> Path:
    """Return the path FILE.journal.jsonl or FILE.failed.jsonl for FILE.jsonl."""
    return path.with_name(f"{path.stem}.{kind}.jsonl")


class ResponseFile:
    """The responses at `path` and their journal, open for appending.

    Raises:
        ValueError: they were made with other settings, or a line is malformed.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        if path.is_dir():
            raise ValueError(
                f"{path} is a directory; name a file for the responses, such as {path / 'responses.jsonl'}."
            )
        path.parent.mkdir(parents=True, exist_ok=True)  # fail on an invalid place before the first batch
        self.path, self.settings = path, dict(settings)
        self.journal = companion_file(path, "journal")
        self.replies: dict[tuple[str, int], Reply] = {}
        if path.exists() and path.stat().st_size:
            stored, replies = read_responses(path)
            self._check(path, stored)
            self._add(replies)
        self._good_bytes = self._read_journal() if self.journal.exists() else 0

    def commit(self, replies: Sequence[Reply]) -> None:
        """Append replies to the journal: all of them, or none if the process dies here."""
        text = json.dumps({"replies": [asdict(reply) for reply in replies]}) + "\n"
        if not self._good_bytes:
            text = json.dumps({"format": FORMAT, "settings": self.settings}) + "\n" + text
        with self.journal.open("ab") as file:
            file.truncate(self._good_bytes)  # drop a partial line of a run that died
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
            self._good_bytes = file.tell()
        self._add(replies)

    def finish(self, order: Sequence[str], summary: Mapping[str, object], failures: Iterable[Failure]) -> None:
        """Rewrite the file with replies in the order of the conversation ids, and remove the journal."""
        place = {name: number for number, name in enumerate(order)}
        replies = sorted(self.replies.values(), key=lambda r: (place.get(r.id, len(place)), r.id, r.turn))
        header = {"format": FORMAT, "settings": self.settings, "summary": summary}
        _write_lines(self.path, [header, *map(asdict, replies)])
        failed = companion_file(self.path, "failed")
        lines = [asdict(f) for f in sorted(failures, key=lambda f: (place[f.id], f.turn))]
        if lines:
            _write_lines(failed, lines)
        else:
            failed.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)
        self._good_bytes = 0

    def _read_journal(self) -> int:
        """Add the committed replies of the journal; return their size in bytes."""
        data = self.journal.read_bytes()
        good = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:good].splitlines(), start=1):
            try:
                entry = parse_json(line)
                stored, replies = {}, []
                if number > 1:
                    replies = [_reply(reply) for reply in entry["replies"]]
                elif not isinstance(stored := entry["settings"], dict):
                    raise TypeError("settings are no mapping")
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{self.journal}:{number}: not a journal line ({error}). Cut the file off there, or delete it."
                ) from error
            if number == 1:
                _check_format(self.journal, entry)
                self._check(self.journal, stored)
            else:
                self._add(replies)
        return good

    def _add(self, replies: Iterable[Reply]) -> None:
        self.replies.update(((reply.id, reply.turn), reply) for reply in replies)

    def _check(self, path: Path, stored: Mapping[str, Any]) -> None:
        wanted, stored = {"not_in": [], **self.settings}, {"not_in": [], **stored}
        different = [
            f"{name} {stored[name]!r}, not {wanted[name]!r}"
            for name in wanted
            if name in stored and stored[name] != wanted[name]
            if name != "target" or canonical_id(str(stored[name])) != canonical_id(wanted[name])
        ]
        if different:
            raise ValueError(
                f"{path} was made with other settings: {'; '.join(different)}. Use the same settings, or write to "
                "another file (data.responses, --out)."
            )
        if missing := [name for name in wanted if name not in stored]:
            raise ValueError(
                f"{path} does not record the settings {', '.join(missing)}: an older version wrote it. Delete it to "
                "regenerate, or write to another file (data.responses, --out)."
            )


def sole_writer(path: Path) -> AbstractContextManager[None]:
    """Hold the lock on the responses at `path`; wait while another process writes them."""
    return sole_process(path.with_name(f".{path.name}.lock"))


def _write_lines(path: Path, entries: Iterable[Mapping[str, object]]) -> None:
    lines = ((json.dumps(entry) + "\n").encode() for entry in entries)
    # Durable, because the journal is removed next; `sole_writer` removes the large files of killed writers.
    write_atomically(path, lambda file: file.writelines(lines), durable=True, sole_writer=True)
