"""An expanded mistral model: the stock classes, with the modules that the configuration names expanded."""

from transformers import MistralForCausalLM, MistralModel

from .configuration_scale_mistral import ScaleMistralConfig
from .expanded_model import ExpandedPreTrainedModel


class ScaleMistralModel(ExpandedPreTrainedModel, MistralModel):
    """The stock model without a head; its hidden states are [base stream, up stream]."""

    config_class = ScaleMistralConfig


class ScaleMistralForCausalLM(ExpandedPreTrainedModel, MistralForCausalLM):
    """The stock language model; logits = head x + head_up x_up."""

    config_class = ScaleMistralConfig
