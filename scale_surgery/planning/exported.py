"""The code files and the classes that the expanded model of an architecture names in its config.json."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from scale_surgery.checkpoint.names import OWN_CODE_FILES
from scale_surgery.modeling import AUTO_CLASSES, CODES, FOLDER, code_hash, code_text
from scale_surgery.planning.architecture import Architecture


def code_texts(architecture: Architecture, files: Iterable[str]) -> dict[str, str]:
    """Return the texts of the code files of an expanded or a fused model, by their names."""
    return {file: own_code_text(architecture, file) if file in OWN_CODE_FILES else code_text(file) for file in files}


def own_code_text(architecture: Architecture, file: str) -> str:
    """Make the code file that imports the base's own classes, so that transformers takes their files along."""
    code = dict(zip(OWN_CODE_FILES, CODES, strict=True))[file]
    prefix = code.capitalize()
    config, classes = architecture.config_class, dict(architecture.own_code)
    widest = next(classes[name] for name in AUTO_CLASSES if name in classes).partition(".")[2]
    imports = sorted({f"from .{path.replace('.', ' import ')}" for path in classes.values()})
    names = sorted({path.partition(".")[2] for path in classes.values()})
    lines = [
        f'"""The classes of the base\'s own code, {CODES[code]}."""',
        "",
        f"from .configuration_{code} import config_of",
        *imports,
        f"from .modeling_{code} import model_of",
        "",
        f"{prefix}{config} = config_of({widest}.config_class, __name__)",
        *(f"{prefix}{name} = model_of({name}, {widest}.config_class, __name__)" for name in names),
    ]
    return "\n".join([*lines, ""])


def is_ours(file: str, digest: str, architecture: Architecture) -> bool:
    """Return whether a code file, by its name and sha256, is that of this release."""
    if file in OWN_CODE_FILES:
        if not architecture.own_code:
            return False
        return digest == hashlib.sha256(own_code_text(architecture, file).encode()).hexdigest()
    return (FOLDER / file).is_file() and digest == code_hash(file)


def auto_map(architecture: Architecture, code: str = "scale") -> dict[str, str]:
    """Make the `auto_map` of config.json of an expanded or a fused model; it names local files only."""
    prefix = code.capitalize()
    if architecture.own_code:
        named = {auto_class: f"{prefix}{path.partition('.')[2]}" for auto_class, path in architecture.own_code.items()}
        classes = {"AutoConfig": f"{prefix}{architecture.config_class}", **named}
        file = dict(zip(CODES, OWN_CODE_FILES, strict=True))[code].removesuffix(".py")
        return {auto_class: f"{file}.{name}" for auto_class, name in classes.items()}
    stem = architecture.config_class.removesuffix("Config").removesuffix("Text")
    models = {
        auto_class: f"modeling_{code}.{prefix}{stock}"
        # a class that is named after another model has another configuration
        + ("" if stock.startswith(stem) else f"_of_{architecture.config_class}")
        for auto_class, stock in architecture.classes.items()
    }
    return {"AutoConfig": f"configuration_{code}.{prefix}{architecture.config_class}", **models}


def architectures(architecture: Architecture, code: str = "scale") -> list[str]:
    """Make the `architectures` of config.json of an expanded or a fused model."""
    names = auto_map(architecture, code)
    widest = next(name for name in AUTO_CLASSES if name in names)
    return [names[widest].partition(".")[2]]


def model_classes(architecture: Architecture) -> dict[str, Any]:
    """Find the classes of an expanded model in this package by auto class, AutoConfig included."""
    classes = {}
    for auto_class, name in auto_map(architecture).items():
        module, _, class_name = name.partition(".")
        classes[auto_class] = getattr(import_module(f"scale_surgery.modeling.{module}"), class_name)
        # a saved model takes its code along, as one that was loaded as remote code does
        classes[auto_class].register_for_auto_class(auto_class)
    return classes
