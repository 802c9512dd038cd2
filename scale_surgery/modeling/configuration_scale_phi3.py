"""Configuration of an expanded phi3 model."""

from transformers import Phi3Config


class ScalePhi3Config(Phi3Config):
    """A stock configuration with one more key, `scale_surgery`: what was expanded, and how wide."""

    model_type = "scale_phi3"
