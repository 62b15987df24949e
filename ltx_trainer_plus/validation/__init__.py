"""Samples generated during training."""
