"""Checkpoint files of the published layouts, small enough for tests: the recorded cases, written out again."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.pipelines import DATA

from nextscale.tokenizers.vq import VQConfig, VQTokenizer

VAR_CASE, CASE_2B, CASE_8B = DATA / "var_shared_adaln", DATA / "infinity_like_2b", DATA / "infinity_like_8b"


HART_CASE = DATA / "hart" / "t2i_small"


def state(case: Path) -> dict[str, torch.Tensor]:
    return load_file(case / "state.safetensors")


def vae(case: Path) -> dict[str, torch.Tensor]:
    return load_file(case / "vae.safetensors")


def flat(folder: Path, case: Path, name: str = "model.pth") -> Path:
    torch.save(state(case), folder / name)
    return folder / name


def tokenizer(folder: Path, case: Path, name: str, nested: bool = True, inner: bool = True) -> Path:
    """Infinity's files keep the state under "vae"; some have no inner `.conv` / `.norm` names."""
    content = vae(case)
    if not inner:
        content = {k.replace(".conv.weight", ".weight").replace(".conv.bias", ".bias"): v for k, v in content.items()}
        content = {k.replace(".norm.weight", ".weight").replace(".norm.bias", ".bias"): v for k, v in content.items()}
    torch.save({"vae": content, "ema": {}} if nested else content, folder / name)
    return folder / name


def training(folder: Path, case: Path, name: str = "ar-ckpt-last.pth") -> Path:
    keys = ("var_wo_ddp", "vae_local") if case == VAR_CASE else ("gpt_fsdp", "vae_local")
    trainer = {keys[0]: state(case), keys[1]: vae(case), "config": {"lr": 1e-4}, "opt": {"state": {}}}
    if case != VAR_CASE:
        del trainer[keys[1]]
    torch.save({"epoch": 3, "iter": 0, "trainer": trainer, "args": {"depth": 4}}, folder / name)
    return folder / name


def shards(folder: Path, case: Path, parts: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    content, weight_map = state(case), {}
    for i in range(parts):
        name = f"model-{i + 1:05d}-of-{parts:05d}.safetensors"
        chunk = {k: content[k] for k in list(content)[i::parts]}
        save_file(chunk, folder / name)
        weight_map |= dict.fromkeys(chunk, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def hart(folder: Path) -> Path:
    """HART's published layout: `llm` with averaged weights beside others, and `tokenizer`."""
    content = state(HART_CASE)
    config = json.loads((HART_CASE / "config.json").read_text())
    llm = {k.removeprefix("llm."): v for k, v in content.items() if k.startswith("llm.")}
    tokens = {k.removeprefix("tokenizer."): v for k, v in content.items() if k.startswith("tokenizer.")}
    values = config["tokenizer"]
    shape = {"vocabulary": values["vocab_size"], "code_dim": values["z_channels"], "channels": values["ch"]}
    whole = VQTokenizer(VQConfig(**shape, multipliers=tuple(values["ch_mult"]), hybrid=True))
    for name, p in whole.named_parameters():  # generation needs no encoder, so the case has none
        if name.startswith(("encoder.", "quant_conv.")):
            tokens[f"vae.{name}"] = p.detach().clone()
    tokens["disc.main.0.weight"] = torch.zeros(3)
    (folder / "llm").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    (folder / "llm" / "config.json").write_text(json.dumps({"model_type": "hart", **config["llm"]}))
    torch.save(llm, folder / "llm" / "ema_model.bin")
    broken = {k: torch.full_like(v, float("nan")) if v.is_floating_point() else v for k, v in llm.items()}
    save_file(broken, folder / "llm" / "model.safetensors")  # not the averaged weights
    save_file(tokens, folder / "tokenizer" / "model.safetensors")
    return folder


def recorded_tokens(case: Path, pipe) -> bool:
    """Whether a loaded pipeline plays the recorded sampled run through its public call."""
    config, io = json.loads((case / "config.json").read_text()), load_file(case / "io.safetensors")
    name = "sampled" if "sampled" in config["runs"] else "insertion"
    run, what = config["runs"][name], "tokens" if case == VAR_CASE else "bits"
    options = {"top_k": run["top_k"], "top_p": run["top_p"], "generator": torch.Generator().manual_seed(run["g_seed"])}
    if case == VAR_CASE:
        out = pipe(io[f"{name}.labels"], guidance_scale=run["cfg"], **options)
    else:
        text = list(io[f"{name}.text_features"].split(io[f"{name}.text_lens"].tolist()))
        out = pipe(
            prompt_embeds=text,
            guidance_scale=run["cfg_list"],
            temperature=run["tau_list"],
            guidance_layers=run["cfg_insertion_layer"],
            aspect_ratio=config["h_div_w_template"],
            pixel_budget="0.06M",
            **options,
        )
    return all(torch.equal(t, io[f"{name}.{what}.{k}"].int()) for k, t in enumerate(out.tokens))
