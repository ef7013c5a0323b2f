"""The queue of sequences that wait for a slot and for blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice
from operator import attrgetter

from whalepod.scheduler.request import Sequence

# Candidates of a class that are compared by cached prefix: bounds the work of one admission.
WINDOW = 32


def _place(sequence: Sequence) -> tuple[bool, int, int]:
    """Preempted sequences first, then by age."""
    _, arrival, index = sequence.order
    return (not sequence.was_preempted, arrival, index)


class WaitingQueue:
    """Waiting sequences by class of priority, preempted ones at the head, then by age."""

    def __init__(self, max_skips: int) -> None:
        self._max_skips = max_skips
        self._classes: dict[int, list[Sequence]] = {}
        self._priorities: list[int] = []

    def __len__(self) -> int:
        return sum(len(members) for members in self._classes.values())

    @property
    def first_priority(self) -> int:
        """The lowest number of all that wait; at least one does."""
        return self._priorities[0]

    def __iter__(self) -> Iterator[Sequence]:
        for priority in self._priorities:
            yield from self._classes[priority]

    def add(self, sequence: Sequence) -> None:
        priority = sequence.request.priority
        members = self._classes.get(priority)
        if members is None:
            members = self._classes[priority] = []
            insort(self._priorities, priority)
        insort(members, sequence, key=_place)

    def remove(self, sequence: Sequence) -> None:
        priority = sequence.request.priority
        members = self._classes[priority]
        index = bisect_left(members, _place(sequence), key=_place)
        assert members[index] is sequence, f"sequence {sequence.sequence_id} does not wait"
        del members[index]
        if not members:
            del self._classes[priority]
            self._priorities.remove(priority)

    def choose(self, num_cached: Callable[[Sequence], int]) -> Sequence | None:
        """Pick the sequence to admit next: of the first class where one may start, the longest
        cached prefix, unless the oldest was preempted or overtaken often enough."""
        for priority in self._priorities:
            ready = filter(attrgetter("may_start"), self._classes[priority])
            candidates = list(islice(ready, WINDOW))
            if not candidates:
                continue
            oldest = candidates[0]
            if len(candidates) == 1 or oldest.was_preempted or oldest.num_skips >= self._max_skips:
                return oldest
            return max(candidates, key=num_cached)  # of equals the oldest
        return None

    def note_admission(self, sequence: Sequence) -> None:
        """Remove a sequence and count it against the older ones that it overtook."""
        members = self._classes[sequence.request.priority]
        place = bisect_left(members, _place(sequence), key=_place)
        for older in members[:place]:
            older.skip()
        self.remove(sequence)
