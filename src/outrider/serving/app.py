"""The server's routes: completions and chats, streamed or whole, and what is around them.

    request -> schema -> `Room` -> prompt tokens -> `Room.submit` -> outputs -> chunks of events, or one answer

A client that goes away frees its requests after the engine's step, and its place at once where they have not come so
far. Errors have OpenAI's body: 400 for what is asked wrongly, 401 without the key, 404 for an unknown model, 413 and
408 for bodies too large or too slow, 415 for compressed ones and those that are not JSON, 429 while the queue is full,
503 when the engine does not run or the server stops. Source of fields and events: OpenAI's API reference; vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from hmac import compare_digest
from importlib.metadata import version
from itertools import accumulate
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.data.chat import render_text, template_of
from outrider.decoding.request import Output, TokenLogprob
from outrider.decoding.request import Request as EngineRequest
from outrider.decoding.structured import Grammar, GrammarCompiler, Structure, StructureError
from outrider.decoding.text import TextStream
from outrider.serving.inspector import page, trace_json, watched
from outrider.serving.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from outrider.serving.tokenizer import ServerTokenizer
from outrider.serving.tools import Format, ToolCall, ToolCallParser, call_structure, format_of
from outrider.serving.worker import Overloaded, Room, Stopping, Submission, Unavailable, Worker

_OPEN_PATHS = ("/health", "/metrics", "/version", "/")  # asked by probes and browsers, which have no key
_MOST_WATCHES = 16  # listeners to the engine's steps
_ENDS = {"Connection": "close"}  # so that a client that keeps its connection goes elsewhere
_GONE = 499  # what nginx calls a client that has closed its connection; nobody reads it


@dataclass(frozen=True)
class Limits:
    """Limits of one HTTP request.

    Args:
        max_new_tokens: of a response; None: as many as the target's context and the engine's KV blocks hold.
        body_bytes, body_seconds: of a request's body, and until all of it has come.
        unread_seconds: until a client that does not read its answer is cut off.
        shutdown_seconds: until requests in progress are ended when the server stops.
    """

    max_new_tokens: int | None = None
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    unread_seconds: float = 60.0
    shutdown_seconds: float = 30.0


class Server:
    """The routes' shared state: the worker, the target's tokenizer, and settings.

    Args:
        name: of the model, as clients ask for it.
        thinking: what chat templates get as `enable_thinking` if a request does not say.

    Attributes:
        closing: whether the process that serves is to end: nothing new is begun, and what would go on for ever ends.
    """

    def __init__(self, worker: Worker, name: str, limits: Limits | None = None, thinking: bool = False) -> None:
        target, config = worker.engine.target, worker.engine.config
        if target.tokenizer is None:
            raise ValueError(f"{target.name} has no tokenizer, and the server's requests are text.")
        self.worker, self.name, self.thinking = worker, name, thinking
        self.target, self.tokenizer, self.limits = target, target.tokenizer, limits or Limits()
        self.started = int(time.time())
        self.grammars = GrammarCompiler(target)
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self.most_tokens = min(target.max_context, config.num_blocks * config.block_size)
        self.texts = ServerTokenizer(target.tokenizer, self.most_tokens, rests=target.device.type == "cpu")
        self.closing: Callable[[], bool] = lambda: False

    def check_model(self, model: str) -> None:
        """Refuse another model than the server's with an HTTPException."""
        if model not in ("", self.name):
            raise HTTPException(404, f"the model {model!r} is not served here, {self.name!r} is.")

    def room(self, requests: int) -> Room:
        """Places for so many requests, taken before anything is tokenised for them.

        Raises:
            Overloaded: more would wait than may.
            Unavailable: the engine does not run; Stopping: the server ends.
        """
        if self.closing():
            raise Stopping
        return self.worker.room(requests)

    async def tokens_of_chat(
        self, request: ChatRequest | TokenizeRequest, tools: Sequence[dict[str, Any]], size: int
    ) -> list[int]:
        """A chat's prompt as the target's template writes it; `size`: bytes of the request."""
        thinking = request.chat_template_kwargs.enable_thinking
        messages = tuple(message.plain() for message in request.messages)
        thinking = self.thinking if thinking is None else thinking
        write = partial(render_text, self.tokenizer, [messages], [], tools=tools, thinking=thinking)
        text = await self.texts.run(write, size)
        return await self.texts.tokens(text, special=self.tokenizer.chat_template is None)

    def call_format(self, tools: Sequence[dict[str, Any]]) -> Format | None:
        """The form of tool calls that the target's chat template asks for; None without tools."""
        format = format_of(template_of(self.tokenizer, tools)) if tools else None
        if tools and format is None:
            raise ValueError("tools: calls in the form that this target's chat template asks for are not read here.")
        return format

    async def grammar(self, wanted: Structure | None) -> Grammar | None:
        """Compile the grammar that the choices of a request follow; None: any text.

        Raises:
            StructureError: it is not valid, cannot be followed, or is too large.
        """
        if wanted is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._compiling, self.grammars.compile, wanted)

    async def text_of(self, tokens: Sequence[int]) -> str:
        if bad := [token for token in tokens if token >= self.target.vocab_size]:
            raise ValueError(f"token {bad[0]} is outside the vocabulary of {self.target.vocab_size}.")
        return await self.texts.text(tokens)

    def new_tokens(self, prompt: Sequence[int], max_tokens: int | None) -> int:
        fitting = self.most_tokens - len(prompt)
        if fitting < 1 or (max_tokens or 1) > fitting:
            both = f"{len(prompt)} tokens of the prompt and {max_tokens or 1} of the response"
            raise ValueError(f"max_tokens: {both} are more than the {fitting + len(prompt)} that fit.")
        limit = self.limits.max_new_tokens
        if limit is not None and max_tokens is not None and max_tokens > limit:
            raise ValueError(f"max_tokens: {max_tokens} is above this server's limit of {limit}.")
        return min(fitting, limit or fitting) if max_tokens is None else max_tokens


