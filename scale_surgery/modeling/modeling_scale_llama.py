"""An expanded llama model: the stock classes, with the modules that the configuration names expanded."""

from transformers import LlamaForCausalLM, LlamaModel

from .configuration_scale_llama import ScaleLlamaConfig
from .expanded_model import ExpandedPreTrainedModel


class ScaleLlamaModel(ExpandedPreTrainedModel, LlamaModel):
    """The stock model without a head; its hidden states are [base stream, up stream]."""

    config_class = ScaleLlamaConfig


class ScaleLlamaForCausalLM(ExpandedPreTrainedModel, LlamaForCausalLM):
    """The stock language model; logits = head x + head_up x_up."""

    config_class = ScaleLlamaConfig
