"""The contract of a snapshot store, as tests: for our own stores, and for those who write theirs.

    class TestMyStore(StoreContract):
        def make_store(self, clock):
            return MyStore(..., clock=clock)

pytest collects the inherited test methods. They need nothing of pytest but plain functions, so that any runner that
calls `setup_method`, a test method and `teardown_method` will do. For readable failures, call
`pytest.register_assert_rewrite("lifecycle.testing.stores")` in a conftest.py before the import.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Barrier, Thread
from typing import Any

from lifecycle.errors import Fenced, SnapshotError
from lifecycle.events import VersionSpan
from lifecycle.request import RolloutRequest
from lifecycle.rollout import Attempt, Channel
from lifecycle.snapshot import Snapshot, Tail
from lifecycle.states import Disposition, FinishReason, Reason, RolloutState
from lifecycle.stores.protocol import Claim, SnapshotStore, StoredRow

TTL = 30.0
OWNER, OTHER = "trainer-a", "trainer-b"


class ManualClock:
    """Wall-clock seconds that move when told to."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def request(rollout_id: str = "r1", **fields: Any) -> RolloutRequest:
    """A request with room for many tokens."""
    return RolloutRequest(id=rollout_id, prompt_ids=(1, 2, 3), max_new_tokens=100_000, **fields)


def snapshot(rollout_id: str = "r1", tokens: int = 0, *, first: int = 0, **fields: Any) -> Snapshot:
    """A snapshot with `tokens` tokens `first, first + 1, …`; aborted in attempt 1 if there are any, else pending."""
    fields.setdefault("state", RolloutState.ABORTED if tokens else RolloutState.PENDING)
    fields.setdefault("attempt", 1 if tokens else 0)
    return Snapshot(
        request=request(rollout_id),
        tokens=array("i", range(first, first + tokens)),
        logprobs=array("d", [-token / 7 for token in range(first, first + tokens)]),
        **fields,
    )


def tail(rollout_id: str = "r1", start: int = 0, count: int = 1, **fields: Any) -> Tail:
    """A tail that goes on where `snapshot` of `start` tokens ends."""
    fields.setdefault("attempt", 1)
    return Tail(
        id=rollout_id,
        start=start,
        tokens=array("i", range(start, start + count)),
        logprobs=array("d", [-token / 7 for token in range(start, start + count)]),
        **fields,
    )


def rich_snapshot(rollout_id: str = "rich") -> Snapshot:
    """A snapshot in which every field is used."""
    return Snapshot(
        request=request(
            rollout_id,
            sampling_params={"temperature": 0.7, "stop": ["\n\n"]},
            group_id="g",
            group_size=4,
            index=2,
            metadata={"answer": 42, "nested": {"π": [1, None, True]}, "raw": b"\x00\xff"},
            routing_key="node-7",
            extra={"lora_path": "adapters/a"},
        ),
        state=RolloutState.COMPLETED,
        prompt_ids=(1, 2, 3, 4),
        tokens=array("i", [7, 8, 2**31 - 1]),
        logprobs=array("d", [-0.5, math.nan, -math.inf]),
        spans=(VersionSpan("7", 0, 2, "span"), VersionSpan("8", 2, 3, "label")),
        text="déjà vu ☃",
        attempt=3,
        attempts=(Attempt(1, "ab" * 16, 0, 2, 1.5, 2.5, 3.5, "preempt", "server_abort", None, "http://w"),),
        channels={"routed_experts": Channel([(0, b"\x01\x02"), (2, b"")], complete=False)},
        finish_reason=FinishReason.STOP,
        matched="</s>",
        reason=Reason.STOP,
        detail="the server's words",
        disposition=Disposition.CARRIED,
        fruitless=1,
        carries=2,
        seq=9,
        process="host-1-abc",
    )


