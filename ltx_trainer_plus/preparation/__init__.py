"""From media files and captions to prepared training data."""
