"""The engine and `stream` as they serve, over real Llama models so small that every outcome can be enumerated.

    Request -> Engine.step -> RequestState, policies, Acceptance, PagedKV, verify_all -> tokens   every way it may go

Models have one layer, two or three tokens and float64 weights. The expected distribution is the target's own over an
ordinary cache, context by context. Shapes: P paths, V vocab.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from types import SimpleNamespace

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.decoding.engine import Engine
from outrider.decoding.generate import stream
from outrider.decoding.policies import FixedPolicy, Policy
from outrider.decoding.request import Request, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.decoding.structured import Grammar
from outrider.drafters.base import DraftCall, Drafter, WrappedDrafter
from outrider.drafters.confidence import ChainHeads
from outrider.drafters.draft import Draft, rerank
from outrider.drafters.language_model import StandaloneDrafter
from outrider.drafters.ngram import HybridDrafter, Library, NgramConfig
from outrider.drafters.trees import CandidateTree, draw_trees
from outrider.sampling import SamplingParams, SeenTokens, warp
from outrider.target.model import Target
from tests.proof.enumeration import (
    Distribution,
    EnumeratedUniforms,
    EnumeratingSource,
    Tokens,
    enumerate_traces,
    exact_target_distribution,
    total_variation,
)
from tests.toys.engine import finish
from tests.toys.policies import gated

GAMMA, COPIED = 2, 3


@cache
def tiny_llama(seed: int, vocab: int = 2) -> Target:
    """One layer in float64, its next tokens neither certain nor all alike."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=64,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.35 if "lm_head" in name else 0.8)
    return Target(model, None, f"tiny-{seed}")


@cache
def next_logits(model: Target, context: Tokens) -> Tensor:
    """After a whole context, read at once into an empty cache."""
    logits = model.forward(torch.tensor([context]), model.new_cache(len(context))).logits_BTV
    assert logits is not None
    return logits[0, -1]


