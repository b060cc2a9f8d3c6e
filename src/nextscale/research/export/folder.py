"""The output folder: `images` is what a scorer reads; all that is ours lies beside it, where no scorer looks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image

from nextscale.errors import NextscaleError, choices
from nextscale.io.locking import LOCK, locked, require_unlocked
from nextscale.io.writing import atomic_write, require_folder
from nextscale.research.export.base import ImageFile
from nextscale.research.export.manifest import require_agreement
from nextscale.research.export.plan import ExportPlan, Shard

# JPEG at 95 without halved colors: what the score sees of the compression is then far below its noise.
FORMATS: dict[str, dict[str, Any]] = {
    ".png": {"format": "PNG"},
    ".jpg": {"format": "JPEG", "quality": 95, "subsampling": 0},
}
END_MARKERS = {".png": b"IEND\xaeB`\x82", ".jpg": b"\xff\xd9"}
SCRATCH = ".scratch"


@dataclass(frozen=True)
class ExportFolder:
    root: Path
    shard: Shard

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def manifest(self) -> Path:
        """Each shard has its own, so that several machines may write into one folder."""
        return self.root / f"manifest{self.shard.suffix}.json"

    def check(self, plan: ExportPlan, settings: dict[str, Any], resume: bool) -> None:
        """Refuse what would be lost, mixed or miscounted. Other shards of the same export may be there already."""
        require_folder(self.root)
        require_folder(self.images)
        try:
            held = sorted(p.name for p in self.root.iterdir() if not p.name.startswith((SCRATCH, LOCK)))
        except FileNotFoundError:
            return
        except OSError as error:
            raise NextscaleError(f"cannot write into {self.root}: {error.strerror}") from None
        manifests = [name for name in held if re.fullmatch(r"manifest(-\d+of\d+)?\.json", name)]
        if held and not manifests:
            raise NextscaleError(f"{self.root} is not empty and is no export: it holds {held[0]}; choose another --out")
        for name in manifests:
            require_agreement(self.root / name, settings)
        mine = self.shard.of(plan.image_files)
        if not resume and (self.manifest.name in manifests or any(self.has(p) for p in mine)):
            raise NextscaleError(f"{self.root} holds images of this export already; --resume makes the missing ones")
        foreign = self.foreign(plan)
        if foreign:
            more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
            raise NextscaleError(
                f"{self.images} holds what is not of this export and a scorer may count: "
                f"{choices(foreign[:3])}{more}; move it away"
            )

    def foreign(self, plan: ExportPlan) -> list[str]:
        folders = {str(parent) for path in plan.known_paths for parent in PurePosixPath(path).parents}
        found = []
        for at, inner, files in os.walk(self.images):
            here = PurePosixPath(Path(at).relative_to(self.images).as_posix())
            found += [str(here / name) for name in files if str(here / name) not in plan.known_paths]
            found += [f"{here / name}/" for name in inner if str(here / name) not in folders]
        return sorted(found)

    def has(self, image_file: ImageFile) -> bool:
        """Whether the file is there to its last byte; a copy from another disk may have been cut off."""
        path = self.images / image_file.path
        end = END_MARKERS[path.suffix]
        try:
            with path.open("rb") as file:
                file.seek(-len(end), os.SEEK_END)
                return file.read() == end
        except OSError:
            return False

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Make a folder for unfinished files beside the images, as a killed process cannot clean up after itself.

        What such a process left here goes when its shard is run again, or the whole. Every run has a folder of its own,
        so that the workers of a dead driver can finish no file from then on: theirs is gone.
        """
        mine = f"{SCRATCH}{self.shard.suffix}"
        path = self.root / f"{mine}.{uuid.uuid4().hex[:8]}"
        try:
            if self.shard.count == 1:  # nobody else is here
                old = [*self.root.glob(f"{SCRATCH}*"), *self.root.glob(f"{LOCK}-*")]
            else:
                old = [*self.root.glob(mine), *self.root.glob(f"{mine}.*")]
            for n, left in enumerate(old):
                if left.is_dir():
                    # Under another name first: a worker that still writes into it could keep it from going.
                    shutil.rmtree(left.rename(self.root / f"{path.name}.old{n}"), ignore_errors=True)
                else:
                    left.unlink()
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NextscaleError(f"cannot write into {self.root}: {error.strerror}") from None
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Lock out other exports of the same images; other shards may work here."""
        require_folder(self.root)
        return locked(self.root, self.shard.suffix)

    def require_unlocked(self) -> None:
        require_unlocked(self.root, self.shard.suffix)

    def save(self, image_file: ImageFile, tiles: Sequence[Image.Image], scratch: Path) -> None:
        path = self.images / image_file.path
        data = io.BytesIO()  # PIL writing to a full disk by itself does not say why it failed
        grid(tiles).save(data, **FORMATS[path.suffix])
        with atomic_write(path, scratch) as file:
            file.write(data.getvalue())

    def save_sidecar(self, image_file: ImageFile, scratch: Path) -> None:
        if image_file.sidecar is None or (self.images / image_file.sidecar[0]).exists():
            return
        with atomic_write(self.images / image_file.sidecar[0], scratch) as file:
            file.write(f"{image_file.sidecar[1]}\n".encode())


def grid(tiles: Sequence[Image.Image]) -> Image.Image:
    """Four images as 2 x 2, row by row; one as it is."""
    if len(tiles) == 1:
        return tiles[0]
    width, height = tiles[0].size
    whole = Image.new("RGB", (2 * width, 2 * height))
    for i, tile in enumerate(tiles):
        whole.paste(tile, (i % 2 * width, i // 2 * height))
    return whole
