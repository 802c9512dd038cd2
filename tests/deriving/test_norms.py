"""The formula that is found for a norm is the one that its up stream gets, with and without a bias."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from scale_surgery.deriving.norms import norm_style
from scale_surgery.modeling.expanded_blocks import NormBlocks
from scale_surgery.modeling.expanded_shapes import shapes_of

FEATURES, EPSILON = 24, 1e-5


class Norm(nn.Module):
    """A norm in one of four styles, written down."""

    eps = EPSILON

    def __init__(self, style: str, *, has_bias: bool) -> None:
        super().__init__()
        self.style = style
        self.weight = nn.Parameter(torch.randn(FEATURES))
        self.bias = nn.Parameter(torch.randn(FEATURES)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.style.startswith("layer") else x
        y = x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()
        y = y * (self.weight + 1 if self.style.endswith("_plus_one") else self.weight)
        return y if self.bias is None else y + self.bias


def blocks_of(norm: Norm, style: str) -> NormBlocks:
    spec = {"kind": "norm", "up": FEATURES, "style": style, "epsilon": EPSILON}
    blocks = NormBlocks(norm, spec, FEATURES)
    blocks.add_tensors("float32", shapes_of(spec, has_bias=norm.bias is not None))
    return blocks


@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize("style", ("rms", "rms_plus_one", "layer", "layer_plus_one"))
def test_an_up_stream_is_normalised_as_the_stock_norm_does(style: str, has_bias: bool) -> None:
    torch.manual_seed(0)
    norm, x = Norm(style, has_bias=has_bias), torch.randn(5, FEATURES)
    assert norm_style(norm, FEATURES) == style
    blocks = blocks_of(norm, style)
    with torch.no_grad():
        blocks.up_weight.copy_(norm.weight)
        if has_bias:
            blocks.up_bias.copy_(norm.bias)
        base, up = blocks(x, x, norm(x), False)
    assert torch.equal(base, norm(x))
    torch.testing.assert_close(up, norm(x))
    wrong_blocks = blocks_of(norm, "rms" if style != "rms" else "layer")
    wrong_blocks.load_state_dict(blocks.state_dict())
    assert not torch.allclose(wrong_blocks(x, x, norm(x), False)[1], norm(x), atol=1e-2)


def test_a_norm_of_another_formula_has_no_style() -> None:
    norm = Norm("rms", has_bias=False)
    norm.forward = lambda x: norm.weight * x * (x.pow(2).mean(-1, keepdim=True) + EPSILON) ** -0.25
    assert norm_style(norm, FEATURES) is None
