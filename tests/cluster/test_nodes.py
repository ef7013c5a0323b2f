"""Who starts which ranks: flags, torchrun, a LeaderWorkerSet; and what carries rows then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whalepod.server.choices import can_return, choose_transport
from whalepod.server.cluster.build_rank import settle
from whalepod.server.cluster.node_plan import plan_nodes, plan_of_one
from whalepod.server.cluster.rank_assignment import RankAssignment
from whalepod.server.config import DeviceConfig, EngineConfig, NodesConfig, ParallelConfig
from whalepod.server.errors import StartupError

FLAGS = NodesConfig(num_nodes=2, node_rank=1, master_address="10.0.0.1", master_port=4000)
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
LEADER_WORKER_SET = {
    "LWS_LEADER_ADDRESS": "pods-0.pods.default",
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
}


def test_one_machine_needs_no_plan() -> None:
    assert plan_nodes(NodesConfig(), 4, {}) is None
    assert plan_nodes(NodesConfig(), 1, {"WORLD_SIZE": "1", "LWS_GROUP_SIZE": "1"}) is None


def test_flags_give_each_machine_its_ranks() -> None:
    plan = plan_nodes(FLAGS, 4, {})
    assert plan is not None
    assert list(plan.ranks) == [2, 3]
    assert (plan.num_nodes, plan.ranks_per_node, plan.is_leader) == (2, 2, False)
    assert (plan.address, plan.port, plan.hosts_store) == ("10.0.0.1", 4000, False)
    first = plan_nodes(replace(FLAGS, node_rank=0), 4, {})
    assert first is not None
    assert first.is_leader
    assert first.hosts_store


def test_torchrun_starts_one_rank_per_process_and_may_hold_the_store() -> None:
    plan = plan_nodes(NodesConfig(), 4, TORCHRUN)
    assert plan is not None
    assert list(plan.ranks) == [3]
    assert (plan.ranks_per_node, plan.num_nodes, plan.attempt) == (2, 2, "2")
    first = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}
    with_agent = plan_nodes(NodesConfig(), 4, first)
    alone = plan_nodes(NodesConfig(), 4, first | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert with_agent is not None
    assert alone is not None
    assert (with_agent.hosts_store, alone.hosts_store) == (False, True)


def test_a_pod_of_a_leader_worker_set_is_a_machine() -> None:
    plan = plan_nodes(NodesConfig(master_port=4000), 4, LEADER_WORKER_SET)
    assert plan is not None
    assert list(plan.ranks) == [2, 3]
    assert (plan.address, plan.port) == ("pods-0.pods.default", 4000)
    assert plan.source == "LeaderWorkerSet"


def test_flags_win_over_torchrun_and_torchrun_over_a_leader_worker_set() -> None:
    both = TORCHRUN | LEADER_WORKER_SET
    sources = [plan_nodes(nodes, 4, both) for nodes in (FLAGS, NodesConfig())]
    assert [plan.source for plan in sources if plan] == ["--num-nodes", "torchrun"]


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "environment", "says"),
    [
        (replace(FLAGS, master_address=None), 4, {}, "--num-nodes 2 needs --master-address"),
        (FLAGS, 3, {}, "3 cannot be spread over 2 machines"),
        (FLAGS, 1, {}, "1 cannot be spread over 2 machines"),
        (NodesConfig(), 2, TORCHRUN, "torchrun starts 4 processes and .* is 2"),
        (NodesConfig(), 4, TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, "every machine needs as many"),
        (NodesConfig(), 4, TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        (NodesConfig(), 4, TORCHRUN | {"RANK": "x"}, "RANK must be a whole number"),
        (NodesConfig(), 3, LEADER_WORKER_SET, "3 cannot be spread .*LeaderWorkerSet"),
    ],
)
def test_what_does_not_fit_together_is_one_sentence(
    nodes: NodesConfig, num_ranks: int, environment: dict[str, str], says: str
) -> None:
    with pytest.raises(StartupError, match=says):
        plan_nodes(nodes, num_ranks, environment)


def test_each_life_of_a_rank_records_to_a_file_of_its_own() -> None:
    config = EngineConfig(record="F", parallel=ParallelConfig(expert_parallel_size=2))
    names = []
    for life in range(3):
        assignment = RankAssignment(
            rank=1, plan=plan_of_one(2), transport="shm", folder="", event_fds=(), life=life,
            engine=config,
        )  # fmt: skip
        names.append(settle(assignment).record)
    assert names == ["F.rank1", "F.rank1.1", "F.rank1.2"]


def engine(device: str, backend: str) -> EngineConfig:
    return EngineConfig(
        device=DeviceConfig(device=device),  # type: ignore[arg-type]
        parallel=ParallelConfig(expert_parallel_size=4, all2all_backend=backend),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("device", "num_launchers", "chosen"),
    [("cpu", 1, "shm"), ("cpu", 2, "gloo"), ("cuda", 1, "cuda_ipc"), ("cuda", 2, "nvshmem")],
)
def test_the_transport_follows_from_where_ranks_are(
    device: str, num_launchers: int, chosen: str
) -> None:
    assert choose_transport(engine(device, "auto"), num_launchers=num_launchers) == chosen
    assert can_return("shm")
    assert not can_return("gloo")


@pytest.mark.parametrize(
    ("device", "backend", "num_launchers", "chosen"),
    [("cpu", "gloo", 1, "gloo"), ("cuda", "nvshmem", 1, "nvshmem"), ("cuda", "gloo", 2, "gloo")],
)
def test_a_transport_can_be_forced(
    device: str, backend: str, num_launchers: int, chosen: str
) -> None:
    assert choose_transport(engine(device, backend), num_launchers=num_launchers) == chosen


@pytest.mark.parametrize(
    ("device", "backend", "num_launchers", "says"),
    [
        ("cpu", "shm", 2, "shm reaches ranks of one .* use gloo"),
        ("cuda", "cuda_ipc", 3, "3 processes start ranks: use nvshmem"),
        ("cpu", "nvshmem", 1, "nvshmem needs --device cuda"),
    ],
)
def test_a_transport_that_does_not_reach_all_ranks_is_refused(
    device: str, backend: str, num_launchers: int, says: str
) -> None:
    with pytest.raises(StartupError, match=says):
        choose_transport(engine(device, backend), num_launchers=num_launchers)
