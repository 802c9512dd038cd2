"""Convert stock exports to GGUF with llama.cpp's converter, run them in llama.cpp and compare with transformers.

    python benchmarks/stock_to_gguf.py --converter llama.cpp/convert_hf_to_gguf.py -o numbers.json
    python benchmarks/stock_to_gguf.py --converter llama.cpp/convert_hf_to_gguf.py --model gpt2 --added inner

It needs llama_cpp_python, and the converter, which no package installs: it lies in a checkout of llama.cpp, and in
the source distribution of llama_cpp_python (pip download --no-binary :all: --no-deps llama_cpp_python) below
vendor/llama.cpp. The converter needs sentencepiece, and for GPT-NeoX the release of transformers that its requirements
name: --python is the interpreter of an environment that has it.

Of each model: an expansion without an up stream, its blocks random, is merged to its stock form and converted in
float32. llama.cpp reads the same prompts, with float32 in its cache; `drift` is the largest difference of its logits
from those of the *expanded* model, as a share of the largest. `greedy` is the share of greedily generated tokens
that are equal. `base` is the drift of the base model's GGUF from the base model, what llama.cpp makes of a model that
was never expanded; `control` its drift from the expanded model.

The shipped model's tokenizer is no published one, so the converter is told that it splits text as GPT-2's does; the
other models are random ones of each family, with the same tokenizer.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from scale_surgery import Request, expand, register
from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.errors import Problem, SurgeryError
from scale_surgery.surgery.merge import merge

SHIPPED = "shipped"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "gpt_neox", "phi3", "gpt2")
# a head size that every kernel of llama.cpp takes
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
# what else a family's config needs so that a model this small is one of it
OWN: dict[str, dict[str, Any]] = {
    # llama.cpp takes the embedding for the head, as every published Gemma does
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 64, "tie_word_embeddings": True},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 64, "tie_word_embeddings": True},
    "gpt_neox": {"num_key_value_heads": 4},
    "phi3": {"original_max_position_embeddings": 256},
    "gpt2": {"num_key_value_heads": 4, "n_inner": 512, "n_positions": 256},
}
# keys that published configs have, that the converter reads, and that transformers no longer writes
OLDER_KEYS = {"gpt_neox": {"rotary_pct": 0.25}, "gpt2": {"n_ctx": 256}}
REQUESTS = {
    "inner": Request("1", variant="adapt", up_width=0, up_kv_heads=0, up_inner_width=32),
    "heads": Request("1", variant="adapt", up_width=0, up_inner_width=0, up_kv_heads=1),
}
SPREAD = 0.1
# transformers gives the tokenizer of such a model a few tokens more, and the converter wants a place for them
SPARE_TOKENS = {"qwen2": 16}
PROMPTS = ("Paul Brown was born on", "The university of Laura Jensen is in the city of", "Q: Where does Ann work?")
NEW_TOKENS = 24
CONTEXT = 128
GGML_FLOAT32 = 0
# the converter, told what the shipped model's tokenizer is
DRIVER = """
import runpy, sys
from pathlib import Path
sys.argv = sys.argv[1:]
folder = str(Path(sys.argv[0]).parent)
sys.path[:0] = [folder, folder + "/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
from conversion.phi import Phi3MiniModel
Phi3MiniModel.set_vocab = TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Result:
    """One stock export in llama.cpp; drifts are shares of the largest logit. A problem is a step that failed."""

    model: str
    added: str
    problem: str | None = None
    drift: float | None = None
    greedy: float | None = None
    base: float | None = None
    control: float | None = None


@dataclass(frozen=True)
class Reading:
    """What a model says of one prompt: logits (tokens, vocabulary), and the tokens it goes on with."""

    ids: list[int]
    logits: np.ndarray[Any, Any]
    new: list[int]


def make_base(name: str, folder: Path) -> Path:
    """The shipped model, or a random one of a family with the shipped model's tokenizer."""
    if name == SHIPPED:
        return SHIPPED_MODEL
    torch.manual_seed(0)
    shutil.copytree(SHIPPED_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    vocabulary = len(transformers.AutoTokenizer.from_pretrained(folder)) + SPARE_TOKENS.get(name, 0)
    config = transformers.AutoConfig.for_model(name, **{**SIZES, "vocab_size": vocabulary, **OWN.get(name, {})})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * SPREAD)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(written | OLDER_KEYS.get(name, {})), encoding="utf-8")
    return folder