# ----------------------------------------------------------------------------
# An answer: choices that grow with the engine's outputs.
# ----------------------------------------------------------------------------


@dataclass
class Choice:
    """One response of an answer; `parser`: if tools are offered; `traced`: its tokens' texts, if it is traced."""

    index: int
    prompt: list[int]
    parser: ToolCallParser | None
    traced: TextStream | None = None
    trace: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    cached: int = 0  # tokens of its prompt that the prefix cache had
    finish: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offset: int = 0  # characters of the tokens whose log-probabilities have been sent
    begun: bool = False  # one of these has text

    def add(self, output: Output) -> tuple[str, list[ToolCall]]:
        """Take an output: (its text outside tool calls, the calls that it completes)."""
        text, calls = output.text, list[ToolCall]()
        if self.parser is not None:
            text, calls = self.parser.push(text, final=output.finish is not None)
        self.text += text
        self.tokens += output.tokens
        self.cached = output.cached_tokens
        self.logprobs += output.logprobs or ()
        self.calls += calls
        self.finish = "tool_calls" if output.finish == "stop" and self.calls else output.finish
        return text, calls


class RouteAnswer(ABC):
    """An answer to one HTTP request, in the shape of its route."""

    kind: str  # of a whole answer
    chunk: str  # of a streamed part

    def __init__(
        self, server: Server, request: ChatRequest | CompletionRequest, id: str, choices: dict[str, Choice]
    ) -> None:
        self.server, self.request, self.id, self.choices = server, request, id, choices
        self.created = int(time.time())

    @abstractmethod
    def whole(self, choice: Choice) -> dict[str, Any]:
        """Fields of a finished choice besides its index and finish reason."""

    @abstractmethod
    def part(self, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Fields of a streamed chunk."""

    @abstractmethod
    def logprobs(self, choice: Choice, first: int) -> dict[str, Any]:
        """The log-probabilities of a choice's tokens from the `first` on."""

    def opening(self) -> dict[str, Any] | None:
        """Fields of every choice's first chunk, before there is any text; None: no such chunk."""
        return None

    async def collect(self, submission: Submission) -> dict[str, Any]:
        """The whole answer.

        Raises:
            Unavailable: the engine failed, or one of the requests did.
            StructureError: what the answer must follow turned out to be too much work.
        """
        async for output in submission:
            _check(output)
            choice = self.choices[output.id]
            choice.add(output)
            choice.trace += self._trace(choice, output)
        choices = []
        for choice in self.choices.values():
            whole = {"index": choice.index, **self.whole(choice), "logprobs": self._logprobs(choice, 0)}
            whole |= {"finish_reason": choice.finish} | ({} if choice.traced is None else {"trace": choice.trace})
            if self.request.return_token_ids:
                whole |= {"token_ids": choice.tokens, "prompt_token_ids": choice.prompt}
            choices.append(whole)
        return {**self._head(self.kind), "choices": choices, **self._closing(submission)}

    async def events(self, submission: Submission) -> AsyncIterator[str]:
        options = self.request.stream_options
        try:
            opening = self.opening()
            for choice in self.choices.values():
                if opening is not None:
                    yield self._event(choice, opening, None)
            async for output in submission:
                _check(output)
                choice = self.choices[output.id]
                calls_before = len(choice.calls)
                text, calls = choice.add(output)
                always = self.request.return_token_ids or self.request.num_logprobs is not None or self.request.trace
                if not (text or calls or choice.finish or (output.tokens and always)):
                    continue  # the text is held back: it may be the beginning of a stop string or a tool call
                part = self.part(text, [_shown(call, calls_before + i, True) for i, call in enumerate(calls)])
                yield self._event(choice, part, output)
            if options.include_usage:
                yield _data({**self._head(self.chunk), "choices": [], **self._closing(submission)})
        except (Unavailable, StructureError) as error:
            status = 400 if isinstance(error, StructureError) else 503 if isinstance(error, Stopping) else 500
            yield _data(error_body(status, str(error)))
        yield "data: [DONE]\n\n"

    def _event(self, choice: Choice, part: dict[str, Any], output: Output | None) -> str:
        options, ids = self.request.stream_options, dict[str, Any]()
        if self.request.return_token_ids and output is not None:
            ids = {"token_ids": output.tokens}
            if len(choice.tokens) == len(output.tokens):  # the first
                ids["prompt_token_ids"] = choice.prompt
        if choice.traced is not None and output is not None:
            ids["trace"] = self._trace(choice, output)
        usage = {"usage": self._usage()} if options.include_usage and options.continuous_usage_stats else {}
        finish = None if output is None else choice.finish
        logprobs = None if output is None else self._logprobs(choice, len(choice.tokens) - len(output.tokens))
        chunk = {"index": choice.index, **part, "logprobs": logprobs, "finish_reason": finish, **ids}
        return _data({**self._head(self.chunk), "choices": [chunk], **usage})

    def _logprobs(self, choice: Choice, first: int) -> dict[str, Any] | None:
        return None if self.request.num_logprobs is None else self.logprobs(choice, first)

    def _trace(self, choice: Choice, output: Output) -> list[dict[str, Any]]:
        if choice.traced is None or output.trace is None:
            return []
        return [trace_json(output.trace, choice.traced, self.server.texts.piece, final=output.finish is not None)]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.server.name}

    def _usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt counts once for all its choices, and is cached as far as for the first of them."""
        choices = list(self.choices.values())
        prompts = choices[:: self.request.n]
        read = sum(len(choice.prompt) for choice in prompts)
        written = sum(len(choice.tokens) for choice in choices)
        details = {"cached_tokens": sum(choice.cached for choice in prompts)}
        counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return {**counts, "prompt_tokens_details": details}

    def _closing(self, submission: Submission) -> dict[str, Any]:
        """Usage, and `metrics` if there is one response, as vLLM has it."""
        metrics = [record.metrics() for record in submission.records.values()]
        return {"usage": self._usage()} | ({"metrics": metrics[0]} if len(metrics) == 1 else {})


class CompletionAnswer(RouteAnswer):
    kind = chunk = "text_completion"

    def whole(self, choice: Choice) -> dict[str, Any]:
        return self.part(choice.text, [])

    def part(self, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, choice: Choice, first: int) -> dict[str, Any]:
        piece = self.server.texts.piece
        pieces, logprobs = [piece(token) for token in choice.tokens[first:]], choice.logprobs[first:]
        *offsets, choice.offset = accumulate((len(piece) for piece in pieces), initial=choice.offset)
        return {
            "tokens": pieces,
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [{piece(token): value for token, value in one.top} for one in logprobs],
            "text_offset": offsets,
        }


class ChatAnswer(RouteAnswer):
    kind, chunk = "chat.completion", "chat.completion.chunk"

    def whole(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text or None if choice.calls else choice.text}
        if choice.calls:
            message["tool_calls"] = [_shown(call, i, False) for i, call in enumerate(choice.calls)]
        return {"message": message}

    def part(self, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": text} if text else {}
        return {"delta": {**delta, "tool_calls": calls} if calls else delta}

    def logprobs(self, choice: Choice, first: int) -> dict[str, Any]:
        texts = self.server.texts

        def shown(token: int, value: float, **top: Any) -> dict[str, Any]:
            own = texts.bytes_of(token, first=not choice.begun)
            return {"token": texts.piece(token), "logprob": value, "bytes": own, **top}

        content = []
        for token, one in zip(choice.tokens[first:], choice.logprobs[first:], strict=True):
            content.append(shown(token, one.logprob, top_logprobs=[shown(*other) for other in one.top]))
            choice.begun = choice.begun or texts.has_text(token)
        return {"content": content}

    def opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}


def _shown(call: ToolCall, index: int, streamed: bool) -> dict[str, Any]:
    """A tool call as clients read it: parts of a stream are numbered."""
    function = {"name": call.name, "arguments": call.arguments}
    place = {"index": index} if streamed else {}
    return {**place, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _check(output: Output) -> None:
    error = output.error
    if isinstance(error, StructureError) or (error is not None and isinstance(error.__cause__, StructureError)):
        raise StructureError(str(error))
    if isinstance(error, Stopping):
        raise Stopping
    if error is not None:
        raise Unavailable(f"the engine ended this request: {type(error).__name__}: {error}")


def _data(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


class EventStream(StreamingResponse):
    """Events that free their requests when the response ends, however it does: also before its first event."""

    def __init__(self, answer: RouteAnswer, submission: Submission) -> None:
        super().__init__(answer.events(submission), media_type="text/event-stream")
        self._submission = submission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._submission.close()


async def respond(answer: RouteAnswer, submission: Submission) -> Response:
    """What the engine decodes for the choices of `answer`: streamed if that is asked for, else whole."""
    if answer.request.stream:
        return EventStream(answer, submission)
    try:
        return JSONResponse(await answer.collect(submission))
    finally:
        submission.close()


async def unless_gone(http: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes, which is cancelled where it stands when the client goes."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=_GONE)
    finally:
        for task in (working, gone):
            task.cancel()


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


# ----------------------------------------------------------------------------
# The application.
# ----------------------------------------------------------------------------


def create_app(server: Server, api_key: str | None = None) -> FastAPI:
    """The routes of a server, whose worker runs as long as the application does.

    Args:
        api_key: what clients must send as a bearer token; None: they need none.
    """

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        await server.worker.start()
        yield
        await server.worker.stop()

    # No pages of documentation: they would load scripts from elsewhere. /openapi.json is there.
    app = FastAPI(title="Outrider", version=version("outrider"), lifespan=running, docs_url=None, redoc_url=None)
    app.router.route_class = JSONRoute
    app.add_middleware(Guard, limits=server.limits, api_key=api_key)
    _add_errors(app, server)

    @app.post("/v1/completions")
    async def completions(request: CompletionRequest, http: Request) -> Response:
        server.check_model(request.model)

        async def answered() -> Response:
            with server.room(request.n * len(request.prompts)) as room:
                prompts = [
                    await server.texts.tokens(one, special=True) if isinstance(one, str) else one
                    for one in request.prompts
                ]
                grammar = await server.grammar(request.structure)
                answer, requests = _prepare(server, request, prompts, grammar=grammar)
                submission = await room.submit(requests)
            return await respond(answer, submission)

        return await unless_gone(http, answered())

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest, http: Request) -> Response:
        server.check_model(request.model)
        tools = [tool.plain() for tool in request.tools if request.tool_choice != "none"]

        async def answered() -> Response:
            with server.room(request.n) as room:
                prompt = await server.tokens_of_chat(request, tools, size=len(await http.body()))
                format = server.call_format(tools)
                calls = None if format is None else call_structure(request, format)
                grammar = await server.grammar(calls or request.structure)
                parser = None if format is None else partial(ToolCallParser, format, tools)
                answer, requests = _prepare(server, request, [prompt], parser=parser, grammar=grammar)
                submission = await room.submit(requests)
            return await respond(answer, submission)

        return await unless_gone(http, answered())

    @app.get("/", include_in_schema=False)
    async def inspector() -> Response:
        html, allowed = page()
        return HTMLResponse(html, headers={"Content-Security-Policy": allowed, "Referrer-Policy": "no-referrer"})

    @app.get("/inspector/events", include_in_schema=False)
    async def inspector_events() -> Response:
        if len(server.worker.watches) >= _MOST_WATCHES:
            raise HTTPException(429, f"{_MOST_WATCHES} listen already.")
        about = {"model": server.name, "version": version("outrider")}
        events = watched(server.worker.watches, server.worker.engine, about, closing=server.closing)
        return StreamingResponse((_data(event) async for event in events), media_type="text/event-stream")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": server.name, "object": "model", "created": server.started, "owned_by": "outrider"}
        return {"object": "list", "data": [model | {"max_model_len": server.target.max_context}]}

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest, http: Request) -> Response:
        server.check_model(request.model)

        async def answered() -> Response:
            with server.room(1):
                if request.messages:
                    tools = [tool.plain() for tool in request.tools]
                    tokens = await server.tokens_of_chat(request, tools, size=len(await http.body()))
                else:
                    tokens = await server.texts.tokens(request.prompt, request.add_special_tokens)
            texts = server.tokenizer.convert_ids_to_tokens(tokens) if request.return_token_strs else None
            about = {"count": len(tokens), "max_model_len": server.target.max_context}
            return JSONResponse({**about, "tokens": tokens, "token_strs": texts})

        return await unless_gone(http, answered())

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest, http: Request) -> Response:
        server.check_model(request.model)

        async def answered() -> Response:
            with server.room(1):
                return JSONResponse({"prompt": await server.text_of(request.tokens)})

        return await unless_gone(http, answered())

    @app.get("/health")
    async def health() -> Response:
        if server.closing():
            raise Stopping
        if server.worker.healthy:
            return Response()
        return _refusal(503, str(server.worker.failure))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.worker.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def running_version() -> dict[str, str]:
        return {"version": version("outrider")}

    return app


def _prepare(
    server: Server,
    request: ChatRequest | CompletionRequest,
    prompts: Sequence[list[int]],
    parser: Callable[[], ToolCallParser] | None = None,
    grammar: Grammar | None = None,
) -> tuple[RouteAnswer, list[EngineRequest]]:
    """An empty answer, and the engine's requests: `request.n` for each prompt.

    Args:
        parser: makes the reader of a choice's tool calls; None without tools.
    """
    most = request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        most = request.max_completion_tokens
    kind: type[RouteAnswer] = ChatAnswer if isinstance(request, ChatRequest) else CompletionAnswer
    id = f"{'chatcmpl' if kind is ChatAnswer else 'cmpl'}-{uuid.uuid4().hex}"
    choices: dict[str, Choice] = {}
    requests = []
    for index, prompt in enumerate(prompt for prompt in prompts for _ in range(request.n)):
        rules = request.rules(server.new_tokens(prompt, most), server.target.eos_ids)
        requests.append(
            EngineRequest(
                f"{id}-{index}",
                prompt,
                request.sampling(index),
                rules=rules,
                most_drafts=request.most_drafts,
                logprobs=request.num_logprobs,
                grammar=grammar,
                trace=request.trace,
                cache_salt=request.cache_salt,
            )
        )
        traced = TextStream(server.tokenizer) if request.trace else None
        choices[requests[-1].id] = Choice(index, prompt, parser and parser(), traced=traced)
    return kind(server, request, id, choices), requests


# ----------------------------------------------------------------------------
# Errors, the key, and bodies.
# ----------------------------------------------------------------------------

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's object for an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def _refusal(status: int, message: str, param: str | None = None, **headers: str) -> JSONResponse:
    return JSONResponse(error_body(status, message, param), status, headers)


def _add_errors(app: FastAPI, server: Server) -> None:
    """Every error as OpenAI's object, with a reason."""

    @app.exception_handler(RequestValidationError)
    async def invalid(http: Request, error: RequestValidationError) -> Response:
        errors = error.errors()
        # A field of several types has an error for each type; the error of the type that fits says what is wrong.
        first = next((one for one in errors if not one["type"].endswith("_type")), errors[0])
        param = _field(first, error.body) or None
        reason = str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            reason = "this server has no such field"
        return _refusal(400, f"{param}: {reason}." if param else f"{reason}.", param)

    @app.exception_handler(ValueError)
    async def refused(http: Request, error: ValueError) -> Response:
        return _refusal(400, str(error))

    @app.exception_handler(HTTPException)
    async def failed(http: Request, error: HTTPException) -> Response:
        return _refusal(error.status_code, str(error.detail), **(error.headers or {}))

    @app.exception_handler(Overloaded)
    async def full(http: Request, error: Overloaded) -> Response:
        return _refusal(429, str(error), **{"Retry-After": str(error.retry_after)})

    @app.exception_handler(Exception)
    async def unforeseen(http: Request, error: Exception) -> Response:
        return _refusal(500, f"{type(error).__name__}, a fault of this server.")

    @app.exception_handler(Unavailable)
    async def unavailable(http: Request, error: Unavailable) -> Response:
        stops = isinstance(error, Stopping)
        status = 503 if stops or server.worker.failure else 500
        return _refusal(status, str(error), **(_ENDS if stops else {}))


