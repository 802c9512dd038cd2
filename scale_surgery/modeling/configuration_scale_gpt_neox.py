"""Configuration of an expanded gpt_neox model."""

from transformers import GPTNeoXConfig


class ScaleGPTNeoXConfig(GPTNeoXConfig):
    """A stock configuration with one more key, `scale_surgery`: what was expanded, and how wide."""

    model_type = "scale_gpt_neox"
