"""Logs as the trainers of other projects write them, generated from their own format statements."""
