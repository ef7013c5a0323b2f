"""Which way rows and sums go between ranks of one or several nodes, as one rank sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.lane import Lane, Turn
from whalepod.ep_comm.modes.throughput_config import ThroughputConfig, ThroughputRegions


class Route(NamedTuple):
    """Tokens `[T]` bool that go to a place of a lane on `rank`."""

    rank: int
    lane: Lane
    place: int
    is_member_T: Tensor


class Routes:
    """This rank's place among the nodes.

    neighbours  the ranks of this node, this one included
    partners    other node -> the rank there with this rank's place: the two forward for each other
    """

    def __init__(self, group: Group, config: ThroughputConfig, regions: ThroughputRegions) -> None:
        self._group = group
        self._regions = regions
        self._topology = topology = config.topology
        self.node, self._index = topology.node_of(group.rank), topology.index_of(group.rank)
        self.neighbours = topology.ranks_of(self.node)
        self.partners = {
            v: topology.rank_at(v, self._index) for v in range(topology.num_nodes) if v != self.node
        }

    def of_tokens(self, is_in_TR: Tensor) -> Iterator[Route]:
        """Yield where this rank's tokens go: to the neighbours directly, and once to each other
        node."""
        for rank in self.neighbours:
            yield Route(rank, self._regions.rows, self._group.rank, is_in_TR[:, rank])
        is_on_TV = layout.nodes_hit(is_in_TR, self._topology.num_nodes)
        for v, partner in self.partners.items():
            yield Route(partner, self._regions.forwarded, self.node, is_on_TV[:, v])

    def of_sums(self, source: int) -> tuple[int, Lane, int]:
        """Return where the expert rows of a source's tokens go: (rank, lane, place there)."""
        node = self._topology.node_of(source)
        if node == self.node:
            return source, self._regions.returned, self._group.rank
        relay = self._topology.rank_at(self.node, self._topology.index_of(source))
        return relay, self._regions.reduced, self.place_to_reduce(node, self._index)

    def writer_for(self, source: int) -> int:
        """Return the rank that puts the rows of `source` into this rank's heap."""
        if source in self.neighbours:
            return source
        return self._topology.rank_at(self.node, self._topology.index_of(source))

    def place_to_reduce(self, node: int, index: int) -> int:
        """Return the place of (source node, rank of this node) in the `reduced` lane."""
        return node * self._topology.ranks_per_node + index

    def give_up_dispatch(self, turn: Turn) -> None:
        """Tell all who would wait for this rank's rows, or for those it forwards."""
        me, group, hearers = self._group.rank, self._group, set(self._group.hearers())
        for rank in sorted(hearers & set(self.neighbours)):
            for source in (me, *self.partners.values()):
                self._regions.rows.give_up(group, rank, turn, source)
        for partner in sorted(hearers & set(self.partners.values())):
            self._regions.forwarded.give_up(group, partner, turn, self.node)

    def give_up_combine(self, turn: Turn) -> None:
        """Tell all who would wait for this rank's sums."""
        me, group, hearers = self._group.rank, self._group, set(self._group.hearers())
        for rank in sorted(hearers & set(self.neighbours)):
            self._regions.returned.give_up(group, rank, turn, me)
            for v in self.partners:
                place = self.place_to_reduce(v, self._index)
                self._regions.reduced.give_up(group, rank, turn, place)
        for partner in sorted(hearers & set(self.partners.values())):
            self._regions.returned.give_up(group, partner, turn, me)
