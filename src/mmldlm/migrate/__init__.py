"""Bringing users of the MM-LDLM research code over: settings, data, command lines, environment."""