def shake(path: Path) -> Path:
    """Give every expansion tensor random values, as large as a trained one's."""
    torch.manual_seed(1)
    for file in path.glob("expansion-*.safetensors"):
        tensors = {name: tensor + torch.randn_like(tensor) * SPREAD for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return path


@dataclass(frozen=True)
class Converter:
    """llama.cpp's convert_hf_to_gguf.py, and the interpreter that runs it."""

    script: Path
    python: Path


def convert(converter: Converter, model: Path, file: Path) -> Path:
    """Convert a checkpoint to GGUF in float32; a converter that refuses it says why in its last line."""
    program = [converter.python, "-c", DRIVER, converter.script, model, "--outtype", "f32", "--outfile", file]
    done = subprocess.run([str(part) for part in program], capture_output=True, text=True)
    if done.returncode:
        raise SurgeryError(Problem("other-program", "converter", error=done.stderr.strip().splitlines()[-1]))
    return file


@torch.no_grad()
def read_in_transformers(path: Path) -> list[Reading]:
    """What a checkpoint says in transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    readings = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        row = torch.tensor([ids])
        for _ in range(NEW_TOKENS):
            logits = model(row).logits[0]
            row = torch.cat((row, logits[-1:].argmax(-1, keepdim=True)), dim=1)
        readings.append(Reading(ids, logits[: len(ids)].numpy(), row[0, len(ids) :].tolist()))
    return readings


def read_in_llama_cpp(file: Path, prompts: list[list[int]]) -> list[Reading]:
    """What a GGUF file says in llama.cpp."""
    from llama_cpp import Llama

    options: dict[str, Any] = {"type_k": GGML_FLOAT32, "type_v": GGML_FLOAT32, "flash_attn": False, "n_threads": 1}
    try:
        model = Llama(str(file), n_ctx=CONTEXT, logits_all=True, verbose=False, **options)
    except ValueError as error:
        raise SurgeryError(Problem("other-program", "llama.cpp", error=error)) from error
    readings = []
    for ids in prompts:
        model.reset()
        model.eval(ids)
        logits = np.array(model.scores[: len(ids)])
        new = [int(logits[-1].argmax())]
        while len(new) < NEW_TOKENS:
            model.eval(new[-1:])
            new.append(int(np.argmax(model.scores[len(ids) + len(new) - 1])))
        readings.append(Reading(ids, logits, new))
    return readings


def drift(before: list[Reading], after: list[Reading]) -> float:
    """Largest difference of logits as a share of the largest logit."""
    largest = max(float(np.abs(reading.logits).max()) for reading in before)
    pairs = zip(before, after, strict=True)
    return max(float(np.abs(first.logits - second.logits).max()) for first, second in pairs) / largest


def agreement(before: list[Reading], after: list[Reading]) -> float:
    """Share of greedily generated tokens that are equal."""
    pairs = zip(before, after, strict=True)
    return float(np.mean([first == second for a, b in pairs for first, second in zip(a.new, b.new, strict=True)]))


def measure(name: str, added: str, converter: Converter, folder: Path) -> Result:
    """Expand, merge, convert and run one model."""
    base = make_base(name, folder / "base")
    expanded = shake(expand(base, REQUESTS[added], folder / "expanded").path)
    try:
        stock = merge(expanded, folder / "stock", "stock").path
        expected = read_in_transformers(expanded)
        prompts = [reading.ids for reading in expected]
        readings = read_in_llama_cpp(convert(converter, stock, folder / "stock.gguf"), prompts)
        unexpanded = read_in_llama_cpp(convert(converter, base, folder / "base.gguf"), prompts)
    except SurgeryError as error:
        return Result(name, added, problem=str(error))
    return Result(
        name,
        added,
        drift=drift(expected, readings),
        greedy=agreement(expected, readings),
        base=drift(read_in_transformers(base), unexpanded),
        control=drift(expected, unexpanded),
    )


def render(results: list[Result]) -> Table:
    """Lay results out as a table."""
    table = Table("model", "added", "drift", "greedy", "base", "control", "problem", box=None)
    for result in results:
        if result.problem is None:
            table.add_row(
                result.model,
                result.added,
                f"{result.drift:.1e}",
                f"{result.greedy:.0%}",
                f"{result.base:.1e}",
                f"{result.control:.2g}",
            )
        else:
            table.add_row(result.model, result.added, "", "", "", "", result.problem)
    return table


@click.command()
@click.option("--converter", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=True)
@click.option(
    "--python", type=click.Path(path_type=Path, exists=True), default=sys.executable, help="Of the converter."
)
@click.option("--model", "names", type=click.Choice([SHIPPED, *FAMILIES]), multiple=True, help="Default: all.")
@click.option("--added", "requests", type=click.Choice(list(REQUESTS)), multiple=True, help="Default: all.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the numbers as JSON.")
def main(converter: Path, python: Path, names: tuple[str, ...], requests: tuple[str, ...], output: Path | None) -> None:
    """Convert stock exports to GGUF and compare llama.cpp with transformers."""
    register()
    transformers.utils.logging.disable_progress_bar()
    results = []
    for name, added in itertools.product(names or (SHIPPED, *FAMILIES), requests or REQUESTS):
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(name, added, Converter(converter, python), Path(folder)))
        print(json.dumps(asdict(results[-1])), file=sys.stderr)
    Console(width=120).print(render(results))
    if output is not None:
        output.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