@contextmanager
def refused(kind: type[Exception] = SnapshotError) -> Iterator[None]:
    """The block must raise `kind`."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


class StoreContract:
    """What every store must do. Subclass it and give `make_store`."""

    def make_store(self, clock: Callable[[], float]) -> SnapshotStore:
        """A new, empty store that measures leases by `clock`."""
        raise NotImplementedError

    def peer(self, store: SnapshotStore) -> SnapshotStore:
        """Another connection to the data of `store`, as another process would have; by default the same one."""
        return store

    def setup_method(self) -> None:
        """A store and a clock for each test."""
        self.clock = ManualClock()
        self.store = self.make_store(self.clock)
        self.epoch = self.store.new_epoch()

    def teardown_method(self) -> None:
        """Close the store."""
        self.store.close()

    def put(self, value: Snapshot, *, owner: str = OWNER, epoch: int | None = None, **how: Any) -> None:
        """Write and flush one snapshot."""
        self.store.put(value, self.epoch if epoch is None else epoch, owner=owner, ttl=TTL, **how)
        self.store.flush()

    def append(self, value: Tail, *, epoch: int | None = None) -> None:
        """Write and flush one tail."""
        self.store.append(value, self.epoch if epoch is None else epoch)
        self.store.flush()

    def mark(self, rollout_id: str, disposition: Disposition, *, epoch: int | None = None) -> None:
        """Write and flush one disposition."""
        self.store.mark(rollout_id, disposition, self.epoch if epoch is None else epoch)
        self.store.flush()

    def row(self, rollout_id: str = "r1") -> StoredRow:
        """The listed row of a rollout."""
        return next(row for row in self.store.rows() if row.id == rollout_id)

    # -- values --------------------------------------------------------------------------------------------------

    def test_satisfies_the_protocol(self) -> None:
        """It has every method of the protocol."""
        assert isinstance(self.store, SnapshotStore)

    def test_gives_back_what_was_put(self) -> None:
        """Every field survives, to the bit."""
        value = rich_snapshot()
        self.put(value)
        assert same(self.store.load("rich"), value)

    def test_keeps_odd_ids_apart(self) -> None:
        """Ids are opaque: quotes, spaces, other scripts, case and length all count."""
        ids = ["a", "A", "a ", "it's; --", "ä", "日本", "x" * 2000, "%s", "?"]
        for tokens, rollout_id in enumerate(ids, start=1):
            self.put(snapshot(rollout_id, tokens))
        assert [len(self.store.load(rollout_id).tokens) for rollout_id in ids] == list(range(1, len(ids) + 1))

    def test_refuses_an_id_that_not_every_store_can_hold(self) -> None:
        """A NUL character, or half a surrogate pair, in an id is refused, and the store goes on."""
        for rollout_id in ("a\0b", "a\ud800b"):
            with refused():
                self.put(snapshot(rollout_id))
        self.put(snapshot())
        assert self.store.load("r1").id == "r1"

    def test_unknown_ids_are_key_errors(self) -> None:
        """`load` and `discard` of something that is not stored raise KeyError."""
        with refused(KeyError):
            self.store.load("nobody")
        with refused(KeyError):
            self.store.discard("nobody")

    def test_lists_rows_in_order(self) -> None:
        """`rows` tells what is known without the payload, ordered by id."""
        self.put(snapshot("b", 2))
        self.put(snapshot("a", 3, state=RolloutState.PARTIAL, attempt=2))
        first, second = self.store.rows()
        assert (first.id, first.state, first.tokens, first.attempt) == ("a", "partial", 3, 2)
        assert (second.id, second.disposition, second.epoch) == ("b", "none", self.epoch)
        assert (second.owner, second.lease_until) == (OWNER, self.clock.now + TTL)
        assert second.updated_at == self.clock.now

    def test_discard_deletes(self) -> None:
        """A discarded rollout is gone with its tails, and its id is free."""
        self.put(snapshot("r1", 5))
        self.append(tail("r1", 5))
        self.store.discard("r1")
        assert list(self.store.rows()) == []
        self.put(snapshot("r1", 1))
        assert len(self.store.load("r1").tokens) == 1

    # -- extensions only -----------------------------------------------------------------------------------------

    def test_an_extension_is_accepted(self) -> None:
        """More tokens after the same ones take the place of what was stored."""
        self.put(snapshot(tokens=5))
        self.put(snapshot(tokens=9, attempt=2))
        assert same(self.store.load("r1"), snapshot(tokens=9, attempt=2))

    def test_the_same_again_is_harmless(self) -> None:
        """A write that is repeated, because its outcome was not known, changes nothing."""
        writes: list[Callable[[], None]] = [
            lambda: self.put(snapshot(tokens=5)),
            lambda: self.append(tail(start=5, count=3)),
            lambda: self.mark("r1", Disposition.CARRIED),
            lambda: self.put(snapshot(tokens=8, disposition=Disposition.CARRIED)),
            lambda: self.put(snapshot(tokens=3), rollback=True),
        ]
        for write in writes:
            write()
            before = self.store.load("r1")
            write()
            assert same(self.store.load("r1"), before)

    def test_other_tokens_are_a_contradiction(self) -> None:
        """Other token ids where some are stored are refused, and change nothing."""
        self.put(snapshot(tokens=5))
        with refused():
            self.put(snapshot(tokens=9, first=1))
        assert same(self.store.load("r1"), snapshot(tokens=5))

    def test_other_logprobs_are_a_contradiction(self) -> None:
        """Other logprobs for the same tokens are refused."""
        value = snapshot(tokens=5)
        self.put(value)
        value.logprobs[2] = -9.0
        with refused():
            self.put(value)

    def test_every_nan_is_the_same(self) -> None:
        """Logprobs that are unknown agree, whatever their bits are."""
        value = snapshot(tokens=2)
        value.logprobs[1] = math.nan
        self.put(value)
        value.logprobs[1] = -math.nan
        self.put(value)

    def test_tokens_fall_only_by_a_rollback(self) -> None:
        """Fewer tokens are refused, unless the caller says that they were dropped on purpose."""
        self.put(snapshot(tokens=5))
        with refused():
            self.put(snapshot(tokens=4))
        self.put(snapshot(tokens=0, attempt=1), rollback=True)
        assert len(self.store.load("r1").tokens) == 0

    def test_a_rollback_may_bring_other_tokens(self) -> None:
        """After a restart from the prompt other tokens come."""
        self.put(snapshot(tokens=5))
        self.put(snapshot(tokens=7, first=100), rollback=True)
        assert same(self.store.load("r1"), snapshot(tokens=7, first=100))

    def test_attempts_do_not_go_back(self) -> None:
        """A snapshot of an earlier attempt is refused."""
        self.put(snapshot(tokens=5, attempt=3))
        with refused():
            self.put(snapshot(tokens=6, attempt=2))

    def test_final_is_final(self) -> None:
        """A final state is never left, not even by a rollback."""
        self.put(snapshot(tokens=5, state=RolloutState.COMPLETED))
        for rollback in (False, True):
            with refused():
                self.put(snapshot(tokens=6, state=RolloutState.PARTIAL), rollback=rollback)
        self.put(snapshot(tokens=5, state=RolloutState.COMPLETED))

    def test_an_ended_id_may_begin_anew(self) -> None:
        """Once a rollout is delivered, or given up, a fresh one may be stored under its id, if it is said to be one."""
        self.put(snapshot(tokens=5, state=RolloutState.COMPLETED))
        with refused():
            self.put(snapshot(), anew=True)
        self.mark("r1", Disposition.DELIVERED)
        with refused():
            self.put(snapshot())
        self.put(snapshot(tokens=6, state=RolloutState.COMPLETED), anew=True)
        assert same(self.store.load("r1"), snapshot(tokens=6, state=RolloutState.COMPLETED))
        self.mark("r1", Disposition.STALE)
        self.put(snapshot(state=RolloutState.DISCARDED), anew=True)
        self.put(snapshot(), anew=True)
        assert same(self.store.load("r1"), snapshot())

    # -- tails ---------------------------------------------------------------------------------------------------

    def test_tails_follow_the_snapshot(self) -> None:
        """A checkpoint adds tokens, spans, text and the state; everything else stays."""
        self.put(snapshot(tokens=2, text="ab", state=RolloutState.STREAMING))
        spans = (VersionSpan("7", 0, 5),)
        self.append(tail(start=2, count=2, text="cd", text_start=2, attempt=2))
        self.append(tail(start=4, count=1, text="e", text_start=4, spans=spans, attempt=2))
        expected = snapshot(tokens=5, text="abcde", spans=spans, state=RolloutState.PARTIAL, attempt=2)
        assert same(self.store.load("r1"), expected)
        assert (self.row().tokens, self.row().state) == (5, "partial")

    def test_a_snapshot_takes_the_place_of_tails(self) -> None:
        """After a put nothing is left of the tails before it."""
        self.put(snapshot(tokens=2))
        self.append(tail(start=2, count=3))
        self.put(snapshot(tokens=5, attempt=2))
        self.append(tail(start=5, count=1, attempt=2))
        assert same(self.store.load("r1"), snapshot(tokens=6, attempt=2, state=RolloutState.PARTIAL))

    def test_overlapping_tails_are_cut(self) -> None:
        """Tokens of a tail that are stored already are compared and not stored twice."""
        self.put(snapshot(tokens=4, state=RolloutState.PARTIAL))
        self.append(tail(start=2, count=4))
        self.append(tail(start=0, count=3))
        assert same(self.store.load("r1"), snapshot(tokens=6, state=RolloutState.PARTIAL))

    def test_a_contradicting_tail_is_refused(self) -> None:
        """Other tokens, or other logprobs, in the overlap are refused, and change nothing."""
        self.put(snapshot(tokens=4, state=RolloutState.PARTIAL))
        wrong_tokens, wrong_logprobs = tail(start=2, count=4), tail(start=2, count=4)
        wrong_tokens.tokens[1] = 99
        wrong_logprobs.logprobs[1] = -99.0
        for wrong in (wrong_tokens, wrong_logprobs):
            with refused():
                self.append(wrong)
        assert same(self.store.load("r1"), snapshot(tokens=4, state=RolloutState.PARTIAL))

    def test_a_gap_is_refused(self) -> None:
        """A tail must begin where the stored tokens end, or before."""
        self.put(snapshot(tokens=4))
        with refused():
            self.append(tail(start=5))

    def test_tails_of_earlier_attempts_are_refused(self) -> None:
        """What an old attempt still has to say is not appended to a newer one."""
        self.put(snapshot(tokens=4, attempt=2))
        with refused():
            self.append(tail(start=4, attempt=1))

    def test_a_tail_needs_a_snapshot(self) -> None:
        """A tail, or a disposition, for something that is not stored is refused."""
        with refused():
            self.append(tail())
        with refused():
            self.mark("r1", Disposition.DELIVERED)

    def test_a_final_rollout_grows_no_more(self) -> None:
        """A tail after the end is refused; one that repeats what is stored is not."""
        self.put(snapshot(tokens=4, state=RolloutState.COMPLETED))
        self.append(tail(start=3, count=1))
        with refused():
            self.append(tail(start=3, count=2))

    def test_an_empty_tail_changes_nothing(self) -> None:
        """A checkpoint without news is a no-op."""
        self.put(snapshot(tokens=4))
        self.append(tail(start=4, count=0))
        assert same(self.store.load("r1"), snapshot(tokens=4))

    # -- dispositions --------------------------------------------------------------------------------------------

    def test_a_disposition_is_saved_beside_the_snapshot(self) -> None:
        """`mark` shows in rows and in the loaded snapshot."""
        self.put(snapshot(tokens=4, state=RolloutState.COMPLETED))
        self.mark("r1", Disposition.DELIVERED)
        assert self.row().disposition == "delivered"
        assert self.store.load("r1").disposition is Disposition.DELIVERED

    def test_delivered_is_not_undone_by_a_later_put(self) -> None:
        """A put of the same life does not take a delivery back."""
        self.put(snapshot(tokens=4, state=RolloutState.COMPLETED))
        self.mark("r1", Disposition.DELIVERED)
        self.put(snapshot(tokens=4, state=RolloutState.COMPLETED))
        assert self.row().disposition == "delivered"

    def test_pending_is_what_somebody_waits_for(self) -> None:
        """Not final, or completed or failed without an end; never what was given up."""
        for state in RolloutState:
            for disposition in Disposition:
                self.put(snapshot(f"{state}-{disposition}", 3, state=state, disposition=disposition))
        final = {RolloutState.COMPLETED, RolloutState.FAILED}
        open_ones = {Disposition.NONE, Disposition.CARRIED}
        expected = sorted(
            f"{state}-{disposition}"
            for state in RolloutState
            for disposition in Disposition
            if state != RolloutState.DISCARDED and (state not in final or disposition in open_ones)
        )
        assert [row.id for row in self.store.pending()] == expected
        claim = self.store.claim(OTHER, TTL, force=True)
        assert sorted(claimed.snapshot.id for claimed in claim.claimed) == expected

    # -- owners --------------------------------------------------------------------------------------------------

    def test_epochs_are_never_handed_out_twice(self) -> None:
        """Each new epoch, also that of a claim, is higher than all before."""
        self.put(snapshot(), owner=OTHER)
        claimed = self.store.claim(OWNER, TTL, force=True).claimed[0]
        later = self.store.new_epoch()
        assert self.epoch < claimed.epoch < later

    def test_a_lower_epoch_is_fenced(self) -> None:
        """After a claim by another, nothing that the old owner writes is accepted, and nothing changes."""
        self.put(snapshot(tokens=4))
        claimed = self.store.claim(OTHER, TTL, force=True).claimed[0]
        writes: list[Callable[[], None]] = [
            lambda: self.put(snapshot(tokens=5)),
            lambda: self.put(snapshot(tokens=2), rollback=True),
            lambda: self.append(tail(start=4)),
            lambda: self.mark("r1", Disposition.DELIVERED),
        ]
        for write in writes:
            with refused(Fenced):
                write()
        assert same(self.store.load("r1"), claimed.snapshot)
        assert self.row().disposition == "none"
        self.put(snapshot(tokens=5), owner=OTHER, epoch=claimed.epoch)

    def test_two_owners_cannot_share_an_epoch(self) -> None:
        """The epoch is one owner's: another one with the same number is fenced."""
        self.put(snapshot(tokens=4))
        with refused(Fenced):
            self.put(snapshot(tokens=5), owner=OTHER)

    def test_a_living_owner_is_not_replaced_by_a_new_submit(self) -> None:
        """A later process that submits the same id is fenced while the first one's lease runs, and free after it."""
        self.put(snapshot(tokens=4))
        later = self.store.new_epoch()
        with refused(Fenced):
            self.put(snapshot(), owner=OTHER, epoch=later)
        self.clock.advance(TTL + 1)
        self.put(snapshot(), owner=OTHER, epoch=later)
        assert same(self.store.load("r1"), snapshot())
        with refused(Fenced):
            self.append(tail(start=4))

    def test_claims_wait_for_leases(self) -> None:
        """What a lease holds cannot be claimed; when it has run out, it can."""
        self.put(snapshot(tokens=4))
        assert ids(self.store.claim(OTHER, TTL)) == []
        self.clock.advance(TTL - 1)
        assert ids(self.store.claim(OTHER, TTL)) == []
        self.clock.advance(2)
        assert ids(self.store.claim(OTHER, TTL)) == ["r1"]
        assert (self.row().owner, self.row().lease_until) == (OTHER, self.clock.now + TTL)

    def test_ones_own_lease_counts_too(self) -> None:
        """An owner does not claim from itself what it holds."""
        self.put(snapshot(tokens=4))
        assert ids(self.store.claim(OWNER, TTL)) == []

    def test_force_does_not_wait(self) -> None:
        """A caller who knows by other means that the owner is dead takes everything."""
        self.put(snapshot("r1", 4))
        self.put(snapshot("r2", 4))
        assert ids(self.store.claim(OTHER, TTL, force=True)) == ["r1", "r2"]

    def test_a_release_frees_at_once(self) -> None:
        """An owner that stops in order need not be waited for."""
        self.put(snapshot(tokens=4))
        self.store.release(OWNER)
        assert self.row().lease_until is None
        assert ids(self.store.claim(OTHER, TTL)) == ["r1"]

    def test_renewing_extends_the_lease(self) -> None:
        """`renew` counts from now, and says how many unfinished rollouts are held."""
        self.put(snapshot("r1", 4))
        self.put(snapshot("r2", 4, state=RolloutState.COMPLETED))
        self.mark("r2", Disposition.DELIVERED)
        self.clock.advance(TTL - 1)
        assert self.store.renew(OWNER, TTL) == 1
        self.clock.advance(TTL - 1)
        assert ids(self.store.claim(OTHER, TTL)) == []

    def test_a_write_extends_the_lease(self) -> None:
        """An owner that writes is alive."""
        self.put(snapshot("r1", 4))
        self.clock.advance(TTL - 1)
        self.put(snapshot("r2", 4))
        self.clock.advance(TTL - 1)
        assert ids(self.store.claim(OTHER, TTL)) == []

    def test_claims_can_be_restricted(self) -> None:
        """With `ids`, nothing else is claimed; unknown ones are left out."""
        for rollout_id in ("r1", "r2", "r3"):
            self.put(snapshot(rollout_id, 4))
        claim = self.store.claim(OTHER, TTL, ids=["r3", "r1", "nobody"], force=True)
        assert ids(claim) == ["r1", "r3"]
        assert self.row("r2").owner == OWNER

    def test_a_claim_brings_the_tails(self) -> None:
        """What was checkpointed before a crash comes back."""
        self.put(snapshot(tokens=4))
        self.append(tail(start=4, count=3))
        claimed = self.store.claim(OTHER, TTL, force=True).claimed[0]
        assert same(claimed.snapshot, snapshot(tokens=7, state=RolloutState.PARTIAL))
        self.append(tail(start=7, count=1), epoch=claimed.epoch)

    def test_claims_at_once_share_nothing(self) -> None:
        """Of processes that claim at the same time, each rollout goes to exactly one."""
        expected = [f"r{number:02}" for number in range(40)]
        for rollout_id in expected:
            self.put(snapshot(rollout_id, 3))
        self.store.release(OWNER)
        peers = [self.peer(self.store) for _ in range(3)]
        start, claims = Barrier(len(peers)), [Claim(())] * len(peers)

        def take(number: int) -> None:
            start.wait()
            claims[number] = peers[number].claim(f"taker-{number}", TTL)

        threads = [Thread(target=take, args=(number,)) for number in range(len(peers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(rollout_id for claim in claims for rollout_id in ids(claim)) == expected
        for peer in peers:
            if peer is not self.store:
                peer.close()

    # -- durability ----------------------------------------------------------------------------------------------

    def test_flushed_writes_are_seen_by_others(self) -> None:
        """After `flush` another connection sees the write."""
        self.put(snapshot(tokens=4))
        self.append(tail(start=4))
        peer = self.peer(self.store)
        assert same(peer.load("r1"), snapshot(tokens=5, state=RolloutState.PARTIAL))
        if peer is not self.store:
            peer.close()

    def test_closing_flushes_and_may_be_repeated(self) -> None:
        """`close` keeps what was written, and does nothing the second time."""
        peer = self.peer(self.store)
        self.store.put(snapshot(tokens=4), self.epoch, owner=OWNER, ttl=TTL)
        if peer is self.store:
            return
        self.store.close()
        self.store.close()
        assert same(peer.load("r1"), snapshot(tokens=4))
        peer.close()


def ids(claim: Claim) -> list[str]:
    """The ids of a claim, sorted; it must have brought nothing unreadable."""
    assert not claim.unreadable, claim.unreadable
    return sorted(claimed.snapshot.id for claimed in claim.claimed)


def same(one: Snapshot, other: Snapshot) -> bool:
    """Equal in every field, logprobs to the bit (NaN equals itself)."""
    return _key(one) == _key(other)


def _key(value: Snapshot) -> list[Any]:
    plain = {name: getattr(value, name) for name in Snapshot.__dataclass_fields__}
    logprobs = plain.pop("logprobs")
    return [plain, logprobs.tobytes()]
