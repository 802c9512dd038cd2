"""Expand Hugging Face checkpoints, prove that nothing changed, and take the expansion off again."""
__version__ = "0.1.0"
