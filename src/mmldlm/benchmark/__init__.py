"""`mmldlm benchmark`: what each speed-up is worth, measured in fresh processes and compared with the noise."""
