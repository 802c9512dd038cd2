"""Configuration of an expanded mistral model."""

from transformers import MistralConfig


class ScaleMistralConfig(MistralConfig):
    """A stock configuration with one more key, `scale_surgery`: what was expanded, and how wide."""

    model_type = "scale_mistral"
