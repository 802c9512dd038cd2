"""Mutations of files as such, and code that somebody planted: it may lie there, it may not run."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOSTILE_NAMES = (
    b"a\x1b[31mb.txt",
    b"a\nb.json",
    b"\xff\xfe.txt",
    "x\u202ey.md".encode(),
    b" ",
    b"-o",
    b"x" * 255,
    b".env",
)


def mutate_file(dice: random.Random, file: Path, outside: Path) -> str:
    """Change one file, whatever it holds; says how."""
    name = dice.choice(list(CHANGES))
    CHANGES[name](dice, file, outside)
    return name


def _replace_by_link(target: str) -> Callable[[random.Random, Path, Path], None]:
    def change(dice: random.Random, file: Path, outside: Path) -> None:
        neighbours = sorted(path.name for path in file.parent.iterdir())
        file.unlink()
        file.symlink_to(target.format(outside=outside, other=dice.choice(neighbours)))

    return change


def _link_to_itself(dice: random.Random, file: Path, outside: Path) -> None:
    """Out of the folder, to the very same bytes."""
    shutil.move(file, outside.parent / "moved")
    file.symlink_to(outside.parent / "moved")


def _rewrite(change: Callable[[random.Random, bytes], bytes]) -> Callable[[random.Random, Path, Path], None]:
    return lambda dice, file, outside: file.write_bytes(change(dice, file.read_bytes())) and None


def _folder(dice: random.Random, file: Path, outside: Path) -> None:
    file.unlink()
    file.mkdir()


def _fifo(dice: random.Random, file: Path, outside: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _sparse(dice: random.Random, file: Path, outside: Path) -> None:
    os.truncate(file, 1 << 24)


def _hostile_name(dice: random.Random, file: Path, outside: Path) -> None:
    (file.parent / os.fsdecode(dice.choice(HOSTILE_NAMES))).write_bytes(b"a file with such a name\n")


def _deep_folders(dice: random.Random, file: Path, outside: Path) -> None:
    here = file.parent / "/".join("d" * 40)
    here.mkdir(parents=True)
    (here / "file.txt").write_text("deep", encoding="utf-8")


def _link_to_parent(dice: random.Random, file: Path, outside: Path) -> None:
    (file.parent / "loop").symlink_to(".", target_is_directory=True)


def _link_folder_outside(dice: random.Random, file: Path, outside: Path) -> None:
    (file.parent / "assets").symlink_to(outside.parent, target_is_directory=True)


CHANGES: dict[str, Callable[[random.Random, Path, Path], None]] = {
    "delete": lambda dice, file, outside: file.unlink(),
    "empty": _rewrite(lambda dice, content: b""),
    "truncate": _rewrite(lambda dice, content: content[: dice.randrange(len(content) + 1)]),
    "append": _rewrite(lambda dice, content: content + dice.randbytes(9)),
    "twice": _rewrite(lambda dice, content: content + content),
    "noise": _rewrite(lambda dice, content: dice.randbytes(len(content))),
    "zeros": _rewrite(lambda dice, content: bytes(len(content))),
    "sparse": _sparse,
    "rename": lambda dice, file, outside: file.rename(file.with_name(f"{file.stem}-2{file.suffix}")) and None,
    "folder": _folder,
    "fifo": _fifo,
    "link to a neighbour": _replace_by_link("{other}"),
    "link to nothing": _replace_by_link("nothing"),
    "link outside": _replace_by_link("{outside}"),
    "link to a device": _replace_by_link("/dev/zero"),
    "link to a process": _replace_by_link("/proc/self/environ"),
    "link to the same bytes": _link_to_itself,
    "unreadable": lambda dice, file, outside: file.chmod(0),
    "hostile name beside it": _hostile_name,
    "deep folders beside it": _deep_folders,
    "link to its folder beside it": _link_to_parent,
    "link to a folder outside": _link_folder_outside,
}


class Planted:
    """What a pickle of it runs when it is read."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.sentinel,)


def plant_code(dice: random.Random, file: Path, outside: Path) -> str:
    """Put code into a folder where a careless reader would run it; it leaves a file beside `outside` if it runs."""
    sentinel, folder = outside.parent / "it-ran", file if file.is_dir() else file.parent
    line = f"from pathlib import Path\nPath({str(sentinel)!r}).touch()\n"
    name = dice.choice(["pickle", "module", "own code", "config", "tokenizer", "processor"])
    if name == "pickle":
        places = sorted(path for path in folder.rglob("*.pt")) or [folder / "pytorch_model.bin"]
        place = dice.choice([*places, folder / "pytorch_model.bin", folder / "training_args.bin"])
        place.write_bytes(pickle.dumps(Planted(sentinel)))
    elif name == "own code" and (sources := sorted(folder.glob("*.py"))):
        chosen = dice.choice(sources)
        chosen.write_text(chosen.read_text(encoding="utf-8") + line, encoding="utf-8")
    else:
        module = dice.choice(["planted", "__init__", "torch", "conftest", "sitecustomize", "modeling_planted"])
        (folder / f"{module}.py").write_text(
            f"{line}\nclass Config: pass\nModel = Tokenizer = Config\n", encoding="utf-8"
        )
        _name_module(folder, name, module)
    return f"plant {name}"


def _name_module(folder: Path, name: str, module: str) -> None:
    maps = {
        "config": ("config.json", {"AutoConfig": f"{module}.Config", "AutoModelForCausalLM": f"{module}.Model"}),
        "tokenizer": ("tokenizer_config.json", {"AutoTokenizer": [f"{module}.Tokenizer", None]}),
        "processor": ("preprocessor_config.json", {"AutoProcessor": f"{module}.Model"}),
    }
    if name in maps:
        file = folder / maps[name][0]
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        file.write_text(json.dumps(content | {"auto_map": maps[name][1]}), encoding="utf-8")
