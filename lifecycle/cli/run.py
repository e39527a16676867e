"""`lifecycle run`: prompts in, complete groups out, partials kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from lifecycle.cli.prompts import Sampling, fingerprint, read_prompts
from lifecycle.errors import ConfigurationError

EPILOG = """\b
DIR holds samples.jsonl (delivered samples, one a line), lifecycle.jsonl (the log), snapshots.db (what can be
resumed) and, where the analysis extra is installed, report.html.

\b
Try it:
  lifecycle run examples/prompts.jsonl --out out --samples-per-prompt 4 --target 8 --max-new-tokens 200
  lifecycle run examples/prompts.jsonl --out out --samples-per-prompt 4 --max-new-tokens 200 --resume
"""


@click.command(epilog=EPILOG)
@click.argument("prompts", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory of the run.")
@click.option(
    "--server",
    "servers",
    multiple=True,
    metavar="URL",
    help="An SGLang server or a router; several: servers used in turn. Without: an embedded simulator.",
)
@click.option(
    "--target", type=click.IntRange(1), help="Stop after this many whole groups and carry the rest."
)
@click.option(
    "--samples-per-prompt", type=click.IntRange(1), default=1, show_default=True, help="Size of a group."
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(0),
    default=256,
    show_default=True,
    help="Tokens a sample may have, over all its attempts; a prompt's own max_new_tokens wins.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Rollouts in flight at once.",
)
@click.option("--resume", is_flag=True, help="Go on with everything unfinished, carried or never started.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    help="Give each sample a sampling_seed made of this and its id. Default: 0 with the embedded simulator, none else.",
)
@click.option("--temperature", type=click.FloatRange(0), help="Of all prompts that do not give their own.")
@click.option(
    "--api-key-env", metavar="NAME", help="Environment variable that holds the API key of router and workers."
)
@click.option(
    "--transport",
    type=click.Choice(["auto", "fast", "httpx"]),
    default="auto",
    show_default=True,
    help="HTTP client of the streams; auto takes fast where the extra of that name is installed.",
)
@click.option(
    "--unreachable-timeout",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds without any accepted request after which the run ends short.",
)
@click.option(
    "--checkpoint-tokens",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Tokens a rollout in flight may gain before they are saved.",
)
@click.option(
    "--eos-token-id",
    "eos_token_ids",
    type=int,
    multiple=True,
    help="The model's end-of-sequence ids, so that a prefix that ends with one is not resumed. "
    "Known for the embedded simulator.",
)
@click.option(
    "--progress/--no-progress",
    default=None,
    help="Live progress. Default: a bar on a terminal, plain lines else.",
)
@click.option(
    "--sim-mode", type=click.Choice(["cumulative", "incremental"]), default="incremental", hidden=True
)
@click.option("--sim-workers", type=click.IntRange(1), default=2, hidden=True)
@click.option("--sim-tokens-per-second", type=click.FloatRange(0), default=60.0, hidden=True)
@click.option("--sim-option", "sim_options", multiple=True, hidden=True)
def run(prompts: Path, out: Path, servers: tuple[str, ...], **options: Any) -> None:
    """Generate samples for the prompts in PROMPTS (JSON lines) and deliver them in whole groups.

    A line is {"id"?, "prompt" | "input_ids", "sampling_params"?, "max_new_tokens"?, "metadata"?}. Ctrl-C or SIGTERM
    saves the partial samples; --resume goes on from them.
    """
    seed = options.pop("seed")
    if seed is None and not servers:
        seed = 0
    temperature = options.pop("temperature")
    sampling = Sampling(
        samples_per_prompt=options["samples_per_prompt"],
        max_new_tokens=options["max_new_tokens"],
        seed=seed,
        params={} if temperature is None else {"temperature": temperature},
    )
    try:
        checked = read_prompts(prompts, sampling)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None
    from lifecycle.cli.rundir import Manifest, RunDirectory
    from lifecycle.cli.running import RunOptions, execute

    manifest = Manifest(
        prompts=fingerprint(checked),
        count=len(checked),
        samples_per_prompt=sampling.samples_per_prompt,
        max_new_tokens=sampling.max_new_tokens,
    )
    if not servers:
        from adapters.sglang.simulator.text import EOS_ID

        options["eos_token_ids"] = (*options["eos_token_ids"], EOS_ID)
    settings = RunOptions(servers=servers, **_known(options))
    with RunDirectory(out, manifest, resume=options["resume"]) as directory:
        sys.exit(execute(checked, directory, settings))


def _known(options: dict[str, Any]) -> dict[str, Any]:
    passed_on = (
        "target",
        "concurrency",
        "api_key_env",
        "transport",
        "unreachable_timeout",
        "checkpoint_tokens",
        "eos_token_ids",
        "progress",
        "sim_mode",
        "sim_workers",
        "sim_tokens_per_second",
        "sim_options",
    )
    return {name: options[name] for name in passed_on}
