"""Media files in and out (PyAV, Pillow)."""
