"""What a store keeps, and what it refuses to take."""

from __future__ import annotations

import math
from collections.abc import Callable

from lifecycle.events import VersionSpan
from lifecycle.states import Disposition, RolloutState
from lifecycle.stores.protocol import SnapshotStore
from lifecycle.testing.stores.builders import (
    OTHER,
    OWNER,
    TTL,
    refused,
    rich_snapshot,
    same,
    snapshot,
    tail,
)
from lifecycle.testing.stores.fixture import StoreTests


class ValueContract(StoreTests):
    """Lossless, extensions only, dispositions beside."""

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
