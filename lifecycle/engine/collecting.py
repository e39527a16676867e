"""Collecting whole groups: admit, watch, judge, stop, carry. What counts as what is decided in `lifecycle.collect`."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from lifecycle.collect import Target, Verdict, check_group, is_settled, is_whole
from lifecycle.engine.groups import DISPOSITIONS, GROUP_RECORDS, Batch, LiveGroup, Members
from lifecycle.engine.reports import AbortReport
from lifecycle.engine.sources import Feed, GroupItem, Source
from lifecycle.errors import ConfigurationError, DuplicateRollout, EngineClosed, StoreUnavailable
from lifecycle.log.records import GroupSettled
from lifecycle.rollout import Rollout
from lifecycle.snapshot import Snapshot, take
from lifecycle.states import Disposition, Reason

if TYPE_CHECKING:
    from lifecycle.engine.engine import LifecycleEngine

__all__ = ["Batch", "Collector", "Filter", "GroupItem", "LiveGroup", "Members", "OnGroup", "Source"]

Filter = Callable[[list[Snapshot]], "bool | Awaitable[bool]"]
OnGroup = Callable[[tuple[Snapshot, ...]], object]
"""May be async."""
LOOK_AGAIN_SECONDS = 0.5


class Collector:
    """Keeps the groups that were carried between calls; runs one `collect` at a time."""

    def __init__(self, engine: LifecycleEngine) -> None:
        self._engine = engine
        self.carried: dict[str, LiveGroup] = {}
        self.pushed_back: list[GroupItem] = []
        self._feeds: list[Feed] = []
        self._call: Collection | None = None

    def feed(self, source: Source) -> Feed:
        """The feed of a source that an earlier call has left waiting, or a new one."""
        open_feeds = [feed for feed in self._feeds if feed.open]
        known = next((feed for feed in open_feeds if feed.source is source), None)
        self._feeds = (
            open_feeds if known is not None else [*open_feeds, Feed(source, self.pushed_back.append)]
        )
        return known or self._feeds[-1]

    @property
    def busy(self) -> bool:
        """Whether a `collect` is running."""
        return self._call is not None

    def adopt(self, rollouts: Sequence[Rollout]) -> None:
        """Groups that came back from the store are carried; incomplete ones are completed by their source."""
        now = self._engine.core.clock.monotonic()
        for rollout in rollouts:
            group = self.carried.setdefault(rollout.request.group, LiveGroup(rollout.request.group, [], now))
            others = [member for member in group.members if member.id != rollout.id]
            group.members = sorted([*others, rollout], key=lambda member: member.request.index)

    def holds(self, rollout: Rollout) -> bool:
        """Whether a running `collect` decides what becomes of it."""
        group = None if self._call is None else self._call.begun.get(rollout.request.group)
        return group is not None and rollout in group.members

    def still_held(self, group: LiveGroup) -> bool:
        """Whether nobody else was given one of its members meanwhile, by a handle or from another process."""
        rollouts = self._engine.core.rollouts
        return all(rollouts.get(member.id) is member for member in group.members)

    async def collect(
        self,
        source: Source,
        *,
        target: int | None,
        accept: Filter | None,
        max_groups: int | None,
        on_group: OnGroup | None,
    ) -> Batch:
        """See `LifecycleEngine.collect`."""
        if self.busy:
            raise ConfigurationError("collect is already running on this engine; await it first")
        if max_groups is not None and max_groups < 1:
            raise ConfigurationError(f"max_groups must be at least 1, or None, not {max_groups}")
        call = Collection(self._engine, self, Target(target), accept, max_groups, on_group)
        self._call = call
        self._engine.core.on_rest.append(call.heard)
        try:
            return await call.run(source)
        except BaseExceptionGroup as group:
            raise only_exception(group) from None
        finally:
            self._engine.core.on_rest.remove(call.heard)
            self._call = None


class Collection:
    """One call of `collect`."""

    def __init__(
        self,
        engine: LifecycleEngine,
        collector: Collector,
        target: Target,
        accept: Filter | None,
        max_groups: int | None,
        on_group: OnGroup | None,
    ) -> None:
        self._engine = engine
        self._on_group = on_group
        self._handed: list[Members] = []
        self._core = engine.core
        self._collector = collector
        self._carried = collector.carried
        self._pushed_back = collector.pushed_back
        self._give_ups = self._core.give_ups
        self._target = target
        self._accept = accept
        self._max_groups = max_groups
        self._live: dict[str, LiveGroup] = {}
        self.begun: dict[str, LiveGroup] = {}
        self._doors: dict[Verdict, list[LiveGroup]] = {verdict: [] for verdict in Verdict}
        self._news = anyio.Event()
        self._tasks: anyio.abc.TaskGroup
        self._exhausted = False

    def heard(self, _rollout: Rollout) -> None:
        """A rollout came to rest."""
        self._news.set()

    async def run(self, source: Source) -> Batch:
        """Admit and judge until the stop decision or until nothing can change any more, then carry the rest."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._take_carried()
                tasks.start_soon(self._feed, self._collector.feed(source))
                await self._watch()
                tasks.cancel_scope.cancel()
            report = await self._stop()
            return await self._leave(report)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._stop()
                with anyio.move_on_after(self._core.settings.close_timeout):  # a store may stand still
                    await self._give_back()
            raise

    # -- in ----------------------------------------------------------------------------------------------------

    def _take_carried(self) -> None:
        for group in [g for g in self._carried.values() if not self._collector.still_held(g)]:
            del self._carried[group.id]
        complete = [g for g in self._carried.values() if len(g.members) == g.members[0].request.group_size]
        complete.sort(key=lambda group: not is_whole(group.states))
        for group in complete:
            if self._target.stopped:
                return
            del self._carried[group.id]
            self._begin(group)
            if self._accept is None and is_whole(group.states):
                self._settled(group)  # before others are begun that the target may not need

    def _begin(self, group: LiveGroup) -> None:
        self._live[group.id] = group
        self.begun[group.id] = group
        for member in group.members:
            if member.disposition is Disposition.CARRIED and member.at_rest:
                member.disposition = Disposition.NONE
            self._engine.go_on(member)
        self._news.set()

    def _admit(self, item: GroupItem) -> None:
        """Take a group in, all of it or none: what cannot be taken is found before the first member is."""
        group_id = check_group(item)
        if group_id in self.begun:
            if all(isinstance(one, Snapshot) and one.disposition is Disposition.CARRIED for one in item):
                return  # the source hands back what was carried, and it has been begun already
            if any(one.id in self._core.rollouts for one in item):
                raise DuplicateRollout(item[0].id, "being collected")
        known = self._carried.get(group_id)
        members = [] if known is None else known.members
        held = {m.id: m for m in members if self._core.rollouts.get(m.id) is m}
        for one in item:
            if one.id not in held:
                self._engine.check(one)
        self._carried.pop(group_id, None)
        members = [held.get(one.id) or self._engine.take(one) for one in item]
        members.sort(key=lambda member: member.request.index)
        self._begin(LiveGroup(group_id, members, self._core.clock.monotonic()))

    async def _feed(self, feed: Feed) -> None:
        while self._pushed_back and await self._wait_for_room():
            self._admit(self._pushed_back.pop(0))
        while await self._wait_for_room():
            item = await feed.next(self._engine.tasks)
            if item is None:
                break
            if self._target.stopped:
                self._pushed_back.append(item)
                return
            self._admit(item)
        self._exhausted = True
        self._news.set()

    async def _wait_for_room(self) -> bool:
        """True when another group may come in, False when none may come any more."""
        while not self._target.stopped and not self._gave_up:
            if self._room():
                return True
            with anyio.move_on_after(LOOK_AGAIN_SECONDS):
                await self._news.wait()
        return False

    @property
    def _gave_up(self) -> bool:
        """No server has taken anything for too long, since this call began."""
        return self._core.give_ups > self._give_ups

    def _room(self) -> bool:
        if self._max_groups is not None and len(self._live) >= self._max_groups:
            return False
        try:
            self._core.recorder.storage.admit()
        except StoreUnavailable:
            return False
        return self._core.load < self._core.settings.max_in_flight

    # -- through -----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while not self._target.stopped:
            self._news = anyio.Event()
            for group in [g for g in self._live.values() if not g.judging and is_settled(g.states)]:
                self._settled(group)
            if self._target.stopped or self._nothing_moves():
                return
            await self._news.wait()
            if self._core.closing:
                raise EngineClosed("the engine was closed while collecting")

    def _nothing_moves(self) -> bool:
        return self._exhausted and all(group.resting and not group.judging for group in self._live.values())

    def _settled(self, group: LiveGroup) -> None:
        if not group.announced:
            group.announced = True
            ends = [member.entered_at for member in group.members]
            straggler = round(max(ends) - min(ends), 6)
            self._core.recorder.group(GroupSettled, group.members, began=group.began, straggler_s=straggler)
        if self._accept is None or not is_whole(group.states):
            self._judge(group, accepted=True)
            return
        group.judging = True
        self._tasks.start_soon(self._ask_filter, group, self._accept)

    async def _ask_filter(self, group: LiveGroup, accept: Filter) -> None:
        answer = accept([self._snapshot(member) for member in group.members])
        accepted = await answer if inspect.isawaitable(answer) else answer
        group.judging = False
        self._judge(group, accepted=bool(accepted))
        self._news.set()

    def _judge(self, group: LiveGroup, *, accepted: bool) -> None:
        stale = any(self._core.too_stale(member) for member in group.members)
        verdict = self._target.judge(group.states, accepted=accepted, stale=stale)
        del self._live[group.id]
        if verdict is Verdict.DELIVER and self._on_group is not None:
            self._tasks.start_soon(self._hand_over, group, self._on_group)
        else:
            self._doors[verdict].append(group)

    async def _hand_over(self, group: LiveGroup, on_group: OnGroup) -> None:
        """Deliver one group while the others go on. Shielded: once it is written down, it is handed over."""
        with anyio.CancelScope(shield=True):
            delivered = await self._let_out({Verdict.DELIVER: [group]})
            for members in delivered[Verdict.DELIVER]:
                self._handed.append(members)
                outcome = on_group(members)
                if inspect.isawaitable(outcome):
                    await outcome

    def _snapshot(self, member: Rollout) -> Snapshot:
        return take(member, self._engine.process_id)

    # -- out ---------------------------------------------------------------------------------------------------

    async def _stop(self) -> AbortReport | None:
        unfinished = [m for group in self._live.values() for m in group.members if not m.at_rest]
        if not unfinished:
            return None
        return await self._engine.abort_rollouts(unfinished, Reason.OVER_SAMPLED)

    async def _leave(self, report: AbortReport | None) -> Batch:
        """Let every group out through its door. Shielded: what is written down as delivered reaches the caller."""
        for group in self._live.values():
            group.judging = False
            failed = is_settled(group.states) and not is_whole(group.states)
            self._doors[Verdict.FAILED if failed else Verdict.SURPLUS].append(group)
        self._live.clear()
        with anyio.CancelScope(shield=True):
            gone = await self._let_out(self._doors)
        complete = not gone[Verdict.SURPLUS] and not self._gave_up
        return Batch(
            groups=(*self._handed, *gone[Verdict.DELIVER]),
            carried=gone[Verdict.SURPLUS],
            failed=gone[Verdict.FAILED],
            filtered=gone[Verdict.FILTERED],
            stale=gone[Verdict.STALE],
            reached=complete if self._target.wanted is None else self._target.stopped,
            report=report,
        )

    async def _let_out(self, doors: Mapping[Verdict, list[LiveGroup]]) -> dict[Verdict, tuple[Members, ...]]:
        """Write down the disposition of every member, then say so; if that fails, all groups are carried."""
        moves = [
            (m, DISPOSITIONS[v]) for v, groups in doors.items() for group in groups for m in group.members
        ]
        try:
            await self._engine.deliver(moves)
        except BaseException:
            self._keep([group for groups in doors.values() for group in groups])
            raise
        return {verdict: self._announce(verdict, groups) for verdict, groups in doors.items()}

    def _announce(self, verdict: Verdict, groups: list[LiveGroup]) -> tuple[Members, ...]:
        kept = [group for group in groups if not any(m.fenced for m in group.members)]
        for group in kept:
            self._core.recorder.group(GROUP_RECORDS[verdict], group.members, began=group.began)
        if verdict is Verdict.SURPLUS:
            self._keep(kept)
        return tuple(tuple(self._snapshot(member) for member in group.members) for group in kept)

    def _keep(self, groups: Sequence[LiveGroup]) -> None:
        for group in groups:
            self._carried[group.id] = group
            for member in group.members:
                member.carries += 1

    async def _give_back(self) -> None:
        """The call itself was cancelled or failed: what was not handed over is carried."""
        groups = [*self._live.values(), *(group for groups in self._doors.values() for group in groups)]
        groups = [group for group in groups if group.id not in self._carried]
        self._live.clear()
        for group in groups:
            group.judging = False
        if self._core.closing:
            self._keep(groups)  # the books are closed; the store holds them as they are
        else:
            await self._let_out({Verdict.SURPLUS: groups})


def only_exception(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception in a group of one; the group itself otherwise."""
    return group.exceptions[0] if len(group.exceptions) == 1 else group
