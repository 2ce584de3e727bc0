"""Text to pair store."""
