"""Training samples and the files of responses: tokens of conversations, and the ranges that the target generated.

    tokens   [system, user 1, RESPONSE 1, user 2, RESPONSE 2]        spans = ranges of the responses, [start, end)

A position is supervised exactly when generation produced its token; nothing is searched for in rendered text.
A training leaves its tokens in the file, which is mapped into memory (`StoredSample`): a list of Python's numbers takes
some 36 bytes a token, and each rank would have one.
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
    """One training sequence. `spans` of generated tokens ascend, are disjoint, not empty, and start at 1 or later."""

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
        """Positions whose next token was generated: the last prompt token of each turn, then its response's tokens."""
        return [p - 1 for p in self.supervised_positions]

    @property
    def num_supervised(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True)
class Reply:
    """One generated turn: prompt tokens, then the tokens of the response (its stop token included when it has one).

    `exact` is false where a server gave text only and its tokens had to be guessed by splitting it again.
    """

    id: str
    turn: int
    prompt: list[int]
    response: list[int]
    finished: bool
    exact: bool = True


TOKEN_BYTES = 7  # of a token in a responses file, its comma included
TRUNCATED_SHARE = 0.2  # more is said: a drafter that learns from beginnings alone never sees how responses end


def truncation_warning(finished: Sequence[bool], max_new_tokens: int) -> str | None:
    """What to say where more than a fifth of the responses were cut off at their longest length."""
    cut = finished.count(False)
    if cut <= TRUNCATED_SHARE * len(finished):
        return None
    return (
        f"warning: {cut} of {len(finished)} responses ({cut / len(finished):.0%}) were cut off at max_new_tokens "
        f"{max_new_tokens}: raise data.max_new_tokens (--max-new-tokens), which takes another responses file"
    )


def join_turns(replies: Iterable[Reply]) -> list[Sample]:
    """Samples from replies: a turn continues its conversation's sample where its prompt begins with those tokens.

    A chat template that rewrites earlier turns (dropped thinking, say) breaks the chain, and the turn becomes a sample
    of its own. Samples are in the order in which their first replies come.
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
    """The samples of one conversation: its last turn, whose prompt and response are all its tokens, and the spans."""
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
    """Where a line of a file is, in bytes."""

    start: int
    size: int


class MappedResponses:
    """The lines of a responses file, mapped into memory; another process that gets this object maps the file itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._version = self._found()
        self._map()

    def _found(self) -> tuple[int, int]:
        found = self.path.stat()
        return found.st_size, found.st_mtime_ns

    def _map(self) -> None:
        with self.path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __getstate__(self) -> tuple[Path, tuple[int, int]]:
        return self.path, self._version

    def __setstate__(self, state: tuple[Path, tuple[int, int]]) -> None:
        self.path, self._version = state
        if self._found() != self._version:
            raise ValueError(f"{self.path} was written anew while this run began: start it again.")
        self._map()

    def reply(self, line: Line) -> Reply:
        """The reply of a line."""
        return _reply(parse_json(self._bytes[line.start : line.start + line.size]))


class StoredSample(Sample):
    """A sample whose tokens are read from the file of responses each time that they are asked for."""

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
    """`join_turns` of replies of a file (`open_responses`), their tokens left in it."""
    text = MappedResponses(path)
    turns: dict[str, list[tuple[Line, int, int]]] = {}
    for reply, line in replies:
        turns.setdefault(reply.id, []).append((line, len(reply.prompt), len(reply.prompt) + len(reply.response)))
    samples: list[Sample] = []
    for name, said in turns.items():
        if len(said) > 1:  # whether a turn goes on with the one before is told by its tokens
            conversation = [(text.reply(line), line) for line, _, _ in said]
            lines = {id(reply): line for reply, line in conversation}
            found = [(lines[id(last)], spans) for last, spans in _joined(reply for reply, _ in conversation)]
            lengths = {line: length for line, _, length in said}
            parts = [(line, spans, lengths[line]) for line, spans in found]
        else:
            ((line, start, end),) = said
            parts = [(line, ((start, end),), end)] if end > start else []
        samples += [StoredSample(name, spans, length=length, line=line, text=text) for line, spans, length in parts]
    return samples


# ----------------------------------------------------------------------------
# Regenerated responses: the on-policy text a drafter learns from, kept as tokens in a JSON Lines file.
#
#     FILE.jsonl          line 1   {"format": 2, "settings": {...}, "summary": {...}}   what made it, and its counts
#                         others   {"id", "turn", "prompt": [tokens], "response": [tokens], "finished", "exact"}
#     FILE.journal.jsonl  line 1   {"format": 2, "settings": {...}}          only while responses are being made
#                         others   {"replies": [...]}                        one commit: what ended at one step
#     FILE.failed.jsonl   each     {"id", "turn", "reason"}                  only where servers failed
#
# A commit is one line: it counts when its newline is there and is cut off otherwise, so a process may die at any
# moment. At the end the file is written anew, in the order of the conversations, and takes its place by a rename; its
# bytes do not depend on how often the run was interrupted. Tokens, not text, so that the loss mask's boundary is exact.
# ----------------------------------------------------------------------------


FORMAT = 2  # 1 had no number, and ids of conversations that were lines of their file


def _check_format(path: Path, header: Mapping[str, Any]) -> None:
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {header.get('format', 1)!r} and this version reads format {FORMAT}: responses are "
            "kept by the content of their prompts now. Delete it to regenerate, or write to another file "
            "(data.responses, --out)."
        )


