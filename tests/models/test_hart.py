"""HART: the official layout of folders, seeds, and what methods and text do to it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from support import files
from support.pipelines import ask, embeds

from nextscale import NOVA, FastVAR, NextscaleError, Pipeline, SparseVAR, Truncate
from nextscale.engine.rng import PerImageNoise
from nextscale.models.residual_diffusion import ancestral_steps
from nextscale.research.verify import verify
from nextscale.testing import tiny_hart

CASE = files.HART_CASE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return files.hart(tmp_path / "hart")


def text(slots: int = 6) -> list[torch.Tensor]:
    return embeds(slots, dim=40)


def test_the_official_layout(root: Path) -> None:
    for source in (root, root / "llm"):
        pipe = Pipeline.from_pretrained(source, progress_bar=False)
        config = pipe.backbone.config
        assert (config.heads, config.sides, config.text_length) == (4, (1, 2, 3, 4), 6)
        assert pipe.tokenizer.config.hybrid
        image = pipe(prompt_embeds=text(), seed=3, top_k=50).images[0]
        assert image.size == (8, 8)


def test_the_heads_come_from_the_config_or_from_the_width(root: Path) -> None:
    (root / "llm" / "config.json").unlink()
    config = Pipeline.from_pretrained(root, progress_bar=False).backbone.config
    assert config.heads == 1  # 64 wide
    assert (config.sides, config.text_length) == ((1, 2, 3, 4), 6)  # from the levels that the file stores


def test_a_config_that_contradicts_the_weights(root: Path) -> None:
    file = root / "llm" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "depth": 24}))
    with pytest.raises(NextscaleError, match="has depth = 24, but its weights have 2"):
        Pipeline.from_pretrained(root)


def test_missing_pieces(root: Path) -> None:
    pipe = Pipeline.from_pretrained(root, text_encoder=root / "nowhere", progress_bar=False)
    with pytest.raises(NextscaleError, match="nowhere' could not be loaded"):
        pipe("a fox")
    with pytest.raises(NextscaleError, match=r"must be \[1..6, 40\] per image, not \[7, 40\]"):
        pipe(prompt_embeds=text(7))
    (root / "tokenizer" / "model.safetensors").unlink()
    with pytest.raises(NextscaleError, match=r"tokenizer holds no weights; looked for ema_model.bin"):
        Pipeline.from_pretrained(root)


def test_the_mask_buffer_is_never_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nextscale.checkpoints.files import PickleState

    asked: list[str] = []
    original = PickleState.tensors
    monkeypatch.setattr(PickleState, "tensors", lambda self, keys: asked.extend(keys) or original(self, keys))
    Pipeline.from_pretrained(root, progress_bar=False)
    assert "word_embed.weight" in asked
    assert "attn_bias_for_masking" not in asked


def test_a_seed_is_an_image_alone_and_in_a_batch(hart: Pipeline) -> None:
    batch = ask(hart, 3, output_type="latent").images
    again = ask(hart, 3, output_type="latent").images
    assert torch.equal(batch, again)
    for i in range(3):
        alone = ask(hart, 1, first=i, output_type="latent").images
        assert torch.allclose(alone[0], batch[i], atol=1e-4)  # the first sampler steps enlarge rounding
    other = ask(hart, 1, seed=5, output_type="latent").images
    assert not torch.allclose(other[0], batch[0], atol=1e-2)


def test_the_residual_is_added_at_the_last_scale_only(hart: Pipeline) -> None:
    """A run that stops early has none; the full one has codes plus at most 0.6 per channel."""
    maps: list[torch.Tensor] = []
    out = ask(hart, 1, callback_on_scale_end=lambda e: maps.append(e.features.clone()))
    codes = hart.tokenizer.codes(out.tokens[-1].long())
    residual = (maps[-1] - maps[-2]).flatten(2).transpose(1, 2) - codes
    assert 0.01 < residual.abs().max() <= 0.6 + 1e-5
    stopped = ask(hart, 1, method=Truncate(1), output_type="latent").images
    assert torch.equal(stopped, maps[-2])


@pytest.mark.parametrize("cosine", [False, True])
def test_half_precision(cosine: bool) -> None:
    pipe = tiny_hart(cosine_attention=cosine).to(torch.bfloat16)
    out = ask(pipe, 2, output_type="pt", method=NOVA(t_est=4))
    exact = ask(tiny_hart(cosine_attention=cosine), 2, output_type="pt", method=NOVA(t_est=4))
    assert torch.isfinite(out.images).all()
    assert torch.equal(out.tokens[0], exact.tokens[0])
    assert pipe.backbone.level_embed.mlp[0].weight.dtype == torch.float32
    assert pipe.backbone.residual.enter.weight.dtype == torch.bfloat16


def test_padding_on_the_left(hart: Pipeline) -> None:
    """Fewer features than slots: zeros in front of them, as if the user had written them."""
    short = embeds(5)[0]
    state = hart.backbone
    from nextscale.models.text_conditioning import TextCondition

    rows, places = state.read(TextCondition([short]), guided=True)
    assert places.tolist() == [[-1] * 7 + [0, 1, 2, 3, 4], [0] * 12]
    assert torch.equal(rows[0, 7:], short)
    assert rows[0, :7].abs().max() == rows[1].abs().max() == 0


def test_every_step_of_the_residual_has_noise_of_its_own() -> None:
    draws, like = PerImageNoise([1]), torch.empty(1, 4, 3)
    start, first, second = (draws.normal(like, 7, [0], name) for name in ("start", "step 0", "step 1"))
    assert not torch.equal(start, first)
    assert not torch.equal(first, second)
    assert torch.equal(first, draws.normal(like, 7, [0], "step 0"))


def test_the_spaced_schedule() -> None:
    """The numbers of the reference."""
    steps = ancestral_steps(8)[::-1]
    assert [s.time for s in steps] == [0, 143, 285, 428, 571, 714, 856, 999]
    betas = [4.1284e-05, 0.054878, 0.148746, 0.249546, 0.366072, 0.517566, 0.735439, 0.99999995]
    for step, beta in zip(steps, betas, strict=True):
        assert torch.tensor(step.log_beta).exp().item() == pytest.approx(beta, rel=2e-4)


# On random weights all cells change about alike, so only the highest threshold leaves some out.
PRESETS = [FastVAR.preset("hart"), dataclasses.replace(SparseVAR.preset("hart"), tau=1.0)]


@pytest.mark.parametrize("method", PRESETS, ids=["fastvar", "sparsevar"])
def test_presets_for_hart_reduce(hart: Pipeline, method) -> None:
    """Their counts at HART's own 14 scales are tested with the methods; here they leave something out and finish."""
    out = ask(hart, 2, method=method)
    assert all(out.trace.share(i) < 1 for i in range(2))
    assert torch.isfinite(ask(hart, 2, method=method, output_type="pt").images).all()


