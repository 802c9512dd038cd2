"""Configuration of an expanded llama model."""

from transformers import LlamaConfig


class ScaleLlamaConfig(LlamaConfig):
    """A stock configuration with one more key, `scale_surgery`: what was expanded, and how wide."""

    model_type = "scale_llama"