def _field(error: dict[str, Any], body: Any) -> str:
    """Where an error of pydantic's is: fields and indices of the body, without names of types that it is none of."""
    *above, last = error["loc"][1:] or [""]
    parts = []
    for part in above if error["type"] == "missing" else [*above, last]:
        if part in body if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int):
            body = body[part]
            parts.append(str(part))
    return ".".join([*parts, str(last)] if error["type"] == "missing" else parts)


class JSONRoute(APIRoute):
    """A route whose JSON bodies give each field once: of two values one would be ignored."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(http: Request) -> Response:
            kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
            if http.method == "POST" and kind != "application/json":
                raise HTTPException(415, "the body must be JSON, and its Content-Type application/json.")
            return await handle(_JSONRequest(http.scope, http.receive))

        return handle_json


class _JSONRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        try:
            return json.loads(body, object_pairs_hook=_fields_once)
        except RecursionError:
            raise HTTPException(400, "the values are nested too deeply.") from None
        except ValueError as error:  # syntax, encoding, a number of thousands of digits
            raise HTTPException(400, f"the body is not JSON: {error}.") from None


def _fields_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise HTTPException(400, f"the field {name[:100]!r} is given twice.")
        fields[name] = value
    return fields


class Guard:
    """Refuses requests without the key, and bodies that are too large, come too slowly or are compressed.

    uvicorn cancels what is left when the server ends, which is answered, too.
    """

    def __init__(self, app: ASGIApp, limits: Limits, api_key: str | None) -> None:
        self.app, self.limits = app, limits
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))  # the first of each name
        key, encoding = headers.get(b"authorization", b""), headers.get(b"content-encoding", b"identity")
        refusal = None
        if self._expected is not None and scope["path"] not in _OPEN_PATHS and not compare_digest(key, self._expected):
            refusal = _refusal(401, "the key is missing or wrong: send Authorization: Bearer KEY.")
        elif encoding.lower() != b"identity":  # a few bytes could mean more than fits into memory
            refusal = _refusal(415, "compressed bodies are not read here: leave out Content-Encoding.")
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        until, size, complete = time.monotonic() + self.limits.body_seconds, 0, False

        async def limited() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()  # a disconnect, which may be long in coming
            try:
                message = await asyncio.wait_for(receive(), max(0.0, until - time.monotonic()))
            except asyncio.TimeoutError:
                raise HTTPException(408, f"the body took longer than {self.limits.body_seconds:g} seconds.") from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > self.limits.body_bytes:
                raise HTTPException(413, f"the body has more than {self.limits.body_bytes} bytes.")
            return message

        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, limited, noted)
        except asyncio.CancelledError:
            if not begun:
                await _refusal(503, str(Stopping()), **_ENDS)(scope, receive, send)
