"""Recorded cases of VAR."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale.checkpoints.files import open_states
from nextscale.checkpoints.pretrained import official_part
from nextscale.engine.guidance import ramp
from nextscale.engine.rng import GeneratorNoise
from nextscale.engine.sampling import Sampling
from nextscale.engine.schedule import Schedule
from nextscale.errors import NextscaleError
from nextscale.models.var import VARConfig
from nextscale.research.verify.base import (
    SMOOTHED,
    TOLERANCE,
    Arguments,
    Case,
    RecordedRun,
    Recording,
    generator_of,
    section,
)
from nextscale.tokenizers.vq import VQConfig

# Only training, or the choice of a kernel, reads these.
_TRAINING = (
    "drop_rate",
    "attn_drop_rate",
    "drop_path_rate",
    "cond_drop_rate",
    "flash_if_available",
    "fused_if_available",
)


def _tokenizer_config(values: dict[str, Any], scales: int) -> VQConfig:
    a = Arguments("vae", values, ("beta", "dropout", "default_qresi_counts", "test_mode", "v_patch_nums"))
    share, ratio = a.take("share_quant_resi", 4), abs(a.take("quant_resi", 0.5))
    a.only("quant_conv_ks", 3)
    config = VQConfig(
        vocabulary=a.take("vocab_size"),
        code_dim=a.take("z_channels"),
        channels=a.take("ch"),
        multipliers=tuple(a.take("ch_mult", (1, 1, 2, 2, 4))),
        residual_blocks=a.take("num_res_blocks", 2),
        phis=0 if ratio < 1e-6 else share or scales,  # 0 in the official code: one phi per scale
        phi_ratio=ratio,
        normalized=a.take("using_znorm", False),
    )
    a.done()
    return config


def _backbone_config(values: dict[str, Any], tokenizer: VQConfig) -> VARConfig:
    a = Arguments("transformer", values, _TRAINING)
    width = a.take("embed_dim")
    config = VARConfig(
        depth=a.take("depth"),
        width=width,
        heads=a.take("num_heads"),
        sides=tuple(a.take("patch_nums")),
        classes=a.take("num_classes"),
        vocabulary=tokenizer.vocabulary,
        code_dim=tokenizer.code_dim,
        hidden=round(width * a.take("mlp_ratio", 4.0)),
        shared_modulation=a.take("shared_aln", False),
        cosine_attention=a.take("attn_l2_norm", False),
        eps=a.take("norm_eps", 1e-6),
    )
    a.done()
    return config


def _run(name: str, values: Any, recorded: Recording, classes: int, scales: int) -> RecordedRun:
    if not isinstance(values, dict):
        raise NextscaleError(f"runs.{name} must be an object of arguments")
    a = Arguments(f"runs.{name}", values, ("record", "B", "batch"))
    labels = recorded.get(f"{name}.labels").long()
    if labels.min() < 0 or labels.max() > classes:
        raise NextscaleError(f"{name}.labels must lie in 0..{classes} ({classes} = no class)")
    generator = generator_of(a.take("g_seed"), f"runs.{name}")
    if a.take("labels", 0) is None:  # then the official code draws them first
        drawn = torch.multinomial(torch.full((classes,), 1 / classes), len(labels), True, generator=generator)
        recorded.compare(f"{name}.labels", drawn, tolerance=0)
    sampling = Sampling.make(
        scales,
        guidance=ramp(float(a.take("cfg")), scales),
        top_k=a.take("top_k", 0),
        top_p=a.take("top_p", 0.0),
        smooth=a.take("more_smooth", False),
    )
    a.done()

    def finish(image: Tensor) -> dict[str, tuple[Tensor, float]]:
        return {"image": (image.add(1).mul(0.5), TOLERANCE)}

    tolerance = SMOOTHED if sampling.smooth else TOLERANCE
    return RecordedRun(name, labels, len(labels), sampling, GeneratorNoise(generator), "tokens", finish, tolerance)


def open_case(folder: Path, config: dict[str, Any], recorded: Recording, device: torch.device) -> Case:
    sides = section(config, "transformer").get("patch_nums", [])
    vq = _tokenizer_config(section(config, "vae"), len(sides))
    var = _backbone_config(section(config, "transformer"), vq)
    backbone = official_part(open_states(folder / "state.safetensors"), ("var",), var)
    tokenizer = official_part(open_states(folder / "vae.safetensors"), ("vq",), vq)
    runs = [_run(n, v, recorded, var.classes, len(sides)) for n, v in section(config, "runs").items()]
    models = [part.build(torch.float32, device) for part in (backbone, tokenizer)]
    return Case(folder, models[0], models[1], Schedule.squares(sides), runs, recorded)


def play(case: Case, keep_images: bool) -> None:
    recorded = case.recorded
    for run in case.runs:
        maps = case.play(run, keep_images)
        for scale, before in zip(list(case.schedule)[1:], maps, strict=False):
            small = case.tokenizer.inputs(before, scale).transpose(1, 2).unflatten(2, scale.grid)
            recorded.compare(f"{run.name}.next_in.{scale.index - 1}", small, run.tolerance)
        recorded.compare(f"{run.name}.next_in.{len(maps) - 1}", maps[-1], run.tolerance)
    if "tf.logits" in recorded.tensors:
        _teacher_forced(case)
    if "vae.image" in recorded.tensors:
        _tokenizer(case)


def _teacher_forced(case: Case) -> None:
    """Compare one masked pass over the recorded inputs with what was generated scale by scale."""
    recorded, schedule = case.recorded, case.schedule
    x = recorded.get("tf.x").float().to(case.backbone.device)
    parts = x.split([s.tokens for s in schedule][1:], dim=1)
    with torch.inference_mode():
        cond = case.backbone.conditioning(recorded.get("tf.labels").long(), schedule, guided=False)
        logits = case.backbone.teacher_forced(cond, [None, *parts], schedule)
    recorded.compare("tf.logits", logits)


def _tokenizer(case: Case) -> None:
    recorded = case.recorded
    encoded = case.tokenizer.encode(recorded.get("vae.image").to(case.tokenizer.device), case.schedule)
    recorded.compare("vae.f", encoded.features)
    for k, (tokens, total) in enumerate(zip(encoded.tokens, encoded.maps, strict=True)):
        recorded.compare(f"vae.tokens.{k}", tokens, tolerance=0, required=True)
        recorded.compare(f"vae.f_hat.{k}", total)
    recorded.compare("vae.recon", case.tokenizer.decode(encoded.maps[-1]))
