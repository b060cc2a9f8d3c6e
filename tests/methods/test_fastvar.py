"""FastVAR's published constants, and what its cache does."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file
from support.pipelines import DATA

from nextscale import FastVAR, Pipeline
from nextscale.checkpoints.files import open_states
from nextscale.checkpoints.pretrained import official_part
from nextscale.engine.rows import Rows
from nextscale.engine.sampling import Sampling
from nextscale.engine.schedule import Schedule, infinity_schedule
from nextscale.methods.fastvar import FastVARPolicy
from nextscale.methods.policy import PolicyContext, ScaleContext
from nextscale.methods.selection import Selection
from nextscale.models.registry import Defaults, ModelSpec
from nextscale.testing import randomize
from nextscale.tokenizers.bsq import BSQConfig, BSQTokenizer

CASE = DATA / "fastvar"


def policy_for(schedule: Schedule, method: FastVAR, depth: int = 32) -> FastVARPolicy:
    sampling = Sampling.make(len(schedule), guidance=(3.0,) * len(schedule))
    return FastVARPolicy(PolicyContext(1, schedule, sampling, depth, ("self", "cross", "ffn")), method)


def kept(policy: FastVARPolicy, k: int, layer: int) -> int | None:
    scale = list(policy.context.schedule)[k]
    ctx = ScaleContext(scale, Rows((0,), (0,)), lambda *a: torch.zeros(1))
    chosen = policy.select(layer, ("self",), torch.randn(2, scale.tokens, 4), ctx)
    return None if chosen is None else int(chosen.count[0])


def test_constants_for_infinity() -> None:
    policy = policy_for(infinity_schedule(1.0, "1M"), FastVAR.preset("infinity"))
    assert FastVAR.preset("infinity") == FastVAR()
    actions = [policy.plan_scale(s).actions[0] for s in policy.context.schedule]
    assert actions == ["run"] * 11 + ["skip"] * 2
    assert (kept(policy, 9, 10), kept(policy, 10, 10), kept(policy, 8, 10)) == (615, 800, None)
    assert [layer for layer in range(32) if kept(policy, 9, layer)] == list(range(3, 28))
    assert policy.first == 9, "24x24, the scale before, is cached"


def test_constants_for_hart() -> None:
    sides = (1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 27, 36, 48, 64)
    policy = policy_for(Schedule.squares(sides), FastVAR.preset("hart"), depth=24)
    assert all(policy.plan_scale(s).actions == ("run",) for s in policy.context.schedule)
    assert (kept(policy, 12, 0), kept(policy, 13, 23), kept(policy, 11, 0)) == (1152, 1024, None)
    assert policy.first == 12


def test_other_shapes_follow_by_relative_scale() -> None:
    policy = policy_for(infinity_schedule(0.571, "0.25M"), FastVAR(), depth=12)
    assert policy.ratios == [0.0] * 7 + [0.4, 1.0, 1.0]  # 0.8, 0.9 and 1.0 of the schedule
    assert policy.layers == range(1, 10)


def test_tokens_far_from_the_mean_stay_and_the_rest_gets_the_cached_increment() -> None:
    policy = policy_for(infinity_schedule(1.0, "1M"), FastVAR(), depth=8)
    scales, rows = list(policy.context.schedule), Rows((0,), ())
    cached, pruned = scales[8], scales[9]
    x = torch.zeros(1, cached.tokens, 2)
    increment = torch.arange(cached.tokens).float()[None, :, None].expand(1, -1, 2)
    policy.restore(3, ("ffn",), x, None, x + increment, ScaleContext(cached, rows, lambda *a: x))
    x = torch.zeros(1, pruned.tokens, 2)
    x[:, ::2] = 5.0
    ctx = ScaleContext(pruned, rows, lambda *a: x)
    chosen = policy.select(3, ("ffn",), x, ctx)
    assert isinstance(chosen, Selection)
    out = policy.restore(3, ("ffn",), x, chosen, torch.full((1, int(chosen.count), 2), -1.0), ctx)
    area = torch.nn.functional.interpolate(increment.transpose(1, 2).view(1, 2, 24, 24), size=(32, 32), mode="area")
    filled = x + area.flatten(2).transpose(1, 2)
    mask = chosen.mask(pruned.tokens)[0]
    assert (out[0, mask] == -1).all()
    assert torch.equal(out[0, ~mask], filled[0, ~mask])


def test_the_public_code() -> None:
    """A recorded run of the public FastVAR code for Infinity: 32 tiny layers, 13 scales, one guided greedy image."""
    recorded, io = json.loads((CASE / "recorded.json").read_text()), load_file(CASE / "io.safetensors")
    part = official_part(open_states(CASE / "state.safetensors"), ("infinity",))
    tokenizer = BSQTokenizer(BSQConfig(8, channels=32, multipliers=(1, 1), residual_blocks=1))
    randomize(tokenizer)  # nothing is decoded here
    spec = ModelSpec("recorded", "infinity", part.config, tokenizer.config, Defaults(3.0), "", "", ())
    pipe = Pipeline(part.build(torch.float32, "cpu"), tokenizer, spec, progress_bar=False)
    logits = {}
    out = pipe(
        prompt_embeds=[io["greedy.text_features"]],
        method=FastVAR(),
        greedy=True,
        guidance_scale=recorded["runs"]["greedy"]["cfg_list"],
        pixel_budget="1M",
        seed=0,
        output_type="latent",
        callback_on_scale_end=lambda e: logits.update({e.scale.index: e.logits}),
    )
    for k in range(13):
        theirs = io.get(f"greedy.bits.{k}")
        assert (out.tokens[k] == -1).all() if theirs is None else torch.equal(out.tokens[k], theirs.int())
    compared = 0
    for name, cells in io.items():
        if name.startswith("kept."):
            _, k, layer, group = name.split(".")
            for row in range(2):
                ours = out.trace.kept(0, int(k) + 1, int(layer) + 1, group, row).flatten().nonzero()[0]
                assert ours.tolist() == cells[row].tolist(), name
                compared += 1
    assert compared == 2 * 3 * 3 * 2  # scales, layers, sub-layers, rows
    assert (logits[10] - io["greedy.logits.10"]).abs().max() < 1e-4
    assert (out.images - io["greedy.f_hat.10"]).abs().max() < 1e-4
