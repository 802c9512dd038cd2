"""Models that see images: the language model inside is expanded, and images work as before."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from scale_surgery import (
    Request,
    expand,
    extract,
    inspect,
    load_expansion,
    merge,
    route_export,
    strip,
    verify,
)
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.errors import CheckpointError, PlanError
from scale_surgery.modeling.expanded_routers import ROUTERS
from scale_surgery.planning.new_tokens import NewTokens
from tests.by_hand import save_base
from tests.conftest import digests, edited, refused, shake
from tests.each import mostly
from tests.evidence.test_evaluate import with_tokenizer
from tests.sweep.take import twin_config

ROWS = 9


def config_of(name: str) -> Any:
    """A tiny config of a model that sees images, whose parts fit each other."""
    config = twin_config(name)
    if hasattr(config.vision_config, "out_hidden_size"):
        # what the vision part gives is put where embeddings of tokens are
        config.vision_config.out_hidden_size = config.text_config.hidden_size
    if name == "qwen3_vl":
        # what these layers of the vision part give is added again above the first layers of the language model
        config.vision_config.deepstack_visual_indexes = [0, 1]
    if name == "gemma3":
        # sixteen patches, four of which make one token
        config.vision_config.image_size, config.mm_tokens_per_image = 4 * config.vision_config.patch_size, 4
    return config


def inputs(name: str, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A prompt with an image in it, as the processor of each model makes one."""
    generator, vision = torch.Generator().manual_seed(1), config.vision_config
    text = torch.randint(50, 100, (1, ROWS), generator=generator)
    image = getattr(config, "image_token_id", None) or config.image_token_index
    made: dict[str, torch.Tensor] = {}
    if name == "qwen3_vl":
        side = 2 * vision.spatial_merge_size
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels, count = torch.randn(side * side, size, generator=generator), 4
        text = torch.cat([text, torch.tensor([[config.vision_start_token_id]])], dim=1)
        made["image_grid_thw"] = torch.tensor([[1, side, side]])
    else:
        pixels = torch.randn(1, 3, vision.image_size, vision.image_size, generator=generator)
        patches = (vision.image_size // vision.patch_size) ** 2
        count = config.mm_tokens_per_image if name == "gemma3" else patches
    made["input_ids"] = torch.cat([text, torch.full((1, count), image), text[:, :ROWS]], dim=1)
    is_image = (made["input_ids"] == image).long()
    kinds = {"gemma3": "token_type_ids", "qwen3_vl": "mm_token_type_ids"}
    return made | {"pixel_values": pixels.to(dtype)} | ({kinds[name]: is_image} if name in kinds else {})


def write_base(config: Any, dtype: torch.dtype, path: Path) -> Path:
    torch.manual_seed(0)
    save_base(path, AutoModelForImageTextToText.from_config(config), dtype)
    # what a processor reads goes along
    (path / "preprocessor_config.json").write_text('{"size": 8}')
    return path


def load(path: Path, **options: Any) -> Any:
    return AutoModelForImageTextToText.from_pretrained(path, dtype="auto", trust_remote_code=True, **options).eval()


@torch.no_grad()
def logits(model: Any, **given: torch.Tensor) -> Any:
    return model(**given).logits


@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly(
        [(name, dtype) for name in ("gemma3", "llava", "qwen3_vl") for dtype in (torch.float32, torch.bfloat16)],
        [("qwen3_vl", torch.float32)].__contains__,
    ),
)
def test_with_an_image_and_without(tmp_path, name, dtype):
    config = config_of(name)
    base = write_base(config, dtype, tmp_path / "base")
    made = expand(base, Request("last:2", variant="adapt", collaborate="both"), tmp_path / "expanded")
    stock, expanded, prompt = load(base), load(made.path), inputs(name, config, dtype)
    seen = logits(stock, **prompt)
    assert torch.equal(logits(expanded, **prompt), seen)
    text = {"input_ids": torch.randint(50, 100, (2, ROWS), generator=torch.Generator().manual_seed(2))}
    assert torch.equal(logits(expanded, **text), logits(stock, **text))
    # and the image is looked at, and the new blocks do something
    assert not torch.equal(logits(stock, **prompt | {"pixel_values": prompt["pixel_values"] + 1}), seen)
    with torch.no_grad():
        for parameter_name, parameter in expanded.named_parameters():
            if parameter_name.endswith(".w12"):
                parameter.fill_(0.01)
    assert not torch.equal(logits(expanded, **prompt), seen)
    assert (made.path / "preprocessor_config.json").is_file()
    assert verify(made.path, base).passed
    assert digests(strip(made.path, tmp_path / "stripped").path) == digests(base)
    # on the base in memory, too, once something is learned; what looks at images is of the base as well
    extracted = extract(shake(made.path), tmp_path / "extract").path
    model = load_expansion(stock, extracted)
    assert torch.equal(logits(model, **prompt), logits(load(made.path), **prompt))
    assert not torch.equal(logits(model, **prompt), seen)
    with torch.no_grad():
        changed = next(
            weight
            for weight_name, weight in stock.named_parameters()
            if "vision" in weight_name or "visual" in weight_name
        )
        changed.view(-1)[0] += 1
    with refused("base-differs-load", "model", CheckpointError):
        load_expansion(stock, extracted)


