"""An expanded llama model: the stock classes, with the modules that the configuration names expanded."""

from transformers import LlamaForCausalLM, LlamaModel

from .configuration_scale_llama import ScaleLlamaConfig

# transformers 4 copies the files that this one imports itself, and no others
from .expanded_attention import SPLIT_ATTENTION  # noqa: F401
from .expanded_causal_lm import ExpandedForCausalLM
from .expanded_fused import FusedLinear  # noqa: F401
from .expanded_mixture import Mixture  # noqa: F401
from .expanded_model import ExpandedPreTrainedModel
from .expanded_modules import EXPANSION_NAMES  # noqa: F401
from .expanded_routing import RouterState  # noqa: F401
from .expanded_streams import Streams  # noqa: F401


class ScaleLlamaModel(ExpandedPreTrainedModel, LlamaModel):
    """The stock model without a head; its hidden states are [base stream, up stream]."""

    config_class = ScaleLlamaConfig


class ScaleLlamaForCausalLM(ExpandedForCausalLM, LlamaForCausalLM):
    """The stock language model; logits = head x + head_up x_up."""

    config_class = ScaleLlamaConfig
