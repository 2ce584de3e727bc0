"""The use cases that `import mmldlm` offers; the only place that knows several rooms."""
