"""MM-LDLM: one denoiser for a text and its latent."""

__version__ = "0.1.0"
