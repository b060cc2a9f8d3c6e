"""FLOPs that the trace counts, against the formula."""

from __future__ import annotations

from support.pipelines import embeds

from nextscale import Pipeline


def test_the_unconditional_text_has_its_own_length(infinity: Pipeline) -> None:
    """Every key of the text costs 4 width per token and layer; nine more are seen by the unconditional rows alone."""

    def flops(unwanted: int) -> tuple[int, int]:
        options = {"seed": 1, "pixel_budget": "0.06M", "guidance_scale": 3.0}
        text = {"prompt_embeds": embeds(5), "negative_prompt_embeds": embeds(unwanted, seed=9)}
        image = infinity(**text, **options).trace.to_dict()["images"][0]
        assert image["flops"] == image["flops_full"]
        assert all(e["rows"] == 2 for e in image["scales"])
        return image["flops"], sum(e["tokens"] for e in image["scales"]) + image["scales"][0]["context"]

    (short, tokens), (long, _) = flops(2), flops(11)
    assert long - short == 9 * 4 * infinity.backbone.width * infinity.backbone.depth * tokens
