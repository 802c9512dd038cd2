"""Text to learn from and to measure on: files and datasets become documents, and documents token sequences."""
