"""Noisy pairs to predictions."""
