"""The Dockerfile, as far as that shows without running it (`make test-docker` runs its steps), and docs/serving.md."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from dockerfile import DONE_HERE, NOTED, PORT, ROOT, TARGETS, copy_files, exec_form, in_context, read_stages

from nextscale.cli import app

TEXT = (ROOT / "Dockerfile").read_text()
STAGES = read_stages(TEXT)
PAGE = (ROOT / "docs" / "serving.md").read_text()
SERVE: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]


def test_stages_build_on_one_another() -> None:
    assert list(STAGES)[-1] == "cpu", "what `docker build` without a target makes"
    assert set(TARGETS) <= set(STAGES)
    assert {stage.parent for stage in STAGES.values()} == {"python:3.12-slim", "base"}
    mounted = re.findall(r"--mount=\S*from=(\w+)", TEXT)
    assert mounted
    assert set(mounted) <= set(STAGES)


def test_unknown_instructions_are_noticed() -> None:
    assert read_stages("FROM a AS b\nRUN one && \\\n  # why\n two\n")["b"].steps == [("RUN", "one &&  two")]
    with pytest.raises(ValueError, match="MAINTAINER"):
        read_stages("FROM a AS b\nMAINTAINER me\n")
    assert {word for stage in STAGES.values() for word, _ in stage.steps} == {*DONE_HERE, *NOTED}


def test_no_package_index_is_named() -> None:
    assert not re.search(r"://|--(extra-)?index|--find-links|-i ", TEXT)
    assert {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"} == set(re.findall(r"\bPIP_\w+_URL\b", TEXT))
    for name in ("wheel", "base"):
        assert ("ARG", "PIP_INDEX_URL PIP_EXTRA_INDEX_URL") in STAGES[name].steps


def test_what_is_copied_is_enough_for_the_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for word, rest in STAGES["wheel"].steps:
        if word == "COPY":
            copy_files(rest, source)
    for weights in source.rglob("*.safetensors"):
        weights.write_bytes(b"")  # to pack them takes seconds
    build = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if ".dist-info/" not in name}
    assert {"LICENSE", "NOTICE", "MODEL_CARD.md"} == {n.partition("/licenses/")[2] for n in names if "/licenses/" in n}
    package = ROOT / "src" / "nextscale"
    files = {str(path.relative_to(ROOT / "src")) for path in package.rglob("*") if path.is_file()}
    assert packed == {name for name in files if "__pycache__" not in name}


@pytest.mark.parametrize(
    ("path", "copied"),
    [
        ("src/nextscale/serve/page/index.html", True),
        ("src/nextscale/__pycache__/x.pyc", False),
        ("src/nextscale.egg-info/PKG-INFO", False),
        ("README.md", True),
        (".git/config", False),
        ("tests/conftest.py", False),
        ("docs/README.md", False),
    ],
)
def test_what_docker_is_sent(path: str, copied: bool) -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert in_context(path, patterns) == copied


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib, which the image's Python has, came with 3.11")
def test_requirements_are_those_of_the_package() -> None:
    import tomllib

    (listing,) = (rest for _, rest in STAGES["base"].steps if "tomllib" in rest)
    command = listing.partition(" > ")[0].replace("python", sys.executable, 1)
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, check=True, capture_output=True, text=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert done.stdout.split("\n")[:-1] == [*project["dependencies"], *extras["serve"], *extras["text"]]


@pytest.mark.parametrize("target", TARGETS)
def test_the_entrypoint_is_a_command(target: str) -> None:
    program, command, *options = exec_form(STAGES[target].last("ENTRYPOINT"))
    assert (program, command) == ("nextscale", "serve")
    given = SERVE.make_context("serve", options).params  # an unknown option raises
    assert given["host"] == "0.0.0.0"
    assert str(given["port"]) == STAGES[target].last("EXPOSE") == str(PORT)
    assert given["device"] == target
    assert given["runtime"] == {"cpu": None, "cuda": "graphs"}[target]


@pytest.mark.parametrize("target", TARGETS)
def test_the_server_is_not_root(target: str) -> None:
    user = STAGES[target].last("USER")
    assert user.isdecimal(), "Kubernetes cannot tell whether a name is root"
    assert int(user) > 0
    assert f"--uid {user}" in TEXT
    assert STAGES[target].steps[-2:] == [("USER", user), ("ENTRYPOINT", STAGES[target].last("ENTRYPOINT"))]


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" and self.server.healthy else 503)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def health() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_health_check(health: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    program, *rest = exec_form(STAGES["base"].last("HEALTHCHECK"))
    assert program == "python"
    codes = []
    for health.healthy in (True, False):  # type: ignore[attr-defined]
        command = [sys.executable, *(part.replace(str(PORT), str(health.server_port)) for part in rest)]
        codes.append(subprocess.run(command, timeout=60).returncode)
    assert codes == [0, 1]


def test_the_documented_commands() -> None:
    assert set(re.findall(r"docker build .*--target (\w+)", PAGE)) == set(TARGETS)
    for target in TARGETS:
        assert f"docker build --target {target} -t nextscale:{target} ." in TEXT
    assert STAGES["base"].last("VOLUME") == "/opt/cache"
    assert ":/opt/cache" in PAGE


# The page about serving, beside the code


def test_the_page_names_every_metric() -> None:
    metrics = pytest.importorskip("nextscale.serve.metrics", reason="needs pip install 'nextscale[serve]'")
    families = {family.name: family.type for family in metrics.Metrics().registry.collect()}
    names = {f"{n}_total" if kind == "counter" else n for n, kind in families.items() if n.startswith("nextscale_")}
    watched = {"nextscale_ready", "nextscale_queue_length", "nextscale_images_running", "nextscale_graphs_captured"}
    assert set(re.findall(r"nextscale_\w+", PAGE)) == names | watched


def test_the_page_names_every_field() -> None:
    protocol = pytest.importorskip("nextscale.serve.protocol", reason="needs pip install 'nextscale[serve]'")
    tables = PAGE[PAGE.index("## A request") : PAGE.index("### Quality and method")]
    named = {name for row in re.findall(r"^\| (`.*?) \|", tables, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(protocol.ImageRequest.model_fields)


def test_the_page_names_only_options_that_exist() -> None:
    options = {name for parameter in SERVE.params for name in parameter.opts}
    text = re.sub(r"^ +(docker|python|pip|curl|-d|-e) .*$", "", PAGE, flags=re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    of_docker = {"--init", "--stop-timeout", "--build-arg"}
    assert named - of_docker <= options, named - of_docker - options


def test_the_python_of_the_page_is_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        compile(block, "serving.md", "exec")
        for module, names in re.findall(r"^from (nextscale\S*) import (.*)$", block, re.MULTILINE):
            assert not [n for n in names.split(", ") if not hasattr(importlib.import_module(module), n)]
