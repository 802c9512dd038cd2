"""Configuration of an expanded gemma3_text model."""

from transformers import Gemma3TextConfig


class ScaleGemma3TextConfig(Gemma3TextConfig):
    """A stock configuration with one more key, `scale_surgery`: what was expanded, and how wide."""

    model_type = "scale_gemma3_text"
