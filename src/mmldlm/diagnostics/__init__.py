"""Tools that look at runs and at training code."""
