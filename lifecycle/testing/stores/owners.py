"""Who may write: epochs, leases and claims; and what others see."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread

from lifecycle.errors import Fenced
from lifecycle.states import Disposition, RolloutState
from lifecycle.stores.protocol import Claim
from lifecycle.testing.stores.builders import OTHER, OWNER, TTL, ids, refused, same, snapshot, tail
from lifecycle.testing.stores.fixture import StoreTests


class OwnerContract(StoreTests):
    """One owner at a time, told by its epoch."""

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