class TinyTrees(Drafter):
    """Trees of three nodes from a tiny model: two siblings, and a node below the first of them.

    They are drawn by the production code or, with `chosen`, the likeliest tokens, reranked. A confidence follows from
    the tokens before its node alone.
    """

    shape = CandidateTree(((0,), (1,), (0, 0)))

    def __init__(self, model: Target, chosen: bool = False) -> None:
        self.model, self.chosen = model, chosen
        self.gamma, self.nodes = self.shape.depth, len(self.shape.paths)
        self.heads = ChainHeads(model.vocab_size)

    def new_session(self, capacity: int) -> list[int]:
        return []

    def extend(self, sessions: Sequence[list[int]], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        for session, part in zip(sessions, tokens, strict=True):
            session += part

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        return [self._propose(call) for call in calls]

    def _propose(self, call: DraftCall) -> Draft:
        before = tuple(call.session)

        def level(_: int, paths_RPk: Tensor) -> Tensor:
            return torch.stack([next_logits(self.model, (*before, *path)) for path in paths_RPk[0].tolist()])[None]

        if self.chosen:
            return self._choose(call, (*before, call.anchor))
        (draft,) = draw_trees(self.shape, [call], level, heads=self.heads, device=torch.device("cpu"))
        parents = [(*before, call.anchor, *draft.tokens_before(parent + 1)) for parent in draft.parents]
        return replace(draft, confidences=[next_logits(self.model, at).softmax(-1).max().item() for at in parents])

    def _choose(self, call: DraftCall, context: Tokens) -> Draft:
        tokens: list[int] = []
        survivals: list[float] = []
        for parent, depth, rank in ((-1, 1, 0), (-1, 1, 1), (0, 2, 0), (1, 2, 0)):
            if call.limit is None or depth <= call.limit:
                above = [] if parent < 0 else [tokens[parent]]
                probs_V = next_logits(self.model, (*context, *above)).softmax(-1)
                tokens.append(int(probs_V.argsort(descending=True)[rank]))
                survivals.append(probs_V[tokens[-1]].item() * (1.0 if parent < 0 else survivals[parent]))
        draft = Draft(tokens, [-1, -1, 0, 1][: len(tokens)])
        return rerank(draft, survivals, self.nodes if call.nodes is None else min(self.nodes, call.nodes))


@cache
def target(vocab: int) -> Target:
    return tiny_llama(2, vocab)


@cache
def drafter(kind: str, vocab: int) -> Drafter:
    """`chain`: a language model, with its own paged cache, `unsure`: without its confidences; `drawn` and `chosen`
    trees; `hybrid KIND`: copies beside; `borrowed KIND`: of other texts too.
    """
    if kind.startswith("hybrid "):
        return HybridDrafter(drafter(kind.removeprefix("hybrid "), vocab), NgramConfig(COPIED, longest=2))
    if kind.startswith("borrowed "):
        library = Library([[0, 0, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0, 1]])
        return HybridDrafter(drafter(kind.removeprefix("borrowed "), vocab), NgramConfig(COPIED, longest=2), library)
    model = tiny_llama(3, vocab)
    if kind in ("drawn", "chosen"):
        return TinyTrees(model, kind == "chosen")
    chain = StandaloneDrafter(model, target(vocab), GAMMA)
    return Unsure(chain) if kind == "unsure" else chain


class Unsure(WrappedDrafter):
    """A drafter without confidences."""

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        return [replace(draft, confidences=[]) for draft in super().propose(calls, min_confidence)]


# Slots for all that two requests may hold, or for so little that the second is preempted.
ROOMY = EngineConfig(max_requests=2, token_budget=16, block_size=2, num_blocks=12)
TIGHT = EngineConfig(max_requests=2, token_budget=16, block_size=1, num_blocks=6)
CACHED = EngineConfig(max_requests=2, token_budget=16, block_size=1, num_blocks=24, prefix_cache=True)
PROMPTS: list[Tokens] = [(0,), (1, 1)]
PARAMS = [
    SamplingParams(temperature=0.8, repetition_penalty=1.3, seed=2, presence_penalty=0.4, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, seed=3),
]


class TinyLanguage:
    """All texts of tokens of a few letters that match a regular expression, by trying; the last token ends a response.

    Args:
        pieces: text of each token but the last.
        longest: letters of its longest text, or of as much of it as is ever looked at.
    """

    def __init__(self, pattern: str, pieces: Sequence[str], longest: int) -> None:
        self.pieces, self.end = list(pieces), len(pieces)
        letters = sorted(set("".join(pieces)))
        texts = ("".join(text) for n in range(longest + 1) for text in product(letters, repeat=n))
        self.texts = {text for text in texts if re.fullmatch(pattern, text)}
        self._beginnings = {text[:n] for text in self.texts for n in range(len(text) + 1)}
        wrapper = TokenizerWrapper(self)
        tokens = LLTokenizer(wrapper, len(pieces) + 1, eos_token=self.end)
        matcher = LLMatcher(tokens, LLMatcher.grammar_from_regex(pattern))
        known = SimpleNamespace(eos_ids=frozenset({self.end}), device="cpu")
        self.grammar = Grammar(matcher, known)  # type: ignore[arg-type]

    # What llguidance asks of a tokenizer.
    bos_token_id = None

    @property
    def eos_token_id(self) -> int:
        return self.end

    @property
    def tokens(self) -> list[bytes]:
        return [*(piece.encode() for piece in self.pieces), b"<end>"]

    def __call__(self, text: bytes) -> list[int]:
        return [self.pieces.index(chr(byte)) for byte in text if chr(byte) in self.pieces]

    def allowed(self, said: Tokens) -> Tensor:
        """Bool [V]; all of them behind the end."""
        if self.end in said:
            return torch.ones(self.end + 1, dtype=torch.bool)
        text = "".join(self.pieces[token] for token in said)
        return torch.tensor([*(text + piece in self._beginnings for piece in self.pieces), text in self.texts])

    def ended(self, outputs: Distribution) -> Distribution:
        """What responses are that stop behind their end."""
        found: Distribution = {}
        for (said,), weight in outputs.items():
            kept = said[: said.index(self.end) + 1] if self.end in said else said
            found[(kept,)] = found.get((kept,), 0.0) + weight
        return found


@dataclass(frozen=True)
class Case:
    """What is enumerated: two requests in the engine, of so many new `tokens` each, or one in `stream`.

    The first follows `language`, if any, and ends with the language's last token. `read`: prompts that the engine has
    answered before, greedily and without drafts.
    """

    policy: Policy = field(default_factory=FixedPolicy)
    kind: str = "chain"
    gate: Policy | None = None
    config: EngineConfig = ROOMY
    coupled: bool = False
    tokens: tuple[int, ...] = (4, 3)
    vocab: int = 2
    language: TinyLanguage | None = None
    prompts: Sequence[Tokens] = tuple(PROMPTS)
    read: Sequence[Tokens] = ()

    @property
    def grammar(self) -> Grammar | None:
        return None if self.language is None else self.language.grammar

    @property
    def params(self) -> list[SamplingParams]:
        return [replace(params, coupled=self.coupled) for params in PARAMS[: len(self.tokens)]]

    def in_engine(self, trace: EnumeratingSource) -> tuple[Tokens, ...]:
        """The responses of one trace."""
        engine = Engine(
            target(self.vocab),
            drafter(self.kind, self.vocab),
            gated(self.policy, self.gate),
            config=self.config,
            randomness=EnumeratedUniforms(trace).randomness,
        )
        for prompt in self.read:
            finish(engine, [Request("read", prompt, rules=StopRules(2, ()), most_drafts=0)])
        parts = zip(self.prompts, self.params, self.tokens, strict=False)
        requests = [
            Request(str(r), prompt, params, StopRules(count, ()), grammar=None if r else self.grammar)
            for r, (prompt, params, count) in enumerate(parts)
        ]
        said = finish(engine, requests)
        return tuple(tuple(said[request.id]) for request in requests)

    def in_stream(self, trace: EnumeratingSource) -> tuple[Tokens, ...]:
        """As `in_engine`, of the first request alone."""
        chunks = stream(
            target(self.vocab),
            PROMPTS[0],
            drafter(self.kind, self.vocab),
            params=self.params[0],
            rules=StopRules(self.tokens[0], ()),
            policy=gated(self.policy, self.gate),
            grammar=self.grammar,
            randomness=EnumeratedUniforms(trace).randomness,
        )
        return (tuple(token for chunk in chunks for token in chunk.tokens),)

    def expected(self) -> Distribution:
        """Every request's tokens drawn one by one from the target, the requests independent."""
        joint: Distribution = {(): 1.0}
        for r, prompt in enumerate(self.prompts[: len(self.tokens)]):
            own = self.answers(r, prompt)
            joint = {(*a, *b): p * q for (a, p), (b, q) in product(joint.items(), own.items())}
        return joint

    def answers(self, r: int, prompt: Tokens) -> Distribution:
        """What request r may be answered after a prompt."""
        params, language = self.params[r], None if r else self.language

        def row(context: Tokens) -> Tensor:
            said = context[len(prompt) :]
            seen = SeenTokens(self.vocab, params, prompt, output=said)
            logits_V = next_logits(target(self.vocab), context)
            if language is not None:
                logits_V = logits_V.masked_fill(~language.allowed(said), -torch.inf)
            return warp(logits_V, params, seen.with_tokens())

        own = exact_target_distribution(row, [prompt], self.tokens[r])
        return own if language is None else language.ended(own)


@dataclass(frozen=True)
class Chat(Case):
    """Two turns in one engine with a prefix cache: the second prompt is all that was said before, and a token more."""

    config: EngineConfig = CACHED
    tokens: tuple[int, ...] = (4, 2)

    def in_engine(self, trace: EnumeratingSource) -> tuple[Tokens, ...]:
        engine = Engine(
            target(self.vocab),
            drafter(self.kind, self.vocab),
            self.policy,
            config=self.config,
            randomness=EnumeratedUniforms(trace).randomness,
        )
        said: list[Tokens] = []
        for params, count in zip(self.params, self.tokens, strict=True):
            prompt = self.prompts[0] if not said else self._second(said[0])
            (answer,) = finish(engine, [Request("turn", prompt, params, StopRules(count, ()))]).values()
            said.append(tuple(answer))
        return tuple(said)

    def expected(self) -> Distribution:
        first = self.answers(0, self.prompts[0])
        turns = {said: self.answers(1, self._second(said)) for (said,) in first}
        return {(a, b): p * q for (a,), p in first.items() for (b,), q in turns[a].items()}

    def _second(self, said: Tokens) -> Tokens:
        return (*self.prompts[0], *said, 1)


@dataclass
class Tally:
    """Counts of what was enumerated, and the largest deviation among it."""

    cases: int = 0
    traces: int = 0
    largest: float = 0.0

    def deviation(self, case: Case, run: Callable[[EnumeratingSource], tuple[Tokens, ...]]) -> float:
        """Total variation distance between what `run` says and the target's own distribution."""
        found: Distribution = {}
        traces = 0
        for outputs, probability in enumerate_traces(run):
            found[outputs] = found.get(outputs, 0.0) + probability
            traces += 1
        distance = total_variation(found, case.expected())
        self.cases, self.traces, self.largest = self.cases + 1, self.traces + traces, max(self.largest, distance)
        print(f"{traces:6} traces, total variation {distance:.1e}")
        return distance
