"""Loading from a hub: a real HTTP server that speaks the hub's protocol, real huggingface_hub on our side."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support import files
from support.files import CASE_2B, CASE_8B, VAR_CASE

from nextscale.io.network import is_reachable

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    root: Path
    log: list[str]

    def log_message(self, *args) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/")
        self.log.append(f"{self.command} {path}")
        if path.startswith("api/models/"):
            return self.api(*path.removeprefix("api/models/").split("/", 4))
        if path.startswith("api/"):  # who the token belongs to
            return self.answer(401)
        owner, name, _, revision, *rest = path.split("/")
        if name == "private" and self.headers.get("Authorization") != "Bearer secret":
            return self.answer(401, X_Error_Code="RepoNotFound")
        repo, file = self.root / owner / name, self.root / owner / name / "/".join(rest)
        if not repo.is_dir():
            return self.answer(404, X_Error_Code="RepoNotFound")
        if revision not in ("main", COMMIT):
            return self.answer(404, X_Error_Code="RevisionNotFound")
        if not file.is_file():
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        body = file.read_bytes()
        etag = hashlib.sha1(body).hexdigest()
        return self.answer(200, body, ETag=f'"{etag}"', X_Repo_Commit=COMMIT, Accept_Ranges="bytes")

    do_HEAD = do_GET

    def api(self, owner: str, name: str, what: str = "", revision: str = "main", *rest: str) -> None:
        repo = self.root / owner / name
        if not repo.is_dir():
            return self.answer(404, X_Error_Code="RepoNotFound")
        names = [str(p.relative_to(repo)) for p in sorted(repo.rglob("*")) if p.is_file()]
        if what == "tree":
            found = [{"type": "file", "path": n, "size": (repo / n).stat().st_size, "oid": "0" * 40} for n in names]
        else:
            found = {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}
        return self.answer(200, json.dumps(found).encode(), Content_Type="application/json")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    var, infinity, mine = root / "acme" / "var", root / "acme" / "infinity", root / "acme" / "converted"
    for folder in (var, infinity, mine, root / "acme" / "other"):
        folder.mkdir(parents=True)
    files.flat(var, VAR_CASE, "var_tiny.pth")
    files.tokenizer(var, VAR_CASE, "vae_tiny.pth", nested=False)
    shutil.copytree(var, root / "acme" / "private")
    files.shards(infinity / "tiny_weights", CASE_8B)
    files.tokenizer(infinity, CASE_8B, "vae_d24.pth")
    files.flat(infinity, CASE_2B, "unrelated.pth")
    files.hart(root / "acme" / "hart")
    (root / "acme" / "other" / "config.json").write_text('{"model_type": "bert"}')
    handler = type("Handler", (Hub,), {"root": root, "log": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


# A published model of test size: registered in the process that loads it.
PRELUDE = """
import dataclasses, json, sys
from nextscale import MODELS, NextscaleError, Pipeline
from nextscale.checkpoints import locate, pretrained
from nextscale.checkpoints.files import open_states
from nextscale.checkpoints.families import backbones
def register(name, case, like, **files):
    part = pretrained.official_part(open_states(locate.Path(case) / "state.safetensors"), backbones())
    MODELS[name] = dataclasses.replace(MODELS[like], name=name, backbone=part.config, **files)
register("tiny-var", {var!r}, "var-d16", repo="acme/var", weights="var_tiny.pth", tokenizer_files=("vae_tiny.pth",))
register("tiny-infinity", {infinity!r}, "infinity-8b", repo="acme/infinity", weights="tiny_weights/",
         tokenizer_files=("vae_d24_missing.pth", "vae_d24.pth"))
def attempt(*args, **kwargs):
    try:
        print(repr(Pipeline.from_pretrained(*args, progress_bar=False, **kwargs)))
    except NextscaleError as error:
        print("refused:", error)
"""


def run(hub, tmp_path: Path, code: str, endpoint: str | None = None, cache: str = "cache") -> str:
    address = endpoint or f"http://127.0.0.1:{hub.server_address[1]}"
    env = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / cache), "HF_HUB_DISABLE_XET": "1"}
    script = PRELUDE.format(var=str(VAR_CASE), infinity=str(CASE_8B)) + code
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_models_by_name_and_by_repository(hub, tmp_path: Path) -> None:
    hub.RequestHandlerClass.log.clear()
    out = run(
        hub,
        tmp_path,
        """
attempt("tiny-var")
attempt("acme/var", model="tiny-var", revision="main")
attempt("acme/var")
attempt("tiny-infinity")
attempt("tiny-infinity", vae="acme/infinity", local_files_only=True)
attempt("tiny-infinity", dtype="bfloat16", local_files_only=True)
""",
    ).splitlines()
    assert out[0] == out[1] == "Pipeline(tiny-var, dtype=float32, device=cpu)"
    assert out[2] == "refused: the hub repository 'acme/var' holds several models; choose model= from tiny-var"
    assert out[3] == out[4] == "Pipeline(tiny-infinity, dtype=float32, device=cpu)"
    assert out[5] == "Pipeline(tiny-infinity, dtype=bfloat16, device=cpu)"
    fetched = [line for line in hub.RequestHandlerClass.log if line.startswith("GET") and "/resolve/" in line]
    assert len([line for line in fetched if line.endswith("var_tiny.pth")]) == 1, "the cache is used"
    assert not [line for line in fetched if "unrelated" in line], "only what is needed is fetched"


def test_hart_has_two_folders(hub, tmp_path: Path) -> None:
    root = Path(hub.RequestHandlerClass.root) / "acme" / "hart"
    out = run(
        hub,
        tmp_path,
        f"""
