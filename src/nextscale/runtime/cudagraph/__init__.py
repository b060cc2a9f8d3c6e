"""Scales as CUDA graphs, whatever a method decides."""
