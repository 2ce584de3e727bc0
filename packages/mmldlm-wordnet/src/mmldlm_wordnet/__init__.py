"""A trained model as package data: `mmldlm.load("builtin:wordnet")`."""
