"""The former name of `mmldlm.checkpoint.load`."""

from mmldlm.checkpoint.load import LoadedModel, build_model, load_model

__all__ = ["LoadedModel", "build_model", "load_model"]
