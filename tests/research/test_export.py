"""Exports that are interrupted, shared out, or cannot be."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import files
from support.files import VAR_CASE
from support.killing import kill_after

from nextscale import NOVA, Pipeline, Truncate
from nextscale.cli import main
from nextscale.errors import NextscaleError
from nextscale.models.registry import MODELS
from nextscale.research.export.plan import ExportPlan, Shard
from nextscale.research.export.protocol import sampling_for
from nextscale.research.export.run import export
from nextscale.testing import tiny_var

LABELS = "0 1 2 3 4 5 6"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return tiny_var()


@pytest.fixture
def plan(tmp_path: Path) -> ExportPlan:
    (tmp_path / "labels.txt").write_text(LABELS)
    return ExportPlan.read("imagenet", tmp_path / "labels.txt", images=2)


@pytest.fixture(scope="module")
def var_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    files.tokenizer(folder, VAR_CASE, "vae_ch160v4096z32.pth", nested=False)
    return files.flat(folder, VAR_CASE, "mine.pth")


def content(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in (out / "images").rglob("*") if p.is_file()}


def stamps(out: Path) -> dict[str, tuple[int, int]]:
    """A file that is written again is another file, or changed later."""
    found = {p.name: p.stat() for p in (out / "images").rglob("*") if p.is_file()}
    return {name: (s.st_ino, s.st_mtime_ns) for name, s in found.items()}


def require_whole(out: Path, wanted: dict[str, bytes]) -> None:
    """Every file of the folder is one of the finished export, to the last byte."""
    have = content(out)
    assert {name: data == wanted.get(name) for name, data in have.items()} == dict.fromkeys(have, True)


@pytest.mark.parametrize("batch", [1, 3])
def test_resume_makes_what_is_missing_and_nothing_else(
    pipe: Pipeline, plan: ExportPlan, tmp_path: Path, batch: int
) -> None:
    export(pipe, plan, tmp_path / "whole", batch=batch)
    wanted = content(tmp_path / "whole")
    assert len(wanted) == 14
    out = tmp_path / "out"
    export(pipe, plan, out, batch=batch)
    (out / "images" / "00001.png").unlink()  # in the middle of a batch
    cut = out / "images" / "01004.png"
    cut.write_bytes(cut.read_bytes()[:-5])
    for name in (".scratch", ".scratch-2of4"):  # of killed processes
        (out / name).mkdir()
        (out / name / ".00001.xyz.png").write_bytes(b"half")
    (out / ".lock").write_text("17 on here")
    (out / ".lock-2of4").write_text("17 on here")
    before = stamps(out)
    done = export(pipe, plan, out, batch=batch, resume=True)
    assert (done.made, done.missing) == (2, 0)
    assert content(out) == wanted
    changed = {name for name, stamp in stamps(out).items() if before.get(name) != stamp}
    assert changed == {"00001.png", "01004.png"}
    assert sorted(p.name for p in out.iterdir()) == ["images", "manifest.json"]
    manifest = (out / "manifest.json").read_bytes()
    assert export(pipe, plan, out, batch=batch, resume=True).made == 0
    assert (
        (out / "manifest.json").read_bytes()
        == manifest
        == (tmp_path / "whole" / "manifest.json").read_bytes().replace(b"/whole/", b"/out/")
    )


def test_killed_at_every_moment(tmp_path: Path) -> None:
    """See `_survive` below, which runs in its own process: a fork of this one could hang in its threads."""
    script = [sys.executable, __file__, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "finished after" in done.stdout


def test_the_command_is_killed_and_resumed(var_files: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "labels.txt").write_text(LABELS)
    args = ["export", "imagenet", "--prompts", "labels.txt", "--weights", var_files, "--images", 8, "--batch", 2]
    args = [*map(str, args), "--method", "truncate", "--device", "cpu"]
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    kill_after(4, [*args, "--out", "out"], environment)  # the manifest and three images

    def here(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", ["nextscale", *args, *more])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0)

    assert here("--out", "whole", "--quiet") == 0
    wanted, left, before = content(tmp_path / "whole"), content(tmp_path / "out"), stamps(tmp_path / "out")
    assert (len(left), len(wanted)) == (3, 56)
    require_whole(tmp_path / "out", wanted)
    assert capsys.readouterr().out == ""
    assert here("--out", "out") == 2
    assert "--resume makes the missing ones" in capsys.readouterr().err
    assert here("--out", "out", "--resume") == 0
    output = capsys.readouterr().out
    assert f"made {56 - len(left)} images" in output
    assert "create_npz_from_sample_folder" in output
    assert content(tmp_path / "out") == wanted
    after = stamps(tmp_path / "out")
    assert {name: after[name] for name in before} == before
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["settings"]["method"]["name"] == "truncate"
    assert manifest["settings"]["sampling"]["top_p"] == 0.96
    assert manifest["weight_files"] == ["mine.pth", "vae_ch160v4096z32.pth"]
    sums = subprocess.run(["sha256sum", var_files], capture_output=True, text=True, check=True).stdout
    assert manifest["settings"]["weights_sha256"][0] == sums.split()[0]
    assert manifest["runs"][0]["torch"] == torch.__version__
    assert manifest["runs"][0]["hardware"]


@pytest.mark.parametrize("where", ["write", "replace", "mkdir"])
def test_a_full_disk(pipe: Pipeline, plan: ExportPlan, tmp_path: Path, monkeypatch, where: str) -> None:
    export(pipe, plan, tmp_path / "whole")
    wanted = content(tmp_path / "whole")
    (tmp_path / "empty").mkdir()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out, real, written = tmp_path / "out", os.replace, []

    def replace(source: str, target: Path) -> None:
        written.append(target)
        if where == "replace" and len(written) > 5:
            full()
        real(source, target)

    class FullFile:
        def __enter__(self) -> FullFile:
            return self

        def __exit__(self, *error: object) -> None: ...

        write = full

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        if where == "write":
            opened = os.fdopen
            patch.setattr(os, "fdopen", lambda h, m: opened(h, m) if len(written) < 5 else os.close(h) or FullFile())
        if where == "mkdir":
            patch.setattr(Path, "mkdir", full)
        with pytest.raises(NextscaleError, match=r"cannot write .*No space left on device"):
            export(pipe, plan, out)
    if where == "mkdir":
        assert not out.exists()
    else:
        assert len(content(out)) == 4  # and the manifest
        require_whole(out, wanted)
        assert sorted(p.name for p in out.iterdir()) == ["images", "manifest.json"]
    export(pipe, plan, out, resume=True)
    assert content(out) == wanted


def test_shards_share_out_the_images(pipe: Pipeline, plan: ExportPlan, tmp_path: Path) -> None:
    export(pipe, plan, tmp_path / "whole")
    wanted = content(tmp_path / "whole")
    together, apart = tmp_path / "together", []
    for i in (2, 1, 3):  # in one folder, in any order
        done = export(pipe, plan, together, shard=Shard(i, 3))
        apart.append(content(tmp_path / f"{i}") if export(pipe, plan, tmp_path / f"{i}", shard=Shard(i, 3)) else {})
        assert done.missing == 14 - sum(map(len, apart))
    assert sum(map(len, apart)) == 14
    assert {**apart[0], **apart[1], **apart[2]} == wanted == content(together)
    assert len(list(together.glob("manifest-*of3.json"))) == 3
    with pytest.raises(NextscaleError, match="holds images of this export already"):
        export(pipe, plan, together, shard=Shard(1, 3))
    assert export(pipe, plan, together, resume=True).made == 0  # as one, too
    assert export(pipe, plan, tmp_path / "few", shard=Shard(40, 40)).made == 0
    assert (tmp_path / "few" / "manifest-40of40.json").exists()


def test_shards_of_prompts_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    records = [{"id": str(i), "prompt": "a fox"} for i in range(7)]
    (tmp_path / "p.json").write_text(json.dumps(records))
    image_files = ExportPlan.read("imagereward", tmp_path / "p.json").image_files
    parts = [Shard(i, 4).of(image_files) for i in range(1, 5)]
    assert sorted(p.path for part in parts for p in part) == sorted(p.path for p in image_files)
    assert [len(part) for part in parts] == [20, 20, 20, 10]  # whole prompts


def test_a_second_process_is_told_so(pipe: Pipeline, plan: ExportPlan, tmp_path: Path, monkeypatch, capsys) -> None:
    out, attempts = tmp_path / "out", []

    def meanwhile(self: Pipeline, *args: object, **options: object) -> object:
        """Another export while the first makes its first image."""
        if not attempts:
            attempts.append("begun")
            for shard in (Shard(), Shard(1, 2)):
                with pytest.raises(NextscaleError, match=r"is at work in .*out; let it finish") as error:
                    export(tiny_var(), plan, out, shard=shard, resume=True)
                attempts.append(str(error.value))
            monkeypatch.setattr(Pipeline, "from_pretrained", lambda *args, **options: pytest.fail("it was loaded"))
            command = ["export", "imagenet", "--prompts", tmp_path / "labels.txt", "--images", 2, "--out", out]
            monkeypatch.setattr(sys, "argv", ["nextscale", *map(str, command)])
            with pytest.raises(SystemExit) as stopped:
                main()
            assert stopped.value.code == 2
            assert "is at work in" in capsys.readouterr().err
        return real(self, *args, **options)

    real = Pipeline.__call__
    monkeypatch.setattr(Pipeline, "__call__", meanwhile)
    assert export(pipe, plan, out).made == 14
    assert len(attempts) == 3
    assert sorted(p.name for p in out.iterdir()) == ["images", "manifest.json"]


def test_shards_run_side_by_side(pipe: Pipeline, plan: ExportPlan, tmp_path: Path, monkeypatch) -> None:
    out, made = tmp_path / "out", []

    def meanwhile(self: Pipeline, *args: object, **options: object) -> object:
        if self is pipe and not made:
            made.append(0)
            made[0] = export(tiny_var(), plan, out, shard=Shard(2, 2)).made
        return real(self, *args, **options)

    real = Pipeline.__call__
    monkeypatch.setattr(Pipeline, "__call__", meanwhile)
    done = export(pipe, plan, out, shard=Shard(1, 2))
    assert (done.made, done.missing, made) == (7, 0, [7])
    assert sorted(p.name for p in out.iterdir()) == ["images", "manifest-1of2.json", "manifest-2of2.json"]


def test_the_manifest_keeps_earlier_runs(pipe: Pipeline, plan: ExportPlan, tmp_path: Path, monkeypatch) -> None:
    """Each on another machine; the second makes nothing that the first has made."""
    runs = []
    for threads in (1, 2, 1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        done = export(pipe, plan, tmp_path / "out", resume=True)
        (tmp_path / "out" / "images" / "00001.png").unlink()
        runs.append([run["threads"] for run in json.loads(done.manifest.read_text())["runs"]])
    assert runs == [[1], [1, 2], [1, 2], [1, 2, 3]]


def test_a_folder_that_cannot_be_written_is_noticed_first(tmp_path: Path, monkeypatch, capsys) -> None:
    """Before a model is loaded. Root may write anywhere, so the system's answer is made up."""
    (tmp_path / "p.json").write_text('[{"id": "1", "prompt": "a fox"}]')
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda *args, **options: pytest.fail("it was loaded"))

    def says(out: str) -> str:
        monkeypatch.setattr(sys, "argv", ["nextscale", "export", "imagereward", "--prompts", "p.json", "--out", out])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        return capsys.readouterr().err

    assert says("file/below") == "error: cannot write into file/below: Not a directory\n"
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert says("new/folder") == "error: cannot write into new/folder: Permission denied\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "p.json"]


