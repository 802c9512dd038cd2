"""An expanded qwen3 model: the stock classes, with the modules that the configuration names expanded."""

from transformers import Qwen3ForCausalLM, Qwen3Model

from .configuration_scale_qwen3 import ScaleQwen3Config
from .expanded_model import ExpandedPreTrainedModel


class ScaleQwen3Model(ExpandedPreTrainedModel, Qwen3Model):
    """The stock model without a head; its hidden states are [base stream, up stream]."""

    config_class = ScaleQwen3Config


class ScaleQwen3ForCausalLM(ExpandedPreTrainedModel, Qwen3ForCausalLM):
    """The stock language model; logits = head x + head_up x_up."""

    config_class = ScaleQwen3Config
