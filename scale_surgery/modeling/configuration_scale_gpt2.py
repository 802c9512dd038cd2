"""Configuration of an expanded gpt2 model."""

from transformers import GPT2Config


class ScaleGPT2Config(GPT2Config):
    """A stock configuration with one more key, `scale_surgery`: what was expanded, and how wide."""

    model_type = "scale_gpt2"
