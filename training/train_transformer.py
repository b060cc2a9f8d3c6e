"""Train transformer and text encoder together, stage by stage: first the grids that decide what is where, then all.

    python -m training.train_transformer --stage objects     # then details, then finish

Every stage starts from the state that the one before left in the run's folder, saves its weights, and only then draws
a sheet of samples.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.checkpoints.load import set_dtype
from nextscale.engine.schedule import Schedule
from nextscale.kernels.sdpa import scaled_dot_product_attention
from nextscale.models.infinity import Infinity, InfinityBlock, InfinityBlockCond, InfinityConfig
from nextscale.models.layers import SelfAttention, attention_biases
from nextscale.models.registry import Defaults, ModelSpec
from nextscale.models.residual import ResidualStream
from nextscale.pipeline import Pipeline
from nextscale.text.words import Lexicon, WordEncoder, WordsConfig, WordTransformer
from nextscale.tokenizers.bsq import BSQTokenizer
from training import store
from training.common import (
    Average,
    Clock,
    Log,
    arguments,
    autocast,
    device,
    grids,
    make_painter,
    make_tokenizer,
    part,
    quantize,
    ratio_of,
    read_config,
    sheet,
)
from training.state import Training

MASKED = 7  # grids whose attention is one masked call; more would waste it, fewer would be many small calls


def build(config: dict[str, Any]) -> tuple[Infinity, WordTransformer, BSQTokenizer, Lexicon]:
    scenes = part(config, "scenes")
    lexicon = Lexicon(scenes.words_of(scenes.read_vocabulary()))
    tokenizer = make_tokenizer(config)
    options = config["transformer"]
    text = WordTransformer(WordsConfig(len(lexicon), **options["text"]))
    backbone = Infinity(
        InfinityConfig(
            bits=tokenizer.bits,
            text_dim=text.config.width,
            text_length=text.config.length,
            levels=config["grids"],
            **options["model"],
        )
    )
    return backbone, text, tokenizer, lexicon


@torch.no_grad()
def initialize(backbone: Infinity, text: WordTransformer) -> None:
    for module in (backbone, text):
        for name, p in module.named_parameters():
            if p.ndim >= 2 and "norm" not in name:
                p.normal_(std=p.shape[-1] ** -0.5 if name.endswith("weight") and "embed" not in name else 0.02)
        for name, p in module.named_parameters():
            if name.endswith(("proj.weight", "fc2.weight")) and ("blocks." in name or "layers." in name):
                p.zero_()  # every block starts as the identity
    backbone.unconditional.normal_()
    backbone.head_linear.weight.mul_(0.1)
    backbone.shared_modulation[1].weight.mul_(0.1)
    backbone.head_modulation[1].weight.mul_(0.1)
    for block in backbone.blocks:
        block.offset.zero_()
        block.offset[:, :, :2] = 1  # the gates are open
        block.attn.log_scale.fill_(math.log(4))
    text.embed.weight.normal_()


class Grouped:
    """Block-causal attention: the first grids in one masked call, each later one in a call of its own."""

    def __init__(self, schedule: Schedule, where: torch.device) -> None:
        spans = [(s.start, s.start + s.tokens) for s in schedule]
        self.first = spans[:MASKED][-1][1]
        self.later = spans[MASKED:]
        level = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(spans[:MASKED])]).to(where)
        self.mask = (level[:, None] >= level)[None, None]

    def attend(self, attn: SelfAttention, qkv: Tensor, positions: Tensor) -> Tensor:
        q, k, v = attn.split(qkv, positions)
        n, scale = self.first, attn.softmax_scale
        parts = [scaled_dot_product_attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], scale, self.mask)]
        parts += [scaled_dot_product_attention(q[:, :, a:b], k[:, :, :b], v[:, :, :b], scale) for a, b in self.later]
        return torch.cat(parts, dim=2)


def run_block(
    block: InfinityBlock,
    x: Tensor,
    modulation: Tensor,
    keys: tuple[Tensor, Tensor],
    text_mask: Tensor,
    positions: Tensor,
    attention_masks: Grouped,
) -> Tensor:
    bias = attention_biases([block.attn])[0]
    stream = ResidualStream(x)
    attend = functools.partial(attention_masks.attend, positions=positions)
    block(stream, InfinityBlockCond(modulation, bias, *keys, text_mask), attend, Infinity.sublayers)
    return stream.sum


class Trainer:
    def __init__(self, config: dict[str, Any], where: torch.device) -> None:
        self.config, self.options, self.where = config, config["transformer"], where
        self.backbone, self.text, self.tokenizer, self.lexicon = build(config)
        initialize(self.backbone, self.text)
        for module in (self.backbone, self.text, self.tokenizer):
            module.to(where)
        self.tokenizer.requires_grad_(False)
        # Most batches are square. Compiling for the other shapes would take longer than it saves.
        self.run_square, self.encode_square = run_block, self.tokenizer.encoder
        if where.type == "cuda":
            self.run_square = torch.compile(run_block, dynamic=False)
            self.tokenizer.encoder.to(memory_format=torch.channels_last)
            self.encode_square = torch.compile(self.tokenizer.encoder)
        self.memories: dict[Schedule, Grouped] = {}
        matrices, others = [], []
        for name, p in (*self.backbone.named_parameters(), *self.text.named_parameters()):
            hidden = p.ndim == 2 and name.startswith(("blocks.", "layers."))
            (matrices if hidden else others).append(p)
        muon = torch.optim.Muon(matrices, self.options["muon"], weight_decay=0.01, momentum=0.95)
        adam = torch.optim.AdamW(others, self.options["adam"], betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        modules = {"backbone": self.backbone, "text": self.text}
        average = Average(list(modules.values()), self.options["average"])
        self.training = Training(modules, [muon, adam], average)

    def start_average(self) -> None:
        self.training.average = Average([self.backbone, self.text], self.options["average"])

    def learning_rate(self, progress: float) -> float:
        start = self.options["decay_from"]
        return min(1.0, progress / 0.01 + 0.05) * min(1.0, (1 - progress) / (1 - start) + 0.01)

    def encoded(self, images: Tensor) -> Tensor:
        encode = self.encode_square if images.shape[2] == images.shape[3] else self.tokenizer.encoder
        with torch.no_grad(), autocast(self.where):
            return torch.cat([encode(p).float() for p in images.split(64)])

    def losses(self, features: Tensor, batch: Any, count: int) -> Tensor:
        """Binary cross-entropy per grid, nats per bit; random flips and text dropout included."""
        ratio, rows = ratio_of(batch), len(features)
        schedule, whole = grids(count, ratio), grids(self.config["grids"], ratio)
        rates = torch.rand(rows, count, device=self.where) * self.options["flip_rate"]
        rates *= torch.rand(rows, 1, device=self.where) < self.options["flipped"]
        made = quantize(self.tokenizer, features, schedule, whole, rates)
        logits = self.logits(made.inputs, batch, schedule)
        labels = torch.cat(made.labels, dim=1).float()
        right = F.binary_cross_entropy_with_logits(logits[..., 1] - logits[..., 0], labels, reduction="none")
        per_token = right.mean((0, 2))
        return torch.stack([per_token[s.start : s.start + s.tokens].mean() for s in schedule])

    def logits(self, inputs: list[Tensor | None], batch: Any, schedule: Schedule) -> Tensor:
        tokens, lengths = (t.to(self.where, non_blocking=True) for t in (batch.tokens, batch.lengths))
        with autocast(self.where):
            text = self.text(tokens, lengths).float()
            none = torch.rand(len(tokens), 1, 1, device=self.where) < self.options["text_dropout"]
            text = torch.where(none, self.backbone.unconditional[: text.shape[1]], text)
            mask = (torch.arange(text.shape[1], device=self.where) < lengths[:, None])[:, None, None]
            state = self.backbone.prepare((text, lengths, mask), schedule)
            x = torch.cat(
                [self.backbone.embed(state, i, s) for s, i in zip(schedule, inputs, strict=True)], dim=1
            ).float()
            if schedule not in self.memories:
                self.memories[schedule] = Grouped(schedule, self.where)
            memory = self.memories[schedule]
            run = self.run_square if schedule.frame[0] == schedule.frame[1] else run_block
            for layer, block in enumerate(self.backbone.blocks):
                x = run(block, x, state.modulation[layer], state.text_keys[layer], mask, state.rotary, memory)
        with torch.autocast(self.where.type, enabled=False):
            return self.backbone.head(state, x.float())

    def step(self, features: Tensor, batch: Any, count: int, progress: float) -> Tensor:
        rate = self.learning_rate(progress)
        optimizers = self.training.optimizers
        for optimizer, base in zip(optimizers, (self.options["muon"], self.options["adam"]), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * rate
        losses = self.losses(features, batch, count)
        # A grid counts by its side: more than one token of its many, less than all of them.
        sides = [math.sqrt(s.tokens) for s in grids(count, ratio_of(batch))]
        weights = torch.tensor(sides, device=self.where)
        (losses * weights).sum().div(weights.sum()).backward()
        for module in (self.backbone, self.text):
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.training.average.update()
        self.training.steps += 1
        return losses.detach()

    def pipeline(self) -> Pipeline:
        """The model as a user has it, in the precision of its device."""
        backbone, tokenizer, text = (copy.deepcopy(m) for m in (self.backbone, self.tokenizer, self.text))
        for module in (backbone, tokenizer, text):
            module.eval().requires_grad_(False)
            if self.where.type == "cuda" and not isinstance(module, WordTransformer):
                set_dtype(module, torch.bfloat16)
        spec = ModelSpec(
            "clipart", "infinity", backbone.config, tokenizer.config, Defaults(**self.config["sampling"]), "", "", ()
        )
        return Pipeline(backbone, tokenizer, spec, WordEncoder(self.lexicon, text), progress_bar=False)


class Source:
    """Scenes as features. Painting and encoding cost as much as a step on few grids, so there a scene is shown
    `reuse` times, with other flips, mixed with those of the last hundred batches."""

    def __init__(self, trainer: Trainer, painter: Any, seed: int, workers: int, kind: dict[str, Any]) -> None:
        self.trainer, self.painter, self.reuse = trainer, painter, kind.get("reuse", 1)
        stream = part(trainer.config, "scenes").stream
        self.scenes: Iterator[Any] = stream(seed, kind["batch"], workers, **trainer.options["scenes"])
        self.kept: list[tuple[Tensor, Any]] = []
        self.random = random.Random(seed)
        self.shown = 0

    def __next__(self) -> tuple[Tensor, Any]:
        self.shown += 1
        if self.shown % self.reuse == 0 or len(self.kept) < self.reuse:
            batch = next(self.scenes)
            features = self.trainer.encoded(self.painter.paint(batch))
            if self.reuse == 1:
                return features, batch
            self.kept = [*self.kept[-99:], (features.half(), batch)]
            return features, batch
        features, batch = self.random.choice(self.kept)
        return features.float(), batch


def train(trainer: Trainer, stage: dict[str, Any], painter: Any, clock: Clock, log: Log, seed: int) -> None:
    kinds = stage["steps"]
    workers = trainer.config["workers"] // len(kinds)
    sources = [Source(trainer, painter, seed + i, workers, kind) for i, kind in enumerate(kinds)]
    step, shown = 0, 0
    while not clock.over:
        which = step % len(kinds)
        kind, (features, batch) = kinds[which], next(sources[which])
        losses = trainer.step(features, batch, kind["grids"], clock.progress)
        step, shown = step + 1, shown + len(features)
        if step <= 2 * len(kinds) or step % 100 < len(kinds):
            numbers = " ".join(f"{x:.3f}" for x in losses.tolist())
            log(f"{stage['name']} step {step} {clock.elapsed:.0f} s, {kind['grids']} grids: {numbers}")
    trainer.training.elapsed = clock.before + clock.elapsed
    log(f"{stage['name']}: {step} steps, {shown} images, {clock.elapsed:.0f} s")


def draw_sheet(trainer: Trainer, path: Path, count: int, prompts: tuple[str, ...], ratio: float = 1.0) -> None:
    """The fixed prompts, seeds 0, 1, ..., from the first `count` grids."""
    pipe = trainer.pipeline()
    images: list[Any] = []

    def stop(end: Any) -> bool | None:
        return False if end.scale.index + 1 >= count else None

    budget = {13: "1M", 7: "0.06M"}[trainer.config["grids"]]
    for i in range(0, len(prompts), 16):
        some = prompts[i : i + 16]
        seeds = list(range(i, i + len(some)))
        images += pipe(some, seed=seeds, callback_on_scale_end=stop, pixel_budget=budget, aspect_ratio=ratio).images
    sheet(images, prompts, 8, 160).save(path)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--fresh", action="store_true", help="ignore a state in the run's folder")
    options = parser.parse_args()
    config = read_config(options.config, options.smoke)
    stages = config["transformer"]["stages"]
    names = [s["name"] for s in stages]
    if options.stage not in names:
        parser.error(f"unknown stage {options.stage!r}; allowed: {', '.join(names)}")
    number = names.index(options.stage)
    stage = stages[number]
    log, where = Log(options.run, "transformer"), device()
    torch.manual_seed(config["seed"] + number)
    painter = make_painter(options.sprites, config, where, options.smoke)
    trainer = Trainer(config, where)
    source = options.run if (options.run / "tokenizer.safetensors").exists() else options.init
    if source is None:
        parser.error(f"{options.run} has no tokenizer: run python -m training.train_tokenizer first, or give --init")
    store.load_into(source, tokenizer=trainer.tokenizer)
    training, state = trainer.training, options.run / "state"
    if options.resume or (state.exists() and not options.fresh and number):
        training.load(options.resume or state)
    else:
        if options.init:
            store.load_into(options.init, backbone=trainer.backbone, text=trainer.text)
            trainer.start_average()
        training.elapsed = sum(s["seconds"] for s in stages[:number])
    torch.manual_seed(config["seed"] + number + training.steps)  # no later run repeats what an earlier one drew
    clock = Clock(options.seconds or stage["seconds"], training.elapsed, sum(s["seconds"] for s in stages))
    train(trainer, stage, painter, clock, log, config["seed"] + 1000 * (number + 1) + training.steps)
    training.save(state)
    training.average.swap()
    store.save(options.run, backbone=trainer.backbone, text=trainer.text, tokenizer=trainer.tokenizer)
    prompts = part(config, "prompts").FIXED
    count = stage["steps"][-1]["grids"]
    draw_sheet(trainer, options.run / f"{stage['name']}.png", count, prompts[:8] if options.smoke else prompts)
    for ratio, share in trainer.options["scenes"].get("ratios", {}).items():
        if float(ratio) != 1 and share:
            draw_sheet(trainer, options.run / f"{stage['name']}-{ratio}.png", count, prompts[:8], float(ratio))


if __name__ == "__main__":
    main()
