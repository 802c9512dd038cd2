"""An expanded gemma2 model: the stock classes, with the modules that the configuration names expanded."""

from transformers import Gemma2ForCausalLM, Gemma2Model

from .configuration_scale_gemma2 import ScaleGemma2Config

# transformers 4 copies the files that this one imports itself, and no others
from .expanded_attention import SPLIT_ATTENTION  # noqa: F401
from .expanded_causal_lm import ExpandedForCausalLM
from .expanded_fused import FusedLinear  # noqa: F401
from .expanded_mixture import Mixture  # noqa: F401
from .expanded_model import ExpandedPreTrainedModel
from .expanded_modules import EXPANSION_NAMES  # noqa: F401
from .expanded_routing import RouterState  # noqa: F401
from .expanded_streams import Streams  # noqa: F401


class ScaleGemma2Model(ExpandedPreTrainedModel, Gemma2Model):
    """The stock model without a head; its hidden states are [base stream, up stream]."""

    config_class = ScaleGemma2Config


class ScaleGemma2ForCausalLM(ExpandedForCausalLM, Gemma2ForCausalLM):
    """The stock language model; logits = head x + head_up x_up."""

    config_class = ScaleGemma2Config
