"""Prompts through a T5 encoder, as Infinity reads them. Needs the extra `text` (transformers)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale.text.hub import HubEncoder


class T5Encoder(HubEncoder):
    model_class = "T5EncoderModel"

    def __init__(self, source: str | Path, max_length: int = 512, **options: Any) -> None:
        super().__init__(source, max_length, **options)

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> list[Tensor]:
        """Features of every prompt without its padding, [length, dim] float32; the end token counts."""
        if self.model is None:
            self.load()
        self.warn_if_cut(max(len(ids) for ids in self.tokenizer(list(prompts)).input_ids))
        batch = self.tokenizer(
            list(prompts), padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        ).to(self.device)
        features = self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
        return [row[: int(mask.sum())].float() for row, mask in zip(features, batch.attention_mask, strict=True)]