def test_shards_out_of_range() -> None:
    assert Shard.parse("2/4") == Shard(2, 4)
    for text in ("0/4", "5/4", "1/0"):
        with pytest.raises(NextscaleError, match=f"shard {text} is out of range"):
            Shard.parse(text)
    for text in ("4", "a/b", "1/4/2", "-1/4", ""):
        with pytest.raises(NextscaleError, match="not of the form i/n"):
            Shard.parse(text)


def test_other_settings_are_refused_and_named(pipe: Pipeline, plan: ExportPlan, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(pipe, plan, out, method=NOVA(t_est=2))
    before = content(out)

    def refused(other: Pipeline, again: ExportPlan, **options: object) -> str:
        options.setdefault("method", NOVA(t_est=2))
        with pytest.raises(NextscaleError, match=r"manifest\.json is of an export with other settings") as error:
            export(other, again, out, resume=True, **options)
        return str(error.value)

    labels = tmp_path / "labels.txt"
    assert "seed is 0 there and 1 now" in refused(pipe, ExportPlan.read("imagenet", labels, images=2, seed=1))
    assert "images_per_prompt is 2 there and 3 now" in refused(pipe, ExportPlan.read("imagenet", labels, images=3))
    assert 'method.name is "nova" there and "none" now' in refused(pipe, plan, method=None)
    assert "method.fields.t_est is 2 there and 3 now" in refused(pipe, plan, method=NOVA(t_est=3))
    assert "sampling.top_p is 0.96 there and 0.5 now" in refused(pipe, plan, top_p=0.5)
    assert "weights_sha256 is [" in refused(tiny_var(seed=1), plan)
    assert 'dtype is "float32" there and "bfloat16" now' in refused(tiny_var().to(dtype="bfloat16"), plan)
    labels.write_text("1 2 3")
    assert "prompts_sha256 is" in refused(pipe, ExportPlan.read("imagenet", labels, images=2))
    with pytest.raises(NextscaleError, match="other settings: prompts_sha256"):
        export(pipe, ExportPlan.read("imagenet", labels), out, shard=Shard(2, 2))  # nor may another shard differ
    assert content(out) == before
    (out / "manifest.json").write_text("{}")
    with pytest.raises(NextscaleError, match="is not the manifest of an export"):
        export(pipe, plan, out, resume=True)


def test_foreign_files_are_refused_and_named(pipe: Pipeline, plan: ExportPlan, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "holiday.jpg").write_bytes(b"x")
    for resume in (False, True):
        with pytest.raises(NextscaleError, match=r"is not empty and is no export: it holds holiday\.jpg"):
            export(pipe, plan, out, resume=resume)
    (out / "holiday.jpg").unlink()
    export(pipe, plan, out)
    (out / "images.npz").write_bytes(b"x")  # what the scorer makes beside the images is no harm
    for name in ("00001 (copy).png", "99999.png", ".hidden", "more/00001.png"):
        (out / "images" / name).parent.mkdir(exist_ok=True)
        (out / "images" / name).write_bytes(b"x")
    with pytest.raises(NextscaleError, match=r"\.hidden, 00001 \(copy\)\.png, 99999\.png and 2 more; move it away"):
        export(pipe, plan, out, resume=True)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(NextscaleError, match=r"cannot write into .*Not a directory"):
        export(pipe, plan, tmp_path / "file")


def test_what_fails_at_the_first_image_leaves_nothing(pipe: Pipeline, plan: ExportPlan, tmp_path: Path) -> None:
    for options in ({"method": NOVA(t_est=7)}, {"top_p": 3.0}, {"batch": 0}, {"guidance_scale": float("nan")}):
        with pytest.raises(NextscaleError):
            export(pipe, plan, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    export(pipe, plan, tmp_path / "out", method=Truncate(1))


def test_sampling_of_the_protocols() -> None:
    """Given values first, then what the authors say of the benchmark, then the model's own."""
    spec = MODELS["infinity-2b"]
    assert sampling_for("geneval", spec, {"top_p": None, "temperature": None})["temperature"] == 1.0
    assert sampling_for("geneval", spec, {"temperature": 0.5})["temperature"] == 0.5
    assert sampling_for("mjhq", spec, {}) == {}
    assert sampling_for("imagenet", MODELS["var-d30"], {})["guidance_scale"] == 1.5


def test_the_command_refuses_before_it_loads(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "p.txt").write_text("a fox\n")
    (tmp_path / "p.json").write_text('[{"id": "1", "prompt": "a fox"}]')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Pipeline, "from_pretrained", lambda *args, **options: pytest.fail("it was loaded"))
    for words, args in {
        "unknown benchmark 'coco'": ("coco", "--prompts", "p.txt", "--out", "out"),
        "GenEval: line 1 is 'a fox': it is not JSON at column 1": (
            "geneval",
            "--prompts",
            "p.txt",
            "--out",
            "out",
        ),
        "needs its prompts": ("dpg", "--out", "out"),
        "shard 3/2 is out of range": ("imagereward", "--prompts", "p.json", "--out", "out", "--shard", "3/2"),
        "is not empty": ("imagereward", "--prompts", "p.json", "--out", "."),
        "unknown method 'magic'": ("imagereward", "--prompts", "p.json", "--out", "out", "--method", "magic"),
    }.items():
        monkeypatch.setattr(sys, "argv", ["nextscale", "export", *args])
        with pytest.raises(SystemExit) as stopped:
            main()
        err = capsys.readouterr().err
        assert (stopped.value.code, err.count("\n")) == (2, 1)
        assert words in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.json", "p.txt"]


def _survive(folder: Path) -> None:
    """Kill the export with SIGKILL at its 1st, 2nd, ... step (a file begun, half written, whole, in place)."""
    torch.set_num_threads(1)
    pipe, out = tiny_var(), folder / "out"
    (folder / "labels.txt").write_text(LABELS)
    plan = ExportPlan.read("imagenet", folder / "labels.txt", images=2)
    export(pipe, plan, folder / "whole", batch=2)
    wanted, seen, attempts = content(folder / "whole"), dict[str, tuple[int, int]](), 0
    while True:
        child = os.fork()
        if child == 0:
            _kill_at(1 + attempts % 13)
            export(pipe, plan, out, batch=2, resume=True)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        require_whole(out, wanted)
        now = stamps(out)
        assert {name: now[name] for name in seen} == seen, "an image was made twice"
        seen, attempts = now, attempts + 1
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, status
    assert content(out) == wanted
    assert sorted(p.name for p in out.iterdir()) == ["images", "manifest.json"]
    print(f"finished after {attempts} attempts")


def _kill_at(step: int) -> None:
    count, open_file, replace = 0, os.fdopen, os.replace

    def tick() -> None:
        nonlocal count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def ticking_open(handle: int, mode: str) -> object:
        tick()
        file = open_file(handle, mode)
        write = file.write

        class Slow:
            def __enter__(self) -> Slow:
                return self

            def __exit__(self, *error: object) -> None:
                file.close()

            def write(self, data: bytes) -> None:
                write(data[: len(data) // 2])
                file.flush()
                tick()
                write(data[len(data) // 2 :])

        return Slow()

    def ticking_replace(source: str, target: Path) -> None:
        tick()
        replace(source, target)
        tick()

    os.fdopen, os.replace = ticking_open, ticking_replace


if __name__ == "__main__":
    _survive(Path(sys.argv[1]))
