"""What every method should keep, recomputed in plain numpy from the papers' formulas: nothing here knows the package.

A run is recorded (`recording.py`) as arrays; an oracle says from these which cells each layer should have computed.
"""
