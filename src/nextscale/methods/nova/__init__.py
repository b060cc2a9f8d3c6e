"""NOVA: entropy decides when to start pruning, how many tokens per scale and layer, and a cache restores them."""

from nextscale.methods.nova.method import NOVA

__all__ = ["NOVA"]
