"""Names of a checkpoint's files, and checks that a name from a file is safe to use."""

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
CARD_FILE = "README.md"
EXTRACT_FILE = "extract.json"
# record of a plain checkpoint made by merge --to stock
STOCK_FILE = "merge.json"
# files of a base that an expansion changes; their texts are in surgery.json
CHANGED_FILES = (CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)
# index of an extract, under a name that no loader takes for a whole model
STORED_INDEX = "expanded.index.json"
TRAINING_FOLDER = "training"
# what a base wrote for its own rehearsal, in that folder
SAMPLES_FILE = "rehearsal.jsonl"
# the settings of a run, in that folder
SETTINGS_FILE = "settings.json"
LOG_FILE = "log.jsonl"
# record of a job of learn; its models are in subfolders
JOB_FILE = "learn.json"
# reports of a run; they contain host names and are never copied with a model
REPORTS_FOLDER = f"{TRAINING_FOLDER}/runs"
# weights in formats that this program does not read; transformers prefers safetensors
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
OTHER_WEIGHT_SUFFIXES = (*PICKLE_SUFFIXES, ".h5", ".msgpack", ".gguf", ".onnx", ".onnx_data", ".ot", ".tflite")

# code files of every expanded checkpoint
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

# code files of every fused checkpoint
FUSED_CODE_FILES = (
    "configuration_fused.py",
    "configuration_scale.py",
    "expanded_releases.py",
    "expanded_stock.py",
    "modeling_fused.py",
)

# an additional code file, expanded or fused, if the base has its own classes; it imports them
OWN_CODE_FILES = OWN_CODE_FILE, OWN_FUSED_FILE = "base_scale.py", "base_fused.py"

# limit of most file systems
MAX_NAME_BYTES = 255


def is_inside(name: object) -> bool:
    """Return True if a name from a file stays inside the folder to which it is joined."""
    if not isinstance(name, str) or not is_unicode(name) or set("\\\0") & set(name) or not PurePosixPath(name).parts:
        return False
    path = PurePosixPath(name)
    # ./x and x//y would be aliases of a file
    is_plain = path.as_posix() == name and all(len(part.encode()) <= MAX_NAME_BYTES for part in path.parts)
    return is_plain and not path.is_absolute() and ".." not in path.parts


def is_unicode(name: str) -> bool:
    """Return True if a name can be written as UTF-8: Python's form of it has no lone surrogates."""
    return HALF_A_CHARACTER.search(name) is None


def as_unicode(name: str) -> str:
    """Return a name in the form of records, with escaped bytes if it is not UTF-8."""
    return name.encode(errors="backslashreplace").decode()
