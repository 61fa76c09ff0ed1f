"""Decoding by transformers' own `generate`: plain, with prompt lookup, or assisted by a smaller model.

    generate(..., streamer=S) in a thread -> S.put(tokens of one round) -> rounds of `Decode`

The model is transformers' own, without our packed weights. Prompt lookup and assisted generation hand over a round's
tokens at once, so accepted lengths are exact; of the assistant's drafts transformers tells nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import BaseStreamer, StoppingCriteria, StoppingCriteriaList

from outrider.target.hub import model_config, resolve_model
from outrider.target.loading import load_model


class _Rounds(BaseStreamer):
    """A streamer that queues the tokens of each round; the prompt, which comes first, is left out."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[list[int] | BaseException | None] = SimpleQueue()
        self._prompt = True

    def put(self, value: Tensor) -> None:
        if self._prompt:
            self._prompt = False
        else:
            self.queue.put(value.flatten().tolist())

    def end(self) -> None:
        """Nothing to do: the response ends when `generate` returns."""


class _Cancelled(StoppingCriteria):
    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.event.is_set(), device=input_ids.device)


class HfDecoder:
    """Greedy decoding of a prompt, round by round; drafts are `lookup` tokens copied from it, or an assistant's."""

    def __init__(
        self, model: Any, eos_ids: Sequence[int], lookup: int | None = None, assistant: Any | None = None
    ) -> None:
        self._model, self._assistant = model, assistant
        self._settings: dict[str, Any] = {"do_sample": False, "eos_token_id": list(eos_ids), "pad_token_id": 0}
        if lookup is not None:
            self._settings["prompt_lookup_num_tokens"] = lookup

    def __call__(self, prompt: Sequence[int], most: int) -> Iterator[list[int]]:
        rounds, cancelled = _Rounds(), _Cancelled()
        thread = threading.Thread(target=self._generate, args=(prompt, most, rounds, cancelled), daemon=True)
        thread.start()
        try:
            while (event := rounds.queue.get()) is not None:
                if isinstance(event, BaseException):
                    raise ValueError(f"transformers' generate failed: {event}") from event
                yield event
        finally:
            cancelled.event.set()
            thread.join()

    def _generate(self, prompt: Sequence[int], most: int, rounds: _Rounds, cancelled: _Cancelled) -> None:
        try:
            tokens = torch.tensor([list(prompt)], device=self._model.device)
            with torch.inference_mode():
                self._model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    generation_config=GenerationConfig(max_new_tokens=most, **self._settings),
                    streamer=rounds,
                    stopping_criteria=StoppingCriteriaList([cancelled]),
                    assistant_model=self._assistant,
                )
            rounds.queue.put(None)
        except BaseException as error:  # it belongs to the thread that waits
            rounds.queue.put(error)


def load_causal_lm(id_or_dir: str, device: str | torch.device, dtype: torch.dtype) -> Any:
    """Load a model by transformers, without its generation settings: a penalty there would make another text than
    the target's likeliest.
    """
    path = resolve_model(id_or_dir)
    model = load_model(model_config(path), path, dtype)
    model.generation_config = GenerationConfig()
    return model.to(device).eval().requires_grad_(False)
