"""Loading of models as a user would load them, with problems of tensors that do not fit."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from scale_surgery import modeling
from scale_surgery.checkpoint.code_names import code_elsewhere
from scale_surgery.checkpoint.files import write_json
from scale_surgery.checkpoint.folder import Checkpoint, open_checkpoint, read_json
from scale_surgery.checkpoint.names import CONFIG_FILE, INDEX_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY, numbering_of
from scale_surgery.errors import CheckpointError, Problem, SurgeryError, name_some
from scale_surgery.planning.base import left_over_quantisation
from scale_surgery.running.device import has_bfloat16, is_out_of_memory
from scale_surgery.running.options import RunOptions

# arguments of `translated` during the run of a loaded model
RUNNING = ("model-not-run", "config.json, generation_config.json")
# bytes of a model that is fast enough in any dtype
SMALL = 100 * 1000**2


@contextmanager
def translated(code: str, where: object) -> Iterator[None]:
    """Convert any error of transformers, tokenizers, torch or custom model code to a CheckpointError with this code."""
    try:
        yield
    except SurgeryError:
        raise
    except Exception as error:
        # broken files cause validation errors of various classes, bare exceptions, or too deep recursion
        kind, words = type(error).__name__, " ".join(f"{error}".split())
        if is_out_of_memory(error):
            raise CheckpointError(Problem("out-of-memory", where, kind=kind, error=words)) from error
        raise CheckpointError(Problem(code, where, error=f"{kind}: {words}")) from error


def load_config(path: Path, name: str, run: RunOptions = RunOptions()) -> Any:
    """Read a folder's config with AutoConfig, as a user would."""
    from transformers import AutoConfig

    is_trusted = trusts_code(path, run)
    modeling.register()
    with translated("config-not-read", f"{name}: {CONFIG_FILE}"):
        config: Any = AutoConfig.from_pretrained(path, trust_remote_code=is_trusted)
        return config.get_text_config()


@contextmanager
def loaded(
    given: Path | Checkpoint,
    run: RunOptions = RunOptions(),
    *,
    renamed: Mapping[str, str] | None = None,
    name: str | None = None,
) -> Iterator[tuple[Any, list[Problem]]]:
    """Load a model as a user would, with the problems of its tensors. It is freed if no caller holds it."""
    free_memory()
    checkpoint, run = open_checkpoint(given) if isinstance(given, Path) else given, run.placed()
    path, title = checkpoint.path, name or checkpoint.path.name
    if left_over := left_over_quantisation(checkpoint.config, {info.dtype for info in checkpoint.tensors.values()}):
        raise CheckpointError(left_over.within(title))
    size = sum(info.bytes for info in checkpoint.tensors.values())
    with tempfile.TemporaryDirectory() as offload_folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"device_map": {"": run.device}} if run.device != "cpu" else {}
        if run.device == "cpu" and size > run.memory_bytes:
            options = {"device_map": "auto", "max_memory": {"cpu": run.memory_bytes}, "offload_folder": offload_folder}
            path = link_flat(checkpoint, Path(offload_folder))
        options |= {"dtype": run.dtype or "auto", "trust_remote_code": run.trust_remote_code}
        options |= {"key_mapping": dict(renamed)} if renamed else {}
        with quiet_transformers(), translated("model-not-loaded", title):
            auto_class = model_class(checkpoint, run)
            # with this option our classes load in spite of misfits, so that all problems are listed
            options |= {"strict_loading": False} if _is_expanded(checkpoint) else {}
            model, info = auto_class.from_pretrained(path, output_loading_info=True, **options)
            model.eval()
        # this replaces transformers' own report, which is silenced
        if (left := sorted(info["unexpected_keys"])) and not is_strict(model):
            _logger().warning_once(f"{title}: {type(model).__name__} does not load {name_some(left)} of its files.")
        if size > SMALL and run.device == "cpu" and run.dtype is None and _is_slow(model.dtype):
            _logger().warning_once(
                f"This processor has no instructions for {str(model.dtype).removeprefix('torch.')}, and takes several "
                "times as long as in float32. To measure or generate faster, give --dtype float32, and to learn, give "
                "--set running.dtype=float32."
            )
        with quiet_transformers():
            yield model, _load_problems(model, info)
            del model
        free_memory()


def _is_slow(dtype: Any) -> bool:
    # oneDNN has fast products in float16 on a part of the processors that have them in bfloat16, and on no other
    return dtype.itemsize == 2 and not has_bfloat16("cpu")


