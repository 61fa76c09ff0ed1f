"""The inspector's data: its page, traces of requests, and the engine's steps while the page is open.

    GET /                   inspector.html with its styles and scripts, which asks for nothing else
    GET /inspector/events   counts of the engine's steps, every half second, as long as someone listens
    "trace": true           in a request: its answer tells every round, see docs/serving.md

Nothing is counted while nobody listens, and only requests with `trace` get their rounds. Shapes: N numbers of rows.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from outrider.decoding.engine import Engine
from outrider.decoding.request import Output, StepRecord
from outrider.decoding.text import TextStream
from outrider.decoding.trace import DraftTrace, RoundTrace
from outrider.target.model import DecodingTarget
from outrider.utils.files import write_atomically
from outrider.utils.measure import machine, versions
from outrider.utils.packaged import PACKAGE

_INTERVAL = 0.5  # seconds from one event to the next
_POINTS, _CURVE = 32, 48  # of an event: last steps, and points of the cost curve at most


def trace_json(trace: RoundTrace, text: TextStream, piece: Callable[[int], str], final: bool) -> dict[str, Any]:
    """A round as the answer tells it (docs/serving.md).

    Args:
        text: of the rounds before; takes the tokens of this one.
        piece: a token's own text, special tokens included.
        final: the response ends with this round.
    """
    added = []
    for place, token in enumerate(trace.tokens, 1):
        text.push(token.token)
        added.append(text.release(final=final and place == len(trace.tokens)))
    tokens = [
        {"id": token.token, "text": new or piece(token.token), "in_text": bool(new)}
        | {"origin": token.origin, "draft": token.node, "target": _rounded(token.target)}
        | {"top": [{"id": id, "text": piece(id), "target": _rounded(value)} for id, value in token.top]}
        for token, new in zip(trace.tokens, added, strict=True)
    ]
    about = {"round": trace.number, "source": trace.source, "reason": trace.reason}
    return about | {"drafts": [_draft_json(draft, piece) for draft in trace.drafts], "tokens": tokens}


def _draft_json(draft: DraftTrace, piece: Callable[[int], str]) -> dict[str, Any]:
    numbers = ("p_draft", "p_target", "target", "raw", "calibrated", "believed")
    about = {"id": draft.token, "text": piece(draft.token), "parent": draft.parent, "outcome": draft.outcome}
    return about | {name: _rounded(getattr(draft, name)) for name in numbers}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


class Watch:
    """Counts of the engine's steps since they were last taken, for one listener."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._clear()

    def _clear(self) -> None:
        slots = self.engine.scheduler.draft_slots
        self._since = time.perf_counter()
        self._steps: list[StepRecord] = []
        self._reached, self._accepted = [0] * slots, [0] * slots  # by position

    def add(self, step: StepRecord, outputs: Sequence[Output]) -> None:
        """Count a step and what it gave."""
        self._steps.append(step)
        for output in outputs:
            for k in range(min(output.verified, output.accepted + 1)):
                self._reached[k] += 1
                self._accepted[k] += k < output.accepted

    def take(self) -> dict[str, Any]:
        """An event, and counting begins anew."""
        steps, config, scheduler = self._steps, self.engine.config, self.engine.scheduler
        decoding = [step for step in steps if step.requests and not step.prefill_tokens]
        event = {
            "seconds": round(time.perf_counter() - self._since, 4),
            "steps": len(steps),
            "rounds": sum(step.requests for step in steps),
            "tokens": sum(step.committed for step in steps),
            "request_seconds": round(sum(step.requests * step.seconds for step in steps), 4),
            "drafted": sum(step.proposed for step in steps),
            "verified": sum(step.admitted for step in steps),
            "accepted": sum(step.accepted for step in steps),
            "reached_at": self._reached,
            "accepted_at": self._accepted,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "max_requests": config.max_requests,
            "kv_usage": round(scheduler.allocator.used / config.num_blocks, 4),
            "points": [[step.tokens, round(step.seconds, 5)] for step in decoding[-_POINTS:]],
            "cost": self._cost(decoding),
        }
        self._clear()
        return event

    def _cost(self, steps: Sequence[StepRecord]) -> dict[str, Any] | None:
        """Seconds of a step by rows, as the policy estimates them for the mean step; None if it estimates none."""
        cost = self.engine.policy.step_cost
        if not steps or cost is None:
            return None
        requests, drafting = (
            max(1, round(sum(counts) / len(steps)))
            for counts in ([step.requests for step in steps], [step.drafting for step in steps])
        )
        lengths = [progress.length for progress in list(self.engine.scheduler.running.values())] or [0]
        most = max(requests * (1 + self.engine.scheduler.draft_slots), *(step.tokens for step in steps))
        rows_N = np.unique(np.linspace(requests, most, _CURVE).astype(np.int64))
        context = sum(lengths) / len(lengths)
        seconds_N = cost.seconds(rows_N, requests, context) + cost.draft_seconds(drafting)
        return {"requests": requests, "rows": rows_N.tolist(), "seconds": [round(s, 5) for s in seconds_N.tolist()]}


async def watched(
    watches: set[Watch], engine: Engine, about: dict[str, Any], closing: Callable[[], bool]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the server's name (`about`), then its counts until it closes; `watches` get the steps meanwhile."""
    watch = Watch(engine)
    watches.add(watch)
    try:
        yield about | {"policy": engine.policy.name, "most_drafts": engine.scheduler.draft_slots}
        while not closing():
            await asyncio.sleep(_INTERVAL)
            yield watch.take()
    finally:
        watches.discard(watch)


# ----------------------------------------------------------------------------
# The page. inspector.html names its styles and scripts, which are put in their place, so that it is one file.
# ----------------------------------------------------------------------------


@cache
def page() -> tuple[str, str]:
    """The page, and its content security policy: nothing runs but what is in it, nothing is loaded from elsewhere."""
    directory = PACKAGE / "serving" / "page"

    def inlined(tag: str, match: re.Match[str]) -> str:
        return f"<{tag}>\n{(directory / match[1]).read_text('utf-8')}</{tag}>"

    html = (directory / "inspector.html").read_text("utf-8")
    html = re.sub(r'<link rel="stylesheet" href="([\w.-]+)">', lambda match: inlined("style", match), html)
    html = re.sub(r'<script src="([\w.-]+)"></script>', lambda match: inlined("script", match), html)
    allowed = {tag: " ".join(_hashes(html, tag)) for tag in ("style", "script")}
    return html, (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src {allowed['style']}; "
        f"script-src {allowed['script']}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(html: str, tag: str) -> list[str]:
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return [f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts]


def write_answer(path: Path, target: DecodingTarget, chunks: Sequence[Output], settings: Mapping[str, Any]) -> None:
    """Write a response whose chunks have traces, as `outrider serve` writes its answers (docs/serving.md)."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    text, rounds = TextStream(tokenizer), []
    for chunk in chunks:
        assert chunk.trace is not None, "the chunks were decoded with trace=True"
        final = chunk.finish is not None
        rounds.append(trace_json(chunk.trace, text, lambda id: str(tokenizer.decode([id])), final=final))
    choice = {"index": 0, "text": "".join(chunk.text for chunk in chunks), "finish_reason": chunks[-1].finish}
    answer: dict[str, Any] = {"object": "generation", "model": target.name, "choices": [choice | {"trace": rounds}]}
    answer |= {"settings": dict(settings), "machine": machine(), "versions": versions()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(answer, ensure_ascii=False, indent=1) + "\n")
