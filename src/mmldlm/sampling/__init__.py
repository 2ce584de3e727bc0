"""Noise to text and latents."""
