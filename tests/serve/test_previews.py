from __future__ import annotations

import numpy as np
import pytest
import torch

from nextscale.io.images import as_output, to_pil
from nextscale.pipeline import Pipeline
from nextscale.serve.previews import decode_preview, pixels_of, preview_scales


@pytest.mark.parametrize(
    ("wanted", "seconds", "scales"),
    [
        (0, [1.0] * 13, ()),
        (1, [1.0] * 13, (6,)),
        (3, [1.0] * 12, (4, 6, 9)),
        (3, [0.1] * 10 + [1, 2, 4], (10, 11, 12)),  # not the last, which is the image
        (2, [0.1] * 10 + [1, 2, 4], (11, 12)),
        (3, [5.0] + [0.1] * 9, (4, 5, 6)),  # none before scale 4
        (3, [1.0] * 5, (4,)),  # the fifth is the image
        (3, [1.0] * 5 + [0.0] * 8, (4,)),  # a method leaves the last eight out
        (3, [1.0] * 3, ()),
        ("all", [1.0] * 4, (1, 2, 3)),
    ],
)
def test_previews_are_spread_over_the_time(wanted, seconds, scales) -> None:
    assert preview_scales(wanted, seconds) == scales


def test_pixels_are_those_of_finished_images() -> None:
    images = torch.randn(2, 3, 8, 8)
    for pixels, image in zip(pixels_of(as_output(images, "pt")), to_pil(images), strict=True):
        assert np.array_equal(pixels(), np.asarray(image))


def test_a_small_preview_has_half_the_side(any_pipe: Pipeline) -> None:
    maps = any_pipe.tokenizer.empty_features(2, any_pipe.schedule())
    large, small = (decode_preview(any_pipe.tokenizer.decode, maps, half) for half in (False, True))
    assert [n // 2 for n in large.shape[2:]] == list(small.shape[2:])
    assert torch.equal(large, as_output(any_pipe.decode(maps), "pt"))
