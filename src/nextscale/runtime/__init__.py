"""How planned scales are run: eager, compiled, as CUDA graphs."""
