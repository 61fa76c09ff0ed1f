"""Every turn of every conversation, answered by the target: turn by turn, by whatever source gives responses.

    for turn 0, 1, ...:   conversations + earlier replies  ->  requests  ->  source  ->  commits to the response file

What a source is asked, and in which batches, follows from the list of conversations alone; what is done already is only
left out. A resumed run therefore ends with the same bytes, and a longer list keeps the replies that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.data.chat import Chat, response_text
from outrider.data.conversations import Conversation, chat_messages
from outrider.data.responses import Failure, ResponseFile
from outrider.data.samples import Reply
from outrider.data.sources import RegenerationConfig, Request, ResponseSource


@dataclass
class Summary:
    """Turns: total = done + skipped (prompt too long) + failed + waiting. Tokens are those of the done responses."""

    total: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    waiting: int = 0
    tokens: int = 0
    finished: int = 0
    inexact: int = 0

    def add(self, replies: Iterable[Reply]) -> None:
        """Count replies as done."""
        for reply in replies:
            self.done += 1
            self.tokens += len(reply.response)
            self.finished += reply.finished
            self.inexact += not reply.exact


@dataclass(frozen=True)
class Regeneration:
    """The replies to the conversations asked for, in their order; counts; what servers failed at.

    `new_tokens`: response tokens that this run made.
    """

    replies: list[Reply]
    summary: Summary
    failures: list[Failure]
    new_tokens: int


def regenerate(
    chat: Chat,
    source: ResponseSource,
    conversations: Sequence[Conversation],
    config: RegenerationConfig,
    path: Path,
    on_progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
    stop: Callable[[], bool] = lambda: False,
) -> Regeneration:
    """Complete the responses file at `path`: a response to every turn of every conversation.

    Args:
        on_progress: called after each commit, and first for what is there already, with (turns done, turns in all,
            response tokens so far).
        stop: asked between commits; True ends early with what there is.

    Raises:
        ValueError: `path` holds responses made with other settings, or to another conversation of the same id; the
            template cannot express a conversation.
    """
    settings = {"target": chat.name, **asdict(config), "chat_template_sha256": chat.template_sha256}
    file = ResponseFile(path, {**settings, **source.description})
    summary = Summary(total=sum(len(c.turns) for c in conversations))
    lost: set[str] = set()  # conversations with a turn that is skipped or failed: later turns cannot be asked
    failures: list[Failure] = []
    new_tokens = 0
    for turn in range(max((len(c.turns) for c in conversations), default=0)):
        requests: list[Request] = []
        turns_left: dict[str, int] = {}
        for conversation in conversations:
            earlier = [file.replies.get((conversation.id, t)) for t in range(turn)]
            replies = [reply for reply in earlier if reply is not None]
            if turn >= len(conversation.turns) or conversation.id in lost or len(replies) < turn:
                continue
            turns_left[conversation.id] = len(conversation.turns) - turn
            request, stored = _request(chat, source, conversation, replies, config, file)
            if stored is not None:
                summary.add([stored])
            elif len(request.prompt) > config.max_prompt_tokens:
                lost.add(conversation.id)
                summary.skipped += turns_left[conversation.id]
                continue
            requests.append(request)
        if summary.done and not new_tokens:
            on_progress(summary.done, summary.total, summary.tokens)  # what an earlier run did
        for answers in source.answer(requests, config, stop):
            new = [answer for answer in answers if isinstance(answer, Reply)]
            if new:
                file.commit(new)
                summary.add(new)
                new_tokens += sum(len(reply.response) for reply in new)
            for answer in answers:
                if isinstance(answer, Failure):
                    lost.add(answer.id)
                    failures.append(answer)
                    summary.failed += turns_left[answer.id]
            on_progress(summary.done, summary.total, summary.tokens)
    summary.waiting = summary.total - summary.done - summary.skipped - summary.failed
    file.finish([c.id for c in conversations], asdict(summary), failures)
    wanted = [(c.id, turn) for c in conversations for turn in range(len(c.turns))]
    kept = [file.replies[key] for key in wanted if key in file.replies]
    return Regeneration(kept, summary, failures, new_tokens)


def _request(
    chat: Chat,
    source: ResponseSource,
    conversation: Conversation,
    replies: list[Reply],
    config: RegenerationConfig,
    file: ResponseFile,
) -> tuple[Request, Reply | None]:
    """What to ask for the turn after `replies`, and the reply that is already there."""
    turn = len(replies)
    prompts = chat.prompts(conversation, replies, config.thinking)
    stored = file.replies.get((conversation.id, turn))
    if stored is not None and stored.prompt not in prompts and not source.renders_prompts:
        raise ValueError(
            f"{file.path} holds a response to another prompt with the id {conversation.id!r}. "
            "Give the new prompt its own id, or delete the file."
        )
    said = [response_text(chat.tokenizer, reply.response) for reply in replies]
    messages = chat_messages(conversation.turns[: turn + 1], said)
    seed = config.seed_of(conversation.id, turn)
    prompt = stored.prompt if stored is not None else prompts[0]
    return Request(conversation.id, turn, prompt, seed, stored is not None, messages, conversation.tools), stored
