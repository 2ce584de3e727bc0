"""Pair store to packed batches."""
