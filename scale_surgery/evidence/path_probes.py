"""Numbers of several expansions: each path beside the model that it is alone, and what their mixture loses.

base files                     --stock class-->           path 0 alone
base files, shards of NAME     --a folder of links-->     path k alone, the model that apply writes
the whole folder               --as a user loads it-->    the same paths, chosen by name and side by side, their mixture

Each is freed before the next is loaded. One that is larger than the memory given to it is streamed from its files.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scale_surgery.checkpoint.expansions import BASE_NAME
from scale_surgery.checkpoint.files import write_json
from scale_surgery.checkpoint.folder import Checkpoint
from scale_surgery.checkpoint.names import CONFIG_FILE, INDEX_FILE
from scale_surgery.checkpoint.reading import parse_json
from scale_surgery.errors import CheckpointError, shorten
from scale_surgery.evidence.hostile_texts import excess, hostile_texts, prompt_texts
from scale_surgery.progress import Track
from scale_surgery.running.drift import largest_difference
from scale_surgery.running.loading import RUNNING, loaded, translated
from scale_surgery.running.options import Probes, RunOptions
from scale_surgery.running.probe import same_tokens
from scale_surgery.running.prompts import Batch, encode_prompts, token_problems
from scale_surgery.running.tokenizer import load_tokenizer
from scale_surgery.surgery.config import make_index, written_config
from scale_surgery.surgery.record import Manifest, only


@dataclass(frozen=True)
class PathNumbers:
    """What the probes showed of one path, beside the model that it is alone.

    Attributes:
        name: "base", or that of the expansion.
        is_bit_equal: Whether its logits are those of that model, bit for bit, chosen by name and beside all others.
        drift: Largest absolute difference of logits, chosen by name.
        drift_beside: The same of the path beside all others.
        generation_equal: Whether greedy continuation with KV cache gives that model's tokens; None if not run.
        uncached_equal: The same without KV cache.
    """

    name: str
    is_bit_equal: bool
    drift: float
    drift_beside: float
    generation_equal: bool | None
    uncached_equal: bool | None

    @property
    def problems(self) -> tuple[str, ...]:
        """In what it is not that model, a line each."""
        of = "the base model" if self.name == BASE_NAME else f"the model that {self.name} is alone"
        worst = max((self.drift, self.drift_beside), key=lambda own: math.inf if math.isnan(own) else own)
        drift = f"path {self.name}: logits drift {worst:.3g} from {of}, expected bit-equal."
        greedy = f"path {self.name}: its greedy continuation is not that of {of}, with or without KV cache."
        is_other = self.generation_equal is False or self.uncached_equal is False
        return (drift,) * (not self.is_bit_equal) + (greedy,) * is_other


@dataclass(frozen=True)
class MixtureNumbers:
    """What the probes showed of a composed model.

    Attributes:
        prompts: Number of prompts, in one left-padded batch.
        tokens: Tokens in them.
        is_text: Whether they are text; seeded random ids otherwise, where the base has no tokenizer that loads.
        device: Where all models ran; on another the last bits may be others.
        dtype: Dtype of the logits.
        attention: Attention kernel.
        new_tokens: Tokens generated for each prompt.
        paths: The base's path, and that of each expansion.
        texts: Texts on which the mixture was weighed against each path: the prompts, what each path writes greedily,
            and halves of these joined, so that what has come to be trusted goes wrong.
        longest: Tokens of the longest.
        excess: Loss of the mixture above that of the best path for a text, where it is largest, in nats.
        worst: Which text that is.
        rounding: What of it the rounding of logits in their dtype can explain, in nats.
        load_problems: Tensors that were missing, unexpected or re-initialised on load.
        token_problems: Prompts whose token ids differ between the tokenizers of base and composed model.
    """

    prompts: int
    tokens: int
    is_text: bool
    device: str
    dtype: str
    attention: str
    new_tokens: int
    paths: tuple[PathNumbers, ...]
    texts: int
    longest: int
    excess: float
    worst: str
    rounding: float
    load_problems: tuple[str, ...]
    token_problems: tuple[str, ...]

    @property
    def path_problems(self) -> tuple[str, ...]:
        """In what paths are not the models that they are alone."""
        return tuple(line for path in self.paths for line in path.problems)


@dataclass(frozen=True)
class PathRun:
    """What one model, or one path, made of a batch: logits of its tokens, without padding; on the CPU."""

    logits: Tensor
    cached: Tensor | None
    uncached: Tensor | None


def probe_paths(
    checkpoint: Checkpoint, manifest: Manifest, base: Path, probes: Probes, run: RunOptions, track: Track
) -> MixtureNumbers:
    """Run every model alone, then that of all expansions, on the same prompts, and compare.

    Args:
        checkpoint: The folder of several expansions.
        manifest: Its surgery.json.
        base: A folder that loads as its base.
        probes: Prompts, and tokens to generate for each; without these no text is written either.
        run: How the models run: device, trust_remote_code, memory_bytes. They are as they are stored.
        track: Makes progress bars.

    Returns:
        What they showed.

    Raises:
        CheckpointError: If a model cannot be loaded or does not run.
    """
    encoded, names = encode_prompts(base, probes, run), tuple(manifest.expansions)
    tokens = token_problems(encoded, load_tokenizer(checkpoint.path, run))
    with track("probe prompts", 2 * (len(names) + 1)) as advance:
        alone = []
        for found in run_alone(checkpoint, manifest, base, encoded.batch, probes.new_tokens, run):
            alone.append(found)
            advance(1)
        with loaded(checkpoint.path, run) as (model, problems), translated(*RUNNING):
            beside = _beside(model, encoded.batch, run.device)
            paths = []
            for name, own, other in zip((None, *names), alone, beside, strict=True):
                with model.use_expansion(name):
                    found = run_path(model, encoded.batch, probes.new_tokens, run.device)
                paths.append(compare(name or BASE_NAME, own, found, other))
                advance(1)
            written = hostile_texts(model, encoded.batch, run.device, write=bool(probes.new_tokens))
            texts = [*prompt_texts(encoded.batch), *written]
            losses = {name: loss for text in texts for name, loss in excess(model, text, run.device)}
            attention = str(model.config._attn_implementation)
    worst, longest = max(losses, key=lambda name: losses[name]), max(text.ids.shape[1] for text in texts)
    logits = alone[0].logits
    rounding = 4 * float(logits.abs().max()) * torch.finfo(logits.dtype).eps * math.sqrt(longest)
    return MixtureNumbers(
        prompts=len(encoded.batch.ids),
        tokens=int(encoded.batch.mask.sum()),
        is_text=encoded.tokenizer is not None,
        device=run.device,
        dtype=str(logits.dtype).removeprefix("torch."),
        attention=attention,
        new_tokens=probes.new_tokens,
        paths=tuple(paths),
        texts=len(losses),
        longest=longest,
        excess=losses[worst],
        worst=worst,
        rounding=rounding,
        load_problems=tuple(problems),
        token_problems=tokens,
    )


def run_alone(
    checkpoint: Checkpoint, manifest: Manifest, base: Path, batch: Batch, new_tokens: int, run: RunOptions
) -> Iterator[PathRun]:
    """Run the base, and then each model that an expansion is alone.

    Args:
        checkpoint: The folder of several expansions.
        manifest: Its surgery.json.
        base: A folder that loads as its base.
        batch: The prompts.
        new_tokens: Tokens to generate, 0 for none.
        run: How the models run.

    Yields:
        What each made of the prompts, in the order of the paths.

    Raises:
        CheckpointError: If one cannot be loaded, its tensors do not fit its class, or it does not run.
    """
    with _loaded(base, manifest.base_name, run) as model, translated(*RUNNING):
        yield run_path(model, batch, new_tokens, run.device)
    for name in manifest.expansions:
        with tempfile.TemporaryDirectory() as folder:
            link_alone(*only(checkpoint, manifest, name), Path(folder))
            # no code lies there: this program's own runs
            own = replace(run, trust_remote_code=False)
            with _loaded(Path(folder), name, own) as model, translated(*RUNNING):
                yield run_path(model, batch, new_tokens, run.device)


@contextmanager
def _loaded(path: Path, name: str, run: RunOptions) -> Iterator[Any]:
    with loaded(path, run, name=name) as (model, problems):
        if problems:
            advice = f"{name}: its tensors do not fit its class, so another model would be compared."
            raise CheckpointError.from_problems([*shorten(problems), advice])
        yield model


def link_alone(checkpoint: Checkpoint, manifest: Manifest, folder: Path) -> None:
    """Make a folder that loads as the model that an expansion is alone: links to shards, config.json and an index.

    Args:
        checkpoint: The expanded folder as if it held that expansion alone.
        manifest: Its surgery.json, from which config.json is made again: the one in the folder may be another.
        folder: Where the links go.
    """
    for shard in checkpoint.shards:
        (folder / shard).symlink_to((checkpoint.path / shard).resolve())
    places = {name: info.file for name, info in checkpoint.tensors.items()}
    total = sum(info.bytes for info in checkpoint.tensors.values())
    write_json(folder / INDEX_FILE, make_index(places, {}, total))
    base = parse_json(manifest.replaced[CONFIG_FILE])
    write_json(folder / CONFIG_FILE, written_config(manifest, base, checkpoint.dtype))


@torch.no_grad()
def run_path(model: Any, batch: Batch, new_tokens: int, device: str) -> PathRun:
    """Run a model as it stands: logits of prompts, and greedy continuation with and without KV cache."""
    inputs = {"input_ids": batch.ids.to(device), "attention_mask": batch.mask.to(device)}
    logits = model(**inputs, use_cache=False).logits.cpu()[batch.mask.bool()]
    if not new_tokens:
        return PathRun(logits, None, None)
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    cached, uncached = (model.generate(**inputs, **options, use_cache=own).cpu() for own in (True, False))
    return PathRun(logits, cached, uncached)


@torch.no_grad()
def _beside(model: Any, batch: Batch, device: str) -> list[Tensor]:
    """Logits of each path beside all others, without padding."""
    found = model.path_logits(batch.ids.to(device), attention_mask=batch.mask.to(device))
    return [own.cpu()[batch.mask.bool()] for own in found]


def compare(name: str, alone: PathRun, found: PathRun, beside: Tensor) -> PathNumbers:
    """Compare a path with the model that it is alone.

    Args:
        name: What the path is called.
        alone: What that model made of the prompts.
        found: What the path made of them, chosen by name.
        beside: Its logits beside all other paths.
    """
    return PathNumbers(
        name=name,
        is_bit_equal=torch.equal(alone.logits, found.logits) and torch.equal(alone.logits, beside),
        drift=largest_difference(alone.logits, found.logits),
        drift_beside=largest_difference(alone.logits, beside),
        generation_equal=same_tokens(alone.cached, found.cached),
        uncached_equal=same_tokens(alone.uncached, found.uncached),
    )
