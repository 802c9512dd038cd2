"""An expanded gpt_neox model: the stock classes, with the modules that the configuration names expanded."""

from transformers import GPTNeoXForCausalLM, GPTNeoXModel

from .configuration_scale_gpt_neox import ScaleGPTNeoXConfig

# transformers 4 copies the files that this one imports itself, and no others
from .expanded_attention import SPLIT_ATTENTION  # noqa: F401
from .expanded_causal_lm import ExpandedForCausalLM
from .expanded_fused import FusedLinear  # noqa: F401
from .expanded_mixture import Mixture  # noqa: F401
from .expanded_model import ExpandedPreTrainedModel
from .expanded_modules import EXPANSION_NAMES  # noqa: F401
from .expanded_routing import RouterState  # noqa: F401
from .expanded_streams import Streams  # noqa: F401


class ScaleGPTNeoXModel(ExpandedPreTrainedModel, GPTNeoXModel):
    """The stock model without a head; its hidden states are [base stream, up stream]."""

    config_class = ScaleGPTNeoXConfig


class ScaleGPTNeoXForCausalLM(ExpandedForCausalLM, GPTNeoXForCausalLM):
    """The stock language model; logits = head x + head_up x_up."""

    config_class = ScaleGPTNeoXConfig
    # the head is embed_out on disk and in transformers 4, lm_head in the modules of transformers 5
    renamed_modules = {r"^embed_out\.": "lm_head."} if "lm_head.weight" in GPTNeoXForCausalLM._tied_weights_keys else {}
