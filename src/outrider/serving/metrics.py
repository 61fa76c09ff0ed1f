"""A server's counters under vLLM's names: the Prometheus page, and `metrics` of each answer.

    rounds with drafts   vllm:spec_decode_num_drafts_total                     num_spec_steps
    drafts verified      vllm:spec_decode_num_draft_tokens_total               num_draft_tokens
    of them accepted     vllm:spec_decode_num_accepted_tokens_total            num_accepted_draft_tokens
    at position k        vllm:spec_decode_num_accepted_tokens_per_pos_total    acceptance_histogram

Drafts that the policy left out are not counted, as vLLM does not count what it does not schedule. Counters and
histograms of several servers may be added up, and the gauges of requests too; `kv_cache_usage_perc` is a share of one
server. Source of names, meanings and buckets: vLLM 0.32 (v1/metrics/loggers.py, v1/spec_decode/metrics.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from outrider.decoding.engine import Engine
from outrider.decoding.request import FinishReason, Output, StepRecord

disable_created_metrics()  # gauges of the time at which each counter began: sums of them mean nothing

_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


@dataclass
class RequestRecord:
    """Times (seconds of `time.perf_counter`) and drafts of one request.

    `slots`: most drafts of a round. `histogram[j]`: rounds with drafts of which j were accepted.
    """

    arrived: float
    prompt_tokens: int
    slots: int
    scheduled: float | None = None
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    draft_tokens: int = 0
    histogram: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.histogram = [0] * (self.slots + 1)

    def begin(self, now: float) -> None:
        """It is in the engine's batch; only the first time counts."""
        if self.scheduled is None:
            self.scheduled = now

    def add(self, output: Output, now: float) -> None:
        if not output.tokens:
            return
        self.first = now if self.first is None else self.first
        self.last = now
        self.tokens += len(output.tokens)
        if output.verified:
            self.draft_tokens += output.verified
            self.histogram[output.accepted] += 1

    @property
    def accepted(self) -> int:
        return sum(accepted * rounds for accepted, rounds in enumerate(self.histogram))

    def metrics(self) -> dict[str, Any]:
        """`metrics` of an answer; `speculative_decoding` if there is a drafter."""
        metrics: dict[str, Any] = {}
        if self.scheduled is not None and self.first is not None and self.last is not None:
            decoding = self.last - self.first
            metrics = {
                "time_to_first_token_ms": (self.first - self.scheduled) * 1000,
                "generation_time_ms": decoding * 1000,
                "queue_time_ms": (self.scheduled - self.arrived) * 1000,
                "tokens_per_second": self.tokens / (self.last - self.scheduled),
            }
            if self.tokens > 1:
                metrics["mean_itl_ms"] = decoding / (self.tokens - 1) * 1000
        if self.slots:
            rounds = sum(self.histogram)
            metrics["speculative_decoding"] = {
                "mean_acceptance_length": 1 + self.accepted / max(rounds, 1),
                "draft_acceptance_rate": self.accepted / max(self.draft_tokens, 1),
                "acceptance_histogram": list(self.histogram),
                "num_spec_steps": rounds,
                "num_accepted_draft_tokens": self.accepted,
                "num_draft_tokens": self.draft_tokens,
                "num_spec_tokens": self.slots,
            }
        return metrics


class ServerMetrics:
    """The Prometheus page of one server.

    Args:
        engine: whose requests and KV blocks are counted when the page is asked for. Without a drafter the counters of
            drafts are left out.
    """

    def __init__(self, model_name: str, engine: Engine) -> None:
        scheduler = engine.scheduler
        self.slots = slots = scheduler.draft_slots
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._gauge("num_requests_running", "Requests in the engine's batch.", lambda: len(scheduler.running))
        self._gauge("num_requests_waiting", "Requests that wait to be in it.", lambda: len(scheduler.waiting))
        self._gauge(
            "kv_cache_usage_perc",
            "Share of the KV blocks in use; 1 is all.",
            lambda: scheduler.allocator.used / engine.config.num_blocks,
        )
        self._prompts = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached: tuple[Counter, Counter] | None = None
        if engine.config.prefix_cache:
            queries = self._counter("prefix_cache_queries", "Tokens of prompts that were looked for in the cache.")
            self._cached = queries, self._counter("prefix_cache_hits", "Tokens of them that were in it.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._preempted = self._counter(
            "num_preemptions", "Requests that gave up their KV blocks to be recomputed later."
        )
        finished = self._counters("request_success", "Finished requests.", "finished_reason")
        self._finished = {
            reason: finished.labels(**self._labels, finished_reason=reason)
            for reason in (*get_args(FinishReason), "abort")
        }
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST)
        self._gap = self._histogram("inter_token_latency_seconds", "Between two rounds that gave tokens.", _GAP)
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _LONG)
        self._queued = self._histogram("request_queue_time_seconds", "From arrival to the engine's batch.", _LONG)
        self._prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._length = self._histogram("request_generation_tokens", "Tokens of a response.", _TOKENS)
        self._rows = self._histogram("iteration_tokens_total", "Rows of one target forward.", _TOKENS)
        if slots:
            self._rounds = self._counter("spec_decode_num_drafts", "Rounds of a request with drafts.")
            self._drafts = self._counter("spec_decode_num_draft_tokens", "Drafts verified.")
            self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafts accepted.")
            by_position = self._counters("spec_decode_num_accepted_tokens_per_pos", "By position.", "position")
            self._by_position = [by_position.labels(**self._labels, position=k) for k in range(slots)]

    def step(self, step: StepRecord) -> None:
        self._rows.observe(step.tokens)
        self._preempted.inc(step.preempted)

    def output(self, output: Output, record: RequestRecord, now: float) -> None:
        """Count a request's output of a step that ended at `now`, also in its record."""
        if output.tokens:
            if record.last is None:
                self._first.observe(now - record.arrived)
                self._prompts.inc(record.prompt_tokens)
                if self._cached is not None:
                    queries, hits = self._cached
                    queries.inc(record.prompt_tokens)
                    hits.inc(output.cached_tokens)
            else:
                self._gap.observe(now - record.last)
            self._generated.inc(len(output.tokens))
        if output.verified:
            self._rounds.inc()
            self._drafts.inc(output.verified)
            self._accepted.inc(output.accepted)
            for counter in self._by_position[: output.accepted]:
                counter.inc()
        record.add(output, now)
        if output.finish is not None:
            self._finished[output.finish].inc()
            self._whole.observe(now - record.arrived)
            self._prompt_length.observe(record.prompt_tokens)
            self._length.observe(record.tokens)
            if record.scheduled is not None:
                self._queued.observe(record.scheduled - record.arrived)

    def aborted(self, requests: int) -> None:
        self._finished["abort"].inc(requests)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def _gauge(self, name: str, help: str, value: Callable[[], float]) -> None:
        made = Gauge(f"vllm:{name}", help, [*self._labels], registry=self._registry)
        made.labels(**self._labels).set_function(value)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(f"vllm:{name}", help, [*self._labels], registry=self._registry, buckets=buckets)
        return made.labels(**self._labels)

    def _counters(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"vllm:{name}", help, [*self._labels, *labels], registry=self._registry)

    def _counter(self, name: str, help: str) -> Counter:
        return self._counters(name, help).labels(**self._labels)
