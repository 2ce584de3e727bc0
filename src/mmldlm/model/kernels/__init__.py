"""Triton kernels of the denoiser, each behind a switch and with a plain twin in `ops`."""
