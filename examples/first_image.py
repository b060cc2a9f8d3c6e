"""Draw one prompt with the model that comes with the package; about half a minute on a laptop.

PIXEL_BUDGET=0.06M draws small and fast (all examples read it), but not what the model was trained for.
"""

import os

from nextscale import NOVA, Pipeline

pipe = Pipeline.from_pretrained()  # no download
size = os.environ.get("PIXEL_BUDGET")
method = NOVA.preset("balanced") if size is None else None  # a small image has too few scales for it

out = pipe("two foxes above a blue heart", seed=7, method=method, pixel_budget=size)
out.images[0].save("fox.png")
print(out.trace.summary())
