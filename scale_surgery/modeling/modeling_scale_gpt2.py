"""An expanded gpt2 model: the stock classes, with the modules that the configuration names expanded."""

from transformers import GPT2LMHeadModel, GPT2Model

from .configuration_scale_gpt2 import ScaleGPT2Config
from .expanded_model import ExpandedPreTrainedModel


class ScaleGPT2Model(ExpandedPreTrainedModel, GPT2Model):
    """The stock model without a head; its hidden states are [base stream, up stream]."""

    config_class = ScaleGPT2Config


class ScaleGPT2ForCausalLM(ExpandedPreTrainedModel, GPT2LMHeadModel):
    """The stock language model; logits = head x + head_up x_up."""

    config_class = ScaleGPT2Config
