"""Default widths on the shapes of models that people use: sparse files, whose headers alone are read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
import transformers

from scale_surgery.deriving.planned import plan
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.request import Request
from scale_surgery.planning.scale import default_kv_heads
from scale_surgery.show.tables_plan import plan_rows
from tests.each import woven

# vocabulary, hidden, inner, layers, query heads, key/value heads, head size
SHAPES = {
    "gemma-3-270m": ("Gemma3TextConfig", 262144, 640, 2048, 18, 4, 1, 256),
    "gemma-3-1b": ("Gemma3TextConfig", 262144, 1152, 6912, 26, 4, 1, 256),
    "qwen2.5-0.5b": ("Qwen2Config", 151936, 896, 4864, 24, 14, 2, 64),
    "llama-3.2-1b": ("LlamaConfig", 128256, 2048, 8192, 16, 32, 8, 64),
}
QUARTER = {"gemma-3-270m": "last:5", "gemma-3-1b": "last:7", "qwen2.5-0.5b": "last:6", "llama-3.2-1b": "last:4"}
MOST_ADDED = 0.15


@pytest.fixture(scope="module")
def shape_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")

    def made(name: str) -> Path:
        return folder / name if (folder / name).exists() else save_shape(folder / name, *SHAPES[name])

    return made


def save_shape(folder: Path, kind: str, vocabulary: int, hidden: int, inner: int, layers: int, *heads: int) -> Path:
    """Write a tied base of zeros, of which only the header takes room on the disk."""
    config = getattr(transformers, kind)(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        **dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True)),
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    header, end = {}, 0
    for name, parameter in model.named_parameters():
        start, end = end, end + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def head_and_layers(made: Plan) -> tuple[int, int]:
    """How many parameters the head gets, and the layers."""
    return (
        sum(tensor.elements for tensor in made.head_parts),
        sum(tensor.elements for tensor in made.tensors if tensor.layer is not None),
    )


@pytest.mark.parametrize(
    ("name", "variant"), woven(("gemma-3-270m", "qwen2.5-0.5b"), ("preserve", "adapt"), among=SHAPES)
)
def test_few_layers_add_few_parameters_and_the_head_no_more_than_they(name, variant, shape_of):
    collaborate = "both" if variant == "adapt" else None
    for layers in ("last:4", QUARTER[name]):
        made = plan(shape_of(name), Request(layers, variant=variant, collaborate=collaborate))
        assert made.costs.parameters_added <= MOST_ADDED * made.costs.parameters_before
        assert made.costs.forward_factor <= 1 + MOST_ADDED
        head, inside = head_and_layers(made)
        assert head <= inside or made.widths.up_width == 8
        # the control: eight features more would cost more, or are more than the ratio asks for
        wider = made.widths.up_width + 8
        if wider <= made.sizes.hidden / 8:
            more = plan(shape_of(name), Request(layers, variant=variant, collaborate=collaborate, up_width=wider))
            head, inside = head_and_layers(more)
            assert head > inside


def test_an_eighth_of_llama_3_2_1b_is_what_the_paper_has(shape_of):
    for layers in ("all", "last:4"):
        widths = plan(shape_of("llama-3.2-1b"), Request(layers)).widths
        assert (widths.up_width, widths.up_kv_heads, widths.up_inner_width) == (256, 1, 1024)
    # one layer does not pay for 256 columns of the head
    assert plan(shape_of("llama-3.2-1b"), Request("-1")).widths.up_width < 256
    assert plan(shape_of("llama-3.2-1b"), Request("-1", up_width=256)).widths.up_width == 256, "what is said counts"


def test_a_plan_says_what_is_less_than_the_ratio_asks_for(shape_of):
    share = dict(plan_rows(plan(shape_of("gemma-3-270m"), Request("last:4"))))["share of base"]
    assert "up width 8 instead of 80, so that the new columns of the head cost at most as much as the layers" in share
    assert "no new heads: 1 key/value head is 100.0% of 1, more than twice the share (--up-kv-heads 1" in share
    all_of_it = dict(plan_rows(plan(shape_of("llama-3.2-1b"), Request("all"))))["share of base"]
    assert all_of_it == "residual stream 12.5%, key/value heads 12.5%, inner 12.5%", "the control"


def test_a_head_is_added_only_if_it_is_at_most_twice_the_share():
    assert [default_kv_heads(heads, 0.125) for heads in (0, 1, 2, 3, 4, 5, 8, 12, 16)] == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert [default_kv_heads(1, ratio) for ratio in (0.49, 0.5, 1.0, 2.0)] == [0, 1, 1, 2]
