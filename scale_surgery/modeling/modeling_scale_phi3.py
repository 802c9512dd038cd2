"""An expanded phi3 model: the stock classes, with the modules that the configuration names expanded."""

from transformers import Phi3ForCausalLM, Phi3Model

from .configuration_scale_phi3 import ScalePhi3Config
from .expanded_model import ExpandedPreTrainedModel


class ScalePhi3Model(ExpandedPreTrainedModel, Phi3Model):
    """The stock model without a head; its hidden states are [base stream, up stream]."""

    config_class = ScalePhi3Config


class ScalePhi3ForCausalLM(ExpandedPreTrainedModel, Phi3ForCausalLM):
    """The stock language model; logits = head x + head_up x_up."""

    config_class = ScalePhi3Config
