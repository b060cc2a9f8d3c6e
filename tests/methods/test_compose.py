"""A composition does what its parts do alone, scale by scale and cell by cell."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.pipelines import DATA, ask

from nextscale import NOVA, Compose, DropGuidance, FastVAR, SkipVAR, SparseVAR, ToProVAR, Truncate
from nextscale.methods.policy import Activation, Policy

SKIP = SkipVAR(str(DATA / "skipvar_decision.json"), at=0.5)
SELECTING = {
    "nova": NOVA(t_est=2, alpha=0.0),
    "nova, attention": NOVA(t_est=2, alpha=0.0, metric="attention"),
    "nova, feature cache": NOVA(t_est=2, alpha=0.0, cache="feature", probe="previous"),
    "toprovar": ToProVAR(tau=0.45, a_max=0.9),
    "sparsevar": SparseVAR(start_scale=0.6, tau=0.95, anchor=2, similarity=-1.0),
    "fastvar": FastVAR(),
}
ALONE: dict = {}  # runs of the parts, which many compositions share


def run(pipe, name: str, method, images: int = 3):
    """With the tokens of the plain run, so that a part sees the same maps whatever the others do."""
    key = pipe.backbone.family, name
    if key not in ALONE:
        tokens = ask(pipe, images).tokens
        ALONE[key] = ask(pipe, images, method=method, force_tokens=tokens)
    return ALONE[key]


def rows(out) -> np.ndarray:
    """[images, scales]"""
    return np.array([[e["rows"] for e in image["scales"]] for image in out.trace.to_dict()["images"]])


def activations(out) -> list[dict]:
    return [image["activation"] for image in out.trace.to_dict()["images"]]


def check(pipe, out, parts: list, selecting) -> None:
    """Rows are the fewest that a part leaves, and the cells are those of the part that selects."""
    assert np.array_equal(rows(out), np.minimum.reduce([rows(part) for part in parts]))
    plain = run(pipe, "plain", None).tokens
    both = (o.trace.to_dict()["images"] for o in (out, selecting))
    for image, (ours, theirs) in enumerate(zip(*both, strict=True)):
        ran = [e["scale"] for e in ours["scales"] if e["ran"]]
        first = theirs["activation"]["scale"]
        assert first is None or first not in ran or ours["activation"] == theirs["activation"]
        for t in ran:
            found, asked = out.tokens[t - 1][image], plain[t - 1][image]
            assert torch.equal(found, asked.where(found >= 0, -1)), "the tokens that were asked for, or nothing"
            entropies = (traced["scales"][t - 1]["entropy"] for traced in (ours, theirs))
            assert next(entropies) == pytest.approx(next(entropies), abs=1e-5)
            for layer in range(1, pipe.backbone.depth + 1):
                assert np.array_equal(*(o.trace.kept(image, t, layer) for o in (out, selecting))), (image, t, layer)


@pytest.mark.parametrize(
    ("model", "name"), [*((m, name) for m in ("var", "infinity") for name in SELECTING), ("hart", "nova")]
)
def test_a_composition_does_what_its_parts_do(request, model: str, name: str) -> None:
    pipe = request.getfixturevalue(model)
    last = len(rows(run(pipe, "plain", None))[0])
    others = {"skip": SKIP, "drop": DropGuidance(5), "truncate": Truncate(1)}
    alone = {key: run(pipe, key, method) for key, method in others.items()}
    selecting = run(pipe, name, SELECTING[name])
    assert not all(selecting.trace.kept(0, last - 1, layer).all() for layer in range(1, 5))
    assert len(set(map(tuple, rows(alone["skip"])))) > 1, "the images decide differently"
    composed = Compose((SELECTING[name], *others.values()))
    reversed_ = Compose((*others.values(), SELECTING[name]))
    for method in (composed, reversed_):
        out = ask(pipe, 3, method=method, force_tokens=run(pipe, "plain", None).tokens)
        check(pipe, out, [*alone.values(), selecting], selecting)


def test_every_part_of_a_composition_is_told_what_happens(infinity, monkeypatch) -> None:
    """Whoever selects, and wherever it stands."""
    told = []
    for name in ("on_logits", "on_features", "release"):
        original = getattr(Policy, name)

        def noted(self, *args, name=name, original=original):
            told.append((name, type(self).__name__))
            return original(self, *args)

        monkeypatch.setattr(Policy, name, noted)
    ask(infinity, 1, method=Truncate(1) + DropGuidance(4))
    for name, times in (("on_logits", 6), ("on_features", 6), ("release", 1)):
        assert told.count((name, "TruncatePolicy")) == told.count((name, "DropGuidancePolicy")) == times


@pytest.mark.parametrize("method", [Truncate(0) + NOVA(t_est=2), NOVA(t_est=2) + Truncate(0)])
def test_the_trace_of_a_composition_knows_its_last_scale(infinity, method) -> None:
    """NOVA reads the entropy of the last scale when somebody looks at the trace."""
    alone, both = (ask(infinity, 2, method=m).trace.to_dict()["images"] for m in (NOVA(t_est=2), method))
    assert [i["scales"] for i in both] == [i["scales"] for i in alone]
    assert all(e["entropy"] is not None for i in both for e in i["scales"])


def test_a_part_without_activation_leaves_it_to_the_others(infinity) -> None:
    out = ask(infinity, 1, method=NOVA(t_est=5, scale_linkage=False, alpha=0.0) + Truncate(2))
    never = NOVA(t_est=5, alpha=0.0)
    found = activations(ask(infinity, 1, method=never + Truncate(2)))[0]
    assert found == {**vars(Activation(scale=6, reason="fixed"))}
    assert activations(out)[0]["scale"] == 6


def test_parts_alone(infinity) -> None:
    assert rows(run(infinity, "plain", None)).tolist() == [[2] * 7] * 3
    assert rows(run(infinity, "drop", DropGuidance(5))).tolist() == [[2] * 4 + [1] * 3] * 3
    assert rows(run(infinity, "truncate", Truncate(1))).tolist() == [[2] * 6 + [0]] * 3


def test_stop_is_stronger_than_skip_and_skip_than_run(infinity) -> None:
    """FastVAR skips the last scale of seven, and thins out the one before; Truncate stops there."""
    plain = run(infinity, "plain", None)
    for method in (FastVAR() + Truncate(1), Truncate(1) + FastVAR()):
        out = ask(infinity, 1, method=method)
        image = out.trace.to_dict()["images"][0]
        assert image["stopped_after"] == 6
        assert rows(out)[0].tolist() == [2] * 6 + [0]
        assert (out.tokens[6] == -1).all()
    skipped = ask(infinity, 1, method=FastVAR())
    assert skipped.trace.to_dict()["images"][0]["stopped_after"] is None
    assert all(torch.equal(a[:1], b) for a, b in zip(plain.tokens[:5], skipped.tokens[:5], strict=True))
