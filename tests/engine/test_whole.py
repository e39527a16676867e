"""Engine and simulated servers together, under interleavings that hypothesis thinks up and shrinks.

Next token and logprob are a pure function of the whole prefix, so whatever happened on the way, every rollout must end
with the tokens of an undisturbed one. Weight versions are compared with what the servers themselves remember.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.sglang.simulator.brain import Brain
from adapters.sglang.simulator.faults import Fault, FaultKind
from adapters.sglang.simulator.settings import ServerSettings
from lifecycle.engine import LifecycleEngine, RolloutHandle
from lifecycle.errors import UpdateTimeout
from lifecycle.machine import ROLLOUT
from lifecycle.policy import OnAbort, Policy
from lifecycle.request import RolloutRequest
from lifecycle.snapshot import Snapshot
from lifecycle.states import Disposition, FinishReason, Outcome, RolloutState
from lifecycle.stores import MemoryStore
from lifecycle.testing.clock import run_virtual
from tests.support.brain_backend import BrainBackend
from tests.support.driving import Lines
from tests.support.examples import examples

SETTLED = (RolloutState.COMPLETED, RolloutState.FAILED, RolloutState.DISCARDED)


@dataclass
class Plan:
    """Everything that will happen, as data that hypothesis can shrink."""

    servers: list[dict[str, Any]]
    faults: list[list[Fault]]
    requests: list[dict[str, Any]]
    actions: list[tuple[float, str, int]]
    policy: dict[str, Any]
    cuts: int
    eos: float


def faults() -> st.SearchStrategy[Fault]:
    """One row of a server's fault table, for one of its first requests."""
    kinds = [kind for kind in FaultKind if kind is not FaultKind.CONTROL_REFUSED]
    return st.builds(
        Fault,
        st.sampled_from(kinds),
        nth=st.integers(0, 6),
        after=st.integers(0, 20),
        steps=st.integers(1, 30),
        status=st.sampled_from([None, 429, 500, 503]),
        deaf=st.booleans(),
        done=st.booleans(),
        delta=st.just(100),  # a count that is wrong by exactly what was shown cannot be told from a delta
    ) | st.builds(
        Fault,
        st.just(FaultKind.CONTROL_REFUSED),
        p=st.just(0.5),
        times=st.integers(1, 3),
        path=st.sampled_from(["abort_request", "pause_generation"]),
    )


ACTIONS = (
    "nothing",
    "abort",
    "abort all",
    "resume",
    "update",
    "update fails",
    "discard",
    "kill",
    "revive",
    "cancel",
    "takeover",
)


def plans() -> st.SearchStrategy[Plan]:
    """Any run of a few rollouts on one or two servers."""
    server = st.fixed_dictionaries(
        {
            "mode": st.sampled_from(["cumulative", "incremental"]),
            "stream_interval": st.integers(1, 3),
            "max_running_requests": st.integers(1, 4),
            "max_queued_requests": st.sampled_from([None, None, 1]),
            "max_total_tokens": st.sampled_from([None, None, 100]),
        }
    )
    request = st.fixed_dictionaries(
        {"prompt": st.integers(1, 4), "budget": st.sampled_from([0, 1, 5, 12, 25, 40]), "text": st.booleans()}
    )
    action = st.tuples(
        st.sampled_from([0.0, 0.05, 0.15, 0.4, 1.0]), st.sampled_from(ACTIONS), st.integers(0, 5)
    )
    policy = st.fixed_dictionaries(
        {
            "on_abort": st.sampled_from([OnAbort.KEEP, OnAbort.KEEP, OnAbort.RESTART]),
            "max_staleness": st.sampled_from([None, None, 0, 1]),
        }
    )
    return st.builds(
        Plan,
        servers=st.lists(server, min_size=1, max_size=2),
        faults=st.lists(st.lists(faults(), max_size=3), min_size=2, max_size=2),
        requests=st.lists(request, min_size=2, max_size=5),
        actions=st.lists(action, min_size=2, max_size=12),
        policy=policy,
        cuts=st.integers(0, 2**16),
        eos=st.sampled_from([0.0, 0.1]),
    )


