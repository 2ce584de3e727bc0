"""Clean pairs to noisy pairs."""
