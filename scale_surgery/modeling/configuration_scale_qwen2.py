"""Configuration of an expanded qwen2 model."""

from transformers import Qwen2Config


class ScaleQwen2Config(Qwen2Config):
    """A stock configuration with one more key, `scale_surgery`: what was expanded, and how wide."""

    model_type = "scale_qwen2"
