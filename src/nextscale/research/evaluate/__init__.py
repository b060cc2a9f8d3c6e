"""Measure methods: quality, cost, and both at once over many settings."""
