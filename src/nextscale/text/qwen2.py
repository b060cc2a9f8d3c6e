"""Prompts through a Qwen2 language model, as HART reads them. Needs the extra `text` (transformers)."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale.text.hub import HubEncoder

logger = logging.getLogger(__name__)

# Of the text that the official tools put in front of every prompt. It is theirs, so users bring it.
OFFICIAL_INSTRUCTION = "424f7aa7b1119f8ed1e329140e5941dfe308183bea0af59041dad5527a9b8f20"


class QwenEncoder(HubEncoder):
    """An encoder of padded prompts: HART attends to padding too, so it is encoded like the rest.

    `instruction` is read before each prompt and then cut off. The official tools have one of their own
    (`llm_system_prompt` in their constants); without it features differ from theirs.
    """

    model_class = "AutoModel"

    def __init__(
        self, source: str | Path, max_length: int = 300, instruction: str | None = None, **options: Any
    ) -> None:
        super().__init__(source, max_length, **options)
        self.instruction = instruction
        if instruction and hashlib.sha256(instruction.encode()).hexdigest() != OFFICIAL_INSTRUCTION:
            logger.warning("the instruction is not the one of the official tools, so features will differ from theirs")

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> list[Tensor]:
        """Padded features and, in a last column, their positions: [max_length, dim + 1] float32."""
        if self.model is None:
            self.load()
        return [self._encode(prompt) for prompt in prompts]

    def _encode(self, prompt: str) -> Tensor:
        self.warn_if_cut(len(self.tokenizer(prompt).input_ids))
        options = {"truncation": True, "max_length": self.max_length, "padding": "max_length", "return_tensors": "pt"}
        ids = self.tokenizer(prompt, **options).input_ids.to(self.device)
        mask = ids != self.tokenizer.pad_token_id
        positions = mask.long().cumsum(1) - 1
        if self.instruction:
            before = self.tokenizer(self.instruction, return_tensors="pt").input_ids.to(self.device)
            ids, mask = torch.cat((before, ids), dim=1), torch.cat((torch.ones_like(before).bool(), mask), dim=1)
        out = self.model(input_ids=ids, attention_mask=mask.long(), output_hidden_states=True).hidden_states[-1]
        features = out[0, -self.max_length :].float()
        return torch.cat((features, positions[0, :, None].float()), dim=1)
