"""One `lifecycle run` from its checked arguments to its exit status."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import anyio
import anyio.abc
import click

from lifecycle.backend import ReceiptStatus, WorkerReceipt
from lifecycle.cli.progress import Progress
from lifecycle.cli.prompts import Prompt
from lifecycle.cli.rundir import RunDirectory, SamplesFile, reconcile, remaining
from lifecycle.cli.summary import RunResult, print_summary
from lifecycle.engine import Batch, LifecycleEngine
from lifecycle.engine.collecting import Members, only_exception
from lifecycle.errors import BackendError, ConfigurationError, LifecycleError, SnapshotError
from lifecycle.policy import Policy
from lifecycle.snapshot import Snapshot
from lifecycle.stores.sqlite import SqliteStore

EXIT_DONE, EXIT_SHORT = 0, 1
CONTROL_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the command line said beyond the prompts."""

    servers: tuple[str, ...]
    target: int | None
    concurrency: int
    api_key_env: str | None
    transport: str
    unreachable_timeout: float
    checkpoint_tokens: int
    eos_token_ids: tuple[int, ...]
    progress: bool | None
    sim_mode: str
    sim_workers: int
    sim_tokens_per_second: float
    sim_options: tuple[str, ...] = ()


@dataclass(slots=True)
class Course:
    """How the run goes: what there is to tell of it, also when it is stopped in the middle."""

    engine: LifecycleEngine | None = None
    batch: Batch | None = None
    signum: int | None = None
    unreachable: str | None = None
    problems: list[SnapshotError] = field(default_factory=list)


def execute(prompts: Sequence[Prompt], directory: RunDirectory, options: RunOptions) -> int:
    """Run and return the exit status."""
    if not options.servers:
        _require_simulator()
    with _servers(options) as urls:
        return anyio.run(_main, prompts, directory, options, urls)


