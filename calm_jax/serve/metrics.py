"""The server's metrics for Prometheus: requests, response times, tokens, chunks, draws and queue lengths."""

from collections.abc import Sequence

import prometheus_client as prometheus

from calm_jax.serve.engine import Engine, Job


class Metrics:
    """The metrics that GET /metrics shows."""

    def __init__(self, engines: Sequence[Engine]):
        self.registry = registry = prometheus.CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> prometheus.Counter:
            return prometheus.Counter(f"calm_{name}", text, labels, registry=registry)

        self.requests = counter("requests", "Completion requests by HTTP status", ("status",))
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.tokens = counter("generated_tokens", "Tokens generated")
        self.chunks = counter("generated_chunks", "Chunks generated", ("exact",))
        self.draws = counter("draws", "Latents drawn")
        # Upper bounds of the histogram's buckets, in seconds.
        buckets = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 600)
        self.seconds = prometheus.Histogram(
            "calm_request_seconds",
            "Seconds until a response is complete",
            buckets=buckets,
            registry=registry,
        )
        self.running = prometheus.Gauge(
            "calm_texts_running", "Texts that have a place in the batch", registry=registry
        )
        self.running.set_function(lambda: sum(one.count_unfinished()[0] for one in engines))
        self.waiting = prometheus.Gauge(
            "calm_texts_waiting", "Texts that wait for a place in the batch", registry=registry
        )
        self.waiting.set_function(lambda: sum(one.count_unfinished()[1] for one in engines))

    def count(self, job: Job) -> None:
        """Adds the tokens, draws and chunks of a job's texts to the counters."""
        self.prompt_tokens.inc(job.num_prompt_tokens)
        for row in job.rows:
            one = row.continuation
            self.tokens.inc(len(one.tokens))
            self.draws.inc(sum(one.draws) + one.match_draws)
            for exact in one.exact:
                self.chunks.labels(str(exact).lower()).inc()
