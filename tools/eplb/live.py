"""`whalepod eplb show`, `apply` and `record`: the experts of a server that runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from whalepod.ep_comm.eplb.placement import balancedness, count_replicas, rank_loads
from whalepod.ep_comm.eplb.policy import Loads
from whalepod.ep_comm.eplb.trace import TraceHeader, TraceRecord, TraceWriter
from whalepod.tools.client import DEFAULT_URL, Client, ClientError, error_message
from whalepod.tools.eplb.files import (
    Placement,
    check_fit,
    placement_of,
    read_loads,
    read_placement,
)
from whalepod.tools.eplb.pictures import write_heat_map
from whalepod.tools.table import format_table

_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowConfig:
    url: Annotated[str, "the server to ask, where no files are given"] = DEFAULT_URL
    api_key: Annotated[str | None, "its key, if it asks for one"] = None
    placement: Annotated[Path | None, "show this placement; goes with --loads"] = None
    loads: Annotated[Path | None, "trace of loads, or JSON"] = None
    window: Annotated[int, "records of a trace that count, from its end"] = 1
    num_ranks: Annotated[int, "ranks of the placement; 0: its file says"] = 0
    out: Annotated[Path | None, "write a heat map, layers by slots: .png, .svg or .html"] = None
    watch_s: Annotated[float, "show again after this many seconds, until Ctrl-C; 0: once"] = 0.0
    json: Annotated[bool, "print JSON instead of a table"] = False

    def __post_init__(self) -> None:
        if (self.placement is None) != (self.loads is None):
            raise ValueError("--placement and --loads go together: neither asks a server")
        if self.window < 1 or self.watch_s < 0:
            raise ValueError(
                f"window ({self.window}) must be at least 1, watch ({self.watch_s:g}) 0 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyConfig:
    admin_url: Annotated[str, "address of the server's admin port"]
    placement: Annotated[
        Path | None, "placement to go to, as `plan` writes it; none: as the loads say"
    ] = None
    admin_key: Annotated[str | None, "key of the admin routes"] = None
    num_ranks: Annotated[int, "ranks of the placement; 0: its file says"] = 0
    wait_s: Annotated[
        float, "wait this long for the experts to be there; they move while requests run"
    ] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordConfig:
    out: Annotated[Path, "trace to write; it must not exist"]
    url: Annotated[str, "the server to ask"] = DEFAULT_URL
    api_key: Annotated[str | None, "its key, if it asks for one"] = None
    interval_s: Annotated[float, "seconds between two looks; only new loads are written"] = 2.0
    num_records: Annotated[int, "end after this many records; 0: at Ctrl-C"] = 0
    num_groups: Annotated[int, "groups of experts of the router"] = 1

    def __post_init__(self) -> None:
        if self.interval_s <= 0 or self.num_records < 0 or self.num_groups < 1:
            raise ValueError(
                f"interval ({self.interval_s:g}) must be above 0, num_records "
                f"({self.num_records}) at least 0, num_groups ({self.num_groups}) at least 1"
            )


def show(config: ShowConfig) -> int:
    """Show where experts lie, and how evenly their loads are spread over the ranks.

    Asks a running server, or reads files. A heat map has a cell for each slot of each layer.
    """
    with Client(config.url, config.api_key) as client, suppress(KeyboardInterrupt):
        while True:
            placement, load_LE, plans = _what_to_show(config, client)
            check_fit(placement, load_LE)
            if config.out is not None:
                write_heat_map(config.out, placement, load_LE, _headline(placement, load_LE))
            if config.json:
                print(json.dumps(_as_json(placement, load_LE, plans)), flush=True)
            else:
                print(describe(placement, load_LE, plans), flush=True)
            if not config.watch_s:
                break
            time.sleep(config.watch_s)
    return 0


def apply(config: ApplyConfig) -> int:
    """Have a running server move its experts to a placement.

    The exit code is 1 if they are not there after --wait; it moves them while it serves requests.
    """
    wanted = None
    if config.placement is not None:
        wanted = read_placement(config.placement, config.num_ranks).slots_LP.tolist()
    with Client(config.admin_url, config.admin_key) as client:
        answer = client.post("/experts", {"slots": wanted})
        if answer.status_code != 200:
            raise ClientError(error_message(answer))
        if wanted is None or not config.wait_s:
            print("asked for: experts move with the next steps")
            return 0
        if _wait(lambda: _admin_slots(client) == wanted, config.wait_s):
            print("every expert is where it was wanted")
            return 0
    print(f"not there after {config.wait_s:g} s: do requests run, does the server's log complain?")
    return 1


def record(config: RecordConfig) -> int:
    """Write the loads of a running server to a trace, for `plan` and `simulate`.

    A server writes one itself with --eplb-trace; this one needs no restart.
    """
    num_written = 0
    with (
        Client(config.url, config.api_key) as client,
        config.out.open("xb") as file,
        suppress(KeyboardInterrupt),
    ):
        for one in _new_loads(client, config.interval_s):
            if not num_written:
                layers, experts = one.loads_LE.shape
                sizes = {"num_layers": layers, "num_experts": experts}
                writer = TraceWriter(file, TraceHeader(**sizes, num_groups=config.num_groups))
            writer.write(one)
            num_written += 1
            if num_written == config.num_records:
                break
    print(f"{config.out}: {num_written} records")
    return 0


def describe(placement: Placement, load_LE: Loads, plans: list[list[float]]) -> str:
    """Return a table of the layers, and what the last placements brought."""
    load_LD = rank_loads(placement.slots_LP, load_LE, placement.num_ranks)
    balance_L = balancedness(placement.slots_LP, load_LE, placement.num_ranks)
    count_LE = count_replicas(placement.slots_LP, load_LE.shape[1])
    rows = [["layer", "balance", "heaviest rank", "lightest rank", "hottest expert", "replicas"]]
    alive = np.flatnonzero(placement.is_alive_D)
    for layer, load_D in enumerate(load_LD):
        mean, total = max(load_D[alive].mean(), 1e-9), max(load_LE[layer].sum(), 1e-9)
        hot, most, least = load_LE[layer].argmax(), load_D.argmax(), alive[load_D[alive].argmin()]
        rows.append([
            str(layer), f"{balance_L[layer]:.3f}", f"{most} ({load_D[most] / mean:.2f})",
            f"{least} ({load_D[least] / mean:.2f})",
            f"{hot} ({load_LE[layer, hot] / total:.1%})", str(count_LE[layer, hot]),
        ])  # fmt: skip
    lines = [_headline(placement, load_LE), "", format_table(rows, numeric=True)]
    for step, before, after, num_changes in plans[-3:]:
        lines.append(
            f"placed at step {step}: balance {before:.3f} -> {after:.3f}, {num_changes} slots"
        )
    return "\n".join(lines)


def _headline(placement: Placement, load_LE: Loads) -> str:
    balance_L = balancedness(placement.slots_LP, load_LE, placement.num_ranks)
    num_slots, num_empty = placement.slots_LP.shape[1], int((placement.slots_LP < 0).sum())
    empty = f" ({num_empty} empty)" if num_empty else ""
    return (
        f"{load_LE.shape[1]} experts in {num_slots} slots{empty} of {placement.num_ranks} ranks, "
        f"{len(load_LE)} layers: balance {balance_L.mean():.3f}, least {balance_L.min():.3f}"
    )


def _as_json(placement: Placement, load_LE: Loads, plans: list[list[float]]) -> dict[str, Any]:
    slots_LP, num_ranks = placement
    return {
        "num_ranks": num_ranks,
        "slots": slots_LP.tolist(),
        "tokens": load_LE.tolist(),
        "rank_loads": rank_loads(slots_LP, load_LE, num_ranks).tolist(),
        "balancedness": balancedness(slots_LP, load_LE, num_ranks).tolist(),
        "plans": plans,
    }


def _what_to_show(config: ShowConfig, client: Client) -> tuple[Placement, Loads, list[list[float]]]:
    if config.placement is not None and config.loads is not None:
        load_LE, _ = read_loads(config.loads, config.window)
        return read_placement(config.placement, config.num_ranks), load_LE, []
    told = _experts(client)
    if not told["tokens"]:
        raise ClientError(f"{client.url} has counted no loads yet: ask again after some requests")
    return placement_of(told, 0, client.url), np.asarray(told["tokens"]), told["plans"]


def _experts(client: Client) -> dict[str, Any]:
    """Return what a server tells of its experts. Raises ClientError if they do not move there."""
    found = _get(client, "/cluster").get("experts")
    if not found:
        raise ClientError(
            f"{client.url} tells of no experts: it serves without --enable-eplb, or has not begun"
        )
    return dict(found)


def _new_loads(client: Client, interval_s: float) -> Iterator[TraceRecord]:
    """Yield loads that differ from those before."""
    last, last_step = None, 0
    while True:
        status = _get(client, "/cluster")
        tokens = (status.get("experts") or {}).get("tokens")
        if tokens and tokens != last:
            step = max(rank["num_steps"] for rank in status["ranks"])
            yield TraceRecord(step, max(step - last_step, 1), np.asarray(tokens, np.int64))
            last, last_step = tokens, step
        time.sleep(interval_s)


def _admin_slots(client: Client) -> Any:
    return _get(client, "/experts")["slots"]


def _get(client: Client, path: str) -> dict[str, Any]:
    answer = client.get(path)
    if answer.status_code != 200:
        raise ClientError(f"{path}: {error_message(answer)}")
    return dict(answer.json())


def _wait(is_so: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not (found := is_so()) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return found
