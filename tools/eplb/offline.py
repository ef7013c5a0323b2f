"""`whalepod eplb plan` and `simulate`: placements for recorded loads, without a server."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from whalepod.ep_comm.eplb.placement import Slots, balancedness
from whalepod.ep_comm.eplb.plan import plan_placement
from whalepod.ep_comm.eplb.policy import Ints, Loads, rebalance_experts
from whalepod.ep_comm.eplb.simulate import SimulationConfig, simulate
from whalepod.ep_comm.eplb.trace import read_header, read_trace
from whalepod.tools.eplb.files import (
    Placement,
    as_json,
    check_fit,
    read_loads,
    read_placement,
)
from whalepod.tools.eplb.pictures import plot, write_svg
from whalepod.tools.flags import require_positive
from whalepod.tools.table import format_bytes, format_table

Policy = Literal["none", "published", "kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    loads: Annotated[Path, "trace of loads, or JSON: a list of loads for each layer"]
    num_ranks: Annotated[int, "ranks that the experts are spread over"]
    num_redundant_experts: Annotated[int, "slots for replicas, over all ranks"] = 0
    num_nodes: Annotated[int, "machines of the ranks"] = 1
    num_groups: Annotated[int, "groups of experts that stay on a machine; 0: the trace says"] = 0
    window: Annotated[int, "records of a trace that count, from its end"] = 1
    current: Annotated[Path | None, "placement to move from; none: experts in turn"] = None
    dead: Annotated[tuple[int, ...], "ranks without capacity"] = ()
    min_gain: Annotated[float, "how much balance must rise for a layer to change"] = 0.0
    published: Annotated[bool, "the published placement as it is, whatever it moves"] = False
    expert_size_bytes: Annotated[int, "bytes of one expert of one layer, to count what moves"] = 0
    out: Annotated[Path | None, "write the placement, in the published form"] = None
    json: Annotated[bool, "print JSON instead of sentences"] = False

    def __post_init__(self) -> None:
        require_positive(self, "num_ranks", "num_nodes", "window")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig:
    trace: Annotated[Path, "trace of loads"]
    num_ranks: Annotated[int, "ranks that the experts are spread over"]
    num_redundant_experts: Annotated[tuple[int, ...], "slots for replicas, a run for each"] = (0,)
    policies: Annotated[
        tuple[Policy, ...],
        "none: experts stay in turn; published: as published; kept: little moves, a run for each",
    ] = ("none", "published", "kept")
    windows: Annotated[tuple[int, ...], "records that a plan looks at, a run for each"] = (1,)
    intervals: Annotated[tuple[int, ...], "records between two plans, a run for each"] = (1,)
    min_gain: Annotated[float, "how much balance must rise for a layer to change (kept)"] = 0.0
    num_nodes: Annotated[int, "machines of the ranks"] = 1
    num_groups: Annotated[int, "groups of experts that stay on a machine; 0: the trace says"] = 0
    expert_size_bytes: Annotated[int, "bytes of one expert of one layer, to count what moves"] = 0
    out: Annotated[Path | None, "write a plot of balance over steps: .svg or .html"] = None
    json: Annotated[bool, "print one JSON object instead of a table"] = False

    def __post_init__(self) -> None:
        require_positive(self, "num_ranks", "num_nodes", "windows", "intervals")


def plan(config: PlanConfig) -> int:
    """Plan where experts should lie, given their loads: balance before and after, what moves."""
    load_LE, groups = read_loads(config.loads, config.window)
    slots = Slots(
        num_experts=load_LE.shape[1],
        num_physical=load_LE.shape[1] + config.num_redundant_experts,
        num_ranks=config.num_ranks,
        num_groups=config.num_groups or groups,
        num_nodes=config.num_nodes,
    )
    before_LP = _current(config, slots, load_LE)
    if config.published:
        sizes = slots.num_physical, slots.num_groups, slots.num_nodes, slots.num_ranks
        after_LP = rebalance_experts(load_LE, *sizes).phy2log_LP
    else:
        after_LP = plan_placement(
            before_LP, load_LE, slots, dead=config.dead, min_gain=config.min_gain
        )
    moves = count_moves(before_LP, after_LP, slots)
    found: dict[str, Any] = {
        "before": balancedness(before_LP, load_LE, slots.num_ranks).tolist(),
        "after": balancedness(after_LP, load_LE, slots.num_ranks).tolist(),
        "num_slots": int(after_LP.size),
        **moves,
        "bytes_between_ranks": (moves["num_same_node"] + moves["num_other_node"])
        * config.expert_size_bytes,
    }
    placement = as_json(Placement(after_LP, slots.num_ranks), slots.num_experts)
    if config.out is not None:
        config.out.write_text(json.dumps(placement) + "\n", encoding="utf-8")
    print(json.dumps(found | {"placement": placement}) if config.json else _sentences(found))
    return 0


def simulate_trace(config: SimulateConfig) -> int:
    """Replay a trace: how even loads would have been, and what would have moved.

    Each record is judged by a placement that was made from records before it.
    """
    header, records = read_header(config.trace), list(read_trace(config.trace))
    if len(records) < 2:
        raise ValueError(f"{config.trace} holds {len(records)} records: at least two are needed")
    runs, lines = [], {}
    for redundant, policy, window, interval in _settings(config):
        slots = Slots(
            num_experts=header.num_experts,
            num_physical=header.num_experts + redundant,
            num_ranks=config.num_ranks,
            num_groups=config.num_groups or header.num_groups,
            num_nodes=config.num_nodes,
        )
        how = SimulationConfig(
            window=window,
            interval=0 if policy == "none" else interval,
            min_gain=config.min_gain,
            keeps_slots=policy != "published",
        )
        steps = list(simulate(records, slots, how))
        balance = np.array([step.balancedness_L for step in steps])[1:]  # the first had no plan
        moved = sum(step.num_moved for step in steps)
        name = f"{policy}, {slots.num_physical} slots, window {window}, interval {interval}"
        lines[name] = [(float(s.step), float(s.balancedness_L.mean())) for s in steps]
        runs.append({
            "policy": policy, "num_slots": slots.num_physical, "window": window,
            "interval": interval, "mean_balance": float(balance.mean()),
            "least_balance": float(balance.min()), "slots_changed": moved,
            "bytes_changed": moved * config.expert_size_bytes,
        })  # fmt: skip
    if config.out is not None:
        title = f"{config.trace.name}: balance of {config.num_ranks} ranks, mean of all layers"
        write_svg(config.out, plot(lines, title), title)
    settings = {name: value for name, value in asdict(config).items() if name != "json"}
    if config.json:
        print(json.dumps({"settings": settings, "runs": runs}, default=str))
    else:
        print(_runs_table(runs, has_bytes=bool(config.expert_size_bytes)))
    return 0


def count_moves(before_LP: Ints, after_LP: Ints, slots: Slots) -> dict[str, int]:
    """Count the slots that get another expert, by where its bytes come from."""
    per_node = slots.per_rank * slots.ranks_per_node
    counts = dict.fromkeys(("num_same_rank", "num_same_node", "num_other_node"), 0)
    for before_P, after_P in zip(before_LP, after_LP, strict=True):
        for slot in np.flatnonzero((before_P != after_P) & (after_P >= 0)).tolist():
            held = np.flatnonzero(before_P == after_P[slot])
            if (held // slots.per_rank == slot // slots.per_rank).any():
                counts["num_same_rank"] += 1
            elif (held // per_node == slot // per_node).any():
                counts["num_same_node"] += 1
            else:  # another machine's, or the checkpoint's
                counts["num_other_node"] += 1
    return {"num_changed": sum(counts.values()), **counts}


def _current(config: PlanConfig, slots: Slots, load_LE: Loads) -> Ints:
    if config.current is None:
        return np.tile(slots.first(), (len(load_LE), 1))
    current = read_placement(config.current, config.num_ranks)
    check_fit(current, load_LE)
    if current.slots_LP.shape[1] != slots.num_physical:
        raise ValueError(
            f"{config.current} has {current.slots_LP.shape[1]} slots, {slots.num_experts} experts "
            f"and --num-redundant-experts {config.num_redundant_experts} make {slots.num_physical}"
        )
    return current.slots_LP


def _settings(config: SimulateConfig) -> Iterator[tuple[int, Policy, int, int]]:
    """Yield the runs; experts that stay need one for each number of slots only."""
    every = itertools.product(
        config.num_redundant_experts, config.policies, config.windows, config.intervals
    )
    for redundant, policy, window, interval in every:
        is_first = (window, interval) == (config.windows[0], config.intervals[0])
        if policy != "none" or is_first:
            yield redundant, policy, window, interval


def _sentences(found: dict[str, Any]) -> str:
    lines = [
        f"{title}: balance {np.mean(values):.3f}, least {min(values):.3f} of {len(values)} layers"
        for title, values in (("before", found["before"]), ("after", found["after"]))
    ]
    lines.append(
        f"{found['num_changed']} of {found['num_slots']} slots change: {found['num_same_rank']} "
        f"from the same rank, {found['num_same_node']} from its machine, "
        f"{found['num_other_node']} from elsewhere"
    )
    if found["bytes_between_ranks"]:
        lines.append(f"{format_bytes(found['bytes_between_ranks'])} go between ranks")
    return "\n".join(lines)


def _runs_table(runs: list[dict[str, Any]], *, has_bytes: bool) -> str:
    rows = [["policy", "slots", "window", "interval", "balance", "least", "slots changed"]]
    for run in runs:
        rows.append([
            run["policy"], str(run["num_slots"]), str(run["window"]), str(run["interval"]),
            f"{run['mean_balance']:.3f}", f"{run['least_balance']:.3f}",
            f"{run['slots_changed']:,}",
        ])  # fmt: skip
        if has_bytes:
            rows[-1].append(format_bytes(run["bytes_changed"]))
    if has_bytes:
        rows[0].append("bytes")
    return format_table(rows, numeric=True)
