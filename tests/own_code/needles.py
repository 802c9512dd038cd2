"""Parts of the model in a file of their own, as people write them."""

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Attention(nn.Module):
    """Without positions: heads see what stands before them through the mask alone."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.is_causal, self.attention_dropout = self.head_dim**-0.5, True, 0.0
        kv_size = config.num_key_value_heads * self.head_dim
        self.q = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, mask, cache):
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (linear(x).view(shape).transpose(1, 2) for linear in (self.q, self.k, self.v))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, eager_attention_forward)
        attend = self.squared if self.config.has_own_attention else attend
        output, _ = attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling)
        return self.o(output.reshape(*x.shape[:-1], -1).contiguous())

    @staticmethod
    def squared(module, q, k, v, mask, scaling, **_):
        """Weights by squares, which no attention function of transformers has."""
        k, v = (states.repeat_interleave(module.num_key_value_groups, dim=1) for states in (k, v))
        scores = (q @ k.transpose(2, 3) * scaling).square() + 1e-3
        length, past = q.shape[2], k.shape[2] - q.shape[2]
        allowed = torch.ones(length, k.shape[2], dtype=torch.bool, device=q.device).tril(past)
        scores = scores * allowed
        return ((scores / scores.sum(-1, keepdim=True)) @ v).transpose(1, 2), None


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.before_attention, self.attention = Norm(config.hidden_size), Attention(config, layer_idx)
        self.before_mlp, self.mlp = Norm(config.hidden_size), Mlp(config)
        self.after_attention = Norm(config.hidden_size) if config.has_norm_after_attention else nn.Identity()
        # such layers compute with their number
        self.slope = 1 / (layer_idx + 1) if (config.sloped_layers or {layer_idx: False})[layer_idx] else 1.0

    def forward(self, x, mask, cache):
        x = x + self.after_attention(self.attention(self.before_attention(x), mask, cache)) * self.slope
        return x + self.mlp(self.before_mlp(x))