@dataclass
class World:
    """The servers, the store, and the engine of the moment."""

    plan: Plan
    random: Random = field(init=False)
    brains: list[Brain] = field(init=False)
    backend: BrainBackend = field(init=False)
    store: MemoryStore = field(default_factory=MemoryStore)
    logs: list[Lines] = field(default_factory=list)
    versions: list[str] = field(default_factory=lambda: ["default"])
    resting: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Build the servers."""
        self.random = Random(self.plan.cuts)
        self.brains = [
            Brain(ServerSettings(seed=3, keep_history=True, eos_probability=self.plan.eos, **about), table)
            for about, table in zip(self.plan.servers, self.plan.faults, strict=False)
        ]
        self.backend = BrainBackend(self.brains, lambda size: self.random.randrange(size + 1))

    def engine(self) -> LifecycleEngine:
        """A new engine on the same servers and store."""
        self.logs.append(Lines())
        policy = Policy(
            backoff_initial=0.1,
            backoff_max=1.0,
            first_token_timeout=4.0,
            idle_timeout=3.0,
            max_attempts=50,
            **self.plan.policy,
        )
        return LifecycleEngine(
            self.backend,
            log=self.logs[-1],  # type: ignore[arg-type]
            store=self.store,
            policy=policy,
            random=self.random,
            version=self.versions[-1],
            abort_timeout=2.0,
            close_timeout=2.0,
            unreachable_timeout=5.0,
            update_timeout=10.0,
            checkpoint_tokens=2,
        )

    def requests(self) -> list[RolloutRequest]:
        """What is to be generated."""
        found = []
        for number, about in enumerate(self.plan.requests):
            prompt: dict[str, Any] = (
                {"text": "ab"[: about["prompt"]] + str(number)}
                if about["text"]
                else {"prompt_ids": [100 + number, *range(about["prompt"])]}
            )
            found.append(RolloutRequest(id=f"r{number}", max_new_tokens=about["budget"], **prompt))
        return found


async def live(world: World) -> None:
    """The run: submit, let things happen, then bring everything to its end on servers that work."""
    async with anyio.create_task_group() as servers:
        servers.start_soon(world.backend.step_for_ever)
        engine, submitted = world.engine(), world.requests()
        async with engine:
            handles = {one.id: engine.submit(one) for one in submitted}
            remaining = await act(world, engine, handles, list(world.plan.actions))
            if remaining is None:
                await finish(world, engine, handles)
        while remaining is not None:
            engine = world.engine()
            async with engine:
                await engine.restore(force=True)
                world.resting.clear()
                handles = {name: engine.handle(name) for name in engine.places()}
                following = await act(world, engine, handles, remaining)
                if following is None:
                    await finish(world, engine, handles)
                remaining = following
        for brain in world.brains:
            for _ in range(200):
                brain.step()
        servers.cancel_scope.cancel()


async def act(  # noqa: C901  one branch per action
    world: World,
    engine: LifecycleEngine,
    handles: dict[str, RolloutHandle],
    actions: list[tuple[float, str, int]],
) -> list[tuple[float, str, int]] | None:
    """Do what the plan says; returns what is left for the next engine when this one is taken over."""
    names = sorted(handles)
    while actions and names:
        delay, action, number = actions.pop(0)
        await anyio.sleep(delay)
        check_moment(world, engine, handles)
        handle = handles[names[number % len(names)]]
        brain = world.brains[number % len(world.brains)]
        if action == "abort":
            report = await engine.abort([handle], timeout=1.0)
            finished = report.outcomes[handle.id] is Outcome.FINISHED
            assert finished == (handle.state is RolloutState.COMPLETED)
            world.resting.add(handle.id)
        elif action == "abort all":
            await engine.abort()
            world.resting |= set(names)
        elif action == "resume":
            resume(world, engine, handle)
        elif action in {"update", "update fails"}:
            await update(
                world, engine, ("abort", "in_place", "retract")[number % 3], fails=action == "update fails"
            )
        elif action == "discard" and (handle.at_rest or handle.state is RolloutState.PENDING):
            engine.discard(handle)
        elif action == "kill":
            brain.kill()
        elif action == "revive":
            brain.revive()
        elif action == "cancel":
            with anyio.move_on_after(0.2):
                await handle.wait()
        elif action == "takeover":
            return actions
    return None


def resume(world: World, engine: LifecycleEngine, handle: RolloutHandle) -> None:
    """What rests unfinished goes on."""
    if handle.state is RolloutState.ABORTED:
        engine.submit(handle.snapshot())
        world.resting.discard(handle.id)


async def update(world: World, engine: LifecycleEngine, mode: str, *, fails: bool) -> None:
    """Change the weights, or try."""
    version = f"v{len(world.versions)}"
    try:
        async with engine.weight_update(version, mode):
            assert engine.stats().gate == "paused"
            if mode == "abort":
                assert not engine.core.flights
            if fails:
                raise ZeroDivisionError  # noqa: TRY301  as a caller's push of weights would
    except ZeroDivisionError:
        engine.resume()
    except UpdateTimeout:
        return
    if not fails:
        world.versions.append(version)


def check_moment(world: World, engine: LifecycleEngine, handles: dict[str, RolloutHandle]) -> None:
    """What is true at every moment."""
    flying = [flight.rollout.id for flight in engine.core.flights.values()]
    assert len(flying) == len(set(flying)), "a rollout never has two live attempts"
    assert engine.ledger().balanced
    for name in world.resting & set(handles):
        assert handles[name].at_rest, "a caller's abort is never undone by a retry"


async def finish(world: World, engine: LifecycleEngine, handles: dict[str, RolloutHandle]) -> None:
    """On servers that work again, everything comes to its end."""
    for brain in world.brains:
        brain.faults.clear()
    for _ in range(60):
        for brain in world.brains:
            brain.revive()
        await engine.drain()
        unfinished = [handle for handle in handles.values() if handle.state not in SETTLED]
        for handle in unfinished:
            resume(world, engine, handle)
        if not unfinished:
            break
    for handle in handles.values():
        check_end(world, await handle.wait())
    assert engine.places() == {}
    ledger = engine.ledger()
    assert ledger.balanced, ledger
    assert ledger.rollouts["in_flight"] == ledger.rollouts["pending"] == ledger.rollouts["resumable"] == 0


def check_end(world: World, snapshot: Snapshot) -> None:
    """Tokens and logprobs are those of an undisturbed rollout, as far as it got."""
    assert snapshot.state in SETTLED
    assert len(snapshot.tokens) == len(snapshot.logprobs) <= snapshot.request.max_new_tokens
    model = world.brains[0].model
    prompt = list(snapshot.prompt_ids or ())
    expected = model.continuation(prompt, len(snapshot.tokens))
    assert [sample.token for sample in expected] == list(snapshot.tokens)
    for sample, logprob in zip(expected, snapshot.logprobs, strict=True):
        assert sample.logprob == logprob or logprob != logprob  # a scripted null  # noqa: PLR0124
    if snapshot.state is RolloutState.COMPLETED:
        full = len(snapshot.tokens) == snapshot.request.max_new_tokens
        assert full or snapshot.finish_reason is FinishReason.STOP
    check_versions(world, snapshot)


def check_versions(world: World, snapshot: Snapshot) -> None:
    """Spans lie in order within the tokens; where the server vouched for them they are what it remembers."""
    position = 0
    for span in snapshot.spans:
        assert position <= span.start < span.end <= len(snapshot.tokens)
        assert span.version in world.versions
        position = span.end
    remembered = {request.rid: request for brain in world.brains for request in brain.history}
    for attempt in snapshot.attempts:
        request = remembered.get(attempt.rid)
        if (
            request is None
            or attempt.start >= len(snapshot.tokens)
            or dropped_since(snapshot, attempt.number)
        ):
            continue
        truth: list[str] = []
        for told in request.spans(len(request.tokens), "none"):
            truth += [told["version"]] * (told["end"] - told["start"])
        for span in snapshot.spans:
            for at in range(max(span.start, attempt.start), min(span.end, attempt.end)):
                if span.source == "span":
                    assert truth[at - attempt.start] == span.version


def dropped_since(snapshot: Snapshot, number: int) -> bool:
    """Whether tokens of this attempt were dropped later: the next attempt does not begin where it ended."""
    later = [attempt for attempt in snapshot.attempts if attempt.number > number]
    own = next(attempt for attempt in snapshot.attempts if attempt.number == number)
    return any(attempt.start < own.end for attempt in later)


def check_logs(logs: Sequence[Lines]) -> None:
    """Every chain replays on the table, is numbered without gaps, and says where tokens fall."""
    for lines in logs:
        state: dict[str, str] = {}
        tokens: dict[str, int] = {}
        seq: dict[str, int] = {}
        asked: set[str] = set()
        for event, about in lines.all:
            name = about.get("rollout_id")
            if "seq" in about:
                assert about["seq"] == seq.get(name, 0) + 1
                seq[name] = about["seq"]
            if event == "rollout.restored":
                state[name], tokens[name] = about["state"], about["tokens"]
            elif event == "rollout.transition":
                before = state.get(name, "pending")
                assert about["source"] == before
                assert ROLLOUT.target(RolloutState(before), about["trigger"]) == about["dest"]
                assert about["tokens"] >= tokens.get(name, 0) - about["dropped_tokens"]
                assert about["tokens"] + about["dropped_tokens"] >= tokens.get(name, 0)
                state[name], tokens[name] = about["dest"], about["tokens"]
                assert about["trigger"] != "restore" or name not in asked, (
                    "a caller's abort is never undone by a retry"
                )
                under_way = about["source"] in {"pending", "streaming", "partial", "aborting"}
                if about["trigger"] == "abort" and about["reason"] == "requested" and under_way:
                    asked.add(name)
            elif event == "rollout.rest":
                asked.discard(name)
                assert about["state"] == state[name]
        assert lines.all[0][0] == "engine.started"
        assert lines.all[-1][0] == "engine.stopped"
        assert lines.all[-1][1]["ledger"]["balanced"]


def run(plan: Plan, backend: str) -> None:
    """One whole run, and what must be true after it."""
    world = World(plan)
    run_virtual(live, world, backend=backend)
    check_logs(world.logs)
    assert world.backend.open == 0
    for brain in world.brains:
        assert brain.idle, "nothing is left on a server"
        assert brain.pause_mode is None
    for row in world.store.pending():
        assert row.disposition == Disposition.NONE
        raise AssertionError(f"{row.id} is still {row.state} in the store")


@settings(max_examples=examples(120))
@given(plans())
def test_whatever_happens_every_rollout_ends_with_its_own_tokens(plan: Plan) -> None:
    """On asyncio."""
    run(plan, "asyncio")


@settings(max_examples=examples(30))
@given(plans())
def test_and_on_trio(plan: Plan) -> None:
    """The same on trio."""
    run(plan, "trio")