@pytest.mark.parametrize(
    "name",
    [
        "context_norm.weight",
        "context_embed.bias",
        "level_embed.mlp.2.weight",
        "blocks.1.norm.weight",
        "blocks.0.attn.v_bias",
        "blocks.1.mlp.gate.weight",
        "head_norm.weight",
        "head_modulation.bias",
        "residual_norm.weight",
        "residual.blocks.1.modulation.weight",
        "residual.final_modulation.bias",
        "residual.time_embed.mlp.0.weight",
    ],
)
def test_any_changed_weight_is_noticed(name: str) -> None:
    assert not verify(CASE, mutate=name).ok


def test_at_weight_two_the_residual_is_not_guided(hart) -> None:
    """As in the original, and at this very weight only."""
    scales = len(hart.schedule())
    tokens = ask(hart).tokens

    def residual(last: float):
        """Of forced tokens: the map then differs by what diffusion adds at the last scale alone."""
        weights = [1.5] * (scales - 1) + [last]  # on top of 1
        return ask(hart, guidance_scale=weights, force_tokens=tokens, output_type="latent").images

    unguided, two, near = residual(0.0), residual(1.0), residual(1.01)
    assert torch.allclose(two, unguided, atol=1e-5)
    assert (near - unguided).abs().max() > 1e-3
