"""Options of workers and replicas, as far as they are read before Ray is asked for anything."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import files
from support.commands import run
from support.files import VAR_CASE

from nextscale.cluster.placement import Placement, as_options, read_resources
from nextscale.errors import NextscaleError
from nextscale.serve.setup import ServeOptions

COMMANDS = (
    ("export", "imagenet", "--out", "out"),
    ("eval", "scenes", "--out", "out"),
    ("eval", "sweep", "methods", "--out", "out"),
    ("calibrate", "shares", "--prompts", "none.txt", "--out", "out.json"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_workers_are_read_first(command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before prompts, folders and models are looked at."""
    monkeypatch.chdir(tmp_path)

    def said(*options: str) -> str:
        done = run(*command, *options)
        assert done.returncode == 2
        return done.stderr

    assert said("--workers", "dask") == "error: unknown workers 'dask'; allowed: local, ray\n"
    for option in (("--address", "auto"), ("--replicas", "2"), ("--resources", "GPU=1")):
        assert said(*option) == "error: --address, --replicas and --resources need --workers ray\n"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert said("--workers", "ray") == "error: --workers ray needs ray: pip install 'nextscale[ray]'\n"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert said("--workers", "ray", "--resources", "GPU") == (
        "error: --resources 'GPU' is not a list of what a worker takes, such as GPU=1 or CPU=4\n"
    )
    for address in (" ", "ray://here:1", "here", "a b:1", ":1"):
        assert said("--workers", "ray", "--address", address) == (
            f"error: --address {address!r} is no address of a cluster; allowed: auto, local, HOST:PORT\n"
        )
    unused = "no cluster can be reached at --address 127.0.0.1:"
    assert unused in said("--workers", "ray", "--address", "127.0.0.1:1")
    assert unused in said("--workers", "ray", "--address", "127.0.0.1:99999")
    assert not list(tmp_path.iterdir())


def test_replicas_are_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0", "-1", "two", "1.5", "10000", ""):
        assert f"--replicas {text!r} is neither a number" in run("serve", f"--replicas={text}").stderr
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    assert run("serve", "--replicas", "2").stderr == "error: --replicas needs ray: pip install 'nextscale[ray]'\n"


def test_resources() -> None:
    assert read_resources(None) == ()
    assert read_resources("CPU=4, GPU=0.5,big=1") == (("CPU", 4.0), ("GPU", 0.5), ("big", 1.0))
    for text in ("", "GPU", "GPU=", "GPU=0", "GPU=1,GPU=2", "=1", "GPU=-1", "GPU=nan", "a b=1", "GPU=1e9"):
        with pytest.raises(NextscaleError, match="is not a list of what a worker takes"):
            read_resources(text)
    with pytest.raises(NextscaleError, match="more than 1 of a resource must be a whole number"):
        read_resources("GPU=1.5")


def test_what_a_worker_takes() -> None:
    gpus, cores = [{"CPU": 16.0, "GPU": 8.0}, {"CPU": 4.0}], [{"CPU": 4.0}]
    assert Placement().needs(None, gpus) == {"GPU": 1.0}
    assert Placement().needs("cpu", gpus) == Placement().needs(None, cores) == {"CPU": 1.0}
    assert Placement().room({"GPU": 1.0}, gpus) == 8
    four = Placement(resources=(("CPU", 4.0),))
    assert four.needs(None, cores) == {"CPU": 4.0}
    assert four.needs("cpu", gpus) == {"CPU": 4.0}
    assert four.needs(None, gpus) == {"GPU": 1.0, "CPU": 4.0}, "cores beside the GPU, not in its place"
    assert Placement(resources=(("GPU", 0.5),)).needs(None, gpus) == {"GPU": 0.5}
    assert four.room({"CPU": 4.0}, gpus) == 5
    assert four.room({"CPU": 4.0}, [{"CPU": 6.0}] * 2) == 2, "a third would wait for ever for what two nodes have left"
    assert four.room({"GPU": 1.0, "CPU": 4.0}, [{"CPU": 30.0, "GPU": 8.0}] * 2) == 14
    assert Placement(replicas=3).room({"CPU": 4.0}, cores) == 3
    with pytest.raises(NextscaleError, match="a worker needs 1 GPU, and a node has 0 GPU at most; --replicas waits"):
        Placement().room({"GPU": 1.0}, cores)
    assert as_options({"CPU": 2.0, "big": 1.0}) == {"num_cpus": 2.0, "num_gpus": 0, "resources": {"big": 1.0}}


def test_replicas_share_the_machine() -> None:
    from nextscale.serve.replicas import as_config, scaling

    options = ServeOptions(max_batch=8, device="cpu", api_key="secret", method="none")
    assert scaling(2, options, {"CPU": 8.0}) == {
        "num_replicas": 2,
        "ray_actor_options": {"num_cpus": 4},
    }
    auto = scaling("auto", options, {"CPU": 8.0})
    assert auto["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 16}
    with pytest.raises(NextscaleError, match="--replicas 9 needs as many cores; this machine has 8"):
        scaling(9, options, {"CPU": 8.0})
    config = as_config(options)
    assert "secret" not in str(config)
    assert ServeOptions.read(config).method == "none"


def test_no_other_command_imports_ray(tmp_path: Path) -> None:
    files.tokenizer(tmp_path, VAR_CASE, "vae_ch160v4096z32.pth", nested=False)
    files.flat(tmp_path, VAR_CASE, "mine.pth")
    (tmp_path / "labels.txt").write_text("0 1")
    (tmp_path / "prompts.txt").write_text("0\n" * 64)
    commands = [
        "export imagenet --prompts labels.txt --weights mine.pth --images 1 --out out --quiet",
        "calibrate shares --prompts prompts.txt --weights mine.pth --out shares.json",
        "eval scenes --methods none --lists nowhere --out scenes",
        "serve --model nowhere.pth",
    ]
    code = "import sys\nfrom nextscale.cli import main\nsys.argv = ['nextscale', *sys.argv[1:]]\n"
    code += "try:\n    main()\nfinally:\n    assert 'ray' not in sys.modules, 'ray was imported'\n"
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-c", code, *command.split()],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == (2 if "nowhere" in command else 0), done.stderr
