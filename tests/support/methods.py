"""Methods that tests run on every model, and those of every kind that graphs must capture."""

from __future__ import annotations

from dataclasses import replace

from support.pipelines import DATA

from nextscale import (
    NOVA,
    DropGuidance,
    FastVAR,
    LDPruning,
    RandomSelection,
    SkipVAR,
    SparseVAR,
    Taper,
    ToProVAR,
    Truncate,
)

try:
    import jsonschema
except ImportError:  # the GPU machine has none; `make test` installs it
    jsonschema = None

# A decision like those that SkipVAR fits, for images of tiny models.
DECISION = str(DATA / "skipvar_decision.json")
# Of no model: those of tiny ones lie somewhere in between.
ENTROPIES = str(DATA / "taper_entropies.json")
LITERAL = NOVA.preset("literal")
METHODS = {
    "skipvar": SkipVAR(DECISION, at=0.5),
    "skipvar and nova": SkipVAR(DECISION, at=0.5) + NOVA(t_est=2, alpha=0.0),
    "nova": NOVA(t_est=2, alpha=0.0),
    "nova, literal": replace(LITERAL, t_est=2, alpha=0.0),
    "nova, lens": NOVA(t_est=2, alpha=0.0, probe="lens"),
    "nova, all layers": NOVA(t_est=2, alpha=0.0, required=1.0, tau=2.0),
    "nova, from layer 2": NOVA(t_est=2, alpha=0.0, probe_from_layer=2, restore_mode="bilinear"),
    "nova, attention": NOVA(t_est=2, alpha=0.0, metric="attention"),
    "nova, nothing": NOVA(t_est=2, alpha=0.0, uncomputed="nothing", probe="previous"),
    "nova, one selection": NOVA(
        t_est=2, alpha=0.0, layer_linkage=False, probe="previous", uncomputed="nothing", cache="zero"
    ),
    "nova, mse": NOVA(t_est=2, alpha=0.0, metric="mse", restore_mode="area"),
    "nova, random": NOVA(t_est=2, alpha=0.0, metric="random"),
    "nova, no linkage": NOVA(t_est=2, alpha=0.0, scale_linkage=False, layer_linkage=False),
    "nova, feature cache": NOVA(t_est=2, alpha=0.0, cache="feature", restore_mode="bicubic"),
    "nova, zero": NOVA(t_est=2, alpha=0.0, cache="zero"),
    "nova, guided": NOVA(t_est=2, alpha=0.0, entropy_of="guided", unit="bit"),
    "nova, bounded": NOVA(t_est=2, alpha=0.0, max_layer_keep=0.3, tau=3.0),
    "nova, steep": NOVA(t_est=2, alpha=0.0, tau=0.3),
    "toprovar": ToProVAR(tau=0.45, a_max=0.9),
    "toprovar, previous layer": ToProVAR(tau=0.5, entropy_from="previous_layer", restore_mode="bilinear"),
    "toprovar, nothing": ToProVAR(tau=0.45, a_max=0.9, uncomputed="nothing"),
    "toprovar, scales": ToProVAR(layer_stage=False, token_stage=False, scale_stage=False),
    "toprovar, layers": ToProVAR(token_stage=False, center=False, scale_stage=False),
    "sparsevar": SparseVAR(start_scale=0.6, tau=0.95, anchor=2, similarity=0.95),
    "sparsevar, strict": SparseVAR(start_scale=0.5, tau=1.0, anchor=3, similarity=1.0),
    "fastvar": FastVAR(),
    "fastvar, hart": FastVAR.preset("hart"),
    "ld_pruning": LDPruning(rho=0.6),
    "ld_pruning, loose": LDPruning(rho=0.4, delta=2.0, skip=1),
    "taper": Taper(budget=0.4),
    "taper, adaptive": Taper(budget=0.5, entropies=ENTROPIES),
    "truncate": Truncate(2),
    "drop guidance": DropGuidance(4),
    "random selection": RandomSelection(NOVA(t_est=2, alpha=0.0)),
    "composed": NOVA(t_est=2, alpha=0.0) + DropGuidance(5) + Truncate(1),
}
# Configurations that reduce nothing.
NOTHING = {
    "nova": NOVA(t_est=2, scale_linkage=False, scale_table="1:0"),
    "nova, attention": NOVA(t_est=2, scale_linkage=False, scale_table="1:0", metric="attention"),
    "toprovar": ToProVAR(tau=1.0),
    "sparsevar": SparseVAR(tau=0.0),
    "fastvar": FastVAR(scale_table="1:0"),
    "ld_pruning": LDPruning(scales=0, delta=0),
    "taper": Taper(budget=1.0),
    "truncate": Truncate(0),
    "random selection": RandomSelection(Truncate(0)),
    "composed": Truncate(0) + NOVA(t_est=2, scale_linkage=False, scale_table="1:0"),
}

SHAPES: tuple[dict, ...] = ({}, {"greedy": True}, {"guidance_layers": -1}, {"guidance_layers": -2})


CAPTURED = {
    "nova": NOVA(t_est=2, alpha=0.0),
    "nova, early": NOVA(t_est=2, alpha=10, tau=2.2),  # no cells at the edge are equally uncertain
    "nova, literal": replace(LITERAL, t_est=2, alpha=10, tau=2.0),
    "nova, lens": NOVA(t_est=2, alpha=10, probe="lens", tau=2.0),
    "nova, bits": NOVA(t_est=2, alpha=10, unit="bit", entropy_of="guided", cache="feature", uncomputed="nothing"),
    "nova, zero": NOVA(t_est=2, alpha=10, cache="zero"),
    "nova, once": NOVA(t_est=2, alpha=10, layer_linkage=False, probe="previous", uncomputed="nothing", cache="zero"),
    "nova, previous": NOVA(t_est=2, alpha=10, probe="previous", probe_from_layer=2),
    "nova, random": NOVA(t_est=2, alpha=10, metric="random"),
    "nova, attention": NOVA(t_est=2, alpha=10, metric="attention"),
    "nova, mse": NOVA(t_est=2, alpha=10, metric="mse"),
    "nova and guidance": NOVA(t_est=2, alpha=10) + DropGuidance(4),
    "ld_pruning": LDPruning(rho=0.6, delta=2.0),
    "taper": Taper(budget=0.4),
    "taper, adaptive": Taper(budget=0.6, entropies=ENTROPIES),
    "random selection": RandomSelection(NOVA(t_est=2, alpha=10), seed=3),
    "random fastvar": RandomSelection(FastVAR(scale_table="0.5:0.3 1:0.6")) + DropGuidance(4),
    "truncate and guidance": Truncate(2) + DropGuidance(4),
    "fastvar": FastVAR(scale_table="0.5:0.3 1:0.6"),
    "fastvar, complete in between": FastVAR(scale_table="0.5:0.3 0.8:0 1:0.6"),
    "sparsevar": SparseVAR(start_scale=0.5, tau=0.9),
    "toprovar": ToProVAR(tau=0.3, beta=1.0, a_max=0.9),
    "toprovar, previous layer": ToProVAR(tau=0.3, beta=1.0, a_max=0.9, entropy_from="previous_layer"),
    "toprovar, layers": ToProVAR(tau=0.3, beta=1.0, a_max=0.9, token_stage=False, uncomputed="nothing"),
}
