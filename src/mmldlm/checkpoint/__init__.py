"""Publish, resume and export weights."""
