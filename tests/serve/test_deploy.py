"""The files in deploy/ that nothing here can run: containers and a unit. What can be checked of them is."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from small_server import listening
from test_grafana import NAME, exported

import tribe
from places import ROOT

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
UNIT = (DEPLOY / "tribe.service").read_text()
PROMETHEUS = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*")


def test_every_image_has_an_exact_version_and_ours_is_that_of_the_package():
    bases = re.findall(r"^FROM (\S+)", CONTAINERFILE, re.MULTILINE)
    images = [*bases, *(service["image"] for service in SERVICES.values())]
    assert len(bases) == 2
    assert [image for image in images if not PINNED.fullmatch(image)] == []
    own = {image for image in images if image.startswith("tribe:")} | set(re.findall(r"-t (tribe:\S+)", CONTAINERFILE))
    assert own == {f"tribe:{tribe.__version__}"}


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_may_do_more_than_it_must(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert str(service.get("user", "1000"))[0] != "0"
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), "of this machine alone"
    for volume in service.get("volumes", ()):
        source = volume.split(":")[0]
        assert (DEPLOY / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"], volume


def test_workers_and_redis_reach_nothing_outside_and_prometheus_asks_every_worker():
    assert COMPOSE["networks"]["inside"]["internal"] is True
    workers = {name: service for name, service in SERVICES.items() if name.startswith("worker")}
    assert all(list(service["networks"]) == ["inside"] for service in (*workers.values(), SERVICES["redis"]))
    ports = {name: service["command"][service["command"].index("--port") + 1] for name, service in workers.items()}
    (job,) = PROMETHEUS["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"{name}:{port}" for name, port in ports.items()]
    proxied, text = SERVICES["haproxy"]["environment"], (DEPLOY / "haproxy.cfg").read_text()
    for name, service in workers.items():
        assert proxied[f"TRIBE_{name.upper()}"] == service["networks"]["inside"]["ipv4_address"]
        assert f'server {name} "${{TRIBE_{name.upper()}-127.0.0.1}}:{ports[name]}"' in text


def test_what_is_served_is_prepared():
    workers = [service for name, service in SERVICES.items() if name.startswith("worker")]
    assert [service["command"][0] for service in workers] == ["/models/net.tribe"] * 2
    assert all("models:/models" in service["volumes"] for service in (*workers, SERVICES["prepare"]))
    assert "prepare" in workers[0]["depends_on"]
    assert "tribe prepare --out /models/net.tribe" in SERVICES["prepare"]["entrypoint"][-1]
    assert re.search(r"^ExecStart=\S+ serve /etc/tribe/net.tribe ", UNIT, re.MULTILINE)


def test_redis_keeps_what_it_is_given():
    words = SERVICES["redis"]["command"]
    told = dict(zip(words[1::2], words[2::2], strict=True))
    assert (told["--appendonly"], told["--maxmemory-policy"]) == ("yes", "noeviction")
    assert SERVICES["redis"]["volumes"] == ["streams:/data"]


@pytest.mark.parametrize("which", ["image", "worker1"])
def test_the_health_checks_ask_a_real_server(which, monkeypatch):
    found = re.search(r"CMD (\[\"python\".*\])", CONTAINERFILE)[1]
    words = json.loads(found) if which == "image" else SERVICES[which]["healthcheck"]["test"][1:]
    assert f"/v2/health/{'live' if which == 'image' else 'ready'}" in words[-1]
    with listening() as server:
        monkeypatch.setenv("TRIBE_PORT", str(server.port))
        assert subprocess.run([sys.executable, *words[1:]], capture_output=True).returncode == 0
    assert subprocess.run([sys.executable, *words[1:]], capture_output=True).returncode != 0


def test_alerts_ask_for_what_is_exported(tmp_path):
    metrics = exported(tmp_path)
    (group,) = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    names = {name for rule in group["rules"] for name in NAME.findall(rule["expr"])}
    assert len(names) >= 5
    assert names <= metrics.keys()


def test_the_image_runs_as_nobody_and_stops_gracefully():
    last = CONTAINERFILE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER (\d+)", last, re.MULTILINE)[1] != "0"
    assert "STOPSIGNAL SIGTERM" in last
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE, re.MULTILINE):
        assert all((ROOT / each).exists() for each in source.split())


def test_the_unit_is_valid(tmp_path):
    assert {"Type=notify", "KillMode=mixed", "NotifyAccess=main"} <= set(UNIT.splitlines())
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    unit = tmp_path / "tribe.service"
    unit.write_text(UNIT.replace("/opt/tribe/bin/tribe", sys.executable))  # it looks for the program
    found = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (found.returncode, found.stderr.strip()) == (0, ""), found.stderr


def test_prometheus_takes_its_files():
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    found = subprocess.run([promtool, "check", "config", DEPLOY / "prometheus/prometheus.yml"], capture_output=True)
    assert found.returncode == 0, found.stdout
