"""Which ranks run on this machine, and where all machines of a group meet.

The answer comes from flags, from `torchrun`, or from a Kubernetes LeaderWorkerSet; the caller
gives the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from whalepod.server.config import NodesConfig
from whalepod.server.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """The part of one launcher in a group that has several.

    first_rank      its ranks are this one and those after it
    num_local       how many
    num_ranks       of the group
    ranks_per_node  of one machine; more than `num_local` where torchrun starts each by itself
    address, port   of the store where all meet
    hosts_store     this launcher opens the store for the others
    attempt         tells this start from earlier ones that used the same store
    timeout_s       how long it waits for the others
    source          where all this is from, for people
    """

    first_rank: int
    num_local: int
    num_ranks: int
    ranks_per_node: int
    address: str = ""
    port: int = 0
    hosts_store: bool = False
    attempt: str = "0"
    timeout_s: float = 0.0
    source: str = ""

    @property
    def ranks(self) -> range:
        """Return the ranks that this launcher starts."""
        return range(self.first_rank, self.first_rank + self.num_local)

    def launcher_of(self, rank: int) -> int:
        """Return who starts a rank: launchers go by their first ranks."""
        return rank - rank % self.num_local

    @property
    def is_leader(self) -> bool:
        """Return whether requests come in here."""
        return self.first_rank == 0

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    @property
    def num_launchers(self) -> int:
        return self.num_ranks // self.num_local

    @property
    def is_spread(self) -> bool:
        """Return whether other launchers start ranks, too."""
        return self.num_launchers > 1


def plan_of_one(num_ranks: int) -> NodePlan:
    """Return the plan of a launcher that starts all ranks."""
    return NodePlan(
        first_rank=0, num_local=num_ranks, num_ranks=num_ranks, ranks_per_node=num_ranks
    )


def plan_nodes(
    config: NodesConfig, num_ranks: int, environment: Mapping[str, str]
) -> NodePlan | None:
    """Return this launcher's part; None if it is the only one.

    Flags win over torchrun, and torchrun over a LeaderWorkerSet. Raises StartupError.
    """
    if config.num_nodes > 1:
        if config.master_address is None:
            raise StartupError(
                f"--num-nodes {config.num_nodes} needs --master-address: the address of machine 0 "
                "that the others reach"
            )
        return _plan_of(config, num_ranks, "--num-nodes")
    if int(_number(environment, "WORLD_SIZE", "1")) > 1:
        return _plan_of_torchrun(config, num_ranks, environment)
    if int(_number(environment, "LWS_GROUP_SIZE", "1")) > 1:
        return _plan_of_leader_worker_set(config, num_ranks, environment)
    return None


def _plan_of(config: NodesConfig, num_ranks: int, source: str) -> NodePlan:
    num_nodes, address = config.num_nodes, config.master_address
    assert address is not None
    if num_ranks % num_nodes or num_ranks < num_nodes:
        raise StartupError(
            f"--expert-parallel-size {num_ranks} cannot be spread over {num_nodes} machines "
            f"({source}): choose a multiple of {num_nodes}"
        )
    num_local = num_ranks // num_nodes
    return NodePlan(
        first_rank=config.node_rank * num_local,
        num_local=num_local,
        num_ranks=num_ranks,
        ranks_per_node=num_local,
        address=address,
        port=config.master_port,
        hosts_store=config.node_rank == 0,
        timeout_s=config.rendezvous_timeout_s,
        source=source,
    )


def _plan_of_torchrun(
    config: NodesConfig, num_ranks: int, environment: Mapping[str, str]
) -> NodePlan:
    """Read what torchrun sets for each process: one process is one rank."""
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if world_size != num_ranks:
        raise StartupError(
            f"torchrun starts {world_size} processes and --expert-parallel-size is {num_ranks}: "
            "give both the same number"
        )
    ranks_per_node = _number(environment, "LOCAL_WORLD_SIZE", "1")
    if world_size % ranks_per_node:
        raise StartupError(
            f"torchrun starts {ranks_per_node} of {world_size} processes here: every machine needs "
            "as many"
        )
    has_agents_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return NodePlan(
        first_rank=rank,
        num_local=1,
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        address=_text(environment, "MASTER_ADDR"),
        port=_number(environment, "MASTER_PORT"),
        hosts_store=rank == 0 and not has_agents_store,
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        timeout_s=config.rendezvous_timeout_s,
        source="torchrun",
    )


def _plan_of_leader_worker_set(
    config: NodesConfig, num_ranks: int, environment: Mapping[str, str]
) -> NodePlan:
    """Read what a LeaderWorkerSet sets in each pod: one pod is one machine."""
    nodes = NodesConfig(
        num_nodes=_number(environment, "LWS_GROUP_SIZE"),
        node_rank=_number(environment, "LWS_WORKER_INDEX"),
        master_address=_text(environment, "LWS_LEADER_ADDRESS"),
        master_port=config.master_port,
        rendezvous_timeout_s=config.rendezvous_timeout_s,
    )
    return _plan_of(nodes, num_ranks, "LeaderWorkerSet")


def _text(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name)
    if not value:
        raise StartupError(
            f"{name} is not set, although the environment names a group: start all machines by "
            "torchrun or a LeaderWorkerSet, or use --num-nodes"
        )
    return value


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default) if default is not None else _text(environment, name)
    if text is None or not text.isdigit():
        raise StartupError(f"{name} must be a whole number, the environment says {text!r}")
    return int(text)
