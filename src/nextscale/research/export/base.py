"""What a benchmark is: a prompt file to read, and the files that its scorer reads."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from nextscale.errors import NextscaleError, choices
from nextscale.research.export.reading import require_unique, sources


@dataclass(frozen=True)
class PromptEntry:
    """One prompt of the file."""

    name: str  # of its file or folder among the images, without ending
    prompt: str | int  # a number is a class label
    number: int  # counted as the benchmark counts
    where: str  # it stands: file and line
    record: str = ""  # the whole line, where a scorer wants it back


@dataclass(frozen=True)
class ImageFile:
    """One file to make."""

    path: str  # inside the folder that the scorer reads
    prompt: str | int
    seeds: tuple[int, ...]  # of one image, or of the four tiles of a grid
    prompt_index: int  # of the prompt in the file; shards share these out
    sidecar: tuple[str, str] | None = None  # path and content of a text file that belongs to it


class Layout(ABC):
    name: ClassVar[str]
    title: ClassVar[str]
    images: ClassVar[int]  # per prompt, as the official protocol has it
    allowed: ClassVar[tuple[int, ...]] = ()  # all numbers that the scorer understands; empty: any
    expects: ClassVar[str]  # the prompt file, in words
    pattern: ClassVar[str] = ""  # files of a prompt folder
    prompts: ClassVar[str] = "text"  # or "label"
    # Manifests hold it and must agree when an export goes on, so its words stay as they were.
    seed_rule: ClassVar[str] = "picture k (from 0) of every prompt has seed + k"

    def find(self, path: Path | None) -> list[Path]:
        """The prompt file, or the files of the prompt folder."""
        if path is None:
            raise NextscaleError(f"{self.title} needs its prompts: {self.expects}")
        with self._explained(path):
            return sources(path, self.pattern)

    def read(self, files: list[Path], path: Path | None) -> list[PromptEntry]:
        with self._explained(path):
            entries = self.parse(files)
            require_unique([e.name for e in entries])
            if not entries:
                raise ValueError("it holds no prompt")
            return entries

    def problem(self, prompt: str | int) -> str | None:
        """What no model of the benchmark's kind could draw."""
        return None if str(prompt).strip() else "the prompt is empty"

    @contextlib.contextmanager
    def _explained(self, path: Path | None) -> Iterator[None]:
        try:
            yield
        except NextscaleError:
            raise
        except ValueError as error:
            raise NextscaleError(
                f"{path} is no prompt file of {self.title}: {error}; expected {self.expects}"
            ) from None

    @abstractmethod
    def parse(self, files: list[Path]) -> list[PromptEntry]:
        """A `ValueError` says what is wrong."""

    @abstractmethod
    def image_files(self, entries: list[PromptEntry], images: int, seed: int) -> list[ImageFile]: ...

    @abstractmethod
    def commands(self, images: Path, side: int, count: int, prompts: str) -> list[str]:
        """What to run next, in a clone of the official repository; <...> is for the user to fill in."""

    def check_images(self, images: int) -> None:
        if images < 1 or (self.allowed and images not in self.allowed):
            allowed = choices(self.allowed) or "at least 1"
            raise NextscaleError(f"{self.title} takes {allowed} images per prompt, not {images}")

    def check_size(self, height: int, width: int) -> None:
        """Complain of images that the scorer would cut wrongly."""
