"""Text encoders that transformers loads: at the first prompt, so that features computed elsewhere need none."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, ClassVar

import torch

from nextscale.errors import NextscaleError, first_line
from nextscale.io.network import why_local

logger = logging.getLogger(__name__)


class HubEncoder:
    model_class: ClassVar[str]  # in transformers

    def __init__(
        self,
        source: str | Path,
        max_length: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        **hub: Any,
    ) -> None:
        self.source, self.max_length, self.dtype, self.hub = str(source), max_length, dtype, hub
        self.device = torch.device(device)
        self.tokenizer: Any = None
        self.model: Any = None

    def load(self) -> None:
        try:
            import transformers
        except ImportError:
            raise NextscaleError(
                "text prompts need transformers: pip install 'nextscale[text]', or pass prompt_embeds="
            ) from None
        # Without a connection transformers would ask for one file after the other, half a minute for each.
        local = "" if os.path.isdir(self.source) else why_local(bool(self.hub.get("local_files_only")))
        options = {**self.hub, "local_files_only": bool(local)}
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.source, **options)
            dtype = self.dtype_on(self.device)
            self.model = getattr(transformers, self.model_class).from_pretrained(self.source, dtype=dtype, **options)
        except Exception as error:  # a foreign library, and files from anywhere
            absent = local and isinstance(error, OSError)
            reason = f"it is not in the local cache, and {local}" if absent else first_line(error)
            raise NextscaleError(f"the text encoder {self.source!r} could not be loaded: {reason}") from None
        self.model.eval().requires_grad_(False).to(self.device)

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """The authors' half precision on a GPU; on a CPU that is slower and gains nothing."""
        return self.dtype or (torch.float16 if device.type == "cuda" else torch.float32)

    def to(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if self.model is not None:
            self.model.to(self.device)

    @property
    def nbytes(self) -> int:
        """Memory of the loaded weights."""
        return 0 if self.model is None else sum(p.nbytes for p in self.model.parameters())

    def warn_if_cut(self, tokens: int) -> None:
        if tokens > self.max_length:
            logger.warning("a prompt of %d tokens is cut to %d", tokens, self.max_length)
