"""Triton kernels, each beside a reference in plain torch that says what it computes and serves all other devices."""
