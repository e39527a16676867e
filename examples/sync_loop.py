"""Plain synchronous code with an engine in a thread of its own: no `async` anywhere.

    python examples/sync_loop.py [URL]                without a URL a simulated server is started

Ctrl-C at any moment aborts what is running on the server, and leaves no thread behind.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from adapters.sglang import SGLangBackend
from adapters.sglang.simulator import SimulatedCluster
from lifecycle import EngineThread, RolloutRequest


def request(name: str, tokens: int = 40) -> RolloutRequest:
    """One sample."""
    return RolloutRequest(id=name, prompt_ids=list(f"{name}: ".encode()), max_new_tokens=tokens)


def main(url: str | None) -> None:
    """Generate, abort, go on, change weights."""
    with ExitStack() as stack:
        if url is None:
            url = stack.enter_context(SimulatedCluster(tokens_per_second=200)).urls[0]
        engine = stack.enter_context(EngineThread(lambda: SGLangBackend(url), max_in_flight=64))

        whole = engine.generate(request("one"), timeout=60)
        print(f"{whole.id}: {whole.state}, {len(whole.tokens)} tokens")

        handles = [engine.submit(request(f"many-{number}", 300)) for number in range(8)]
        try:
            handles[0].wait(timeout=0.5)
        except TimeoutError:
            print(f"{handles[0].id}: still {handles[0].state} after half a second")

        report = engine.abort(handles, reason="over-sampled", timeout=5.0)
        print(
            f"aborted {len(report.outcomes)}: {report.counts}, {len(report.kept)} with tokens to go on from"
        )

        with engine.weight_update("2"):
            print(f"weights may change now: {engine.stats().in_flight} requests in flight")

        partial = handles[0].wait()
        finished = engine.submit(partial).wait(timeout=60)
        print(
            f"{partial.id}: {len(partial.tokens)} tokens, {len(finished.tokens)} after going on: {finished.state}"
        )
        for handle in handles[1:]:
            engine.discard(handle)
        print(f"books balanced: {engine.ledger().balanced}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
