"""Loss to weights."""