@pytest.mark.parametrize(
    ("name", "routed"),
    mostly(
        [(name, routed) for name in ("gemma3", "llava", "qwen3_vl") for routed in (False, True)],
        [("qwen3_vl", True)].__contains__,
    ),
)
def test_fused_sees_the_same_image(tmp_path, name, routed):
    """Of one layer: above and below others are as they were, and images are added between them."""
    config = config_of(name)
    base = write_base(config, torch.float32, tmp_path / "base")
    request = Request("1", variant="adapt", init_w22="random")
    path = shake(expand(base, request, tmp_path / "expanded").path)
    path = route_export(path, tmp_path / "routed", ROUTERS["cosine"]()).path if routed else path
    model, fused = load(path), load(merge(path, tmp_path / "fused").path)
    prompt = inputs(name, config, torch.float32)
    with torch.no_grad():
        for threshold in (-1.0, 1.0) if routed else (None,):
            cosine = {"router": "cosine", "threshold": threshold}
            same = fused.use_threshold(threshold) if routed else nullcontext()
            with same, model.use_expansion(model.expansions, **cosine) if routed else nullcontext():
                seen = logits(model, **prompt)
                torch.testing.assert_close(logits(fused, **prompt), seen, rtol=0, atol=1e-4)
                shifted_logits = logits(fused, **prompt | {"pixel_values": prompt["pixel_values"] + 1})
                assert not torch.allclose(shifted_logits, seen, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("router", mostly(("posterior", "cosine"), "posterior".__eq__))
def test_what_is_added_between_layers_goes_to_both_paths(tmp_path, router):
    """The first collaborative layer is the first of the model: images are added above it, where there are two paths."""
    config = config_of("qwen3_vl")
    base = write_base(config, torch.float32, tmp_path / "base")
    made = expand(base, Request("0,1", variant="adapt", collaborate="both"), tmp_path / "expanded")
    routed = route_export(shake(made.path), tmp_path / "routed", ROUTERS[router]()).path
    stock, expanded, model = map(load, (base, made.path, routed))
    prompt = inputs("qwen3_vl", config, torch.float32)
    with torch.no_grad():
        preserve, adapt = model.path_logits(**prompt)
        assert torch.equal(preserve, logits(stock, **prompt)) and torch.equal(adapt, logits(expanded, **prompt))
        assert not torch.equal(preserve, adapt)
        with model.expansion_disabled(), expanded.expansion_disabled():
            assert all(torch.equal(logits(network, **prompt), preserve) for network in (model, expanded))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whole", "text"), mostly((("eager", "sdpa"), ("sdpa", "eager")), lambda pair: pair[0] == "sdpa")
)
def test_each_part_computes_attention_as_in_the_base_in_memory(tmp_path, whole, text):
    """What looks at images may have another attention than the language model, as GOT-OCR's has by itself."""
    config = config_of("qwen3_vl")
    base = write_base(config, torch.float32, tmp_path / "base")
    made = expand(base, Request("last:2", variant="adapt", collaborate="both"), tmp_path / "expanded")
    kernels = {"": whole, "text_config": text, "vision_config": whole}
    expected = load(shake(made.path), attn_implementation=kernels)
    actual = load_expansion(load(base, attn_implementation=kernels), extract(made.path, tmp_path / "extract").path)
    asked = [
        {key: getattr(network.config, key)._attn_implementation for key in kernels if key}
        for network in (actual, expected)
    ]
    assert asked[0] == asked[1] == {"text_config": text, "vision_config": whole}
    prompt = inputs("qwen3_vl", config, torch.float32)
    assert torch.equal(logits(actual, **prompt), logits(expected, **prompt))


