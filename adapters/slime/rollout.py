"""`generate_rollout`: a whole training step (`--rollout-function-path`), over `LifecycleEngine.collect`.

Groups are drawn from slime's data source while there is room, rewarded and filtered by slime's own functions in
slime's own loop as each of them is whole, and delivered until the batch is full. What is left is aborted, stays with
us, prefixes and finished siblings included, and is delivered first at the next step. Every group that was drawn is
delivered, kept, or dropped with a reason that is counted in the metrics.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import anyio
import anyio.to_thread

from adapters.slime import framework
from adapters.slime.binding import Item, Place, Writer, item_of, mint, notes, reconciled
from adapters.slime.runtime import OpenGroup, Runtime, runtime_for
from lifecycle.engine import Batch
from lifecycle.errors import BackendUnreachable, ConfigurationError
from lifecycle.snapshot import Snapshot

logger = logging.getLogger("lifecycle.slime")


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """One training step, `args.rollout_batch_size` groups; or slime's own evaluation with our `generate`.

    Raises BackendUnreachable when the servers stay away for too long, ConfigurationError when the data source has
    nothing more to give; what was generated until then is kept for the next call.
    """
    if evaluation:
        return framework.evaluate(args, rollout_id, data_source)
    return framework.run(Step(args, rollout_id, data_source, runtime_for(args)).run())


class Step:
    """One call of `generate_rollout`. Runs in slime's loop; `draw` and `accept` are called from the engine's."""

    def __init__(self, args: Any, rollout_id: int, data_source: Any, runtime: Runtime) -> None:
        self._args = args
        self._rollout_id = rollout_id
        self._data_source = data_source
        self._runtime = runtime
        self._state = framework.generate_state(args)
        self._params = dict(self._state.sampling_params)
        self._keep = bool(getattr(args, "partial_rollout", False))
        skip = bool(self._params.get("skip_special_tokens", True))
        mask = self._keep and bool(getattr(args, "mask_offpolicy_in_partial_rollout", False))
        policy = runtime.policy(keep=self._keep)
        self._policy = replace(policy, mask_off_policy=policy.mask_off_policy or mask)
        self._writer = Writer(args, self._state.tokenizer, self._policy, skip)
        self._loop: asyncio.AbstractEventLoop
        self._drawing = anyio.Lock()
        self._over = False
        self._drawn = 0
        self._dropped: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._seen: list[list[Any]] = []

    async def run(self) -> Any:
        """Collect the batch, and put every other group where it belongs."""
        self._loop = asyncio.get_running_loop()
        target = int(self._args.rollout_batch_size)
        delivered = self._runtime.ready[:target]
        del self._runtime.ready[: len(delivered)]
        if len(delivered) < target:
            delivered += await self._collect(target - len(delivered), delivered)
        self._count("carried", len(self._runtime.undelivered()))
        data = sorted((group.samples for group in delivered), key=lambda samples: samples[0].index)
        framework.call_if_named(self._args, "rollout_sample_filter_path", data)
        framework.call_if_named(
            self._args, "rollout_all_samples_process_path", self._all(data), self._data_source
        )
        return framework.train_output(data, self._metrics())

    async def _collect(self, wanted: int, so_far: list[OpenGroup]) -> list[OpenGroup]:
        runtime, thread = self._runtime, self._runtime.thread
        room = max(wanted, int(getattr(self._args, "over_sampling_batch_size", None) or 0))

        async def collect() -> Batch:
            thread.engine.step = self._rollout_id
            thread.engine.policy = self._policy
            await runtime.notice_weights()
            try:
                return await thread.engine.collect(
                    self._draw(), target=wanted, filter=self._accept, max_groups=room
                )
            finally:
                await self._stop_drawing()

        try:
            batch = await asyncio.wrap_future(thread.start(collect))
        except BaseExceptionGroup as several:
            runtime.ready[:0] = so_far
            raise _first(several) from None
        except BaseException:
            runtime.ready[:0] = so_far
            raise
        new = self._sort_out(batch)
        if not batch.reached:
            runtime.ready[:0] = [*so_far, *new]
            raise self._short(len(so_far) + len(new), wanted + len(so_far), thread.stats().outage_s)
        return new

    def _sort_out(self, batch: Batch) -> list[OpenGroup]:
        """Write what came of every group to its samples; the delivered ones are returned, the lost ones counted."""
        for members in batch.carried:
            self._write(members)
        for kind, groups in (("failed", batch.failed), ("stale", batch.stale), ("filtered", batch.filtered)):
            self._count(kind, len(groups))
            for members in groups:
                self._write(members)
                self._seen.append(self._runtime.open_groups.pop(members[0].request.group).samples)
        return [self._runtime.open_groups.pop(members[0].request.group) for members in batch.groups]

    def _short(self, got: int, target: int, outage_s: float) -> BackendUnreachable | ConfigurationError:
        have = f"rollout {self._rollout_id}: {got} of {target} groups"
        if outage_s > 0:
            return BackendUnreachable(
                f"{have}: no server has accepted a request for {outage_s:.0f} s; they are kept for the next call"
            )
        return ConfigurationError(f"{have}: the data source has no more; they are kept for the next call")

    # -- called from the engine's loop -------------------------------------------------------------------------

    async def _draw(self) -> AsyncIterator[list[Item]]:
        """Groups as the engine takes them in, one at a time, so that none is drawn that is not needed."""
        while True:
            async with self._drawing:
                groups = []
                if not self._over and not self._runtime.drawn:
                    groups = await anyio.to_thread.run_sync(self._data_source.get_samples, 1)
                drawn = self._runtime.drawn
                drawn.extend(self._opened(samples) for samples in groups)
            if not drawn:
                return
            yield drawn.popleft()

    async def _stop_drawing(self) -> None:
        """Wait for a draw that the end of the step has overtaken: slime may save the data source right after us."""
        self._over = True
        with anyio.CancelScope(shield=True):
            async with self._drawing:
                pass

    def _opened(self, samples: list[Any]) -> list[Item]:
        group_id = notes(samples[0]).get("group") or mint(f"g{samples[0].group_index}")
        if group_id in self._runtime.open_groups:
            group_id = mint(group_id)
        self._runtime.open_groups[group_id] = OpenGroup(group_id, samples)
        self._drawn += 1
        return [
            self._item(sample, Place(group_id, len(samples), index)) for index, sample in enumerate(samples)
        ]

    def _item(self, sample: Any, place: Place) -> Item:
        params = self._params
        if getattr(self._args, "sglang_enable_deterministic_inference", False):
            params = {**params, "sampling_seed": self._state.group_sampling_seeds[place.index]}
        if sample.session_id is None:
            sample.session_id = str(uuid4())
        item = item_of(self._args, sample, params, self._state.tokenizer, place)
        return reconciled(self._runtime.thread.engine, item)

    async def _accept(self, members: list[Snapshot]) -> bool:
        """Reward and filter a whole group, in slime's loop; the engine's goes on meanwhile."""
        future = asyncio.run_coroutine_threadsafe(self._judge(members), self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.cancel()
            raise

    # -- in slime's loop ---------------------------------------------------------------------------------------

    async def _judge(self, members: Sequence[Snapshot]) -> bool:
        samples = self._write(members)
        for index, sample in enumerate(samples):
            if sample.reward is None:
                samples[index] = await framework.apply_sample_hooks(self._args, sample)
        await framework.reward_group(self._args, samples)
        target = int(self._args.rollout_batch_size)
        remaining = self._drawn - self._dropped.total()
        keep, reason = framework.dynamic_verdict(self._args, samples, remaining=remaining, target=target)
        if not keep:
            self._dropped[reason or "unnamed"] += 1
        return keep

    def _write(self, members: Sequence[Snapshot]) -> list[Any]:
        samples = self._runtime.open_groups[members[0].request.group].samples
        for sample, snapshot in zip(samples, members, strict=True):
            self._writer.write(sample, snapshot)
        return samples

    def _count(self, kind: str, number: int) -> None:
        self._counts[kind] += number
        if number:
            logger.info("rollout %d: %d groups %s", self._rollout_id, number, kind)

    def _all(self, data: list[list[Any]]) -> list[list[Any]]:
        return sorted([*data, *self._seen], key=lambda samples: samples[0].index)

    def _metrics(self) -> dict[str, Any]:
        return {
            **{f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._dropped.items()},
            **{f"rollout/lifecycle/{kind}_groups": count for kind, count in self._counts.items()},
        }


def _first(error: BaseException) -> BaseException:
    """When several rewards fail at once: the first failure, which is what slime's own loop would raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
