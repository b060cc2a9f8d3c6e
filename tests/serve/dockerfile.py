"""Reads the Dockerfile, and runs its steps one by one where there is no Docker.

    python tests/serve/dockerfile.py [--target cpu cuda] [--system]

A stage becomes a temporary folder, in which a new virtual environment stands for the Python of the base image, and
which holds what the image has below /opt. Packages are really installed, the entrypoint is really started, asked by
the health check's command, asked for an image, and stopped by the stop signal. Commands that change the machine
(apt-get, useradd) are skipped unless `--system` asks for them. Pip's variables and files of this machine count as
build arguments. Where a Docker daemon answers, the targets are built and run with it, too.
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

ROOT = Path(__file__).parents[2]
TARGETS = ["cpu", "cuda"]
DONE_HERE = ("WORKDIR", "ENV", "COPY", "RUN")
NOTED = ("ARG", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "USER", "ENTRYPOINT")
SYSTEM = ("apt-get", "useradd")  # commands that would change this machine
PASSED_ON = re.compile(r"PIP_|SSL_|(https?|no)_proxy$", re.IGNORECASE)  # of this machine's environment
PORT = 8000  # in a container
READY_SECONDS = 300


@dataclass
class Stage:
    name: str
    parent: str  # another stage, or an image
    inherited: list[tuple[str, str]]  # instructions of the parent, if it is a stage
    steps: list[tuple[str, str]]  # instruction, arguments

    def last(self, word: str) -> str:
        """The arguments of the instruction that an image obeys: the last one."""
        return [rest for w, rest in (*self.inherited, *self.steps) if w == word][-1]


def read_stages(text: str) -> dict[str, Stage]:
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    stages: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, re.sub(r"\\\n", "", text).splitlines())):
        word, _, rest = line.partition(" ")
        if word not in ("FROM", *DONE_HERE, *NOTED):
            raise ValueError(f"unknown instruction: {line}")
        if word == "FROM":
            parent, _, name = rest.split()
            before = stages.get(parent)
            stages[name] = stage = Stage(name, parent, [*before.inherited, *before.steps] if before else [], [])
        else:
            stage.steps.append((word, rest.strip()))
    return stages


def in_context(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore lets a file or a folder be copied: the last pattern that matches decides."""
    parts, ignored = path.split("/"), False
    names = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
    for pattern in patterns:
        wanted = re.escape(pattern.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(wanted, name) for name in names):
            ignored = not pattern.startswith("!")
    return not ignored


def ignore_patterns() -> list[str]:
    lines = map(str.strip, (ROOT / ".dockerignore").read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def copy_files(arguments: str, workdir: Path) -> None:
    """COPY files, or the contents of one folder, from the build context."""
    *sources, target = arguments.split()
    patterns = ignore_patterns()

    def left_out(folder: str, names: list[str]) -> list[str]:
        within = Path(folder).relative_to(ROOT)
        return [name for name in names if not in_context((within / name).as_posix(), patterns)]

    for source in sources:
        if not in_context(source, patterns):
            raise FileNotFoundError(f".dockerignore leaves out {source}")
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, workdir / target, ignore=left_out)
        else:
            shutil.copy(ROOT / source, workdir / target)


def exec_form(arguments: str) -> list[str]:
    """The list of an instruction in exec form, behind options if it has any."""
    return json.loads(arguments[arguments.index("[") :])


class Image:
    """A folder in which the steps of stages are run."""

    def __init__(self, folder: Path, system: bool) -> None:
        self.folder, self.system, self.workdir = folder, system, folder
        (folder / "home").mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "venv", folder / "python"], check=True)
        self.env = {name: value for name, value in os.environ.items() if PASSED_ON.match(name)}
        self.env |= {"PATH": f"{folder}/python/bin:{os.defpath}", "HOME": f"{folder}/home"}

    def derived(self) -> Image:
        """What a stage begins with that builds on this one: the same folder, so that torch is installed once."""
        child = copy.copy(self)
        child.env = dict(self.env)
        return child

    def here(self, text: str) -> str:
        """Put the folder before paths below /opt."""
        return re.sub(r"(?<![\w./-])/opt\b", f"{self.folder}/opt", text)

    def command(self, arguments: str, *more: str) -> list[str]:
        """The command of an instruction in exec form, behind its options if it has any."""
        name, *rest = exec_form(arguments)
        return [shutil.which(name, path=self.env["PATH"]) or name, *map(self.here, rest), *more]

    def run(self, command: str, images: dict[str, Image]) -> None:
        if command.startswith(SYSTEM) and not self.system:
            print(f"  skipped: {command.split()[0]} would change this machine; --system runs it")
            return
        begun, mounted = time.monotonic(), None
        if mount := re.match(r"--mount=type=bind,from=(\w+),source=(\S+),target=(\S+)\s+", command):
            stage, source, target = mount.groups()
            mounted, command = Path(self.here(target)), command[mount.end() :]
            mounted.symlink_to(images[stage].here(source))
        shell = ["sh", "-c", self.here(command)]
        subprocess.run(shell, cwd=self.workdir, env=self.env, check=True, stdout=subprocess.DEVNULL)
        if mounted:
            mounted.unlink()
        print(f"  {time.monotonic() - begun:.0f} s")


