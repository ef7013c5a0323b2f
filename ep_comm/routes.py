"""Which way rows and sums go between ranks of one or several nodes, as one rank sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.config import ExchangeConfig, ExchangeRegions
from whalepod.ep_comm.group import Expected, Group
from whalepod.ep_comm.slots import Target, TransferId


class Routes:
    """This rank's place among the nodes.

    neighbours  the ranks of this node, this one included
    partners    other node -> the rank there with this rank's place: the two forward for each other
    """

    def __init__(self, group: Group, config: ExchangeConfig, regions: ExchangeRegions) -> None:
        self._group = group
        self._regions = regions
        self._topology = topology = config.topology
        self.node, self._index = topology.node_of(group.rank), topology.index_of(group.rank)
        self.neighbours = topology.ranks_of(self.node)
        self.partners = {
            v: topology.rank_at(v, self._index) for v in range(topology.num_nodes) if v != self.node
        }

    # -- the way to the experts ----------------------------------------------------------------

    def of_tokens(self, is_in_TR: Tensor) -> Iterator[tuple[Target, Tensor]]:
        """Yield where this rank's tokens go, and which, `[T]` bool: to the neighbours directly, and
        once to each other node."""
        for rank in self.neighbours:
            yield self.to_neighbour(rank, self._group.rank), is_in_TR[:, rank]
        if self.partners:
            is_on_TV = layout.nodes_hit(is_in_TR, self._topology.num_nodes)
            for v, partner in self.partners.items():
                yield self._to_partner(partner), is_on_TV[:, v]

    def to_neighbour(self, rank: int, source: int) -> Target:
        """Return where the rows of `source` go on a rank of this node."""
        return Target(rank, self._regions.rows, source)

    def expected_to_forward(self, transfer: TransferId) -> list[Expected]:
        slots = self._regions.forwarded
        assert slots is not None
        return [slots.expect(transfer, v, source, source) for v, source in self.partners.items()]

    def expected_rows(self, transfer: TransferId) -> list[Expected]:
        """Return the signals of all ranks' rows; a neighbour forwards those of other nodes."""
        ranks = range(self._topology.num_ranks)
        writers = [r if r in self.neighbours else self._forwarder(self.node, r) for r in ranks]
        return [self._regions.rows.expect(transfer, r, r, writers[r]) for r in ranks]

    # -- the way back --------------------------------------------------------------------------

    def of_results(self, source: int) -> Target:
        """Return where what the experts made of a source's rows goes: to the source, or to the rank
        of this node that adds up for it."""
        node = self._topology.node_of(source)
        if node == self.node:
            return self.to_owner(source)
        return self._to_reducer(self._forwarder(self.node, source), node)

    def to_owner(self, rank: int) -> Target:
        """Return where this rank's results, or its node's sums, for the tokens of `rank` go."""
        return Target(rank, self._regions.returned, self._group.rank)

    def expected_to_reduce(self, transfer: TransferId, node: int) -> list[Expected]:
        """Return the signals of the neighbours' results for the partner of another node, in order
        of neighbours."""
        slots = self._regions.reduced
        assert slots is not None
        return [
            slots.expect(transfer, self._place_to_reduce(node, index), rank, rank)
            for index, rank in enumerate(self.neighbours)
        ]

    def result_of(self, node: int, index: int) -> Target:
        """Return where the neighbour `index` puts results for the partner of a node, here."""
        assert self._regions.reduced is not None
        place = self._place_to_reduce(node, index)
        return Target(self._group.rank, self._regions.reduced, place)

    def expected_results(self, transfer: TransferId) -> list[Expected]:
        """Return the signals of those that send back, in the order in which they are added."""
        writers = [rank for v in range(self._topology.num_nodes) for rank in self.senders_of(v)]
        return [self._regions.returned.expect(transfer, r, r, r) for r in writers]

    def senders_of(self, node: int) -> list[int]:
        """Return the ranks that send this rank the results of a node."""
        return list(self.neighbours) if node == self.node else [self.partners[node]]

    # -- giving up -----------------------------------------------------------------------------

    def all_of_tokens(self) -> Iterator[Target]:
        """Yield every place in which others may wait for this rank's rows, or for those that it
        forwards."""
        for rank in self._hearers(self.neighbours):
            for source in (self._group.rank, *self.partners.values()):
                yield self.to_neighbour(rank, source)
        for partner in self._hearers(self.partners.values()):
            yield self._to_partner(partner)

    def all_of_results(self) -> Iterator[Target]:
        """Yield every place in which others may wait for this rank's results."""
        for rank in self._hearers(self.neighbours):
            yield self.to_owner(rank)
            for v in self.partners:
                yield self._to_reducer(rank, v)
        for partner in self._hearers(self.partners.values()):
            yield self.to_owner(partner)

    # -- inside --------------------------------------------------------------------------------

    def _hearers(self, ranks: Iterable[int]) -> list[int]:
        return sorted(set(self._group.hearers()).intersection(ranks))

    def _forwarder(self, node: int, source: int) -> int:
        return self._topology.rank_at(node, self._topology.index_of(source))

    def _to_partner(self, rank: int) -> Target:
        assert self._regions.forwarded is not None
        return Target(rank, self._regions.forwarded, self.node)

    def _to_reducer(self, rank: int, node: int) -> Target:
        assert self._regions.reduced is not None
        return Target(rank, self._regions.reduced, self._place_to_reduce(node, self._index))

    def _place_to_reduce(self, node: int, index: int) -> int:
        """Return the place of (source node, rank of this node)."""
        return node * self._topology.ranks_per_node + index
