"""A model as it lies in the folder of one that transformers does not have."""

import torch
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_pine import PineConfig
from .needles import Layer, Norm


class PinePreTrainedModel(PreTrainedModel):
    config_class = PineConfig
    base_model_prefix = "trunk"
    _supports_sdpa = True


class PineModel(PinePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.wte

    def set_input_embeddings(self, value):
        self.wte = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        cache=None,
        use_cache=None,
        output_hidden_states=None,
        **kwargs,
    ):
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        if cache is None and use_cache is not False:
            cache = DynamicCache()
        past = cache.get_seq_length() if cache is not None else 0
        positions = torch.arange(past, past + x.shape[1], device=x.device)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=positions[None],
        )
        seen = [x]
        for layer in self.layers:
            x = layer(x, mask, cache)
            seen.append(x)
        seen[-1] = self.norm(x)
        states = tuple(seen) if output_hidden_states else None
        return BaseModelOutputWithPast(seen[-1], cache=cache, hidden_states=states)


class PineForCausalLM(PinePreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"head.weight": "trunk.wte.weight"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.trunk = PineModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.trunk.wte

    def get_output_embeddings(self):
        return self.head

    def set_output_embeddings(self, value):
        self.head = value

    def forward(self, input_ids=None, labels=None, logits_to_keep=0, **kwargs):
        output = self.trunk(input_ids=input_ids, **kwargs)
        kept = slice(-logits_to_keep, None) if logits_to_keep else slice(None)
        logits = self.head(output.last_hidden_state[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss, logits, output.cache, hidden_states=output.hidden_states)