plan = pretrained.read(locate.locate({str(root)!r}, None, None, locate.Hub()))
MODELS["tiny-hart"] = dataclasses.replace(
    MODELS["hart-0.7b"], name="tiny-hart", backbone=plan.backbone.config, repo="acme/hart")
attempt("tiny-hart")
attempt("tiny-hart", local_files_only=True)
""",
    ).splitlines()
    assert out == ["Pipeline(tiny-hart, dtype=float32, device=cpu)"] * 2


def test_a_converted_repository(hub, tmp_path: Path) -> None:
    target = Path(hub.RequestHandlerClass.root) / "acme" / "converted"
    out = run(
        hub,
        tmp_path,
        f"""
import torch, shutil
from nextscale.checkpoints.convert import convert
plan = pretrained.read(locate.locate("tiny-var", None, None, locate.Hub()))
folder = convert(plan, {str(tmp_path / "new")!r}, torch.bfloat16)
for file in folder.iterdir():
    shutil.copy(file, {str(target)!r})
attempt("acme/converted", dtype="bfloat16")
""",
    )
    assert out == "Pipeline(tiny-var, dtype=bfloat16, device=cpu)\n"


def test_what_cannot_be_had(hub, tmp_path: Path) -> None:
    out = run(
        hub,
        tmp_path,
        """
attempt("acme/nothing")
attempt("acme/other")
attempt("acme/var", model="tiny-var", revision="v9")
attempt("acme/other", model="tiny-var")
attempt("tiny-var", local_files_only=True)
attempt("a/b/c")
""",
    ).splitlines()
    assert "does not exist, or is private" in out[0]
    assert "nor written by 'nextscale convert'" in out[1]
    assert "has no revision 'v9'" in out[2]
    assert "has no var_tiny.pth" in out[3]
    assert "not in the local cache, and downloads are switched off" in out[4]
    assert "neither a model name, nor a local path, nor a hub repository" in out[5]


def test_the_token_is_sent(hub, tmp_path: Path) -> None:
    out = run(
        hub,
        tmp_path,
        """
attempt("acme/private", model="tiny-var")
attempt("acme/private", model="tiny-var", token="wrong")
attempt("acme/private", model="tiny-var", token="secret")
""",
    ).splitlines()
    assert (
        out[0] == out[1] == "refused: the hub repository 'acme/private' does not exist, or is private and needs token="
    )
    assert out[2] == "Pipeline(tiny-var, dtype=float32, device=cpu)"


def test_an_unreachable_hub(hub, tmp_path: Path) -> None:
    """What is cached is used; for the rest there is one sentence, at once: its client would try for 25 seconds."""
    pytest.importorskip("transformers")
    run(hub, tmp_path, 'attempt("tiny-var")')
    out = run(
        hub,
        tmp_path,
        """
import time, transformers
from nextscale.text.t5 import T5Encoder
from nextscale.text.qwen2 import QwenEncoder
def timed(do, *args):
    began = time.monotonic()
    try:
        do(*args)
    except NextscaleError as error:
        print("refused:", error)
    print(time.monotonic() - began < 10)
attempt("tiny-var")
timed(attempt, "tiny-infinity")
timed(attempt, "acme/hart")
timed(T5Encoder("acme/t5").encode, ["a fox"])
timed(QwenEncoder("acme/qwen").encode, ["a fox"])
""",
        endpoint="http://127.0.0.1:9",
    ).splitlines()
    assert out.pop(0) == "Pipeline(tiny-var, dtype=float32, device=cpu)"
    assert out[1::2] == ["True"] * 4
    why = "not in the local cache, and the hub cannot be reached"
    assert out[::2] == [
        f"refused: tiny_weights/ of the hub repository 'acme/infinity' is {why}",
        f"refused: config.json of the hub repository 'acme/hart' is {why}",
        f"refused: the text encoder 'acme/t5' could not be loaded: it is {why}",
        f"refused: the text encoder 'acme/qwen' could not be loaded: it is {why}",
    ]


def test_connections(monkeypatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0), backlog=5) as slow:  # listens, and takes its time to answer
        there = f"http://127.0.0.1:{slow.getsockname()[1]}"
        assert is_reachable(there)
        monkeypatch.setenv("https_proxy", there)
        assert is_reachable("https://no-such-name.invalid"), "a proxy finds names that this machine does not know"
        monkeypatch.setenv("no_proxy", "no-such-name.invalid")
        assert not is_reachable("https://no-such-name.invalid")
    assert not is_reachable(there), "nobody listens any more"
    assert not is_reachable("http://" + "x" * 300)


def test_a_network_that_swallows_everything() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:  # its queue is full then, so what comes next gets no answer at all
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        began = time.monotonic()
        assert not is_reachable(f"http://127.0.0.1:{full.getsockname()[1]}", seconds=0.4)
        assert 0.3 < time.monotonic() - began < 3
        for one in waiting:
            one.close()
