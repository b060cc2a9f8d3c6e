"""Recorded cases of HART: generation with all noise recorded, or its tokenizer alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextscale.checkpoints.families import FAMILIES
from nextscale.checkpoints.pretrained import official_part
from nextscale.engine.sampling import Sampling
from nextscale.engine.schedule import Schedule
from nextscale.errors import NextscaleError
from nextscale.models.hart import HART, HARTConfig
from nextscale.models.text_conditioning import TextCondition
from nextscale.official import LiveState
from nextscale.research.verify.base import TOLERANCE, Arguments, Case, RecordedRun, Recording, section, tensors_of
from nextscale.tokenizers.vq import VQConfig

SMOOTHED = 2e-2  # low temperatures amplify rounding; the reference allows this much for weights it did not choose
_RENAMED = {"x_out": "hidden", "logits_branches": "logits_raw"}


def _tokenizer_config(values: dict[str, Any]) -> VQConfig:
    a = Arguments("tokenizer", values, ("beta", "v_patch_nums", "double_decoder"))
    a.only("quantizer_type", "var_hybrid")
    a.only("quant_conv_ks", 3)
    config = VQConfig(
        vocabulary=a.take("vocab_size"),
        code_dim=a.take("z_channels"),
        channels=a.take("ch"),
        multipliers=tuple(a.take("ch_mult")),
        phis=a.take("share_quant_resi", 4),
        phi_ratio=a.take("quant_resi", 0.5),
        normalized=a.take("using_znorm", False),
        hybrid=True,
    )
    a.done()
    return config


def _backbone_config(values: dict[str, Any], tokenizer: VQConfig) -> HARTConfig:
    a = Arguments("llm", values, ("context_norm_scale",))
    for name, value in {"mlp_type": "llama", "attn_type": "llama", "sampler": "iddpm"}.items():
        a.only(name, value)
    a.only("disable_aln", True)
    a.only("shared_aln", False)
    a.only("use_cross_attn", False)
    width = a.take("embed_dim")
    config = HARTConfig(
        depth=a.take("depth"),
        width=width,
        heads=a.take("num_heads"),
        hidden=(int(width * a.take("mlp_ratio", 4.0) * 2 / 3) + 255) // 256 * 256,
        sides=tuple(a.take("patch_nums")),
        text_dim=a.take("context_dim"),
        text_length=a.take("context_token"),
        vocabulary=tokenizer.vocabulary,
        code_dim=tokenizer.code_dim,
        cosine_attention=a.take("attn_l2_norm", False),
        text_normalized=a.take("use_context_norm", True),
        sinusoid_levels=a.take("use_timestep_embed", True),
        diffusion_width=a.take("diff_width"),
        diffusion_depth=a.take("diff_depth"),
        diffusion_steps=int(a.take("num_sampling_steps", 8)),
        eps=a.take("norm_eps", 1e-6),
    )
    a.done()
    return config


class RecordedDraws:
    """Every random number as it was recorded."""

    def __init__(self, recorded: Recording, run: str) -> None:
        self.recorded, self.run = recorded, run

    def categorical(self, probs: Tensor, scale: int, images: Sequence[int]) -> Tensor:
        return self.recorded.get(f"{self.run}.tokens.{scale}").long().to(probs.device)

    def gumbel(self, like: Tensor, scale: int, images: Sequence[int]) -> Tensor:
        return self.recorded.get(f"{self.run}.gumbel.{scale}").to(like.device)

    def normal(self, like: Tensor, scale: int, images: Sequence[int], name: str) -> Tensor:
        short = "noise_init" if name == "start" else name.replace("step ", "noise.")
        noise = self.recorded.get(f"{self.run}.diff.{short}")
        return noise[: like.shape[0] * like.shape[1]].view(like.shape).to(like.device)


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename `greedy.s0.logits` to `greedy.logits.0`, as all other cases name it."""
    named = {}
    for key, tensor in tensors.items():
        if found := re.fullmatch(r"(\w+)\.s(\d+)\.(\w+)", key):
            run, scale, what = found.groups()
            if what == "x_out" and scale == "0":
                tensor = tensor[:, -1:]  # of the text only the last slot predicts something
            key = f"{run}.{_RENAMED.get(what, what)}.{scale}"
        elif found := re.fullmatch(r"(\w+\.diff\.\w+)_(\d+)", key):
            key = ".".join(found.groups())
        named[key] = tensor
    return named