def free_memory() -> None:
    """Free memory to the system: a large tokenizer leaves hundreds of MB in the heap."""
    gc.collect()
    # glibc only: other C libraries lack this function, and Windows cannot open CDLL(None)
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def link_flat(checkpoint: Checkpoint, folder: Path) -> Path:
    """Link shards of several folders into one, so that transformers can stream them, and return the folder to load."""
    shards = {shard: shard.replace("/", "-") for shard in checkpoint.shards}
    if all(shard == flat for shard, flat in shards.items()):
        return checkpoint.path
    files = {file.name: file.name for file in checkpoint.path.iterdir() if file.is_file() and file.name != INDEX_FILE}
    for file, link in {**files, **shards}.items():
        (folder / link).symlink_to((checkpoint.path / file).resolve())
    index = read_json(checkpoint.path / INDEX_FILE)
    places = {name: shards[shard] for name, shard in index["weight_map"].items()}
    write_json(folder / INDEX_FILE, {**index, "weight_map": places})
    return folder


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and messages of transformers, accelerate and bitsandbytes."""
    from transformers.utils import logging as transformers_logging

    transformers: Any = transformers_logging
    loggers = [logging.getLogger(name) for name in ("accelerate", "bitsandbytes")]
    verbosity, levels = transformers.get_verbosity(), [logger.level for logger in loggers]
    was_shown = transformers.is_progress_bar_enabled()
    transformers.set_verbosity_error()
    transformers.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers.set_verbosity(verbosity)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if was_shown:
            transformers.enable_progress_bar()


def model_class(checkpoint: Checkpoint, run: RunOptions) -> Any:
    """Return the auto class, which knows our model types, or the class in the folder if its code is trusted."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    modeling.register()
    trusts_code(checkpoint.path, run)
    auto_class = auto_class_of(checkpoint.config)
    if not run.trust_remote_code and needs_own_code(checkpoint.config):
        raise CheckpointError(Problem("code-not-trusted", checkpoint.path, model_type=checkpoint.config["model_type"]))
    if run.trust_remote_code and _is_expanded(checkpoint):
        return get_class_from_dynamic_module(checkpoint.config["auto_map"][auto_class.__name__], checkpoint.path)
    return auto_class


def trusts_code(path: Path, run: RunOptions) -> bool:
    """Return True if the code in a folder is trusted.

    Raises:
        CheckpointError: If it is trusted but names code in another repository.
    """
    files = sorted(path.glob("*config.json")) if run.trust_remote_code else []
    if foreign := [code.within(file) for file in files if file.is_file() for code in code_elsewhere(read_json(file))]:
        raise CheckpointError(*foreign)
    return run.trust_remote_code


def needs_own_code(config: Mapping[str, Any]) -> bool:
    """Return True if transformers does not know a model type and the config names code for it."""
    from transformers import CONFIG_MAPPING

    model_type = modeling.stock_type(config.get("model_type"))
    return model_type not in CONFIG_MAPPING and bool(config.get("auto_map"))


def auto_class_of(config: Mapping[str, Any]) -> Any:
    """Return AutoModelForCausalLM, or AutoModelForImageTextToText if transformers has only that for the type."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto

    model_type = modeling.stock_type(config.get("model_type"))
    if model_type not in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForCausalLM
    stock_config = CONFIG_MAPPING[model_type]
    known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(stock_config, None)
    is_whole = known is not None and not modeling.is_part(known, stock_config)
    return AutoModelForCausalLM if is_whole else AutoModelForImageTextToText


def _is_expanded(checkpoint: Checkpoint) -> bool:
    """Return True if a model has expanded modules. A model with duplicated layers has stock modules."""
    return CONFIG_KEY in checkpoint.config and numbering_of(checkpoint.config[CONFIG_KEY]) is None


def _logger() -> Any:
    from transformers.utils import logging as transformers_logging

    return transformers_logging.get_logger("transformers")


def _load_problems(model: Any, info: dict[str, Any]) -> list[Problem]:
    """Return the tensors that do not fit.

    With them an expanded model does not load, and a stock model gets other weights than its files hold.
    """
    keys = {"load-missing": info.get("missing_keys", ()), "load-shape": info.get("mismatched_keys", ())}
    if is_strict(model):
        # the code in the folder may be from an older release
        unexpected = getattr(model, "unexpected_tensors", lambda info: info["unexpected_keys"])
        keys["load-unexpected"] = unexpected(info)
    return [Problem(code, key) for code, some in keys.items() for key in sorted(map(str, some))]


def is_strict(model: Any) -> bool:
    """Return True if a model rejects files with other tensors. Stock classes skip them with a warning."""
    return hasattr(model, "check_loaded")


@contextmanager
def loaded_whole(
    given: Path | Checkpoint, name: str, run: RunOptions = RunOptions(), *, renamed: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """Load a model completely into memory, and reject it if its tensors do not fit its class."""
    # streamed weights would be read again for each batch
    whole = replace(run, memory_bytes=sys.maxsize)
    with ExitStack() as stack:
        model, problems = stack.enter_context(loaded(given, whole, renamed=renamed, name=name))
        if problems:
            raise CheckpointError(Problem("model-unlike-files", name, *problems))
        yield model
