"""Configuration of an expanded gemma2 model."""

from transformers import Gemma2Config


class ScaleGemma2Config(Gemma2Config):
    """A stock configuration with one more key, `scale_surgery`: what was expanded, and how wide."""

    model_type = "scale_gemma2"
