"""The files of ``examples/deploy``: read by the programs that they are for, where those are installed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from areal_actors.cli import cli
from areal_actors.proxy.config import ProxyConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
UNIT = (DEPLOY / "areal-actors.service").read_text()


def accepts(words: list[str]) -> bool:
    """Whether the command line knows these options; the configuration is not loaded."""
    result = CliRunner().invoke(cli, [*words, "no_such_setting=1"])
    return "no_such_setting" in result.output


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="apt-get install systemd")
def test_systemd_accepts_the_unit(tmp_path: Path):
    """With paths of this machine in place of those of the example."""
    text = UNIT.replace("/srv/areal/.venv/bin/areal-actors", "/bin/true").replace("/srv/areal", str(tmp_path))
    unit = tmp_path / "areal-actors.service"
    unit.write_text(text.replace("User=areal", "User=root"))

    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)

    complaints = [line for line in done.stderr.splitlines() if "areal-actors.service" in line]
    assert [] == complaints


def test_kubernetes_accepts_the_manifest():
    """By its schemas, where those are installed; probes ask routes that there are, at the port of the service."""
    service, workload = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    mounted = {volume["name"] for volume in workload["spec"]["template"]["spec"]["volumes"]}
    mounted |= {claim["metadata"]["name"] for claim in workload["spec"]["volumeClaimTemplates"]}
    (port,) = container["ports"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]

    assert 1 == workload["spec"]["replicas"]
    assert service["spec"]["selector"] == workload["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert f"proxy.port={port['containerPort']}" in container["args"]
    assert {"/health", "/livez"} == {probe["path"] for probe in probes}
    assert {port["name"]} == {probe["port"] for probe in probes}
    assert mounted == {mount["name"] for mount in container["volumeMounts"]}
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for document in (service, workload):
        schemas.validate(document, "1.30", strict=True)


@pytest.mark.parametrize("name", ["nginx.conf", "Caddyfile"])
def test_proxies_with_tls_do_not_buffer_streams(name: str):
    """They go on to the port of the unit's service, hide its metrics and accept bodies of its size."""
    text = (DEPLOY / name).read_text()
    unbuffered = {"nginx.conf": "proxy_buffering off;", "Caddyfile": "flush_interval -1"}[name]

    assert unbuffered in text
    assert "127.0.0.1:8080" in text
    assert "/metrics" in text
    assert text.count("{") == text.count("}")
    assert ProxyConfig().max_body_bytes == 16 * 2**20
    assert "16m" in text.lower()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("nginx", ["-t", "-c", "PLACE/main.conf", "-p", "PLACE"]),
        ("caddy", ["validate", "--adapter", "caddyfile", "--config", "PLACE/Caddyfile"]),
        ("promtool", ["check", "config", "PLACE/prometheus.yml"]),
        ("promtool", ["check", "rules", "PLACE/alerts.yml"]),
    ],
)
def test_programs_accept_their_files(tmp_path: Path, program: str, words: list[str]):
    """Those that are installed here."""
    if (found := shutil.which(program)) is None:
        pytest.skip(f"apt-get install {'prometheus' if program == 'promtool' else program}")
    for path in DEPLOY.iterdir():
        shutil.copy(path, tmp_path)
    if program == "nginx":
        # Without the certificate, which it would load, and without a port, which it would open.
        text = re.sub(r"ssl_certificate.*;", "", (DEPLOY / "nginx.conf").read_text())
        text = text.replace("listen 443 ssl", f"listen unix:{tmp_path}/s")
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        text = f"access_log off; {''.join(f'{kind}_temp_path {tmp_path}/{kind};' for kind in kinds)} {text}"
        (tmp_path / "main.conf").write_text(f"pid {tmp_path}/pid; events {{}} http {{ {text} }}")
    command = [found, *(word.replace("PLACE", str(tmp_path)) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert 0 == done.returncode, done.stderr


def test_the_commands_of_the_files_are_those_of_the_program(monkeypatch):
    """Those of the unit, the image, the compose file and the manifest."""
    monkeypatch.chdir(ROOT)
    (started,) = re.findall(r"^ExecStart=\S+ (.+)$", UNIT, re.MULTILINE)
    (default,) = re.findall(r"^CMD (\[.+\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["areal"]["command"]

    manifest = (DEPLOY / "kubernetes.yaml").read_text().replace("/etc/areal/serve.yaml", "examples/serve.yaml")
    _, workload = yaml.safe_load_all(manifest)
    (container,) = workload["spec"]["template"]["spec"]["containers"]

    assert accepts(container["args"])
    assert accepts([word.replace("serve.yaml", "examples/serve.yaml") for word in shlex.split(started)])
    assert accepts(yaml.safe_load(default))
    assert accepts(composed)


def test_the_image_copies_files_that_there_are():
    """And installs the versions that were tried."""
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[:-1]]

    assert copied
    assert all((ROOT / word).exists() for word in copied)
    assert "-c constraints.txt" in text
    assert "USER 1000" in text
    assert "https://download.pytorch.org/whl/cpu" in text
