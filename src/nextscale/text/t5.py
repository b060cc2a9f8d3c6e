"""Prompts through a T5 encoder, as Infinity reads them. Needs the extra `text` (transformers)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale.errors import NextscaleError

logger = logging.getLogger(__name__)


class T5Encoder:
    """Loaded at the first prompt, so that features computed elsewhere need no text encoder at all."""

    def __init__(
        self,
        source: str | Path,
        max_length: int = 512,
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
            from transformers import AutoTokenizer, T5EncoderModel
        except ImportError:
            raise NextscaleError(
                "text prompts need transformers: pip install 'nextscale[text]', or pass prompt_embeds="
            ) from None
        # The authors run it in half precision; on a CPU that is slower and buys nothing.
        dtype = self.dtype or (torch.float16 if self.device.type == "cuda" else torch.float32)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(self.source, **self.hub)
            self.model = T5EncoderModel.from_pretrained(self.source, dtype=dtype, **self.hub)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise NextscaleError(f"the text encoder {self.source!r} could not be loaded: {reason}") from None
        self.model.eval().requires_grad_(False).to(self.device)

    def to(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        if self.model is not None:
            self.model.to(self.device)

    @property
    def nbytes(self) -> int:
        """Memory of the loaded weights."""
        return 0 if self.model is None else sum(p.nbytes for p in self.model.parameters())

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> list[Tensor]:
        """Features of every prompt without its padding, [length, dim] float32; the end token counts."""
        if self.model is None:
            self.load()
        lengths = [len(ids) for ids in self.tokenizer(list(prompts)).input_ids]
        if max(lengths) > self.max_length:
            logger.warning("a prompt of %d tokens is cut to %d", max(lengths), self.max_length)
        batch = self.tokenizer(
            list(prompts), padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        ).to(self.device)
        features = self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
        return [row[: int(mask.sum())].float() for row, mask in zip(features, batch.attention_mask, strict=True)]
