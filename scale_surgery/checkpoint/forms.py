"""What a folder is, and what to type where another kind of folder is needed.

form        known by                             holds
base        config.json without our key          a model that nothing of ours was made of
expanded    surgery.json                         base shards, and shards of one or more expansions
fused       surgery.json, which says so          the blocks of an expansion, joined with the base's tensors
stock       merge.json                           a plain checkpoint of the base's architecture
extract     extract.json                         an expansion without its base
saved       our key, and no record               what a trainer saved of an expanded model
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from scale_surgery.checkpoint.foreign import adopt_line
from scale_surgery.checkpoint.names import CONFIG_FILE, EXTRACT_FILE, MANIFEST_FILE, STOCK_FILE
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.checkpoint.reading import parse_json, read_bytes
from scale_surgery.errors import CheckpointError

Form = Literal["base", "expanded", "fused", "stock", "extract", "saved"]
RECORDS: Mapping[str, Form] = {EXTRACT_FILE: "extract", MANIFEST_FILE: "expanded", STOCK_FILE: "stock"}
FOUND: Mapping[Form, str] = {
    "base": "is a base model",
    "expanded": "is an expanded model",
    "fused": "is fused, its blocks are joined with the base's tensors",
    "stock": "is a plain checkpoint that scale-surgery merge --to stock made, it has no blocks",
    "extract": "is an extract, an expansion without its base",
    "saved": f"has no {MANIFEST_FILE}, another trainer saved it",
}
# what is expected and how to get it, by the form that there is and the form that is needed
EXPECTED: Mapping[tuple[Form, Form], str] = {
    ("base", "expanded"): "one made by scale-surgery expand. Expand it first: scale-surgery expand {path} "
    "--layers LAYERS -o EXPANDED.",
    ("base", "saved"): "what a trainer saved of an expanded model. Give the folder that it wrote.",
    ("expanded", "base"): "a base model. Take its base out: scale-surgery strip {path} -o BASE.",
    ("expanded", "fused"): "a fused one. Fuse it: scale-surgery merge {path} --to fused -o FUSED.",
    ("fused", "expanded"): "blocks of their own. Take them apart first: scale-surgery merge {path} --to blocks "
    "-o EXPANDED.",
    ("fused", "saved"): "blocks of their own. Nothing of it trains; train the model that it was merged from.",
    ("stock", "expanded"): "one that has. Give the expanded model that it was made from.",
    ("extract", "expanded"): "a whole model. Put it on its base first: scale-surgery apply {path} --base MODEL "
    "-o EXPANDED.",
    ("saved", "expanded"): "an expanded folder. Make one of it first: {adopt}",
}


def form_of(path: Path) -> Form:
    """What a folder is, by its records and its config.json; whether an expanded one is fused, its record says."""
    recorded = next((form for file, form in RECORDS.items() if (path / file).is_file()), None)
    return recorded or ("saved" if CONFIG_KEY in _config(path) else "base")


def refuse_form(path: str | Path, form: Form, wanted: Form) -> NoReturn:
    """Refuse a folder of the wrong form, with the command that helps."""
    adopt = adopt_line(path, _config(Path(path))) if form == "saved" else ""
    expected = EXPECTED[form, wanted].format(path=path, adopt=adopt)
    raise CheckpointError(f"{path}: {FOUND[form]}, expected {expected}")


def refuse_extract(path: str | Path, files: Iterable[str]) -> None:
    """Refuse an extract where a whole model is needed."""
    if EXTRACT_FILE in files:
        refuse_form(path, "extract", "expanded")


def _config(path: Path) -> dict[str, Any]:
    """Parsed config.json; empty where it cannot be read."""
    try:
        config = parse_json(read_bytes(path / CONFIG_FILE).decode("utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