@pytest.mark.slow
def test_a_model_whose_language_model_transformers_lists_alone_is_taken_whole(tmp_path):
    """AutoModelForCausalLM would make another model of this type: the language model inside, which has other names."""
    base = write_base(twin_config("llama4"), torch.float32, tmp_path / "base")
    made = expand(base, Request("last:1"), tmp_path / "expanded")
    verification = verify(made.path, base)
    assert verification.passed and verification.numbers is not None
    assert type(load(made.path)).__name__ == "ScaleLlama4ForConditionalGeneration"


@pytest.mark.slow
def test_a_cap_on_the_logits_that_the_part_for_language_names(tmp_path: Path) -> None:
    config = twin_config("gemma4")
    config.text_config.final_logit_softcapping = 0.5
    base = write_base(config, torch.float32, tmp_path / "base")
    made = expand(base, Request("last:1", variant="adapt"), tmp_path / "wide").path
    ids = torch.randint(50, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = load(base)(input_ids=ids).logits
        assert 0.4 < wanted.abs().max() <= 0.5, "it caps"
        model = load(made)
        assert torch.equal(model(input_ids=ids).logits, wanted)
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "saved")(input_ids=ids).logits, wanted)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["text_config"]["final_logit_softcapping"] == 0.5


def test_new_tokens_are_none_of_the_base(tmp_path: Path) -> None:
    """The config of the part for language counts them; what is said of the base does not."""
    base = with_tokenizer(base_of("gemma3", tmp_path / "base"))
    before = inspect(base).sizes.vocabulary
    wide = expand(base, Request("1", new_tokens=NewTokens(("Zaragoza", "Quetzal"))), tmp_path / "wide").path
    written = json.loads((wide / "config.json").read_text())["text_config"]["vocab_size"]
    assert written > before == inspect(wide).sizes.vocabulary


@pytest.mark.parametrize("name", mostly(("gemma3", "qwen3_vl", "llava"), "gemma3".__eq__))
def test_a_plain_checkpoint_with_more_heads_sees_the_same_image(name: str, tmp_path: Path) -> None:
    """The sizes stand in the config of the part for language."""
    config = config_of(name)
    base = write_base(config, torch.float32, tmp_path / "base")
    request = Request("all", variant="adapt", collaborate="both", up_width=0, up_kv_heads=1)
    wide = shake(expand(base, request, tmp_path / "wide").path)
    stock = load(merge(wide, tmp_path / "stock", to="stock").path)
    assert type(stock) is type(AutoModelForImageTextToText.from_config(config))
    given, text, before = inputs(name, config, torch.float32), stock.config.text_config, config.text_config
    assert text.num_key_value_heads > before.num_key_value_heads and text.intermediate_size > before.intermediate_size
    torch.testing.assert_close(logits(stock, **given), logits(load(wide), **given), rtol=0, atol=1e-4)
    assert not torch.allclose(logits(stock, **given), logits(load(base), **given), rtol=0, atol=1e-2), "the control"


def test_copies_in_files_with_other_names_are_refused(tmp_path: Path) -> None:
    """Hub files of Qwen2-VL name layers otherwise than the class, beside a flat config: no number would change."""
    base = base_of("qwen2_vl", tmp_path / "base")
    names = [name for name in open_checkpoint(base).tensors if ".layers.1." in name]
    assert names
    with refused("layers-named-otherwise", "--method depth", PlanError):
        expand(flat(base), Request("1", method="depth"), tmp_path / "deep")
    assert not (tmp_path / "deep").exists()


def base_of(name: str, folder: Path) -> Path:
    """Write a tiny model that sees images."""
    return save_base(folder, AutoModelForImageTextToText.from_config(config_of(name)))


def flat(base: Path) -> Path:
    """Write a model as older releases of transformers did: no part for language in config.json and in names."""
    with edited(base / "config.json") as config:
        text = config.pop("text_config")
        config.update({key: value for key, value in text.items() if key not in ("model_type", "architectures")})
    with edited(base / "model.safetensors") as tensors:
        for name in [name for name in tensors if "language_model." in name]:
            tensors[name.replace("language_model.", "")] = tensors.pop(name)
    return base
