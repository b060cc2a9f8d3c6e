"""Draw several prompts at once; a method decides for each image on its own, and the trace says what it computed."""

import os

from nextscale import NOVA, Pipeline

pipe = Pipeline.from_pretrained()
size = os.environ.get("PIXEL_BUDGET")
method = NOVA.preset("balanced") if size is None else NOVA(t_est=2, alpha=1.0)
prompts = ["a penguin in the snow", "three red apples", "a flat rocket at night"]

out = pipe(prompts, seed=[1, 2, 3], method=method, pixel_budget=size)  # an image depends on its own seed only
for i, (prompt, image) in enumerate(zip(prompts, out.images, strict=True)):
    image.save(f"image-{i}.png")
    activation = out.trace.to_dict()["images"][i]["activation"]
    print(f"{prompt}: reduced from scale {activation['scale']}, {out.trace.share(i):.1%} of the tokens of a plain run")

last = len(pipe.schedule(pixel_budget=size))  # scales and layers count from 1
print("computed cells of the first image, last scale, first layer:", int(out.trace.kept(0, last, 1).sum()))
out.trace.save("traces.json")  # docs: nextscale/trace.schema.json describes it
out.trace.save("maps.npz")  # which cells were computed, of every image, scale and layer
