"""One training run: what is checked before it, where it begins, its loop, how it is interrupted."""
