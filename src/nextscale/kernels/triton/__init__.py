"""The Triton kernels, each beside its reference in the folder above."""
