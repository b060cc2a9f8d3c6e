"""Save a preview after each scale while the image is made."""

import os

from nextscale import Pipeline, to_pil

pipe = Pipeline.from_pretrained()


def save_preview(end):
    """Decode what is there so far; returning False would stop the run here."""
    number = end.scale.index + 1
    to_pil(end.decode())[0].save(f"scale-{number:02}.png")
    print(f"scale {number}: {end.scale.h} x {end.scale.w} tokens")


out = pipe(
    "a penguin in the snow",
    seed=1,
    pixel_budget=os.environ.get("PIXEL_BUDGET"),
    callback_on_scale_end=save_preview,
)
out.images[0].save("penguin.png")
