"""The formula of a norm, found by its output."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from scale_surgery.planning.architecture import NormStyle

EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
TOLERANCE = 1e-3


def is_norm(module: nn.Module) -> bool:
    """Return True if a module may be a norm: it has no parts, and at most a gain and a bias."""
    names = {name for name, _ in module.named_parameters()}
    return "norm" in type(module).__name__.lower() and not list(module.children()) and names <= {"weight", "bias"}


def epsilon(module: nn.Module) -> float:
    """The epsilon of a norm."""
    values = (getattr(module, name, None) for name in EPSILON_NAMES)
    return float(next((value for value in values if isinstance(value, float)), 1e-6))


def norm_style(module: nn.Module, features: int) -> NormStyle | None:
    """Find the formula that gives the output of a norm; None where no known one does."""
    if any(parameter.shape != (features,) for parameter in module.parameters()):
        return None
    x = torch.randn(3, features, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        output = module(x)
    if not isinstance(output, Tensor) or output.shape != x.shape:
        return None
    errors = {style: float((output - candidate).abs().max()) for style, candidate in _candidates(module, x).items()}
    best = min(errors, key=lambda style: errors[style])
    return best if errors[best] < TOLERANCE else None


def _candidates(module: nn.Module, x: Tensor) -> dict[NormStyle, Tensor]:
    gain, bias = (getattr(module, name, None) for name in ("weight", "bias"))
    gain = torch.ones(x.shape[-1]) if gain is None else gain.detach()
    bias = torch.zeros(x.shape[-1]) if bias is None else bias.detach()
    eps = epsilon(module)
    rms = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    centred = x - x.mean(-1, keepdim=True)
    layer = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return {
        "rms": rms * gain + bias,
        "rms_plus_one": rms * (1 + gain) + bias,
        "layer": layer * gain + bias,
        "layer_plus_one": layer * (1 + gain) + bias,
    }
