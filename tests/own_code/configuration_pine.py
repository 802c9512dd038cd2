"""A configuration as it lies in the folder of a model that transformers does not have."""

from transformers import PretrainedConfig


class PineConfig(PretrainedConfig):
    model_type = "pine"

    def __init__(
        self,
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        has_own_attention=False,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.has_own_attention = has_own_attention
        self.has_norm_after_attention = kwargs.pop("has_norm_after_attention", False)
        self.sloped_layers = kwargs.pop("sloped_layers", None)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
