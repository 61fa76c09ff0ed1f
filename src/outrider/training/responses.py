"""`outrider prepare`: the responses file that a recipe or options ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from outrider.data.chat import Chat
from outrider.data.regenerate import DataSection, PromptSource, Regeneration
from outrider.data.responses import TOKEN_BYTES, sole_writer
from outrider.target.model import Target, load_target
from outrider.training.config import PrepareConfig
from outrider.training.dataset import check_prompt_files, make_responses, responses_path
from outrider.training.recipe import load_recipe
from outrider.training.run import computing_dtype
from outrider.utils.files import check_space
from outrider.utils.measure import usable_device

Say = Callable[[str], None]
_FLAGS = {"base_urls": "base-url", "served_model": "model", "chat_api": "chat", "directory": "data-dir"}


@dataclass(frozen=True)
class ResponseJob:
    """Which responses are made, by whom and where they go."""

    data: DataSection
    target: str
    path: Path
    seed: int
    device: str
    precision: str
    threads: int | None

    @staticmethod
    def of(config: PrepareConfig) -> ResponseJob:
        """The recipe's data section with what the options change.

        Raises:
            ValueError: target, prompts or the file are missing, or a field is out of its range.
        """
        base = load_recipe(config.recipe, config.overrides) if config.recipe else None
        fields = {**(base.data.model_dump() if base else {}), **_given(config)}

        def chosen(name: str, default: Any) -> Any:
            return getattr(base, name, default) if getattr(config, name) is None else getattr(config, name)

        target = chosen("target", None)
        path = config.out or (responses_path(base) if base else None)
        if target is None or path is None or not fields.get("prompts"):
            missing = "--target" if target is None else "--out" if path is None else "--prompts"
            raise ValueError(f"{missing} is missing: give it, or a --recipe that has it.")
        try:
            data = DataSection.model_validate({**fields, "responses": str(path)})
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            flag = _FLAGS.get(name, name.replace("_", "-"))
            raise ValueError(f"--{flag} {first['input']}: {first['msg']}.") from error
        if config.overlap and not data.not_in:
            raise ValueError("--overlap compares prompts with sets of --not-in: name one.")
        return ResponseJob(
            data,
            target,
            path,
            seed=chosen("seed", 0),
            device=chosen("device", "auto"),
            precision=base.precision if base else "auto",
            threads=chosen("threads", None),
        )

    def load(self, say: Say) -> tuple[Chat, Target | None]:
        """The target's chat template and, if it decodes here, the target.

        Raises:
            ValueError: a prompt and its response may not fit the target's context, or the disk is full.
        """
        chat, data = Chat.load(self.target), self.data
        longest = data.max_prompt_tokens + data.max_new_tokens
        if longest > chat.max_context:
            raise ValueError(
                f"--max-prompt-tokens + --max-new-tokens is {longest} and {chat.name} reads {chat.max_context} tokens; "
                "lower one of them."
            )
        size = check_prompt_files(data) * data.max_new_tokens * TOKEN_BYTES
        check_space(self.path, size, "a file of the longest responses", remedy="Free some, or choose another --out.")
        if data.base_urls:
            return chat, None
        device = usable_device(self.device)
        # The type in which training would compute: the responses' settings name it.
        dtype = computing_dtype(self.precision, device, say)
        say(f"loading {self.target}")
        target = load_target(self.target, dtype, device)
        return Chat.of(target), target

    def run(self, chat: Chat, target: Target | None, on_progress: Callable[..., None], say: Say) -> Regeneration:
        """Complete the responses file; see `make_responses`."""
        with sole_writer(self.path):
            return make_responses(
                self.data, chat, target, seed=self.seed, path=self.path, on_progress=on_progress, say=say
            )


def _given(config: PrepareConfig) -> dict[str, Any]:
    """Fields of the data section that the options set."""
    temperature = config.temperature if len(config.temperature) > 1 else next(iter(config.temperature), None)
    fields = {name: getattr(config, name) for name in DataSection.model_fields if hasattr(config, name)}
    fields |= {
        "temperature": list(temperature) if isinstance(temperature, tuple) else temperature,
        "not_in": list(config.not_in) or None,
        "base_urls": list(config.base_urls) or None,
        "directory": None if config.directory is None else str(config.directory),
        "prompts": [PromptSource(path=path, limit=config.limit, max_turns=config.max_turns) for path in config.prompts]
        or None,
    }
    return {name: value for name, value in fields.items() if value is not None}
