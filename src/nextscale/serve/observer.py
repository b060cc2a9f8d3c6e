"""What can be watched of an engine."""

from __future__ import annotations

from collections.abc import Sequence


class Observer:
    """Does nothing; its methods are called in the engine's thread or in that of a request, and return at once."""

    def rejected(self, reason: str) -> None:
        """A job was refused: "invalid", "queue_full", or the engine's state."""

    def started(self, waits: Sequence[float]) -> None:
        """A batch began; the seconds that each of its images has waited."""

    def scale_done(self, model: str, scale: int, seconds: float) -> None:
        """A scale (from 1) of a batch took so long."""

    def finished(self, model: str, tokens: int, tokens_plain: int, seconds: float) -> None:
        """An image is done, so long after it was asked for."""

    def canceled(self) -> None:
        """A job was given up by its client."""

    def failed(self, kind: str) -> None:
        """A job ended with an error: the name of its class."""

    def preview_made(self) -> None:
        """An image was decoded before it was done."""

    def preview_skipped(self) -> None:
        """A preview was left out because others wait."""
