"""Run one prompt and seed with several methods: time, tokens, and the distance to the plain image.

python examples/compare_methods.py [METHOD ...]    a METHOD is written as for `nextscale generate --method`
"""

import math
import os
import sys

import numpy as np

from nextscale import Pipeline

pipe = Pipeline.from_pretrained()
size = os.environ.get("PIXEL_BUDGET")
methods = sys.argv[1:] or ["nova:balanced", "nova:fast", "fastvar:fast", "truncate:2"]


def run(method=None):
    return pipe("a flat rocket at night", seed=3, method=method, pixel_budget=size, output_type="np")


plain = run()
print(f"{'method':<20} {'seconds':>8} {'tokens':>7} {'PSNR':>6}")
for method in [None, *methods]:
    out = run(method)  # the first call has warmed up
    error = float(np.square(out.images - plain.images).mean())
    psnr = 10 * math.log10(1 / error) if error else math.inf
    print(f"{method or 'plain':<20} {out.trace.seconds['total']:8.2f} {out.trace.share():7.1%} {psnr:6.1f}")
