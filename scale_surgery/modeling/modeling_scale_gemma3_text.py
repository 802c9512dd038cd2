"""An expanded gemma3_text model: the stock classes, with the modules that the configuration names expanded."""

from transformers import Gemma3ForCausalLM, Gemma3TextModel

from .configuration_scale_gemma3_text import ScaleGemma3TextConfig

# transformers 4 copies the files that this one imports itself, and no others
from .expanded_attention import SPLIT_ATTENTION  # noqa: F401
from .expanded_causal_lm import ExpandedForCausalLM
from .expanded_fused import FusedLinear  # noqa: F401
from .expanded_mixture import Mixture  # noqa: F401
from .expanded_model import ExpandedPreTrainedModel
from .expanded_modules import EXPANSION_NAMES  # noqa: F401
from .expanded_routing import RouterState  # noqa: F401
from .expanded_streams import Streams  # noqa: F401


class ScaleGemma3TextModel(ExpandedPreTrainedModel, Gemma3TextModel):
    """The stock model without a head; its hidden states are [base stream, up stream]."""

    config_class = ScaleGemma3TextConfig


class ScaleGemma3TextForCausalLM(ExpandedForCausalLM, Gemma3ForCausalLM):
    """The stock language model; logits = head x + head_up x_up."""

    config_class = ScaleGemma3TextConfig
