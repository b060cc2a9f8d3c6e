from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nextscale.cli import complete
from nextscale.cli.options import (
    AspectRatio,
    Device,
    Dtype,
    Model,
    OneMethod,
    PixelBudget,
    Preset,
    Prompt,
    Revision,
    Settings,
    Vae,
    Weights,
    load_pipeline,
    method_of,
)
from nextscale.errors import NextscaleError

if TYPE_CHECKING:
    from nextscale.engine.callback import Callback, ScaleEnd

MAX_IMAGES = 1000  # they are made in one batch


def generate(
    prompt: Prompt,
    model: Model = None,
    weights: Weights = None,
    seed: Annotated[int, typer.Option(help="The i-th image gets seed + i.")] = 0,
    out: Annotated[Path, typer.Option(help="The image; several are numbered FILE-0, FILE-1, ...")] = Path("out.png"),
    images: Annotated[int, typer.Option(min=1, max=MAX_IMAGES, help="Images of the prompt.")] = 1,
    negative_prompt: Annotated[
        str | None, typer.Option(help="What it should not show; not for VAR.", show_default=False)
    ] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="Default: what the authors use.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: what the authors use.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 = off. Default: what the authors use.")] = None,
    top_p: Annotated[float | None, typer.Option(help="0 = off. Default: what the authors use.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="The likeliest token everywhere.")] = False,
    method: OneMethod = None,
    preset: Preset = None,
    set_: Settings = [],  # noqa: B006
    height: Annotated[int | None, typer.Option(help="Pixels; with --width.", show_default=False)] = None,
    width: Annotated[int | None, typer.Option(help="Pixels; with --height.", show_default=False)] = None,
    aspect_ratio: AspectRatio = None,
    pixel_budget: PixelBudget = None,
    vae: Vae = None,
    text_encoder: Annotated[str | None, typer.Option(help="T5 folder or hub repository.", show_default=False)] = None,
    dtype: Dtype = None,
    device: Device = None,
    runtime: Annotated[
        str,
        typer.Option(
            help="eager, compiled or graphs; for one image eager starts fastest.",
            autocompletion=complete.one_of(complete.RUNTIMES),
        ),
    ] = "eager",
    quantize: Annotated[str | None, typer.Option(help="fp8: 8-bit weights and activations on a GPU.")] = None,
    offload: Annotated[str | None, typer.Option(help="text: the text encoder rests on the host.")] = None,
    revision: Revision = None,
    preview: Annotated[
        Path | None, typer.Option(help="Write the image as it is after every scale into this folder.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write what was computed where, as JSON.")] = None,
    animate: Annotated[
        Path | None,
        typer.Option(help="Write the scales and where they were computed as an animation, .webp or .gif."),
    ] = None,
    beside_plain: Annotated[
        bool, typer.Option("--beside-plain", help="The animation shows the plain run beside the method, in step.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No bars, no summary.")] = False,
) -> None:
    """Make images of a prompt."""
    from nextscale.io.animation import Film, animation_path, save_animation
    from nextscale.io.images import Previews, image_paths, save_all
    from nextscale.io.writing import require_writable

    if beside_plain and animate is None:
        raise NextscaleError("--beside-plain is for an animation; give --animate FILE.webp too")
    if animate is not None:
        if images != 1:
            raise NextscaleError(f"--animate shows one image; --images must be 1 with it, not {images}")
        for name, path in (("--out", out), ("--trace", trace)):
            if path is not None and path.absolute() == animate.absolute():
                raise NextscaleError(f"--animate and {name} name the same file, {animate}")
        animate = animation_path(animate)
    paths = image_paths(out, images)
    if trace is not None:
        require_writable(trace)
    previews = None if preview is None else Previews(preview)
    reduction = method_of(method, preset, set_)
    if beside_plain and reduction is None:
        raise NextscaleError("--beside-plain needs --method: the plain run would stand beside itself")
    pipe = load_pipeline(
        model,
        weights,
        device,
        dtype,
        vae=vae,
        text_encoder=text_encoder,
        revision=revision,
        runtime=runtime,
        quantize=quantize,
        offload=offload,
        progress_bar=False if quiet else None,
    )
    reduction = method_of(method, preset, set_, pipe.spec.name, quiet)
    film = None if animate is None else Film()
    draw = partial(
        pipe,
        read_prompt(prompt) if pipe.backbone.prompts == "label" else prompt,
        seed=seed,
        num_images_per_prompt=images,
        negative_prompt=negative_prompt,
        guidance_scale=guidance_scale,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        greedy=greedy,
        height=height,
        width=width,
        aspect_ratio=aspect_ratio,
        pixel_budget=pixel_budget,
    )
    result = draw(method=reduction, callback_on_scale_end=together(previews, film))
    save_all(result.images, paths)
    if trace is not None:
        result.trace.save(trace)
    if animate is not None and film is not None:
        panels = [film.panel(in_one_word(method, preset, set_), result)]
        if beside_plain:
            film = Film()
            panels.insert(0, film.panel("plain", draw(callback_on_scale_end=film)))
        save_animation(panels, animate)
    if not quiet:
        typer.echo(result.trace.summary())
        for path in (*paths, *(previews.written if previews else ()), *([animate] if animate else ())):
            typer.echo(f"wrote {path}")


def read_prompt(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise NextscaleError(f"this model takes a class number, not the text {text!r}") from None


def together(*callbacks: Callback | None) -> Callback | None:
    """Make one callback of those that are there and only look."""
    present = [callback for callback in callbacks if callback is not None]
    if len(present) < 2:
        return present[0] if present else None

    def call(end: ScaleEnd) -> None:
        for callback in present:
            callback(end)

    return call


def in_one_word(method: str | None, preset: str | None, settings: Sequence[str]) -> str:
    """Name what was asked for, as `nova:balanced;tau=1.5`."""
    if method is None or method.strip() == "none":
        return "plain"
    more = ";".join([*([preset] if preset else []), *settings])
    return f"{method}{';' if ':' in method else ':'}{more}" if more else method
