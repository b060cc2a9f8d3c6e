"""The sample configs are what Ray and this package accept."""

from __future__ import annotations

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from nextscale.errors import NextscaleError
from nextscale.methods.naming import parse_method
from nextscale.models.registry import get_model
from nextscale.serve.proxy import PATH, VARIABLE
from nextscale.serve.ray import NAME, app, ongoing
from nextscale.serve.setup import ServeOptions

DEPLOY = Path(__file__).parents[2] / "deploy"


def require_config(config: dict[str, Any]) -> None:
    schema = ServeDeploySchema.model_validate(config)
    (application,) = schema.applications
    assert application.import_path == "nextscale.serve.ray:app"
    (deployment,) = config["applications"][0]["deployments"]
    assert deployment["name"] == NAME == app._bound_deployment.name
    options = ServeOptions.read(deployment["user_config"])
    get_model(options.model[0])
    assert parse_method(options.method) is not None
    assert deployment["max_ongoing_requests"] == ongoing(options.max_queue, options.max_batch or 8)


def test_the_serve_config() -> None:
    require_config(yaml.safe_load((DEPLOY / "serve.yaml").read_text()))


def test_the_manifest_for_kuberay() -> None:
    manifest = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    assert manifest["metadata"]["name"]
    require_config(yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    cluster = manifest["spec"]["rayClusterConfig"]
    pinned = next(
        line for line in (DEPLOY.parent / "constraints.txt").read_text().splitlines() if line.startswith("ray==")
    )
    assert cluster["rayVersion"] == pinned.removeprefix("ray==")
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        assert isinstance(group["rayStartParams"], dict)
        (container,) = group["template"]["spec"]["containers"]
        environment = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert environment[VARIABLE] == PATH
        assert "NEXTSCALE_API_KEY" in environment
        assert container["image"]
    (workers,) = groups[1:]
    assert workers["groupName"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_probes_need_nothing_but_python() -> None:
    """KubeRay's own call wget, and a slim image has none."""
    manifest = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())
    cluster = manifest["spec"]["rayClusterConfig"]
    said = [b"success", b"", b"success"]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said.pop())

        def log_message(self, *arguments: Any) -> None: ...

    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        for name in ("readinessProbe", "livenessProbe"):
            program, option, script, *urls = container[name]["exec"]["command"]
            assert (program, option) == ("python", "-c")
            assert urls[0] == "http://127.0.0.1:52365/api/local_raylet_healthz"
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    assert subprocess.run([sys.executable, "-c", script, here]).returncode == 0
    assert subprocess.run([sys.executable, "-c", script, here]).returncode == 1
    server.shutdown()


def test_what_serve_build_writes(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("serve")), "build", "nextscale.serve.ray:app", "-o", "built.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ServeDeploySchema.model_validate(yaml.safe_load((tmp_path / "built.yaml").read_text()))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"modle": "clipart"}, "user_config has no field 'modle'; allowed: model, method"),
        ({"model": 3}, "model must be a list of texts, not 3"),
        ({"model": [3]}, "user_config model must be a text, not 3"),
        ({"max_batch": 0}, "user_config max_batch must be a whole number, from 1 to 100000, not 0"),
        ({"max_queue": "many"}, "user_config max_queue must be a whole number, from 1 to 100000, not 'many'"),
        ({"batch_wait_ms": -1}, "user_config batch_wait_ms must be from 0 to 10000, not -1"),
        ({"method": ["none"]}, r"user_config method must be a text, not \['none'\]"),
    ],
)
def test_bad_configs(config: dict[str, Any], said: str) -> None:
    with pytest.raises(NextscaleError, match=said):
        ServeOptions.read(config)
