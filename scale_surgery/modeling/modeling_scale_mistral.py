"""An expanded mistral model: the stock classes, with the modules that the configuration names expanded."""

from transformers import MistralForCausalLM, MistralModel

from .configuration_scale_mistral import ScaleMistralConfig

# transformers 4 copies the files that this one imports itself, and no others
from .expanded_attention import SPLIT_ATTENTION  # noqa: F401
from .expanded_causal_lm import ExpandedForCausalLM
from .expanded_fused import FusedLinear  # noqa: F401
from .expanded_mixture import Mixture  # noqa: F401
from .expanded_model import ExpandedPreTrainedModel
from .expanded_modules import EXPANSION_NAMES  # noqa: F401
from .expanded_routing import RouterState  # noqa: F401
from .expanded_streams import Streams  # noqa: F401


class ScaleMistralModel(ExpandedPreTrainedModel, MistralModel):
    """The stock model without a head; its hidden states are [base stream, up stream]."""

    config_class = ScaleMistralConfig


class ScaleMistralForCausalLM(ExpandedForCausalLM, MistralForCausalLM):
    """The stock language model; logits = head x + head_up x_up."""

    config_class = ScaleMistralConfig
