"""The papers' figures, drawn from runs of any model."""
