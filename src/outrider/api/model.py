"""Load a target with its drafter and answer prompts: `outrider.load`, as `outrider generate` uses it.

    model = outrider.load("HuggingFaceTB/SmolLM2-135M-Instruct")
    print(model.generate("Name three rivers."))

A prompt is a text (a user turn), chat messages, or token ids; a list of prompts is a batch.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from inspect import signature
from itertools import chain
from numbers import Integral
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor

from outrider.api.drafter import (
    AUTO,
    HOW_TO_TRAIN,
    DrafterChoice,
    OpenedDrafter,
    choose_drafter,
    load_for_mlx,
    open_for_mlx,
    warn_of_thinking,
)
from outrider.api.scheduling import Scheduling, choose_scheduling, given
from outrider.data.chat import render
from outrider.data.conversations import Message
from outrider.decoding.drafting import SchedulerState
from outrider.decoding.engine import Engine, config_for
from outrider.decoding.generate import stream
from outrider.decoding.policies import FixedPolicy, Policy, ThresholdPolicy
from outrider.decoding.request import FinishReason, Output, Request, StopRules
from outrider.decoding.structured import GrammarCompiler, StructuredOutput
from outrider.decoding.trace import RoundTrace
from outrider.decoding.verification import TypicalAcceptance
from outrider.drafters.base import draft_slots
from outrider.drafters.draft import TreeSize
from outrider.drafters.ngram import Library
from outrider.sampling import SamplingParams
from outrider.target.model import DecodingTarget, Target, load_target
from outrider.target.paged import batches
from outrider.utils.measure import default_dtype

Prompt: TypeAlias = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True)
class Response:
    """A whole response; `str()` of it is its text.

    `rounds`: forwards of the target that gave tokens. `seconds`: from the call to the last token, prefill included; a
    batch is decoded together. `seed`: seed of the sampling, drawn if none was given. `error`: the error of a request in
    a batch if `finish` is "error"; the text so far is kept. `trace`: every round, if requested.
    """

    text: str
    tokens: list[int]
    finish: FinishReason
    rounds: int
    seconds: float
    seed: int
    error: Exception | None = None
    trace: Sequence[RoundTrace] = ()

    @property
    def accepted_length(self) -> float:
        """Tokens per round, including the target's (tau); 1 in plain decoding, 0 without any token."""
        return len(self.tokens) / max(1, self.rounds)

    def __str__(self) -> str:
        return self.text


_SAMPLING = [field.name for field in fields(SamplingParams)]


