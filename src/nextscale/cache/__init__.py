"""The KV cache, as one tensor per layer or in pages."""
