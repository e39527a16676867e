"""`lifecycle snapshots`: look into a store, take snapshots out of it, check it, clear it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lifecycle.cli.snapshot_forms import plain, write_parquet
from lifecycle.errors import ConfigurationError, SnapshotError, StoreUnavailable
from lifecycle.snapshot import Snapshot
from lifecycle.states import FINAL_STATES, RolloutState
from lifecycle.stores import StoredRow, open_store
from lifecycle.stores.rules import ENDING_DISPOSITIONS
from lifecycle.stores.sql import SqlStore

PIPE_WIDTH = 200
SHOWN_TOKENS = 16


@click.group()
def snapshots() -> None:
    """Look into a store of snapshots.

    STORE is a SQLite file, a directory of `lifecycle run`, or a PostgreSQL DSN (postgresql://… or "host=… dbname=…").
    """


_store = click.argument("store")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_ids = click.argument("ids", nargs=-1)


@snapshots.command("ls")
@_store
@click.option(
    "--pending", is_flag=True, help="Only what somebody still waits for: what a restore would bring."
)
@click.option("--state", type=click.Choice([str(state) for state in RolloutState]), help="Only this state.")
@_json
def list_rows(store: str, state: str | None, *, pending: bool, as_json: bool) -> None:
    """List what is stored, without reading payloads."""
    with open_store(store, read_only=True) as opened:
        rows = opened.pending() if pending else opened.rows()
        now = opened.lease_clock()
    rows = [row for row in rows if state is None or row.state == state]
    if as_json:
        _print_json([_row(row) for row in rows])
        return
    table = Table(caption=f"{len(rows)} rollouts", caption_justify="left")
    for name in ("id", "state", "disposition", "tokens", "attempt", "epoch", "owner", "lease", "updated"):
        table.add_column(
            name, justify="right" if name in {"tokens", "attempt", "epoch"} else "left", overflow="fold"
        )
    for row in rows:
        values = (row.id, row.state, row.disposition, row.tokens, row.attempt, row.epoch, row.owner or "")
        table.add_row(*(escape(str(value)) for value in values), _lease(row, now), _age(row.updated_at))
    _console().print(table)


@snapshots.command("show")
@_store
@click.argument("rollout_id", metavar="ID")
@_json
def show(store: str, rollout_id: str, *, as_json: bool) -> None:
    """Show one rollout with everything that is stored of it."""
    with open_store(store, read_only=True) as opened:
        snapshot = _load(opened, rollout_id)
    if as_json:
        _print_json(plain(snapshot))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in plain(snapshot).items():
        if value not in (None, {}, [], ""):
            table.add_row(name, escape(_short(name, value)))
    _console().print(table)


@snapshots.command("export")
@_store
@_ids
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Where to write; else standard output."
)
@click.option("--format", "form", type=click.Choice(["jsonl", "parquet"]), default="jsonl", show_default=True)
@click.option("--pending", is_flag=True, help="Only what somebody still waits for.")
def export(store: str, ids: tuple[str, ...], out: Path | None, form: str, *, pending: bool) -> int:
    """Write snapshots as JSON lines, one rollout a line, or as Parquet (needs the analysis extra and --out).

    What cannot be read is named on standard error and left out; the exit status is 1 then.
    """
    if form == "parquet" and out is None:
        raise click.UsageError("--format parquet needs --out FILE")
    unreadable: list[SnapshotError] = []
    with open_store(store, read_only=True) as opened:
        wanted = _wanted(opened, ids, pending=pending)
        found = _readable(opened, wanted, unreadable)
        if form == "parquet" and out is not None:
            count = write_parquet(found, out)
        else:
            count = _write_lines(found, out)
    for error in unreadable:
        click.echo(f"left out: {error}", err=True)
    click.echo(f"{count} rollouts written{'' if out is None else f' to {out}'}", err=True)
    return 1 if unreadable else 0


@snapshots.command("verify")
@_store
@_json
def verify(store: str, *, as_json: bool) -> int:
    """Read everything, check every checksum, name what is damaged; exit status 1 if anything is."""
    unreadable: list[SnapshotError] = []
    with open_store(store, read_only=True) as opened:
        problems = opened.problems()
        ids: Sequence[str] = ()
        good = 0
        try:
            ids = [row.id for row in opened.rows()]
            for _ in _readable(opened, ids, unreadable):
                good += 1
        except StoreUnavailable as error:
            problems.append(str(error))
    if as_json:
        corrupt = [{"id": getattr(error, "rollout_id", None), "problem": str(error)} for error in unreadable]
        _print_json({"rollouts": len(ids), "good": good, "corrupt": corrupt, "store": problems})
    else:
        for problem in [*map(str, unreadable), *problems]:
            click.echo(problem)
        click.echo(
            f"{len(ids)} rollouts: {good} good, {len(unreadable)} unreadable; {len(problems)} other problems"
        )
    return 1 if unreadable or problems else 0


@snapshots.command("discard")
@_store
@_ids
@click.option(
    "--ended", is_flag=True, help="Everything nobody waits for: delivered, filtered, stale or given up."
)
@click.option(
    "--force", is_flag=True, help="Also what a living owner holds; its next write for it will be refused."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@_json
def discard(store: str, ids: tuple[str, ...], *, ended: bool, force: bool, yes: bool, as_json: bool) -> None:
    """Delete rollouts from the store, for good."""
    if bool(ids) == ended:
        raise click.UsageError("give the ids of rollouts, or --ended")
    with open_store(store, create=False) as opened:
        rows = {row.id: row for row in opened.rows()}
        doomed = [row.id for row in rows.values() if _ended(row)] if ended else list(dict.fromkeys(ids))
        for rollout_id in doomed:
            _check_free(rows.get(rollout_id), rollout_id, opened.lease_clock(), force=force or ended)
        if doomed and not yes:
            click.confirm(f"Delete {len(doomed)} rollouts from the store for good?", abort=True, err=True)
        for rollout_id in doomed:
            opened.discard(rollout_id)
    if as_json:
        _print_json({"discarded": doomed})
    else:
        click.echo(f"{len(doomed)} rollouts deleted")


def _check_free(row: StoredRow | None, rollout_id: str, now: float, *, force: bool) -> None:
    if row is None:
        raise ConfigurationError(f"rollout {rollout_id!r} is not in the store; nothing was deleted")
    if not force and row.lease_until is not None and row.lease_until > now:
        raise ConfigurationError(
            f"rollout {rollout_id!r} is held by {row.owner} for {row.lease_until - now:.0f} s more; "
            "stop that process first, or use --force; nothing was deleted"
        )


def _ended(row: StoredRow) -> bool:
    final = row.state in FINAL_STATES and row.disposition in ENDING_DISPOSITIONS
    return final or row.state == RolloutState.DISCARDED


def _load(store: SqlStore, rollout_id: str) -> Snapshot:
    try:
        return store.load(rollout_id)
    except KeyError:
        raise ConfigurationError(f"rollout {rollout_id!r} is not in the store") from None


def _wanted(store: SqlStore, ids: Sequence[str], *, pending: bool) -> list[str]:
    known = [row.id for row in (store.pending() if pending else store.rows())]
    for rollout_id in ids:
        if rollout_id not in known:
            raise ConfigurationError(
                f"rollout {rollout_id!r} is not {'pending ' if pending else ''}in the store; nothing was written"
            )
    return list(dict.fromkeys(ids)) or known


def _readable(store: SqlStore, ids: Sequence[str], unreadable: list[SnapshotError]) -> Iterator[Snapshot]:
    """Load one after the other; errors are gathered. A rollout that vanishes meanwhile was discarded by another."""
    for rollout_id in ids:
        try:
            yield store.load(rollout_id)
        except KeyError:
            continue
        except StoreUnavailable:
            raise
        except SnapshotError as error:
            unreadable.append(error)


def _write_lines(found: Iterator[Snapshot], out: Path | None) -> int:
    if out is None:
        return _lines(found, sys.stdout.buffer)
    try:
        with out.open("wb") as file:
            return _lines(found, file)
    except OSError as error:
        raise ConfigurationError(f"cannot write {out}: {error.strerror}") from error


def _lines(found: Iterator[Snapshot], file: IO[bytes]) -> int:
    encoder, count = msgspec.json.Encoder(), 0
    for snapshot in found:
        file.write(encoder.encode(plain(snapshot)) + b"\n")
        count += 1
    file.flush()
    return count


def _row(row: StoredRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in StoredRow.__dataclass_fields__}


def _lease(row: StoredRow, now: float) -> str:
    if row.lease_until is None:
        return "free" if row.owner else ""
    left = row.lease_until - now
    return f"{left:.0f} s" if left > 0 else "expired"


def _age(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _short(name: str, value: Any) -> str:
    if name in {"tokens", "logprobs", "prompt_ids"}:
        head = ", ".join(_number(item) for item in value[:SHOWN_TOKENS])
        return f"{len(value)}: {head}{', …' if len(value) > SHOWN_TOKENS else ''}"
    if name == "weight_versions":
        return ", ".join(
            f"{span['version']} [{span['start']}, {span['end']}) {span['source']}" for span in value
        )
    if name == "attempts":
        return "\n".join(
            f"{one['number']}: rid {one['rid']} tokens [{one['start']}, {one['end']}) {one['trigger'] or 'open'}"
            f" {one['reason'] or ''} {one['worker'] or ''}".rstrip()
            for one in value
        )
    if name == "channels":
        return ", ".join(
            f"{key} ({'complete' if one['complete'] else 'incomplete'})" for key, one in value.items()
        )
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _number(value: float | None) -> str:
    return "null" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _console() -> Console:
    """A terminal as wide as it is; a pipe wide enough for whole lines."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def _print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))