def _part(tensors: Mapping[str, Tensor], prefix: str, family: str, config: Any, device: torch.device) -> Any:
    """A module from the tensors of a case; what generation does not use was not stored, and is zero."""
    inside = "vae." if family == "hybrid-vq" else ""
    cond = {inside + key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
    if inside:
        with torch.device("meta"):
            module = FAMILIES[family].module(config)
        left_out = [n for n, _ in module.named_parameters() if n.startswith(("encoder.", "quant_conv."))]
        for name in left_out:
            cond.setdefault(inside + name, torch.zeros(module.get_parameter(name).shape))
    return official_part([LiveState("recorded", cond)], (family,), config).build(torch.float32, device)


def open_case(folder: Path, config: dict[str, Any], recorded: Recording, device: torch.device) -> Case:
    tensors = tensors_of(folder / "state.safetensors")
    vq = _tokenizer_config(section(config, "tokenizer"))
    tokenizer = _part(tensors, "tokenizer.vae.", "hybrid-vq", vq, device)
    sides = section(config, "tokenizer")["v_patch_nums"]
    if "llm" not in config:
        return Case(folder, None, tokenizer, Schedule.squares(sides), [], recorded)
    recorded.tensors = _named(recorded.tensors)
    hart = _backbone_config(section(config, "llm"), vq)
    backbone: HART = _part(tensors, "llm.", "hart", hart, device)
    for name, value in {"final_stage": 0, "num_maskgit_iters": 1}.items():
        if config.get(name, value) != value:
            raise NextscaleError(f"config.json has {name} = {config[name]!r}, but only {value!r} is supported")
    recorded.used.add("text.mask")  # the released variant reads it nowhere
    positions = list(recorded.get("text.position_ids"))
    condition = TextCondition(list(recorded.get("text.features")), positions=positions)
    scales = len(hart.sides)
    runs = []
    for name in section(config, "runs"):
        smooth = f"{name}.gumbel.0" in recorded.tensors
        sampling = Sampling.make(
            scales,
            guidance=backbone.guidance(float(config["cfg"]), scales),
            progress=backbone.progress(scales),
            top_k=(600,) * 7 + (300,),
            top_p=config.get("top_p", 0.0),
            greedy=name.startswith("greedy"),  # otherwise the tokens are those that were recorded
            smooth=smooth,
        )

        def finish(image: Tensor) -> dict[str, tuple[Tensor, float]]:
            return {"decoded": (image, TOLERANCE), "image": (image.add(1).mul(0.5), TOLERANCE)}

        tolerance = SMOOTHED if smooth else TOLERANCE
        noise = RecordedDraws(recorded, name)
        runs.append(RecordedRun(name, condition, len(positions), sampling, noise, "tokens", finish, tolerance))
    return Case(folder, backbone, tokenizer, Schedule.squares(hart.sides), runs, recorded)


def play(case: Case, keep_images: bool) -> None:
    if case.backbone is None:
        _tokenizer(case)
    for run in case.runs:
        watched = _watch(case, run)
        maps = case.play(run, keep_images)
        for stop in watched:
            stop()
        _between(case, run, maps)


def _between(case: Case, run: RecordedRun, maps: list[Tensor]) -> None:
    """Compare what lies between two scales: codes, the next input, the numbers of the sampler."""
    recorded, scales = case.recorded, list(case.schedule)
    last = len(scales) - 1
    for scale, before in zip(scales[1:], maps, strict=False):
        small = case.tokenizer.inputs(before, scale)
        recorded.compare(f"{run.name}.next_map.{scale.index - 1}", as_map(small, scale.grid), run.tolerance)
        with torch.inference_mode():
            x = case.backbone.embed(None, small, scale)
        recorded.compare(f"{run.name}.x_in.{scale.index}", torch.cat((x, x)), run.tolerance)
    if f"{run.name}.x_in.0" in recorded.tensors:
        with torch.inference_mode():
            cond = case.backbone.conditioning(run.condition, case.schedule, guided=True)
            recorded.compare(f"{run.name}.x_in.0", case.backbone.embed(cond, None, scales[0]))
    for scale in scales:
        ratio = run.sampling.progress[scale.index]
        tau = torch.tensor(max(0.27 * (1 - 0.95 * ratio), 0.005))
        recorded.compare(f"{run.name}.gumbel_tau.{scale.index}", tau, tolerance=1e-6)
        if not run.sampling.smooth and scale.index < last:
            codes = case.tokenizer.codes(recorded.get(f"{run.name}.tokens.{scale.index}").to(case.tokenizer.device))
            recorded.compare(f"{run.name}.h.{scale.index}", as_map(codes, scale.grid))
        elif scale.index < last:  # a mixture shows in the map it is added to
            recorded.used.add(f"{run.name}.h.{scale.index}")
    weight = torch.tensor(run.sampling.guidance[last] - 1)
    recorded.compare(f"{run.name}.diff.cfg", weight, tolerance=1e-6)
    recorded.used.add(f"{run.name}.diff.noise.{case.backbone.config.diffusion_steps - 1}")  # the last step adds none


def as_map(x: Tensor, grid: tuple[int, int]) -> Tensor:
    return x.transpose(1, 2).unflatten(2, grid)


def _watch(case: Case, run: RecordedRun) -> list[Callable[[], None]]:
    """Compare what goes into and comes out of the diffusion net."""
    recorded, net = case.recorded, case.backbone.residual
    number = 0

    def flat(x: Tensor) -> Tensor:
        return x.flatten(0, 1)

    def condition(module: Any, inputs: Any, out: Tensor) -> None:
        recorded.compare(f"{run.name}.diff.cond", flat(out), run.tolerance)

    def step(module: Any, inputs: Any, out: Tensor) -> None:
        nonlocal number
        x, time, _ = inputs
        # The original's second half is noise of its own, which it overwrites before every step.
        recorded.compare(f"{run.name}.diff.x.{number}", flat(x[: run.images]), run.tolerance, rows=True)
        recorded.compare(f"{run.name}.diff.t.{number}", torch.tensor([time]), tolerance=0)
        recorded.compare(f"{run.name}.diff.net_out.{number}", flat(out), run.tolerance)
        number += 1

    hooks = [case.backbone.residual_norm.register_forward_hook(condition), net.register_forward_hook(step)]
    sample = net.sample

    def sampled(*args: Any) -> Tensor:
        residual = sample(*args)
        recorded.compare(f"{run.name}.diff.sample", flat(residual), run.tolerance, rows=True)
        return residual

    net.sample = sampled

    def restore() -> None:
        del net.sample

    return [*(hook.remove for hook in hooks), restore]


def _tokenizer(case: Case) -> None:
    """Compare both encodings: hybrid, as the transformer learns it, and discrete, with phi at every scale."""
    recorded, tokenizer, schedule = case.recorded, case.tokenizer, case.schedule
    image = recorded.get("image").to(tokenizer.device)
    with torch.inference_mode():
        recorded.compare("encoder_out", tokenizer.encoder(image))
        encoded = tokenizer.encode(image, schedule)
        latent = encoded.features
        recorded.compare("latent", latent)
        last = len(schedule) - 1
        for k, tokens in enumerate(encoded.tokens):
            recorded.compare(f"hybrid.s{k}.tokens", tokens, tolerance=0, required=True)
        before = encoded.maps[last - 1]
        recorded.compare("hybrid.last_target", (latent - before).flatten(2).transpose(1, 2))
        parts = [tokenizer.inputs(m, s) for m, s in zip(encoded.maps, list(schedule)[1:], strict=False)]
        recorded.compare("teacher_input", torch.cat(parts, dim=1))
        hybrid, tokenizer.config = tokenizer.config, dataclasses.replace(tokenizer.config, hybrid=False)
        discrete = tokenizer.encode(image, schedule)
        tokenizer.config = hybrid
        for k, (tokens, total) in enumerate(zip(discrete.tokens, discrete.maps, strict=True)):
            recorded.compare(f"discrete.s{k}.tokens", tokens, tolerance=0, required=True)
            recorded.compare(f"discrete.s{k}.f_hat", total)
        recorded.compare("forward.f_hat_discrete_only", discrete.maps[-1])
        recorded.compare("forward.f_hat_hybrid", latent)  # with the whole rest added
        recorded.compare("post_quant_conv_of_latent", tokenizer.post_quant_conv(latent))
        for name, features in (("recon_discrete_only", discrete.maps[-1]), ("recon_hybrid", latent)):
            recorded.compare(name, tokenizer.decoder(tokenizer.post_quant_conv(features)))
        recorded.compare("decoded_from_latent", tokenizer.decode(latent))
