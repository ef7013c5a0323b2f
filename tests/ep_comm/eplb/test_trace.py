"""Files of expert loads, and what a policy would have done with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.ep_comm.eplb.loads import shifting_loads
from whalepod.ep_comm.eplb.placement import Slots
from whalepod.ep_comm.eplb.simulate import SimulationConfig, simulate
from whalepod.ep_comm.eplb.trace import (
    TraceError,
    TraceHeader,
    TraceRecord,
    TraceWriter,
    read_header,
    read_trace,
)

HEADER = TraceHeader(num_layers=3, num_experts=8, num_groups=2)
SLOTS = Slots(num_experts=64, num_physical=72, num_ranks=8)


def write(path: Path, num_records: int) -> list[TraceRecord]:
    random = np.random.default_rng(4)
    records = [
        TraceRecord(10 * i, 10, random.integers(0, 1 << 40, (3, 8))) for i in range(num_records)
    ]
    with path.open("wb") as file:
        writer = TraceWriter(file, HEADER)
        for record in records:
            writer.write(record)
    return records


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "loads.eplb"
    written = write(path, 3)
    assert read_header(path) == HEADER
    for expected, found in zip(written, read_trace(path), strict=True):
        assert expected[:2] == found[:2]
        assert (expected.loads_LE == found.loads_LE).all()


def test_a_half_written_record_ends_the_file_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loads.eplb"
    write(path, 2)
    data = path.read_bytes()
    for cut in (1, 5, 100):
        path.write_bytes(data[:-cut])
        assert [record.step for record in read_trace(path)] == [0]
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(TraceError, match="the record of step 10 is damaged"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("line", "message"),
    {
        b"{}": "is no trace of expert loads",
        b"\x00\x01": "is no trace of expert loads",
        b'{"format":"whalepod-eplb-trace","version":9,"num_layers":1,"num_experts":1}': "version 9",
    }.items(),
)
def test_another_file_is_refused(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "other"
    path.write_bytes(line + b"\n")
    with pytest.raises(TraceError, match=message):
        list(read_trace(path))


def mean_and_moved(config: SimulationConfig) -> tuple[float, int]:
    found = list(simulate(shifting_loads(seed=11), SLOTS, config))
    return float(np.mean([r.balancedness_L for r in found])), sum(r.num_moved for r in found)


def test_a_simulation_uses_the_past_only() -> None:
    records = list(shifting_loads(seed=3))
    config = SimulationConfig(window=2, interval=2)
    before = list(simulate(records[:6], SLOTS, config))
    changed = [*records[:5], records[5]._replace(loads_LE=records[5].loads_LE[:, ::-1].copy())]
    after = list(simulate(changed, SLOTS, config))
    for one, other in zip(before, after, strict=True):
        assert (one.phy2log_LP == other.phy2log_LP).all()


def test_plans_balance_shifting_loads_and_kept_slots_move_less() -> None:
    never, _ = mean_and_moved(SimulationConfig(interval=0))
    kept, num_kept = mean_and_moved(SimulationConfig())
    published, num_published = mean_and_moved(SimulationConfig(keeps_slots=False))
    careful, num_careful = mean_and_moved(SimulationConfig(min_gain=0.1))
    assert kept > never + 0.2
    assert abs(kept - published) < 0.02
    assert num_kept < 0.25 * num_published, (num_kept, num_published)
    assert num_careful < num_kept
    assert careful > never + 0.15
