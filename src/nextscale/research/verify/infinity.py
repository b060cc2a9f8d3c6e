"""Recorded cases of Infinity."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale.checkpoints.files import open_states
from nextscale.checkpoints.pretrained import official_part
from nextscale.engine.guidance import per_scale
from nextscale.engine.rng import GeneratorNoise
from nextscale.engine.sampling import Sampling
from nextscale.engine.schedule import INFINITY_GRIDS, Schedule
from nextscale.errors import NextscaleError, choices
from nextscale.models.infinity import Infinity, InfinityConfig, rotary_table
from nextscale.models.text_conditioning import TextCondition
from nextscale.research.verify.base import TOLERANCE, Arguments, Case, RecordedRun, Recording, generator_of, section
from nextscale.tokenizers.bsq import BSQConfig

ROUNDED = "io_ca_bf16.safetensors"  # the greedy run with cross-attention rounded to bfloat16
# There, float32 noise that crosses a rounding boundary becomes a step of 1/256. The official code on another
# CPU than the recording one is off by 7e-3; forgetting the rounding is off by 0.17.
ROUNDED_TOLERANCE = 5e-2

# Arguments of the official constructor: those that only training or the choice of a kernel reads, ...
_WITHOUT_EFFECT = (
    *("pn", "drop_rate", "drop_path_rate", "cond_drop_rate", "rand_uncond", "raw_scale_schedule", "batch_size"),
    *("customized_flash_attn", "fused_mlp", "fused_norm", "use_flex_attn", "pad_to_multiplier", "checkpointing"),
    *("inference_mode", "train_h_div_w_list", "always_training_scales"),
    *("block_chunks", "apply_spatial_patchify"),  # read elsewhere: they shape the names and the tokens
)
# ... and those that no released model sets otherwise.
_FIXED = {
    "rope2d_each_sa_layer": 1,
    "rope2d_normalized_by_hw": 2,
    "add_lvl_embeding_only_first_block": 1,
    "shared_aln": True,
    "head_aln": True,
    "head_depth": 1,
    "cos_attn": True,
    "tau": 1,
    "rms_norm": False,
    "swiglu": False,
    "nm0": False,
    "use_bit_label": 1,
    "video_frames": 1,
}


# Of a run: the text itself is recorded, and the official function does not look at the others.
_IGNORED = (
    *("record", "text", "negative_text", "gumbel", "softmax_merge_topk", "sampling_per_bits", "norm_cfg", "cfg_sc"),
    *("cfg_exp_k", "ratio_Bl1", "force_gt_Bhw"),
)


def _tokenizer_config(values: dict[str, Any], patchify: bool) -> BSQConfig:
    a = Arguments("vae", values)
    config = BSQConfig(
        code_dim=a.take("codebook_dim"),
        channels=a.take("base_ch"),
        multipliers=tuple(a.take("ch_mult")),
        residual_blocks=a.take("num_res_blocks", 2),
        patchify=patchify,
    )
    a.only("patch_size", 2 ** (len(config.multipliers) - 1))
    a.done()
    return config


def _backbone_config(values: dict[str, Any], tokenizer: BSQConfig) -> InfinityConfig:
    a = Arguments("transformer", values, _WITHOUT_EFFECT)
    for name, value in _FIXED.items():
        a.only(name, value)
    width, text_dim = a.take("embed_dim"), a.take("text_channels")
    config = InfinityConfig(
        depth=a.take("depth"),
        width=width,
        heads=a.take("num_heads"),
        bits=tokenizer.code_dim * (4 if tokenizer.patchify else 1),
        hidden=round(width * a.take("mlp_ratio", 4) / 256) * 256 or width,
        text_dim=text_dim,
        text_length=a.take("text_maxlen"),
        levels=a.take("num_level_embeddings", 15),
        pool_heads=text_dim // (128 if width <= 4096 else 64),
        eps=a.take("norm_eps", 1e-6),
    )
    a.done()
    return config


def _schedule(config: dict[str, Any]) -> Schedule:
    ratio = config.get("h_div_w_template", 1.0)
    if ratio not in INFINITY_GRIDS:
        raise NextscaleError(f"h_div_w_template {ratio!r} is no row of the table; allowed: {choices(INFINITY_GRIDS)}")
    try:
        grids = tuple((int(h), int(w)) for _, h, w in config["scale_schedule"])
    except (KeyError, TypeError, ValueError):
        raise NextscaleError("config.json needs 'scale_schedule', a list of [1, h, w]") from None
    return Schedule(grids, frame=INFINITY_GRIDS[ratio][-1], aspect_ratio=ratio)


def _text(recorded: Recording, prefix: str) -> list[Tensor]:
    lengths = recorded.get(f"{prefix}_lens").tolist()
    return list(recorded.get(f"{prefix}_features").float().split(lengths))


def _run(name: str, values: Any, recorded: Recording, scales: int, depth: int) -> RecordedRun:
    if not isinstance(values, dict):
        raise NextscaleError(f"runs.{name} must be an object of arguments")
    a = Arguments(f"runs.{name}", values, _IGNORED)
    negative = _text(recorded, f"{name}.negative_text") if values.get("negative_text") else None
    condition = TextCondition(_text(recorded, f"{name}.text"), negative)
    layers = tuple(a.take("cfg_insertion_layer", [0]))
    if any(layer > 1 or depth + layer <= 0 for layer in layers):
        raise NextscaleError(f"runs.{name} has cfg_insertion_layer {list(layers)}; allowed: 1 to {1 - depth}")
    sampling = Sampling.make(
        scales,
        guidance=per_scale(a.take("cfg_list"), scales, f"runs.{name}.cfg_list"),
        temperature=per_scale(a.take("tau_list"), scales, f"runs.{name}.tau_list"),
        top_k=a.take("top_k", 0),
        top_p=a.take("top_p", 0.0),
        guidance_layers=tuple(n for n in layers if n <= 0),  # 1 is accepted by the official code and does nothing
    )
    a.only("gt_leak", 0)
    generator = generator_of(a.take("g_seed"), f"runs.{name}")
    a.done()

    def finish(image: Tensor) -> dict[str, tuple[Tensor, float]]:
        bgr = image.add(1).div(2).mul(255).to(torch.uint8).flip(1).permute(0, 2, 3, 1)
        return {"image": (image, TOLERANCE), "image_uint8_bgr": (bgr, 1)}  # rounding may cross an integer

    return RecordedRun(name, condition, len(condition.text), sampling, GeneratorNoise(generator), "bits", finish)


def open_case(folder: Path, config: dict[str, Any], recorded: Recording, device: torch.device) -> Case:
    patchify = bool(section(config, "transformer").get("apply_spatial_patchify", 0))
    bsq = _tokenizer_config(section(config, "vae"), patchify)
    infinity = _backbone_config(section(config, "transformer"), bsq)
    backbone = official_part(open_states(folder / "state.safetensors"), ("infinity",), infinity)
    tokenizer = official_part(open_states(folder / "vae.safetensors"), ("bsq",), bsq)
    schedule = _schedule(config)
    runs = [_run(n, v, recorded, len(schedule), infinity.depth) for n, v in section(config, "runs").items()]
    models = [part.build(torch.float32, device) for part in (backbone, tokenizer)]
    return Case(folder, models[0], models[1], schedule, runs, recorded)


def play(case: Case, keep_images: bool) -> None:
    recorded = case.recorded
    greedy = min(case.runs, key=lambda run: (run.name != "greedy", run.sampling.top_k[0] != 1))
    for run in case.runs:
        maps = case.play(run, keep_images)
        _text_tensors(case, run)
        if run is greedy and "tf.logits" in recorded.tensors:
            _teacher_forced(case, run, maps)
    if "rope.cos" in recorded.tensors:
        _rotary(case)
    if "vae.image" in recorded.tensors:
        _tokenizer(case)
    if any(name.startswith(ROUNDED) for name in recorded.tensors):
        _rounded(case)


def _text_tensors(case: Case, run: RecordedRun) -> None:
    with torch.inference_mode():
        text, lengths, mask = case.backbone.read(run.condition, run.sampling.guided_until > 0)
        pooled, memory = case.backbone.read_text(text, mask)
    packed = torch.cat([row[:n] for row, n in zip(memory, lengths, strict=True)])
    case.recorded.compare(f"{run.name}.cond", pooled, rows=True)
    case.recorded.compare(f"{run.name}.text_kv", packed, rows=True)


def _teacher_forced(case: Case, run: RecordedRun, maps: list[Tensor]) -> None:
    """Compare one masked pass over the greedy maps with what was generated scale by scale."""
    inputs = [None] + [case.tokenizer.inputs(m, s) for m, s in zip(maps, list(case.schedule)[1:], strict=False)]
    with torch.inference_mode():
        cond = case.backbone.conditioning(run.condition, case.schedule, guided=False)
        logits = case.backbone.teacher_forced(cond, inputs, case.schedule)
    case.recorded.compare("tf.logits", logits.flatten(2))


def _rotary(case: Case) -> None:
    table = rotary_table(case.backbone.head_dim, case.schedule, case.backbone.device)
    case.recorded.compare("rope.cos", table[..., 0])
    case.recorded.compare("rope.sin", table[..., 1])


def _tokenizer(case: Case) -> None:
    recorded, tokenizer = case.recorded, case.tokenizer
    encoded = tokenizer.encode(recorded.get("vae.image").to(tokenizer.device), case.schedule)
    recorded.compare("vae.h", encoded.features)
    for scale, bits in zip(case.schedule, encoded.tokens, strict=True):
        latent = tokenizer.to_map(bits.float(), scale.grid).permute(0, 2, 3, 1)
        recorded.compare(f"vae.bits.{scale.index}", latent, tolerance=0, required=True)
    recorded.compare("vae.z", encoded.maps[-1])
    recorded.compare("vae.recon", tokenizer.decode(encoded.maps[-1]))


def _rounded(case: Case) -> None:
    """Compare once more, with the rounding that the official code applies even in a float32 run."""
    config = dataclasses.replace(case.backbone.config, round_cross_attention=True)
    rounded = Infinity(config).eval().requires_grad_(False).to(case.backbone.device)
    rounded.load_state_dict(case.backbone.state_dict())
    for run in case.runs:
        if any(name.startswith(f"{ROUNDED}/{run.name}.") for name in case.recorded.tensors):
            assert isinstance(run.noise, GeneratorNoise)
            assert run.noise.generator is not None
            noise = GeneratorNoise(torch.Generator().manual_seed(run.noise.generator.initial_seed()))
            again = dataclasses.replace(run, name=f"{ROUNDED}/{run.name}", noise=noise, tolerance=ROUNDED_TOLERANCE)
            case.recorded.used.add(f"{again.name}.text_lens")  # the same text
            dataclasses.replace(case, backbone=rounded).play(again)
