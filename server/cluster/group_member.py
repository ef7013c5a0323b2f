"""One rank's part in what its group agrees upon: the membership, and what to do next."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from whalepod.ep_comm.all_gather import NUMBERS_PER_EPOCH, AllGather
from whalepod.ep_comm.dispatcher import Dispatcher
from whalepod.ep_comm.eplb.reports import NOTHING_MOVES
from whalepod.ep_comm.group import CallFailed, CallStatus, Group
from whalepod.ep_comm.handshake import shake_hands
from whalepod.ep_comm.symmetric_heap import SymmetricHeap
from whalepod.server.cluster.lockstep import Decision, Lockstep, Remove, Step
from whalepod.server.cluster.membership_store import Membership, MembershipStore
from whalepod.server.cluster.rank_record import RankRecord, from_tensor, to_tensor
from whalepod.server.errors import GroupLost

GATHER_PATIENCE = 4.0
"""An exchange of records waits longer than a combine, which waits longer than a dispatch: a rank
that ran into the others' timeouts must find them still waiting for it here."""
PAUSE_MS = 10.0
RENEW_AFTER = NUMBERS_PER_EPOCH // 2
"""Exchanges of one epoch, three days at 200 a second, after which another one begins."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class HealthMonitor:
    """Tells a waiting rank that nothing will come: the membership has changed, or it must stop.

    One for all groups of a rank (`Group.is_gone`).
    """

    store: MembershipStore
    should_stop: Callable[[], bool] = lambda: False
    epoch: int = 0

    def __call__(self, rank: int) -> bool:
        return not self.store.is_newest(self.epoch) or self.should_stop()


class GroupMember:
    """Follows the memberships of the store and gathers the records of each step.

    described    what all ranks must agree on (see `handshake.describe`)
    wake_others  wakes the ranks that sleep
    """

    def __init__(
        self,
        heap: SymmetricHeap,
        dispatcher: Dispatcher,
        lockstep: Lockstep,
        health: HealthMonitor,
        described: Mapping[str, str],
        *,
        wake_others: Callable[[], None] = lambda: None,
    ) -> None:
        # a view of the group for the records, apart from the dispatcher's: a rank that is late in a
        # layer may only be slow, one that is late here is removed
        control = Group(dispatcher.group.transport, is_gone=health)
        self.rank = control.rank
        self.membership = Membership(0)
        self._control = control
        self._heap = heap
        self._exchange = AllGather(control, heap.records, "records")
        self._dispatcher = dispatcher
        self._lockstep = lockstep
        self._health = health
        self._described = described
        text = repr(sorted(described.items())).encode()
        self._version = int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
        self._timeout_ms = dispatcher.timeouts.dispatch_ms
        self._wake_others = wake_others
        self._late: set[int] = set()

    @property
    def is_current(self) -> bool:
        """Return whether this rank goes by the newest membership."""
        return self._health.store.is_newest(self.membership.epoch)

    @property
    def missing(self) -> list[int]:
        """Return the ranks that do not belong to the group at present."""
        return sorted(set(range(self._control.num_ranks)) - self.membership.members)

    @property
    def _gather_ms(self) -> float:
        return GATHER_PATIENCE * self._dispatcher.timeouts.dispatch_ms

    @property
    def is_lowest(self) -> bool:
        """Return whether this is the lowest live rank."""
        return self.rank == min(self.membership.members, default=self.rank)

    @property
    def has_all_experts(self) -> bool:
        """Return whether the members have all experts between them."""
        balancer = self._dispatcher.balancer
        return not self.missing or (balancer is not None and balancer.serves)

    def join(self) -> None:
        """Become a member, ready to step. The others hear of it at once."""
        self._health.store.join(self.rank)
        self._wake_others()

    def adopt(self) -> None:
        """Go by the newest membership from here on.

        Raises GroupLost if this rank is not in it: it ends, and may come back as a new one; and
        HandshakeError if all ranks are in it but were started differently.
        """
        newest = self._health.store.newest()
        if self.rank not in newest.members:
            raise GroupLost(
                f"rank {self.rank} is no member of epoch {newest.epoch}: "
                f"{sorted(newest.members)} went on without it"
            )
        self.membership = newest
        self._health.epoch = newest.epoch
        self._late.clear()
        for group in (self._control, self._dispatcher.group):
            group.mask(self.missing)
        self._exchange.resume(newest.epoch * NUMBERS_PER_EPOCH + 1)
        self._lockstep.start_epoch()
        self._set_patience(1)
        if not self.missing:
            self._shake_hands()
        balancer = self._dispatcher.balancer
        if balancer is not None:
            deadline_ms = self._control.deadline(self._gather_ms)
            status = balancer.adopt(self.missing, newest.epoch, deadline_ms)
            if status.must_stop:
                self._note_late(status)

    def _shake_hands(self) -> None:
        try:
            shake_hands(
                self._control,
                self._heap.handshake,
                self._described,
                self._gather_ms,
                number=self.membership.epoch,
            )
        except CallFailed as error:
            self._note_late(error.status)

    def has_begun(self) -> bool:
        """Return whether another rank waits for this one's record."""
        return self._exchange.has_begun()

    def agree(self, record: RankRecord, *, is_asleep: bool) -> Decision | None:
        """Exchange records and return what the group does; None: look at the membership again.

        is_asleep  the group sleeps
        """
        balancer = self._dispatcher.balancer
        record = replace(
            record,
            balance=NOTHING_MOVES if balancer is None else balancer.report(),
            version=self._version,
            calls=self._dispatcher.num_calls,
            late=frozenset(self._late),
        )
        self._exchange.post(to_tensor(record, self._control.num_ranks))
        if is_asleep:
            self._wake_others()
        self._dispatcher.on_progress("the step", "gather of records")
        deadline_ms = self._control.deadline(self._gather_ms)
        found, status = self._exchange.collect(torch.int64, deadline_ms)
        self._dispatcher.on_progress("", "")
        if status.must_stop:
            self._note_late(status)
            return None
        records = {rank: from_tensor(values) for rank, values in found.items()}
        store = self._health.store
        if store.can_renew and self._exchange.num_in_epoch > RENEW_AFTER:
            if self.is_lowest:
                store.renew()
            return None  # all ranks find the new epoch before they compute
        decision = self._lockstep.decide(records)
        if isinstance(decision, Remove):
            self._remove(decision)
            return None
        reports = [record.balance for record in records.values()]
        if balancer is not None and balancer.must_wait(reports):
            return None
        if isinstance(decision, Step):
            self._prepare(decision)
            if balancer is not None:
                balancer.before_step(reports, self._control.deadline(self._gather_ms))
        return decision

    def _prepare(self, step: Step) -> None:
        """Trust all members again, also those that were late in the last step."""
        self._dispatcher.group.mask(self.missing)
        self._set_patience(step.patience)
        if step.renumber is not None:
            self._dispatcher.resume(step.renumber)

    def _set_patience(self, factor: int) -> None:
        self._dispatcher.timeouts.dispatch_ms = factor * self._timeout_ms

    def _note_late(self, status: CallStatus) -> None:
        """Remember who did not come, unless the wait ended because the membership changed."""
        if not self.is_current:
            return
        self._late.update(status.late)
        if status.late:
            logger.error("rank %d: %s", self.rank, status)

    def _remove(self, decision: Remove) -> None:
        """Let the lowest live rank commit the next membership, and wait for it."""
        if self.rank == decision.by:
            self._health.store.remove(decision.ranks, epoch=self.membership.epoch)
            logger.error("ranks %s are removed from the group", sorted(decision.ranks))
            self._wake_others()
        deadline_ms = self._control.deadline(self._gather_ms)
        while self.is_current and not self._health.should_stop():
            if self._control.transport.now_ms() >= deadline_ms:
                self._late.add(decision.by)
                self._control.suspects.add(decision.by)
                return
            self.pause(PAUSE_MS)

    def pause(self, timeout_ms: float) -> None:
        """Do nothing for a while, and let other ranks run."""
        transport = self._control.transport
        transport.signal_wait(self._heap.never.signal(0), 1, transport.now_ms() + timeout_ms)