def build(stages: dict[str, Stage], target: str, images: dict[str, Image], folder: Path, system: bool) -> None:
    """Run the steps of a stage and of those that it needs, unless they were run before."""
    stage = stages[target]
    used = {name for _, rest in stage.steps for name in re.findall(r"--mount=\S*from=(\w+)", rest)}
    for name in sorted(used | {stage.parent} & set(stages)):
        if name not in images:
            build(stages, name, images, folder, system)
    parent = images.get(stage.parent)
    images[target] = image = parent.derived() if parent else Image(folder / target, system)
    for word, rest in stage.steps:
        print(f"{target}: {word} {' '.join(rest.split())}", flush=True)
        if word == "WORKDIR":
            image.workdir = Path(image.here(rest))
            image.workdir.mkdir(parents=True, exist_ok=True)
        elif word == "ENV":
            image.env |= dict(pair.split("=", 1) for pair in shlex.split(image.here(rest)))
        elif word == "COPY":
            copy_files(rest, image.workdir)
        elif word == "RUN":
            image.run(rest, images)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_until(healthy: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not healthy():
        if time.monotonic() - begun > READY_SECONDS:
            raise TimeoutError(f"not healthy after {READY_SECONDS} s")
        time.sleep(1)
    print(f"  healthy after {time.monotonic() - begun:.0f} s")


def ask_for_image(port: int) -> None:
    body = json.dumps({"prompt": "a red fox", "seed": 7, "method": "truncate:6"}).encode()
    url, headers = f"http://127.0.0.1:{port}/v1/images/generations", {"Content-Type": "application/json"}
    with build_opener(ProxyHandler({})).open(Request(url, body, headers), timeout=120) as answer:
        image = base64.b64decode(json.load(answer)["data"][0]["b64_json"])
    assert image.startswith(b"\x89PNG"), image[:8]
    print(f"  made an image of {len(image)} bytes")


def try_entrypoint(image: Image, stage: Stage) -> None:
    """Start it, wait until it is healthy, ask for an image, stop it."""
    port = free_port()
    command = image.command(stage.last("ENTRYPOINT"), "--port", str(port))
    check = [part.replace(str(PORT), str(port)) for part in image.command(stage.last("HEALTHCHECK"))]
    print(f"{stage.name}: {shlex.join(command)}", flush=True)
    process = subprocess.Popen(command, cwd=image.workdir, env=image.env)

    def healthy() -> bool:
        assert process.poll() is None, f"ended with exit code {process.returncode}"
        return subprocess.run(check, env=image.env, stderr=subprocess.DEVNULL).returncode == 0

    try:
        wait_until(healthy)
        ask_for_image(port)
        process.send_signal(signal.Signals[stage.last("STOPSIGNAL")])
        assert process.wait(60) == 0, f"ended with exit code {process.returncode}"
        print("  stopped with exit code 0")
    finally:
        process.kill()


def try_docker(target: str) -> None:
    """The same with Docker itself; an image for GPUs is only built."""

    def docker(*arguments: str) -> str:
        if arguments[0] != "inspect":
            print(f"{target}: docker {shlex.join(arguments)}", flush=True)
        done = subprocess.run(["docker", *arguments], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        return done.stdout.strip()

    chosen = [f"--build-arg={name}" for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL") if name in os.environ]
    docker("build", "--target", target, "--tag", f"nextscale:{target}", *chosen, ".")
    if target == "cuda":
        return
    port = free_port()
    name = docker("run", "--detach", "--init", "--publish", f"127.0.0.1:{port}:{PORT}", f"nextscale:{target}")
    try:
        wait_until(lambda: docker("inspect", "--format", "{{.State.Health.Status}}", name) == "healthy")
        ask_for_image(port)
        docker("stop", "-t", "60", name)
        assert docker("inspect", "--format", "{{.State.ExitCode}}", name) == "0"
    finally:
        docker("rm", "--force", name)


def why_no_docker() -> str | None:
    if shutil.which("docker") is None:
        return "there is no docker here"
    asked = subprocess.run(["docker", "info"], capture_output=True, text=True)
    return None if asked.returncode == 0 else "no Docker daemon answers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--system", action="store_true", help="run commands that change this machine, too")
    options = parser.parse_args()
    stages = read_stages((ROOT / "Dockerfile").read_text())
    print(
        f"the base image's Python is that of this machine, {sys.version.split()[0]}, instead of {stages['base'].parent}"
    )
    with tempfile.TemporaryDirectory(prefix="nextscale-docker-") as folder:
        images: dict[str, Image] = {}
        for target in options.target:
            build(stages, target, images, Path(folder), options.system)
            if target == "cuda" and not shutil.which("nvidia-smi"):
                print("cuda: its entrypoint is not started: this machine has no GPU")
            else:
                try_entrypoint(images[target], stages[target])
    if reason := why_no_docker():
        print(f"not built by Docker: {reason}")
        return
    for target in options.target:
        try_docker(target)


if __name__ == "__main__":
    main()
