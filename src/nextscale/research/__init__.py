"""Analyze, evaluate, export, verify, calibrate: what commands need and serving does not."""
