"""All kinds of cases, by what is attacked."""

from hostile import arguments, configs, prompts, weights
from hostile.sandbox import KINDS

__all__ = ["KINDS", "arguments", "configs", "prompts", "weights"]