@dataclass(frozen=True)
class Failure:
    """A turn a server could not answer."""

    id: str
    turn: int
    reason: str


def open_responses(path: Path) -> tuple[dict[str, Any], Iterator[tuple[Reply, Line]]]:
    """Settings of a responses file, and its replies one by one with their lines' places in it.

    A last line cut short by a crash is ignored.

    Raises:
        ValueError: missing, not a responses file, of another format, or a malformed line elsewhere (file and line
            named).
    """
    if not path.is_file():
        begun = companion_file(path, "journal").is_file()
        how = (
            "the `outrider prepare` that began it has to end: run it again."
            if begun
            else "`outrider prepare` makes one."
        )
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
            f"{path} is not a responses file: its first line has no settings. `outrider prepare` "
            "makes one; give it a name that is free."
        ) from error
    _check_format(path, header)
    return settings, _replies(path, behind=len(first))


def _replies(path: Path, behind: int) -> Iterator[tuple[Reply, Line]]:
    with path.open("rb") as file:
        file.seek(behind)
        for number, text in enumerate(file, start=2):
            line, behind = Line(behind, len(text)), behind + len(text)
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
    """Settings and replies of a responses file, all in memory; see `open_responses`."""
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
    """Whether these are ids that a vocabulary may have; a float or true would be taken for another token."""
    return isinstance(ids, list) and {*map(type, ids)} <= {int} and (not ids or (min(ids) >= 0 and max(ids) < 2**31))


def companion_file(path: Path, kind: str) -> Path:
    """FILE.journal.jsonl or FILE.failed.jsonl of FILE.jsonl."""
    return path.with_name(f"{path.stem}.{kind}.jsonl")


class ResponseFile:
    """The responses at `path` and their journal, open for more.

    Raises:
        ValueError: they were made with other settings, or a line is malformed.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        if path.is_dir():
            raise ValueError(
                f"{path} is a directory; name a file for the responses, such as {path / 'responses.jsonl'}."
            )
        path.parent.mkdir(parents=True, exist_ok=True)  # now: a place that cannot be should not cost a batch
        self.path, self.settings = path, dict(settings)
        self.journal = companion_file(path, "journal")
        self.replies: dict[tuple[str, int], Reply] = {}
        if path.exists() and path.stat().st_size:
            found, replies = read_responses(path)
            self._check(path, found)
            self._add(replies)
        self._good_bytes = self._read_journal() if self.journal.exists() else 0

    def commit(self, replies: Sequence[Reply]) -> None:
        """Append replies to the journal: all of them, or none if the process dies here."""
        text = json.dumps({"replies": [asdict(reply) for reply in replies]}) + "\n"
        if not self._good_bytes:
            text = json.dumps({"format": FORMAT, "settings": self.settings}) + "\n" + text
        with self.journal.open("ab") as file:
            file.truncate(self._good_bytes)  # half a line from a run that died
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
            self._good_bytes = file.tell()
        self._add(replies)

    def finish(self, order: Sequence[str], summary: Mapping[str, object], failures: Iterable[Failure]) -> None:
        """Write the file anew, replies in the order of the conversation ids, and drop the journal."""
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
        """Take over what is committed; how many bytes of the journal that is."""
        data = self.journal.read_bytes()
        good = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:good].splitlines(), start=1):
            try:
                entry = parse_json(line)
                found, replies = {}, []
                if number > 1:
                    replies = [_reply(reply) for reply in entry["replies"]]
                elif not isinstance(found := entry["settings"], dict):
                    raise TypeError("settings are no mapping")
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{self.journal}:{number}: not a journal line ({error}). Cut the file off there, or delete it."
                ) from error
            if number == 1:
                _check_format(self.journal, entry)
                self._check(self.journal, found)
            else:
                self._add(replies)
        return good

    def _add(self, replies: Iterable[Reply]) -> None:
        self.replies.update(((reply.id, reply.turn), reply) for reply in replies)

    def _check(self, path: Path, found: Mapping[str, Any]) -> None:
        wanted, found = {"not_in": [], **self.settings}, {"not_in": [], **found}
        different = [
            f"{name} {found[name]!r}, not {wanted[name]!r}"
            for name in wanted
            if name in found and found[name] != wanted[name]
            if name != "target" or canonical_id(str(found[name])) != canonical_id(wanted[name])
        ]
        if different:
            raise ValueError(
                f"{path} was made with other settings: {'; '.join(different)}. Set them as they were, or write to "
                "another file (data.responses, --out)."
            )
        if missing := [name for name in wanted if name not in found]:
            raise ValueError(
                f"{path} does not say with which {', '.join(missing)} it was made: an older version wrote it. Delete "
                "it to regenerate, or write to another file (data.responses, --out)."
            )


def sole_writer(path: Path) -> AbstractContextManager[None]:
    """Wait until no other process completes the responses at `path`."""
    return sole_process(path.with_name(f".{path.name}.lock"))


def _write_lines(path: Path, entries: Iterable[Mapping[str, object]]) -> None:
    lines = ((json.dumps(entry) + "\n").encode() for entry in entries)
    # Durable: the journal goes next. There is one writer (`sole_writer`), and a killed one leaves much.
    write_atomically(path, lambda file: file.writelines(lines), durable=True, sole_writer=True)
