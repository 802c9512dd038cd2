"""Names of a checkpoint's files, and whether a name from a file is safe to use."""

from __future__ import annotations

from pathlib import PurePosixPath

from scale_surgery.checkpoint.reading import HALF_A_CHARACTER

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
MANIFEST_FILE = "surgery.json"
EXTRACT_FILE = "extract.json"
# of a plain checkpoint that merge --to stock made
STOCK_FILE = "merge.json"
# of an extract, where no loader takes it for a whole model
STORED_INDEX = "expanded.index.json"
TRAINING_FOLDER = "training"
LOG_FILE = "log.jsonl"
# of a job of learn, in whose folder models lie
JOB_FILE = "learn.json"
# reports of a run, which hold names of machines and are never copied with a model
REPORTS_FOLDER = f"{TRAINING_FOLDER}/runs"
# the same weights in a format that this program does not read; transformers prefers safetensors to them
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
OTHER_WEIGHT_SUFFIXES = (*PICKLE_SUFFIXES, ".h5", ".msgpack", ".gguf", ".onnx")

# code files that every expanded checkpoint carries
CODE_FILES = (
    "configuration_scale.py",
    "modeling_scale.py",
    "expanded_blocks.py",
    "expanded_model.py",
    "expanded_modules.py",
    "expanded_paths.py",
    "expanded_releases.py",
    "expanded_routers.py",
    "expanded_routing.py",
    "expanded_shapes.py",
    "expanded_stock.py",
)

# code files that every fused checkpoint carries
FUSED_CODE_FILES = (
    "configuration_fused.py",
    "configuration_scale.py",
    "expanded_releases.py",
    "expanded_stock.py",
    "modeling_fused.py",
)

# one more where the classes of the base are its own and not of transformers: it names them, expanded or fused
OWN_CODE_FILES = OWN_CODE_FILE, OWN_FUSED_FILE = "base_scale.py", "base_fused.py"

# of a file in a folder
MAX_NAME_BYTES = 255


def is_inside(name: object) -> bool:
    """Whether a name from a file stays inside the folder that it is joined to."""
    if not isinstance(name, str) or not is_unicode(name) or set("\\\0") & set(name) or not PurePosixPath(name).parts:
        return False
    path = PurePosixPath(name)
    # ./x and x//y would be second names of a file
    is_plain = path.as_posix() == name and all(len(part.encode()) <= MAX_NAME_BYTES for part in path.parts)
    return is_plain and not path.is_absolute() and ".." not in path.parts


def is_unicode(name: str) -> bool:
    """Whether a name can be written as UTF-8; otherwise Python's form of it holds lone surrogates."""
    return HALF_A_CHARACTER.search(name) is None


def as_unicode(name: str) -> str:
    """A name as a record can hold it: what is no UTF-8 by its bytes."""
    return name.encode(errors="backslashreplace").decode()
