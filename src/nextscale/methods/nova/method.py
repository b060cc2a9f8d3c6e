"""NOVA: entropy decides when to start pruning tokens, how many per scale and layer; a cache restores them."""

from __future__ import annotations

from dataclasses import dataclass

from nextscale.errors import NextscaleError
from nextscale.methods.base import Method
from nextscale.methods.nova.policy import NOVAPolicy
from nextscale.methods.policy import Policy, PolicyContext
from nextscale.methods.tables import read_table


@dataclass(frozen=True)
class NOVA(Method):
    """Important: `alpha` (when to start) and `tau` (how steeply the ratio rises from scale to scale).

    The rest either is the paper's setting, or settles what the paper leaves open, or replaces a part of the method for
    its ablations. `NOVA.preset("literal")` reads the paper to the letter: every layer ranks the cells by its own lens,
    and all cells are sampled. That destroys images of models whose codes are bits (docs/results.md).

    With `probe="previous"` the mean entropies of layers (eq. 12) are those of the scale before, in which cells that a
    layer did not compute keep what was known of them. So where a reduced scale may follow, the model's head looks at
    the tokens that a layer computes: 0.2 % of a block per token where codes are bits, up to a third of one with 4096
    codes. The trace's FLOPs count no probe.
    """

    removed = ("allow_empty",)

    name = "nova"
    summary = "Entropy growth starts the reduction, entropy picks the tokens, a residual cache restores the others."
    paper = "Adaptive Visual Autoregressive Acceleration via Dual-Linkage Entropy Analysis"

    t_est: int = 5  # scales that are never reduced; their growth is the baseline
    alpha: float = 0.5  # share of the baseline growth at which the reduction starts
    tau: float = 0.8  # scales over which the ratio rises
    lam: float = 0.1  # how much a growing entropy lowers the ratio
    scale_linkage: bool = True  # False: the ratio of a scale comes from `scale_table`
    scale_table: str = "fastvar"  # a name, or a file of `nextscale calibrate shares`
    layer_linkage: bool = True  # False: every layer has the scale's ratio
    metric: str = "entropy"  # which tokens stay: entropy | attention | mse | random
    cache: str = "residual"  # what pruned tokens are restored from: residual | feature | zero
    rank: str = "scale"  # cells are ranked once per scale, by what is known before it; or in every "layer" anew
    required: float = 0.5  # share of the layers that must compute a cell
    uncomputed: str = "auto"  # other cells add "nothing" (auto: where codes are bits), or are sampled all the same
    counts: str = "round"  # kept tokens: the nearest number; "floor": dropped ones rounded down, and one always stays
    restore_mode: str = "bilinear"  # how a cached map is enlarged: nearest | area | bilinear | bicubic
    probe: str = "previous"  # a layer's entropy: as it was at the scale before | lens | lens_topk | auto, one of these
    probe_from_layer: int = 1  # 2: the first layer, which sees bare embeddings, stays out of the mean
    unit: str = "token"  # entropy of a token of bits: their sum, or "bit": their mean
    entropy_of: str = "conditional"  # or "guided": after temperature and guidance
    max_layer_keep: float = 1.0  # the largest share of tokens that a reduced layer keeps

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("t_est", 2, 1000)
        self.require("alpha", 0, 10)
        self.require("tau", 0, 100, above=True)
        self.require("lam", 0, 10)
        self.require("max_layer_keep", 0, 1, above=True)
        self.require_one_of("metric", ("entropy", "attention", "mse", "random"))
        self.require_one_of("cache", ("residual", "feature", "zero"))
        self.require_one_of("rank", ("scale", "layer"))
        self.require("required", 0, 1)
        self.require_one_of("uncomputed", ("auto", "sample", "nothing"))
        self.require_one_of("counts", ("round", "floor"))
        self.require_one_of("restore_mode", ("nearest", "area", "bilinear", "bicubic"))
        self.require_one_of("probe", ("auto", "lens", "lens_topk", "previous"))
        self.require_one_of("probe_from_layer", (1, 2))
        self.require_one_of("unit", ("token", "bit"))
        self.require_one_of("entropy_of", ("conditional", "guided"))
        read_table(self.scale_table)

    def start(self, context: PolicyContext) -> Policy:
        if len(context.schedule) < self.t_est + 2:
            raise NextscaleError(
                f"nova: t_est = {self.t_est} needs a schedule of at least {self.t_est + 2} scales, "
                f"this one has {len(context.schedule)}"
            )
        return NOVAPolicy(context, self)
