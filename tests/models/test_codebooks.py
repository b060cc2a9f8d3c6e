"""The nearest code of VAR's tokenizer, against arithmetic written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nextscale.tokenizers.vq import VQConfig, VQTokenizer


def nearest(vectors: np.ndarray, book: np.ndarray, cosine: bool) -> np.ndarray:
    """One pair at a time, in float64."""
    found = np.empty(len(vectors), dtype=np.int64)
    for i, v in enumerate(vectors):
        if cosine:
            scores = [float(v @ code) / np.linalg.norm(v) / np.linalg.norm(code) for code in book]
            found[i] = int(np.argmax(scores))
        else:
            found[i] = int(np.argmin([float(((v - code) ** 2).sum()) for code in book]))
    return found


@pytest.mark.parametrize("cosine", [True, False])
def test_the_nearest_code(cosine: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    config = VQConfig(vocabulary=24, code_dim=4, channels=32, multipliers=(1,), residual_blocks=1, normalized=cosine)
    tokenizer = VQTokenizer(config)
    # Lengths and channels that differ greatly, so that neither may be left out of the rule.
    book = torch.randn(24, 4, generator=generator) * torch.logspace(-1, 1, 24)[:, None] * torch.tensor([9.0, 1, 1, 0.3])
    vectors = torch.randn(2, 30, 4, generator=generator) * torch.tensor([0.5, 1, 2, 3])
    with torch.no_grad():
        tokenizer.codebook.weight.copy_(book)
        tokens = tokenizer.nearest(vectors)
    expected = nearest(vectors.reshape(-1, 4).double().numpy(), book.double().numpy(), cosine)
    assert tokens.shape == (2, 30)
    assert tokens.flatten().tolist() == expected.tolist()
    other = nearest(vectors.reshape(-1, 4).double().numpy(), book.double().numpy(), not cosine)
    assert (other != expected).sum() > 10, "the two rules differ here"
