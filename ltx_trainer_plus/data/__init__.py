"""Prepared training data, read and made."""
