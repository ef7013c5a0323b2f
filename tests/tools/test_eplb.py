"""`whalepod eplb`: files in, tables, placements and pictures out; a server asked and told."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.ep_comm.eplb.loads import shifting_loads
from tests.tools.fake_openai_server import FakeServer
from whalepod.ep_comm.eplb.trace import TraceHeader, TraceWriter, read_trace
from whalepod.server.gateway.admin import PlacementRequest
from whalepod.server.messages import Experts
from whalepod.tools import cli
from whalepod.tools.eplb.files import Placement
from whalepod.tools.eplb.pictures import slot_shares, write_heat_map

VECTORS = Path(__file__).parents[1] / "ep_comm" / "eplb" / "vectors.json"
SLOTS = [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]]
TOKENS = [[40, 10, 10, 20], [0, 0, 30, 50]]
EXPERTS = asdict(
    Experts(
        num_ranks=2,
        slots=tuple(map(tuple, SLOTS)),
        tokens=tuple(map(tuple, TOKENS)),
        plans=((50, 0.5, 0.75, 3),),
    )
)
"""As the gateway tells it."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "loads.eplb"
    with path.open("xb") as file:
        writer = TraceWriter(file, TraceHeader(num_layers=4, num_experts=64))
        for record in shifting_loads(7):
            writer.write(record)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    """Run a command with --json and return what it printed."""
    assert cli.main(["eplb", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_published_placement_is_written_in_the_published_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vector = json.loads(VECTORS.read_text())["upstream"]
    loads, out = tmp_path / "loads.json", tmp_path / "placement.json"
    loads.write_text(json.dumps({"weight": vector["weight"]}))
    num_spare = vector["num_physical"] - len(vector["weight"][0])
    sizes = [
        "--num-ranks", vector["num_gpus"], "--num-nodes", vector["num_nodes"],
        "--num-groups", vector["num_groups"], "--num-redundant-experts", num_spare,
    ]  # fmt: skip
    found = run(capsys, "plan", loads, *sizes, "--published", "--out", out)
    assert found["after"] == pytest.approx(vector["balancedness"], abs=1e-4)
    written = json.loads(out.read_text())
    assert written == found["placement"]
    assert written["phy2log"] == vector["phy2log"]
    assert written["logcnt"] == vector["logcnt"]
    for ours, published in zip(written["log2phy"], vector["log2phy"], strict=True):
        assert [*map(sorted, ours)] == [*map(sorted, published)], "replicas have no order"


def test_a_plan_counts_what_moves_and_a_second_one_moves_nothing(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "placement.json"
    sizes = ["--num-ranks", 8, "--num-nodes", 2, "--num-redundant-experts", 8]
    found = run(capsys, "plan", trace, *sizes, "--expert-size", "1M", "--out", out)
    assert np.mean(found["after"]) > np.mean(found["before"]) + 0.1
    between = found["num_same_node"] + found["num_other_node"]
    assert found["num_changed"] == found["num_same_rank"] + between
    assert found["bytes_between_ranks"] == between << 20
    again = run(capsys, "plan", trace, *sizes, "--current", out)
    assert (again["num_changed"], again["before"]) == (0, found["after"])

    assert cli.main(["eplb", "plan", *map(str, [trace, *sizes, "--current", out])]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("0 of 288 slots change")


def test_a_dead_rank_holds_nothing(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "plan", trace, "--num-ranks", 4, "--num-redundant-experts", 32, "--dead", 1)
    for row in found["placement"]["phy2log"]:
        assert set(row[24:48]) == {-1}
        assert set(row) - {-1} == set(range(64))


def test_a_simulation_compares_policies_on_the_same_loads(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "balance.svg"
    spare = ["--num-redundant-experts", 0, "--num-redundant-experts", 8]
    windows = ["--windows", 1, "--windows", 3]
    sizes = ["--num-ranks", 8, *spare, *windows, "--expert-size", "2K"]
    found = run(capsys, "simulate", trace, *sizes, "--out", plot)
    runs = {(r["policy"], r["num_slots"], r["window"]): r for r in found["runs"]}
    assert len(runs) == 2 * (1 + 2 + 2), "experts that stay know no window"
    for slots in (64, 72):
        stay, kept = runs["none", slots, 1], runs["kept", slots, 1]
        published = runs["published", slots, 1]
        assert stay["slots_changed"] == 0
        assert kept["mean_balance"] > stay["mean_balance"] + 0.1
        assert kept["slots_changed"] < 0.9 * published["slots_changed"]
        assert kept["bytes_changed"] == 2048 * kept["slots_changed"]
    lines = ElementTree.parse(plot).getroot().findall("{*}polyline")
    assert len(lines) == len(runs)
    assert all(len((line.get("points") or "").split()) == 24 for line in lines)

    assert cli.main(["eplb", "simulate", str(trace), "--num-ranks", "8"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["policy", "none", "published", "kept"]


def test_a_servers_experts_are_shown(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_server.pages["/cluster"] = {"experts": EXPERTS}
    page = tmp_path / "map.html"
    assert cli.main(["eplb", "show", "--url", fake_server.url, "--out", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 experts in 6 slots of 2 ranks, 2 layers: balance 0.944, least 0.889"
    # layer 0: rank 0 holds halves of 0 and 1, and all of 2: 20 + 5 + 10 of 80
    assert lines[3].split() == ["0", "0.889", "1", "(1.12)", "0", "(0.88)", "0", "(50.0%)", "2"]
    assert lines[-1] == "placed at step 50: balance 0.500 -> 0.750, 3 slots"
    found = run(capsys, "show", "--url", fake_server.url)
    assert found["rank_loads"][0] == [35, 45]
    svg = page.read_text().partition("<svg")[1:]
    cells = ElementTree.fromstring("".join(svg)).findall("{*}rect/{*}title")
    tips = [cell.text or "" for cell in cells]
    assert len(tips) == 12 + 2, "slots of both layers, and the ranks"
    assert tips[0] == "layer 0, rank 0, slot 0: expert 0, 1.50"


def test_a_lost_rank_counts_neither_in_means_nor_as_the_lightest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"p": {"phy2log": [[0, 1, -1, -1, 2, 0]]}, "l": [[20, 30, 10]]}.items():
        (tmp_path / name).write_text(json.dumps(value))
    files = ["--placement", tmp_path / "p", "--loads", tmp_path / "l", "--num-ranks", 3]
    out = tmp_path / "map.svg"
    assert cli.main(["eplb", "show", *map(str, [*files, "--out", out])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "6 slots (2 empty) of 3 ranks" in lines[0]
    assert lines[3].split()[1:6] == ["0.750", "0", "(1.33)", "2", "(0.67)"]
    words = [text.text for text in ElementTree.parse(out).getroot().findall("{*}text")]
    assert {"rank 0: 1.33", "rank 1: lost", "rank 2: 0.67"} <= set(words)


def test_a_png_has_a_block_of_pixels_for_each_slot(tmp_path: Path) -> None:
    slots_LP = np.array([[0, 1, 2, -1]])
    load_LE, path = np.array([[40, 40, 320]]), tmp_path / "map.png"
    write_heat_map(path, Placement(slots_LP, 2), load_LE, "")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    place = data.index(b"IDAT")
    (size,) = struct.unpack(">I", data[place - 4 : place])
    image = np.frombuffer(zlib.decompress(data[place + 4 : place + 4 + size]), np.uint8)
    pixels = image.reshape(height, 1 + width * 3)[:, 1:].reshape(height, width, 3)
    assert slot_shares(Placement(slots_LP, 2), load_LE)[0, :3].tolist() == [0.4, 0.4, 3.2]
    middle, cell = 7, width // 4
    light, _, hot, empty = (pixels[middle, slot * cell + 7].tolist() for slot in range(4))
    assert light[2] > light[0], "less than the mean: blue"
    assert hot[0] > 2 * hot[2], "more than the mean: red"
    assert len(set(empty)) == 1
    assert pixels[middle, 0].tolist() == pixels[middle, 2 * cell].tolist() == [0, 0, 0]


def test_a_placement_is_asked_for_and_waited_for(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_server.api_key = "admin"
    fake_server.pages["/experts"] = EXPERTS
    file = tmp_path / "placement.json"
    file.write_text(json.dumps({"num_ranks": 2, "phy2log": SLOTS}))
    command = ["eplb", "apply", "--admin-url", fake_server.url]
    assert cli.main([*command, str(file)]) == 1
    assert "wrong key" in capsys.readouterr().err
    command += ["--admin-key", "admin"]
    assert cli.main([*command, str(file), "--wait", "5"]) == 0
    assert "where it was wanted" in capsys.readouterr().out
    file.write_text(json.dumps({"num_ranks": 2, "phy2log": SLOTS[::-1]}))
    assert cli.main([*command, str(file), "--wait", "0.3"]) == 1
    assert cli.main(command) == 0, "as the loads say"
    asked = [PlacementRequest.model_validate(body).slots for body in fake_server.bodies]
    assert asked == [SLOTS, SLOTS[::-1], None]


def test_new_loads_of_a_server_become_a_trace(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_server.pages["/cluster"] = {"experts": EXPERTS, "ranks": [{"num_steps": 70}]}
    out = tmp_path / "trace.eplb"
    flags = ["--interval", "0.01", "--num-records", "1", "--url", fake_server.url]
    assert cli.main(["eplb", "record", str(out), *flags]) == 0
    (record,) = read_trace(out)
    assert (record.step, record.num_steps, record.loads_LE.tolist()) == (70, 70, TOKENS)
    assert cli.main(["eplb", "record", str(out), *flags]) == 1
    assert "File exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "BROKEN", "--num-ranks", "2"], "is neither JSON nor a trace of loads"),
        (["plan", "UNEVEN", "--num-ranks", "2"], "must be a list of layers"),
        (["plan", "LOADS", "--num-ranks", "3"], "num_physical (4) must be a multiple of"),
        (["plan", "LOADS", "--num-ranks", "2", "--dead", "0"], "have 2 slots for 4 experts"),
        (["show", "--placement", "LOADS", "--loads", "LOADS"], "object with phy2log, got list"),
        (["show", "--placement", "PLACED", "--loads", "LOADS"], "cannot be divided among 0 ranks"),
        (
            ["show", "--placement", "PLACED", "--loads", "LOADS", "--num-ranks", "2"],
            "the placement has 1 layers and experts up to 3",
        ),
        (["simulate", "LOADS", "--num-ranks", "2"], "is no trace of expert loads"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    texts = {
        "BROKEN": "x",
        "UNEVEN": "[[1], [2, 3]]",
        "LOADS": json.dumps(TOKENS),
        "PLACED": json.dumps({"phy2log": SLOTS[:1]}),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    words = [str(tmp_path / word) if word in texts else word for word in arguments]
    assert cli.main(["eplb", *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_server_whose_experts_stay_is_named(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_server.pages["/cluster"] = {"experts": None}
    assert cli.main(["eplb", "show", "--url", fake_server.url]) == 1
    assert "serves without --enable-eplb" in capsys.readouterr().err
