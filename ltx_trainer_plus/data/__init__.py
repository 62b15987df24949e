"""Prepared training data, read and dealt to ranks."""
