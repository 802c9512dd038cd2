"""Configuration of an expanded olmo2 model."""

from transformers import Olmo2Config


class ScaleOlmo2Config(Olmo2Config):
    """A stock configuration with one more key, `scale_surgery`: what was expanded, and how wide."""

    model_type = "scale_olmo2"
