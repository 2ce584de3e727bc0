"""Numbers and pictures about a trained model."""
