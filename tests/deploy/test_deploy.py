"""The files of deploy/ are in step with the code they start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import whalepod
from whalepod.scheduler.stats import Stats
from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.config import EngineConfig, GatewayConfig, NodesConfig
from whalepod.server.gateway.metrics import Metrics
from whalepod.tools import cli
from whalepod.tools.flags import ENV_PREFIX, flags_of

DEPLOY = Path(whalepod.__file__).resolve().parent / "deploy"


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    return board


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def test_every_expression_names_series_that_are_exported_and_none_is_left_out() -> None:
    metrics = Metrics(lambda: Stats(num_accepted_by_position=(1,)))
    metrics.count_error("x")
    metrics.success.labels("stop").inc()
    exported = set(re.findall(r"^(whalepod_\w+)", metrics.render().decode(), re.MULTILINE))
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    named = set(re.findall(r"whalepod_\w+", " ".join(expressions)))

    assert named <= exported
    ends = r"_(bucket|sum|count|created|total)$"
    assert {re.sub(ends, "", n) for n in exported} == {re.sub(ends, "", n) for n in named}


def test_labels_in_expressions_are_labels_of_their_series() -> None:
    labels = {
        sample.name: set(sample.labels)
        for family in Metrics(lambda: Stats(num_accepted_by_position=(1,))).registry.collect()
        for sample in family.samples
    }
    labels |= {
        "whalepod_request_success_total": {"finished_reason"},
        "whalepod_request_errors_total": {"code"},
    }
    checked = 0
    for panel in panels():
        for target in panel["targets"]:
            for label, series in re.findall(r"by \((\w+)\) \(rate\((\w+)", target["expr"]):
                assert label in labels[series], target["expr"]
                checked += 1
    assert checked >= 10


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    all_panels = dashboard()["panels"]
    cells: set[tuple[int, int]] = set()
    for panel in all_panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (place["x"] + i, place["y"] + k) for i in range(place["w"]) for k in range(place["h"])
        }
        assert not own & cells
        cells |= own
    assert len({panel["id"] for panel in all_panels}) == len(all_panels)


def test_compose_starts_what_exists_and_opens_loopback_ports_only() -> None:
    services = load("compose.yaml")["services"]

    assert set(services) == {"whalepod", "prometheus", "grafana"}
    flags = flags_of((EngineConfig, GatewayConfig), {})
    known = {flag.env for flag in flags.values()}
    ours = services["whalepod"]["environment"]
    assert {name for name in ours if name.startswith(ENV_PREFIX)} <= known
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), volume
    assert (DEPLOY.parent / services["whalepod"]["build"]["dockerfile"]).exists()
    grace_s = float(services["whalepod"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > GatewayConfig().drain_timeout_s


def test_prometheus_scrapes_the_service_and_grafana_reads_prometheus() -> None:
    (job,) = load("prometheus.yml")["scrape_configs"]
    (source,) = load("grafana-datasource.yaml")["datasources"]
    services = load("compose.yaml")["services"]

    target = job["static_configs"][0]["targets"][0]
    assert target.split(":")[0] in services
    assert int(target.split(":")[1]) == GatewayConfig().port
    assert source["url"].split("//")[1].split(":")[0] in services
    (provider,) = load("grafana-dashboards.yaml")["providers"]
    mounted = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/whalepod.json" in mounted


def test_pods_of_a_leader_worker_set_start_a_leader_and_workers_that_fit_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = yaml.safe_load_all((DEPLOY / "leader-worker-set.yaml").read_text("utf-8"))
    group, service, policy = documents
    template = group["spec"]["leaderWorkerTemplate"]
    started: dict[str, tuple[EngineConfig, NodePlan | None]] = {}

    def serve(engine: EngineConfig, gateway: GatewayConfig, plan: NodePlan | None) -> int:
        started["serve"] = (engine, plan)
        assert gateway.host == "0.0.0.0"
        assert gateway.asks_for_key
        return 0

    def work(engine: EngineConfig, plan: NodePlan) -> int:
        started["worker"] = (engine, plan)
        return 0

    monkeypatch.setattr("whalepod.tools.serve.serve", serve)
    monkeypatch.setattr("whalepod.tools.serve.work", work)
    monkeypatch.setenv("LWS_GROUP_SIZE", str(template["size"]))
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "whalepod-0.whalepod.default")
    for index, name in enumerate(("leaderTemplate", "workerTemplate")):
        (container,) = template[name]["spec"]["containers"]
        volumes = {volume["name"] for volume in template[name]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        monkeypatch.setenv("LWS_WORKER_INDEX", str(index))
        assert cli.main(container["args"]) == 0

    (leader, first), (worker, second) = started["serve"], started["worker"]
    assert leader == worker, "the flags of both must be the same"
    assert first is not None
    assert second is not None
    assert [*first.ranks, *second.ranks] == list(range(leader.parallel.expert_parallel_size))
    leader_labels = template["leaderTemplate"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= leader_labels.items()
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= leader_labels.items()
    ports = {
        p["name"]: p["containerPort"]
        for p in template["leaderTemplate"]["spec"]["containers"][0]["ports"]
    }
    assert ports == {"http": GatewayConfig().port, "rendezvous": NodesConfig().master_port}


def test_A6_what_cannot_be_repaired_is_started_again_by_each_manifest() -> None:
    services = load("compose.yaml")["services"]
    assert {service["restart"] for service in services.values()} == {"unless-stopped"}
    with (DEPLOY / "leader-worker-set.yaml").open(encoding="utf-8") as file:
        template = next(yaml.safe_load_all(file))["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    (leader,) = template["leaderTemplate"]["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe"):
        assert leader[probe]["httpGet"] == {"path": "/health", "port": "http"}, "/ready waits"
    assert leader["startupProbe"]["failureThreshold"] * 10 >= 1800


def test_the_dashboard_has_json_that_grafana_imports() -> None:
    board = dashboard()

    assert board["uid"] == "whalepod"
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels())
