"""Put an extracted expansion on a model in memory, without a folder of both.

The expanded model shares the weights of the stock model that it is made from: nothing of the base is copied, and that
model stays as it is. A model that has expansions takes up one more.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scale_surgery import modeling
from scale_surgery.checkpoint.expansions import DEFAULT_NAME, STOCK_KEY, expansion_of
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.checkpoint.headers import FLOAT_DTYPES
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.shards import tensor_bytes
from scale_surgery.checkpoint.sources import find_source
from scale_surgery.errors import CheckpointError, PlanError, Problem
from scale_surgery.folder.config import written_config
from scale_surgery.folder.extract_folder import Extract, check_own_files, open_extract
from scale_surgery.planning.base import QUANTISATION_KEY
from scale_surgery.planning.methods import refuse
from scale_surgery.planning.plan import base_title
from scale_surgery.progress import Track, no_track
from scale_surgery.running.expansion_names import check_name
from scale_surgery.running.in_memory import InMemory, kept_in_float32
from scale_surgery.running.loading import auto_class_of, translated
from scale_surgery.running.wrap_model import (
    StoredExpansion,
    check_class,
    check_shareable,
    is_expanded,
    put_expansion,
    quantised_modules,
    quantised_shape,
)
from scale_surgery.surgery.same_base import (
    check_fit,
    check_sizes,
    find_differing,
    hash_base,
    other_computation,
    refuse_differing,
)

if TYPE_CHECKING:
    from torch import Tensor


def load_expansion(
    model: Any,
    extract: str | Path,
    *,
    name: str = DEFAULT_NAME,
    check: bool = True,
    revision: str | None = None,
    extract_revision: str | None = None,
    track: Track = no_track,
    **options: Any,
) -> Any:
    """Put an extracted expansion on its base in memory: the same model as from the folder that `apply` writes.

    Args:
        model: The base: a stock model as `from_pretrained` gives it, which stays usable and shares its weights with
            the result, also quantised or spread over devices; or a folder or a Hub id. Or a model with expansions of
            the same base, which takes up one more.
        extract: A folder that `extract` wrote, or a Hub id.
        name: What the expansion is called in the model; see docs/api.md.
        check: Whether each base tensor is compared with the hash of the one that the expansion was made on; of a
            loaded model each that is not quantised. Without it any values are taken, also cast or fine-tuned ones;
            names and shapes must fit.
        revision: Branch, tag or commit of the base's Hub repository; not with a loaded model.
        extract_revision: Branch, tag or commit of the extract's.
        track: Makes progress bars.
        options: For `from_pretrained`, where `model` is a folder or a Hub id: dtype, device_map,
            quantization_config, ... Files are compared before they are cast or quantised.

    Returns:
        The expanded model; its expansion tensors require gradients, its base does not. Where the model had expansions
        it is the model itself, in which the new one is chosen, and which has no router any more that weighed the
        others.

    Raises:
        CheckpointError: If this is no extract, or the model is not its base: another class, cast, trained, not in
            memory as a whole, quantised in a way that is not known.
        PlanError: If the base is of another architecture, options are given with a loaded model, an expansion cannot
            have the name, or cannot be on a quantised base.
    """
    # the classes then take their code along when the model is saved
    modeling.register()
    check_name(name, model.expansions if is_expanded(model) else ())
    extracted = open_extract(extract, extract_revision)
    architecture = extracted.manifest.plan.architecture
    refuse(extracted.manifest.plan.method, "load_expansion", extract)
    if architecture.own_code:
        raise PlanError(Problem("own-code-in-memory", extract))
    check_own_files(extracted, track)
    if isinstance(model, str | Path):
        model, check = _load_base(extracted, model, revision, options, track, check=check), False
    elif given := [*options, *(["revision"] if revision is not None else [])]:
        raise PlanError(*(Problem("loading-option", option) for option in given))
    check_class(model, architecture)
    _check_model(extracted, model, track, check=check)
    config = written_config(extracted.manifest, model.config.to_dict())
    return put_expansion(model, StoredExpansion(extracted.name, extracted.path, extracted.tensors, config), name)


def _load_base(
    extract: Extract, model: str | Path, revision: str | None, options: Mapping[str, Any], track: Track, *, check: bool
) -> Any:
    """Load a base whose files were compared; then it may be cast."""
    source = find_source(model, revision)
    base = open_checkpoint(source.path)
    check_fit(extract, base, str(model))
    if check:
        differing = find_differing(extract, base, hash_base(base, track))
        refuse_differing(extract, str(model), differing, len(base.tensors), "base-differs-load")
    with translated("model-not-loaded", model):
        return auto_class_of(base.config).from_pretrained(source.path, **options)


def _check_model(extract: Extract, model: Any, track: Track, *, check: bool) -> None:
    """Refuse a loaded model that is not the base, or whose weights cannot be shared."""
    check_shareable(model)
    expected = extract.manifest.base_tensors
    base = InMemory(model, expected)
    modules = {f"{name}.weight": quantised_shape(module) for name, module in quantised_modules(model).items()}
    quantised = {name: modules[place.name] for name, place in base.places.items() if place.name in modules}
    if quantised:
        refuse(extract.manifest.plan.method, "quantised", extract.name)
    headers = base.headers([name for name in base.places if name not in quantised])
    unfed = {name: tensor for name, tensor in base.unfed.items() if expansion_of(name) is None}
    # the files of the base may hold quantised tensors, such as the experts of gpt-oss
    if unfed and QUANTISATION_KEY in extract.manifest.base_config:
        if check:
            base_name = base_title(extract.manifest.base_name, extract.manifest.base_revision)
            raise CheckpointError(Problem("base-dequantised", "model", tensors=list(unfed), base=base_name))
        unfed = {}
    shapes = {name: expected[name].shape for name in base.places}
    given = {name: tuple(tensor.shape) for name, tensor in {**headers, **unfed}.items()} | quantised
    check_sizes(extract, config := _base_config(model), shapes, given, "model")
    for line in other_computation(extract, config, "the model"):
        warnings.warn(line, stacklevel=3)
    if check:
        _check_dtypes(extract, base, headers)
        _check_values(extract, base, headers, track)


def _base_config(model: Any) -> dict[str, Any]:
    """Return the config of the base of a model in memory."""
    config: dict[str, Any] = model.config.to_dict()
    if not is_expanded(model):
        return config
    kept = {key: value for key, value in config.items() if key not in (CONFIG_KEY, "auto_map", "architectures")}
    # sizes that an expansion made larger
    values, text = config[CONFIG_KEY].get(STOCK_KEY, {}), kept.get("text_config")
    kept |= {"text_config": {**text, **values}} if text else values
    return kept | {"model_type": modeling.stock_type(model.config.model_type)}


def _check_dtypes(extract: Extract, base: InMemory, headers: Mapping[str, Tensor]) -> None:
    """Refuse a model that was cast; tensors that its class keeps in float32 are compared by value."""
    expected = extract.manifest.base_tensors
    dtypes = {name: _stored_dtype(tensor) for name, tensor in headers.items()}
    others = {name: dtype for name, dtype in dtypes.items() if dtype != expected[name].dtype}
    kept = kept_in_float32(base.model) if others else ()
    cast = {name: dtype for name, dtype in others.items() if dtype != "F32" or base.places[name].name not in kept}
    if cast:
        name, dtype = next(iter(cast.items()))
        values = {"cast": len(cast), "count": len(headers), "tensor": name, "dtype": dtype}
        raise CheckpointError(Problem("base-cast", "model", **values, stored=expected[name].dtype))


def _check_values(extract: Extract, base: InMemory, headers: Mapping[str, Tensor], track: Track) -> None:
    """Compare the bytes of tensors with the hashes of those that the expansion was made on."""
    differing = {}
    with track("base tensors", sum(tensor.nbytes for tensor in headers.values())) as advance:
        for name, tensor in base.tensors(only=headers):
            expected = extract.manifest.base_tensors[name]
            stored = _as_stored(tensor, expected.dtype)
            if stored is None or hashlib.sha256(tensor_bytes(stored)).hexdigest() != expected.sha256:
                differing[name] = Problem("base-tensor-bytes", name)
            advance(tensor.nbytes)
    refuse_differing(extract, "model", differing, len(headers), "base-differs-load")


def _stored_dtype(tensor: Tensor) -> str:
    """Return the dtype of a tensor, in safetensors' name."""
    name = str(tensor.dtype).removeprefix("torch.")
    return FLOAT_DTYPES.get(name, name.replace("uint", "U").replace("int", "I").upper())


def _as_stored(tensor: Tensor, dtype: str) -> Tensor | None:
    """Return a tensor in its stored dtype; None if that does not hold its values."""
    import torch

    if _stored_dtype(tensor) == dtype:
        return tensor
    name = next((torch_name for torch_name, stored_name in FLOAT_DTYPES.items() if stored_name == dtype), None)
    if name is None:
        return None
    stored = tensor.to(getattr(torch, name))
    return stored if torch.equal(stored.to(tensor.dtype), tensor) else None
