"""Predictions to loss terms."""
