"""Record what a real server and router say, as fixtures for the ordinary tests.

    python -m tests.live.record                       into tests/data/sglang-<version>
    python -m tests.live.record --out DIRECTORY

Replaces what lies there. Every shape is checked while it is recorded (see ``shapes``); a run takes two to four minutes
once the environment is there.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.live import shapes
from tests.live.capture import Recorder, ShapeMissed
from tests.live.cluster import LiveCluster, live_cluster
from tests.live.environment import EXIT_UNAVAILABLE, Environment, InstallFailed, Unavailable, ensure
from tests.live.processes import NotReady

DATA = Path(__file__).resolve().parent.parent / "data"
ONE_AND_ONE = ("--max-queued-requests=1",)
SERVER_INFO_KEYS = frozenset({
    "api_key", "context_length", "dp_size", "enable_metrics", "enable_priority_scheduling", "incremental_streaming_output",
    "max_queued_requests", "max_running_requests", "max_total_num_tokens", "max_total_tokens", "model_path", "nnodes", "pp_size",
    "served_model_name", "skip_tokenizer_init", "status", "stream_interval", "tokenizer_worker_num", "tp_size", "version",
    "weight_version", "frontend", "disaggregation_mode", "load_balance_method", "stream_output",
})  # fmt: skip
"""Of some 600 keys, those that say something about the protocol."""
CONTROL_ROUTES: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/abort_request", {"rid": "x"}),
    ("POST", "/pause_generation", {"mode": "in_place"}),
    ("POST", "/continue_generation", {}),
    ("POST", "/update_weight_version", {"new_version": "9", "abort_all_requests": False}),
    ("GET", "/v1/loads", None),
    ("GET", "/server_info", None),
    ("GET", "/model_info", None),
    ("GET", "/list_workers", None),
)


async def answers(rec: Recorder, cluster: LiveCluster) -> None:
    """Calls that are no streams, at a server and at the router."""
    server, router = cluster.cumulative, cluster.router
    await rec.save_answer("model-info", server, "GET", "/model_info")
    for one in cluster.servers:
        await rec.save_answer(f"server-info-{one.mode}", one, "GET", "/server_info", keep=SERVER_INFO_KEYS)
    await rec.save_answer("loads-idle", server, "GET", "/v1/loads")
    async with shapes.full(rec, server), rec.stream(server, shapes.body(4, rid="waits")) as waits:
        await rec.waiting(server, 1)
        await rec.save_answer("loads-full", server, "GET", "/v1/loads")
        await rec.control(server, "/abort_request", {"rid": "waits"})
        await waits.ends()
    await rec.save_answer("tokenize", server, "POST", "/v1/tokenize", {"prompt": "Hello"})
    await rec.save_answer("detokenize", server, "POST", "/v1/detokenize", {"tokens": shapes.PROMPT})
    await rec.save_answer(
        "abort-unknown-rid", server, "POST", "/abort_request", {"rid": "nobody", "abort_all": False}
    )
    await rec.save_answer("abort-empty-body", server, "POST", "/abort_request", {})
    await rec.save_answer("server-list-workers", server, "GET", "/list_workers")
    await rec.save_answer("server-workers", server, "GET", "/workers")
    await rec.save_answer(
        "completion-no-stream", server, "POST", "/generate", {**shapes.body(4), "return_logprob": True}
    )
    await rec.save_answer("pause-in-place", server, "POST", "/pause_generation", {"mode": "in_place"})
    await rec.save_answer("ready-paused", server, "GET", "/ready")
    version = {"new_version": "default", "abort_all_requests": False}
    await rec.save_answer("update-weight-version", server, "POST", "/update_weight_version", version)
    await rec.save_answer("continue", server, "POST", "/continue_generation", {})
    await rec.save_answer("flush-cache", server, "POST", "/flush_cache")
    await rec.save_answer("router-workers", router, "GET", "/workers")
    await rec.save_answer("router-tokenize", router, "POST", "/v1/tokenize", {"prompt": "Hello"})
    for method, path, body in CONTROL_ROUTES:
        name = path.removeprefix("/").replace("/", "-").replace("_", "-")
        await rec.save_answer(f"router-no-{name}", router, method, path, body)


async def record(cluster: LiveCluster, out: Path) -> list[str]:
    """Record every shape in both modes; the names of what was written."""
    async with httpx.AsyncClient(timeout=httpx.Timeout(30.0, read=90.0), trust_env=False) as client:
        made = cluster.environment
        rec = Recorder(out, made.sglang, made.router, str(made.home), client)
        for server in cluster.servers:
            await shapes.completions(rec, server)
            await shapes.errors(rec, server)
            await shapes.aborts(rec, server)
            await shapes.weight_updates(rec, server)
            await shapes.routed(rec, await asyncio.to_thread(cluster.router_over, server))
        await asyncio.to_thread(lambda: cluster.router)
        await answers(rec, cluster)
        extra = await asyncio.to_thread(
            lambda: cluster.extra(["cumulative", "incremental"], max_running=1, options=ONE_AND_ONE)
        )
        for server in extra:
            await shapes.queue_full(rec, server)
        # Two streams must run at once on the ones to be killed.
        spoilt = await asyncio.to_thread(lambda: cluster.extra(["cumulative", "incremental"]))
        for server in spoilt:
            await shapes.killed(rec, server, await asyncio.to_thread(cluster.router_over, server))
        return rec.written


def clear(out: Path) -> None:
    """Remove earlier recordings, and nothing else."""
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("*.sse"), *out.glob("*.json")]:
        old.unlink()


def run(environment: Environment, out: Path) -> int:
    """Start the cluster, record, and stop it."""
    with (
        tempfile.TemporaryDirectory(prefix="live-") as logs,
        live_cluster(environment, Path(logs)) as cluster,
    ):
        clear(out)
        written = asyncio.run(record(cluster, out))
    size = sum(path.stat().st_size for path in out.iterdir())
    sys.stdout.write(
        f"{len(written)} recordings from SGLang {environment.sglang} in {out}, {size / 1000:.0f} kB\n"
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0, 1 where a shape did not come out, 69 where the platform has no SGLang."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.live.record", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, help="where to write (default: tests/data/sglang-<version>)")
    options = parser.parse_args(arguments)
    try:
        environment = ensure()
        return run(environment, options.out or DATA / f"sglang-{environment.sglang}")
    except Unavailable as problem:
        sys.stderr.write(f"nothing recorded, no SGLang on this platform: {problem}\n")
        return EXIT_UNAVAILABLE
    except (InstallFailed, NotReady, ShapeMissed, httpx.HTTPError) as problem:
        sys.stderr.write(f"recording failed: {problem}\n")
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
