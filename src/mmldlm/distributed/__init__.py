"""Several processes, one run: how they start, agree, and add up their gradients."""