@dataclass(frozen=True, repr=False)
class Model:
    """A loaded target with its drafter; `drafter` None decodes plainly.

    Keywords of `stream` and `generate`:

        max_new_tokens        maximum tokens of a response; 256
        stop                  one or several texts that end the response
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed, coupled
                              see SamplingParams; greedy by default
        json_schema           schema of the response: a mapping, its text, or a pydantic class
        regex, choice, grammar
                              or a regular expression, a list of texts, a grammar; see StructuredOutput
        thinking              switch on thinking in the chat template; False
        tools                 JSON schemas, for chat templates that know them
        raw                   continue the text without the chat template; False
        confidence_threshold  verify the longest prefix with confidences >= this; None: see `scheduling`
        policy                decides which requests draft and how many drafts are verified; None: see `scheduling`
        typical               a lossy rule (TypicalAcceptance); None: lossless, the target's distribution
        trace                 record the origin of every round's tokens (RoundTrace); False

    `say` is called with a line before step costs are measured, once per machine; None: the logger `outrider`.
    """

    target: DecodingTarget
    drafter: OpenedDrafter | None = None
    say: Callable[[str], None] | None = None

    @cached_property
    def scheduling(self) -> Scheduling:
        """Default policy of calls without `policy` or `confidence_threshold`: see `choose_scheduling`."""
        return choose_scheduling(self.target, self.drafter, self.say)

    @cached_property
    def _scheduler_states(self) -> list[tuple[int, SchedulerState]]:
        """(number of requests, learned state) of earlier requests; empty before the first and while one runs."""
        return []

    @contextmanager
    def _with_scheduler_state(self, requests: Sequence[Request], chosen: Scheduling) -> Iterator[SchedulerState | None]:
        """Lend the state learned from earlier requests; the block updates it.

        It is None if a seed must reproduce the same tokens, or if the policy does not weigh costs: data gathered under
        a threshold says nothing about drafts beyond it.
        """
        if not chosen.costs or not all(request.params.fixed_text for request in requests):
            yield None
            return
        try:
            earlier, scheduler_state = self._scheduler_states.pop()
        except IndexError:  # the first request, or another one is running
            earlier, scheduler_state = 0, SchedulerState.of(None if self.drafter is None else self.drafter.drafter)
        try:
            yield scheduler_state
        finally:  # a concurrent request may have returned a state of fewer or more requests: keep the larger
            candidates = [*self._scheduler_states, (earlier + len(requests), scheduler_state)]
            self._scheduler_states[:] = [max(candidates, key=itemgetter(0))]

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiler of grammars for structured responses."""
        return GrammarCompiler(self.target)

    def __repr__(self) -> str:
        drafter = "plain decoding" if self.drafter is None else f"drafter {self.drafter.name}"
        return f"<outrider.Model {self.target.name}, {drafter}>"

    def stream(
        self,
        prompt: Prompt,
        *,
        confidence_threshold: float | None = None,
        policy: Policy | None = None,
        typical: TypicalAcceptance | None = None,
        **options: Any,
    ) -> Iterator[Output]:
        """Answer one prompt; yield text and tokens of each round. Keywords: see the class.

        Raises:
            ValueError: the prompt is empty or exceeds the target's context, a keyword is out of range, or both a
                threshold and a policy are given.
            TypeError: a keyword is unknown.
        """
        request, chosen = self._request(prompt, **options), self._scheduling(confidence_threshold, policy)
        return self._chunks(request, chosen, typical)

    @overload
    def generate(self, prompt: Prompt, **options: Any) -> Response: ...

    @overload
    def generate(self, prompt: Sequence[str] | Sequence[Sequence[Message]], **options: Any) -> list[Response]: ...

    def generate(self, prompt: Any, **options: Any) -> Response | list[Response]:
        """Answer one prompt, or a list of prompts together. Keywords: see the class.

        `Engine` decodes a batch, prompt i with `seed + i` if a seed is given. With `typical`, with MLX, and for targets
        whose rotary embeddings depend on the longest text of a batch, prompts are decoded one by one.

        Raises:
            ValueError, TypeError: see `stream`.
        """
        if not _is_batch(prompt):
            return self._generate(prompt, **options)
        seed = options.pop("seed", None)
        seeds = [None if seed is None else seed + i for i in range(len(prompt))]
        if options.get("typical") is not None or not isinstance(self.target, Target) or not batches(self.target.config):
            return [
                self._generate(item, seed=item_seed, **options) for item, item_seed in zip(prompt, seeds, strict=True)
            ]
        chosen = self._scheduling(*(options.pop(name, None) for name in ("confidence_threshold", "policy")))
        options.pop("typical", None)
        requests = [
            self._request(item, id=str(number), seed=item_seed, **options)
            for number, (item, item_seed) in enumerate(zip(prompt, seeds, strict=True))
        ]
        return self._together(self.target, requests, chosen)

    def spec_generate(
        self,
        target: Any = None,
        input_ids: Tensor | None = None,
        max_new_tokens: int = 256,
        stop_token_ids: Sequence[int] | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> Tensor:
        """Replace `spec_generate` of z-lab's dflash drafters: return prompt and response ids [1, T].

        Args:
            target: the transformers model that dflash decodes with; only its shapes are compared with the loaded
                target, which decodes.
            stop_token_ids: None: the response has `max_new_tokens` tokens, as in dflash.
            temperature: above 0 the seed follows `torch.manual_seed`, as in dflash, but the tokens differ.

        Raises:
            ValueError: `input_ids` is not [1, T], or `target` has other shapes than the loaded one.
        """
        if input_ids is None or input_ids.shape[0] != 1 or input_ids.dim() != 2:
            raise ValueError("input_ids must be the tokens of one prompt, of shape [1, T].")
        if target is not None:
            theirs = target.config.get_text_config()
            for name, ours in (("vocab_size", self.target.vocab_size), ("hidden_size", self.target.hidden_size)):
                if getattr(theirs, name) != ours:
                    raise ValueError(
                        f"target has {name} {getattr(theirs, name)}, the loaded {self.target.name} has {ours}: load "
                        "the drafter for that target."
                    )
        params = SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, seed=int(torch.randint(2**32, ())) if temperature else 0
        )
        rules = StopRules(max_new_tokens, stop_token_ids or ())
        request = Request("", input_ids[0].tolist(), params, rules=rules)
        new = [token for chunk in self._chunks(request, self.scheduling, None) for token in chunk.tokens]
        return torch.cat([input_ids, input_ids.new_tensor([new])], dim=1)

    def _request(
        self,
        prompt: Any,
        *,
        id: str = "",
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        thinking: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        raw: bool = False,
        json_schema: str | Mapping[str, Any] | type | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        trace: bool = False,
        **sampling: Any,
    ) -> Request:
        if unknown := next((name for name in sampling if name not in _SAMPLING), None):
            near = get_close_matches(unknown, [*_SAMPLING, *signature(self._request).parameters], n=1)
            hint = f"did you mean {near[0]}?" if near else "see outrider.Model for the keywords."
            raise TypeError(f"there is no keyword {unknown}; {hint}")
        params = SamplingParams(**sampling)
        if not _is_prompt(prompt):
            raise TypeError(
                "a prompt is a text, messages with a role each, or token ids, not "
                f"{type(prompt).__name__} {prompt!r:.80}"
            )
        rules = StopRules(max_new_tokens, stop_strings=(stop,) if isinstance(stop, str) else tuple(stop))
        tokenizer = self.target.tokenizer
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Integral):
            tokens = [int(token) for token in prompt]
        elif tokenizer is None:
            raise ValueError(f"{self.target.name} has no tokenizer: give token ids.")
        elif raw:
            if not isinstance(prompt, str):
                raise ValueError("raw continues a text: give a text, or leave raw out.")
            tokens = list(tokenizer(prompt)["input_ids"])
        else:
            turn = prompt if isinstance(prompt, str) else tuple({"content": "", **message} for message in prompt)
            tokens = render(tokenizer, [turn], [], tools=tools, thinking=thinking)
        compiled = None
        if any(form is not None for form in (json_schema, regex, choice, grammar)):
            output = StructuredOutput(json=json_schema, regex=regex, choice=choice, grammar=grammar)
            compiled = self.grammars.compile(output)
        return Request(id, tokens, params, rules=rules, grammar=compiled, trace=trace)

    def _scheduling(self, threshold: float | None, policy: Policy | None) -> Scheduling:
        if threshold is None and policy is None:
            return self.scheduling
        if threshold is not None:
            if policy is not None:
                raise ValueError("confidence_threshold and policy exclude each other: leave one of them out.")
            policy = ThresholdPolicy(threshold)
        return given(policy or FixedPolicy())

    def _chunks(self, request: Request, chosen: Scheduling, typical: TypicalAcceptance | None) -> Iterator[Output]:
        drafter = None if self.drafter is None else self.drafter.drafter
        with self._with_scheduler_state([request], chosen) as scheduler_state:
            yield from stream(
                self.target,
                request.prompt,
                drafter,
                params=request.params,
                rules=request.rules,
                policy=chosen.policy_for([request.params]),
                typical=typical,
                grammar=request.grammar,
                traced=request.trace,
                scheduler_state=scheduler_state,
            )

    def _generate(self, prompt: Prompt, **options: Any) -> Response:
        started = time.perf_counter()
        return _response(list(self.stream(prompt, **options)), time.perf_counter() - started)

    def _together(self, target: Target, requests: Sequence[Request], chosen: Scheduling) -> list[Response]:
        started = time.perf_counter()
        drafter = None if self.drafter is None else self.drafter.drafter
        config = config_for(requests, draft_slots(drafter))
        outputs: dict[str, list[Output]] = {request.id: [] for request in requests}
        responses: dict[str, Response] = {}
        with self._with_scheduler_state(requests, chosen) as scheduler_state:
            policy = chosen.policy_for([request.params for request in requests])
            engine = Engine(target, drafter, policy, config=config, scheduler_state=scheduler_state)
            # Close it even when interrupted: the learned state must not keep request ids, which the next batch reuses.
            with closing(engine.run(requests)) as steps:
                for output in chain.from_iterable(steps):
                    outputs[output.id].append(output)
                    if output.finish is not None:
                        responses[output.id] = _response(outputs[output.id], time.perf_counter() - started)
        return [responses[request.id] for request in requests]


def load(
    model: str | Path,
    drafter: str | Path | DrafterChoice | None = AUTO,
    device: str = "auto",
    *,
    thinking: bool = False,
    tree: str | TreeSize | None = None,
    backend: Literal["local", "mlx"] = "local",
    lookup: Sequence[str | Path] = (),
    lookup_responses: int = 0,
    say: Callable[[str], None] | None = None,
) -> Model:
    """Load a target and its drafter.

    Args:
        model: id or directory of the target.
        drafter: a value of `--drafter`: auto, hybrid, a directory or name, ngram, lm:MODEL, "none"; or None.
        device: auto (CUDA if available), cpu, cuda, ...; float32 on a CPU, bfloat16 elsewhere.
        thinking: whether responses will think; `auto` then prefers a drafter that was trained on thinking.
        tree: size of draft trees ("16"), for methods that support them.
        backend: local (PyTorch) or mlx.
        lookup: UTF-8 text files for prompt lookup by a hybrid, besides the request's text.
        lookup_responses: tokens of the latest responses to other requests for prompt lookup: 0, or at least 8. The
            speed of an answer then reveals whether its text is among them. Requests that sample with a given seed
            do not use them unless coupled, because the seed may have drawn those responses.
        say: see `Model`.

    Raises:
        ValueError: the model or drafter does not exist, or they do not fit each other.
    """
    model = str(model)
    choice = choose_drafter(str(drafter), model, thinking) if isinstance(drafter, (str, Path)) else drafter
    size = TreeSize.parse(tree) if isinstance(tree, str) else tree
    if choice is not None:
        warn_of_thinking(choice, thinking)
    elif drafter == AUTO:
        warnings.warn(f"no drafter for {model}, so decoding is plain; {HOW_TO_TRAIN}.", stacklevel=2)
    looks_up = bool(lookup) or lookup_responses != 0
    if looks_up and choice is None:
        raise ValueError("lookup needs a hybrid drafter, not plain decoding: choose one, or leave lookup out.")
    if looks_up and backend == "mlx":
        raise ValueError("lookup is not supported by backend mlx: use the local backend, or leave lookup out.")
    if backend == "mlx":
        target: Any = load_for_mlx(model)
        opened = None if choice is None else open_for_mlx(choice, target, tree=size)
    else:
        target = load_target(model, default_dtype(device), device)
        library = _library(target, lookup, lookup_responses) if looks_up else None
        opened = None if choice is None else choice.open(target, tree=size, library=library)
    return Model(target, opened, say)


def _library(target: Target, files: Sequence[str | Path], responses: int) -> Library:
    documents = []
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"lookup: {file} is not readable UTF-8 text ({error}).") from error
        if target.tokenizer is None:
            raise ValueError(f"lookup needs a tokenizer, and {target.name} has none: leave lookup out.")
        documents.append(target.tokenizer(text, add_special_tokens=False)["input_ids"])
    return Library(documents, responses)


def _is_batch(prompt: Any) -> bool:
    """Return whether this is a list of prompts: neither a text, nor messages, nor token ids."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    return not (prompt and isinstance(prompt[0], (Integral, dict)))


def _is_prompt(prompt: Any) -> bool:
    """Return whether this is a text, messages, or token ids."""
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, Sequence):
        return False
    return all(isinstance(item, Integral) or (isinstance(item, Mapping) and "role" in item) for item in prompt)


def _response(parts: Sequence[Output], seconds: float) -> Response:
    last = parts[-1]
    finish, seed = last.finish, last.seed
    assert finish is not None and seed is not None
    return Response(
        "".join(part.text for part in parts),
        [token for part in parts for token in part.tokens],
        finish,
        rounds=sum(bool(part.tokens) for part in parts),
        seconds=seconds,
        seed=seed,
        error=last.error,
        trace=[part.trace for part in parts if part.trace is not None],
    )
