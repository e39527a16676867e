"""``lifecycle sim``: the simulator as a command."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from adapters.sglang.simulator.faults import Fault, FaultKind, parse_fault
from adapters.sglang.simulator.settings import MODES, ServerSettings


class FaultType(click.ParamType[Fault]):
    """``NAME[:key=value,…]`` as a Fault."""

    name = "fault"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Fault:
        """Parse, or say what would have been right."""
        if isinstance(value, Fault):
            return value
        try:
            return parse_fault(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


_FAULT_HELP = (
    "A fault to simulate, for example cut:after=20,p=0.1. Repeatable. Names: "
    + ", ".join(FaultKind)
    + ". Keys: p (chance per request), after (tokens of the request first), times (at most), nth (only the n-th "
    "request, from 0), rid, steps, status, message, delta, done, deaf, restart (seconds), path."
)

_SERVER_FIELDS = (
    "mode",
    "seed",
    "eos_probability",
    "weight_version",
    "version_dependent",
    "context_length",
    "max_running_requests",
    "max_queued_requests",
    "max_total_tokens",
    "max_new_tokens",
    "stream_interval",
    "tokens_per_second",
)


@click.command("sim", context_settings={"show_default": True})
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=30000,
    help="Port of the first worker, the others follow it; 0 takes free ports.",
)
@click.option(
    "--workers", type=click.IntRange(1, 64), default=1, help="How many servers, all with one model."
)
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default="cumulative",
    help="Whether a chunk repeats everything so far or only brings what is new "
    "(SGLang's --incremental-streaming-output).",
)
@click.option("--seed", type=int, default=0, help="Seed of the model and of the faults.")
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(0),
    default=0.0,
    help="Pace of every stream; 0 is as fast as possible.",
)
@click.option(
    "--max-running-requests", type=click.IntRange(1), default=256, help="More than this wait in the queue."
)
@click.option(
    "--max-queued-requests", type=click.IntRange(0), default=None, help="More than this are refused with 503."
)
@click.option(
    "--max-total-tokens",
    type=click.IntRange(1),
    default=None,
    help="Size of the KV cache: beyond it running requests are retracted.",
)
@click.option("--stream-interval", type=click.IntRange(1), default=1, help="Tokens per chunk.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(0),
    default=128,
    help="Length of answers to requests that do not say.",
)
@click.option("--context-length", type=click.IntRange(1), default=32768, help="Longest prompt plus answer.")
@click.option(
    "--eos-probability",
    type=click.FloatRange(0, 1),
    default=0.005,
    help="Chance at each token that the answer ends there by itself.",
)
@click.option("--weight-version", default="default", help="Label of the weights at the start.")
@click.option("--version-dependent", is_flag=True, help="Let the label of the weights change the tokens.")
@click.option(
    "--fault", "faults", type=FaultType(), multiple=True, metavar="NAME[:KEY=VALUE,…]", help=_FAULT_HELP
)
@click.option(
    "--api-key-env",
    metavar="NAME",
    default=None,
    help="Ask for the key that this environment variable holds, as Authorization: Bearer.",
)
@click.option("--die-with-parent", is_flag=True, help="Stop when the process that started this one is gone.")
@click.option("--lifeline", is_flag=True, hidden=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per worker when it is ready.")
def sim(
    host: str,
    port: int,
    workers: int,
    faults: tuple[Fault, ...],
    api_key_env: str | None,
    die_with_parent: bool,
    lifeline: bool,
    as_json: bool,
    **fields: Any,
) -> None:
    r"""Serve a simulated SGLang: the wire format of 0.5.23, without a GPU or a model.

    Each worker prints its URL when it is ready. Ctrl-C or SIGTERM stops all of them.

    \b
    Try it:
      lifecycle sim --port 30000 --mode incremental --tokens-per-second 20
      curl -N http://127.0.0.1:30000/generate -H 'content-type: application/json' \
           -d '{"text": "Hello", "stream": true, "return_logprob": true}'
    """
    try:
        from adapters.sglang.simulator.process import json_line, plain_line, serve  # noqa: PLC0415 - only with the extra
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing: pip install 'rollout-lifecycle[sim]'"
        raise click.UsageError(message) from None
    settings = ServerSettings(
        api_key=_api_key(api_key_env), **{name: fields[name] for name in _SERVER_FIELDS}
    )
    try:
        status = serve(
            settings,
            workers=workers,
            host=host,
            port=port,
            faults=faults,
            die_with_parent=die_with_parent,
            lifeline=sys.stdin if lifeline else None,
            ready_line=json_line if as_json else plain_line,
        )
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host} port {port}: {error.strerror}") from None
    sys.exit(status)


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise click.UsageError(f"--api-key-env: the environment variable {variable} is not set")
    return key
