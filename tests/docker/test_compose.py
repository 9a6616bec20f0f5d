"""compose.yaml and its neighbours: they parse, refer to what exists, and listen on the loopback address only."""

import re
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


def test_services_use_only_keys_that_compose_knows() -> None:
    known = re.compile(
        "build|cap_drop|command|depends_on|deploy|environment|image|init|networks|ports|profiles|read_only|restart"
        "|security_opt|stop_grace_period|tmpfs|volumes"
    )
    for name, service in SERVICES.items():
        assert all(known.fullmatch(key) for key in service), name
        assert "image" in service
    assert SERVICES.keys() == {"promptsluice", "cuda", "prometheus", "grafana"}


def test_builds_name_stages_of_the_dockerfile() -> None:
    named = set(re.findall(r"^FROM .* AS (\w+)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE))
    for name in ("promptsluice", "cuda"):
        build = SERVICES[name]["build"]
        assert build["target"] in named
        assert (DOCKER / build["context"] / build["dockerfile"]).resolve() == DOCKER / "Dockerfile"
        assert build.get("args", {}).keys() <= {"PIP_EXTRA"}


def test_everything_listens_on_the_loopback_address() -> None:
    ports = [port for service in SERVICES.values() for port in service["ports"]]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_mounted_files_exist_and_named_volumes_are_declared() -> None:
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], mount


def test_the_models_volume_is_the_one_of_the_images() -> None:
    (volume,) = re.findall(r'^VOLUME \["([^"]+)"\]', (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    for name in ("promptsluice", "cuda"):
        assert SERVICES[name]["volumes"] == [f"promptsluice:{volume}"]


def test_prometheus_scrapes_the_gateway_whichever_image_runs() -> None:
    (job,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    ((host, port),) = [target.split(":") for target in job["static_configs"][0]["targets"]]
    for name in ("promptsluice", "cuda"):
        assert host in SERVICES[name]["networks"]["default"]["aliases"]
        assert SERVICES[name]["ports"][0].endswith(f":{port}")


def test_grafana_is_given_its_data_source_and_its_dashboard() -> None:
    source = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["url"] == f"http://prometheus:{SERVICES['prometheus']['ports'][0].rsplit(':', 1)[1]}"
    (provider,) = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/promptsluice.yaml").read_text())[
        "providers"
    ]
    mounts = dict(mount.removesuffix(":ro").split(":") for mount in SERVICES["grafana"]["volumes"])
    inside = {target: source for source, target in mounts.items()}
    assert inside[provider["options"]["path"]] == "./grafana/dashboards"
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DOCKER / "grafana/dashboards" / home.rsplit("/", 1)[1]).exists()


def test_the_gateway_can_write_only_into_its_volume() -> None:
    for name in ("promptsluice", "cuda"):
        service = SERVICES[name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