def _require_simulator() -> None:
    if any(find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise click.UsageError(
            "without --server the embedded simulator is used, and it needs an extra: "
            "pip install 'rollout-lifecycle[sim]'"
        )


@contextmanager
def _servers(options: RunOptions) -> Iterator[Sequence[str]]:
    """The servers to use: those named, or an embedded simulator that ends with this process."""
    if options.servers:
        yield options.servers
        return
    from adapters.sglang.simulator import launch

    arguments = [
        *("--port", "0"),
        *("--workers", str(options.sim_workers)),
        *("--mode", options.sim_mode),
        *("--tokens-per-second", str(options.sim_tokens_per_second)),
        *(part for option in options.sim_options for part in option.split("=", 1)),
    ]
    try:
        simulator = launch(arguments)
    except RuntimeError as error:
        raise ConfigurationError(str(error)) from error
    with simulator:
        yield simulator.urls


async def _main(
    prompts: Sequence[Prompt], directory: RunDirectory, options: RunOptions, urls: Sequence[str]
) -> int:
    """Generate until done or told to stop; then say what came of it."""
    course = Course()
    samples = SamplesFile(directory.samples)
    before = len(samples.ids)
    try:
        async with anyio.create_task_group() as tasks:
            heeding: anyio.CancelScope = await tasks.start(_heed_signals, tasks.cancel_scope, course)
            try:
                await _generate(prompts, directory, samples, options, urls, course)
            finally:
                heeding.cancel()
    except BaseExceptionGroup as group:
        raise only_exception(group) from None
    finally:
        samples.close()
    if course.engine is not None:
        result = RunResult(
            ledger=course.engine.ledger(),
            stats=course.engine.stats(),
            groups_written=len({sample_id.rpartition("/")[0] for sample_id in samples.ids}),
            samples_written=len(samples.ids) - before,
        )
        print_summary(result, directory, course.problems, _write_report(directory))
    return _status(course, options, urls)


async def _generate(
    prompts: Sequence[Prompt],
    directory: RunDirectory,
    samples: SamplesFile,
    options: RunOptions,
    urls: Sequence[str],
    course: Course,
) -> None:
    from adapters.sglang import SGLangBackend

    store = SqliteStore(directory.store)
    try:
        async with SGLangBackend(
            list(urls),
            api_key_env=options.api_key_env,
            transport=options.transport,
            max_connections=options.concurrency,
        ) as backend:
            course.unreachable = await _unreachable(backend)
            await _mend(prompts, backend, store, samples, course)
            todo = remaining(prompts, store.rows(), samples)
            async with _engine(backend, store, directory, options) as engine:
                course.engine = engine
                restored = await engine.restore(force=True, resume=False)
                course.problems += restored.unreadable
                if course.unreachable is None:
                    await _collect(engine, backend, todo, samples, options, course)
    finally:
        store.close()


async def _mend(
    prompts: Sequence[Prompt], backend: Any, store: SqliteStore, samples: SamplesFile, course: Course
) -> None:
    """Write what an earlier process delivered and could not write any more."""
    missing, problems = reconcile(prompts, store, samples)
    course.problems += problems
    for group in missing:
        if course.unreachable is None:
            samples.write([await _with_text(backend, member) for member in group])
        else:
            samples.write(group)


def _engine(
    backend: Any, store: SqliteStore, directory: RunDirectory, options: RunOptions
) -> LifecycleEngine:
    return LifecycleEngine(
        backend,
        log=directory.log,
        store=store,
        max_in_flight=options.concurrency,
        unreachable_timeout=options.unreachable_timeout,
        checkpoint_tokens=options.checkpoint_tokens,
        abort_timeout=10.0,
        close_timeout=5.0,
        policy=Policy(eos_token_ids=frozenset(options.eos_token_ids)),
    )


async def _collect(
    engine: LifecycleEngine,
    backend: Any,
    todo: Sequence[Prompt],
    samples: SamplesFile,
    options: RunOptions,
    course: Course,
) -> None:
    progress = Progress(engine, options.target, show=options.progress)

    async def deliver(members: Members) -> None:
        samples.write([await _with_text(backend, member) for member in members])
        progress.delivered += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(progress.run)
        source = (prompt.requests for prompt in todo)
        batch = course.batch = await engine.collect(source, target=options.target, on_group=deliver)
        tasks.cancel_scope.cancel()
    if engine.stats().outage_s and not batch.reached:
        course.unreachable = "no server accepted a request any more"


async def _with_text(backend: Any, snapshot: Snapshot) -> Snapshot:
    """The sample with the text of its tokens, as a worker spells them; without where none can.

    Not joined from the stream: the text of an aborted attempt is not to be trusted (SGLang 0.5.4 to 0.5.23), and a
    resumed sample must read like one that was never interrupted.
    """
    try:
        return replace(snapshot, text=await backend.detokenize(snapshot.tokens))
    except BackendError:
        return snapshot


async def _unreachable(backend: Any) -> str | None:
    """One sentence if no server answers, or none takes our key; None if at least one can be used."""
    receipts = await backend.workers(deadline=CONTROL_SECONDS)
    if any(_usable(receipt) for receipt in receipts):
        return None
    return "; ".join(f"{r.worker}: {r.detail or 'no answer'}" for r in receipts) or "no worker is known"


def _usable(receipt: WorkerReceipt) -> bool:
    """It answers; a refusal other than of the key may be an endpoint that this server does not have."""
    if receipt.status is ReceiptStatus.UNREACHABLE:
        return False
    return not (receipt.detail or "").startswith(("HTTP 401", "HTTP 403"))


async def _heed_signals(
    scope: anyio.CancelScope, course: Course, *, task_status: anyio.abc.TaskStatus[anyio.CancelScope]
) -> None:
    """The first SIGINT or SIGTERM cancels `scope`; the second one, heard also while closing, stops at once."""
    with (
        anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals,
        anyio.CancelScope(shield=True) as heeding,
    ):
        task_status.started(heeding)
        async for signum in signals:
            if course.signum is not None:
                os._exit(128 + signum)
            course.signum = signum
            name = signal.Signals(signum).name
            click.echo(f"{name}: aborting what is in flight, saving partials (again: stop at once)", err=True)
            scope.cancel()


def _write_report(directory: RunDirectory) -> str | None:
    """`report.html`, where the analysis extra is installed; its path."""
    if find_spec("duckdb") is None:
        return None
    from lifecycle.analysis import find_sources
    from lifecycle.cli.report import make_report, write_html

    target = directory.path / "report.html"
    try:
        write_html(make_report(find_sources([str(directory.log)])), target)
    except LifecycleError as error:
        click.echo(f"Warning: no {target}: {error}", err=True)
        return None
    return str(target)


def _status(course: Course, options: RunOptions, urls: Sequence[str]) -> int:
    if course.signum is not None:
        return 128 + course.signum
    if course.unreachable is not None:
        click.echo(
            f"Error: cannot reach {', '.join(urls)}: {course.unreachable}. "
            "What was generated is saved; --resume goes on.",
            err=True,
        )
        return EXIT_SHORT
    batch = course.batch
    assert batch is not None
    if not batch.reached and options.target is not None:
        click.echo(
            f"Error: {len(batch.groups)} of {options.target} groups: the prompts do not hold more.", err=True
        )
        return EXIT_SHORT
    if batch.failed or course.problems or (options.target is None and batch.carried):
        return EXIT_SHORT
    return EXIT_DONE
