"""Configuration of an expanded qwen3 model."""

from transformers import Qwen3Config


class ScaleQwen3Config(Qwen3Config):
    """A stock configuration with one more key, `scale_surgery`: what was expanded, and how wide."""

    model_type = "scale_qwen3"
