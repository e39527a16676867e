"""`lifecycle log`: one rollout in words, and logs as Parquet."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def log() -> None:
    """Replay one rollout, or convert logs."""


@log.command()
@click.argument("rollout_id", metavar="ID")
@click.argument("logs", nargs=-1, required=True, metavar="LOG…")
@click.option("--places", is_flag=True, help="Say file and line of every sentence.")
def replay(rollout_id: str, logs: tuple[str, ...], places: bool) -> None:
    """Tell the story of the rollout ID in words, over all processes that had it."""
    from lifecycle.analysis import find_sources, tell_story

    for sentence in tell_story(rollout_id, find_sources(logs)):
        place = f"  [{sentence.file}:{sentence.line}]" if places else ""
        click.echo(f"{sentence}{place}")


@log.command("to-parquet")
@click.argument("logs", nargs=-1, required=True, metavar="LOG…")
@click.option(
    "--out",
    "-o",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The Parquet file to write.",
)
def to_parquet_command(logs: tuple[str, ...], out: Path) -> None:
    """Write LOG… as one Parquet file, twenty times smaller and faster to ask; `lifecycle report` reads it too."""
    from lifecycle.analysis import find_sources, to_parquet

    written = to_parquet(find_sources(logs), out)
    click.echo(f"{written.path}: {written.rows:,} rows")
    if written.damaged:
        click.echo(
            f"{written.damaged:,} damaged lines were left out; `lifecycle report` shows them", err=True
        )
