"""Run a folder's model on probe prompts, and compare it with its base and with each expansion alone.

base files                     --stock class-->           the base model
base files, shards of NAME     --a folder of links-->     the model with one expansion alone, as apply writes it
the whole folder               --as a user loads it-->    its output, its base stream, each path selected by name and
                                                          in parallel with the others, and the loss of the mixture

Each model is freed before the next is loaded. All read the same token ids in one left-padded batch. A model larger
than its memory limit is streamed from its files, module by module (accelerate's disk offload).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from scale_surgery.checkpoint.expansions import BASE_NAME
from scale_surgery.checkpoint.names import GENERATION_FILE
from scale_surgery.errors import CheckpointError, Problem, counted
from scale_surgery.evidence.hostile_texts import excess, hostile_texts, prompt_texts
from scale_surgery.evidence.kept_state import KeptState, measure_kept_state
from scale_surgery.folder.folder import Folder
from scale_surgery.folder.write import write_config, write_index
from scale_surgery.planning.architecture import Sizes
from scale_surgery.progress import Finding, Track
from scale_surgery.running.drift import LogitDrift, compare_logits, cosines, largest_difference
from scale_surgery.running.freeze import base_states
from scale_surgery.running.gates import keeping_scores, shut_so_far
from scale_surgery.running.loading import RUNNING, is_strict, loaded, translated
from scale_surgery.running.options import Probes, RunOptions
from scale_surgery.running.own_generation import continue_greedily
from scale_surgery.running.prompts import Batch, encode_prompts, token_problems
from scale_surgery.running.tokenizer import load_tokenizer

# most tokens of a continuation without KV cache
UNCACHED_TOKENS = 2
# bytes of a model from which the probes take long enough for a forecast
LARGE = 2**28


@dataclass(frozen=True)
class Layer:
    """The base stream after one layer: largest absolute difference from the base model, and cosine with it."""

    layer: int
    drift: float
    cosine: float
    is_bit_equal: bool


@dataclass(frozen=True)
class PathNumbers:
    """Comparison of one path with the model of that expansion alone.

    Attributes:
        name: "base", or the name of the expansion.
        is_bit_equal: True if its logits equal that model's bit for bit, selected by name and in parallel with others.
        drift: Largest absolute difference of logits, selected by name.
        drift_beside: Largest absolute difference of logits, in parallel with the others.
        generation_equal: True if greedy continuation with KV cache gives that model's tokens; None if not run.
        uncached_equal: The same without KV cache, for the longest and the shortest prompt and at most two tokens.
    """

    name: str
    is_bit_equal: bool
    drift: float
    drift_beside: float
    generation_equal: bool | None
    uncached_equal: bool | None

    @property
    def problems(self) -> tuple[str, ...]:
        """Differences from that model, a line each."""
        of = "the base model" if self.name == BASE_NAME else f"the model that {self.name} is alone"
        worst = max((self.drift, self.drift_beside), key=lambda number: math.inf if math.isnan(number) else number)
        drift = f"path {self.name}: logits drift {worst:.3g} from {of}, expected bit-equal."
        greedy = f"path {self.name}: its greedy continuation is not that of {of}, with or without KV cache."
        is_other = self.generation_equal is False or self.uncached_equal is False
        return (drift,) * (not self.is_bit_equal) + (greedy,) * is_other


@dataclass(frozen=True)
class MixtureLoss:
    """Loss of a router's mixture on texts: prompts, texts written greedily by each path, and joined halves of these.

    Attributes:
        texts: Number of texts.
        longest: Tokens of the longest.
        excess: Largest loss of the mixture on a text above that of the base, or with several expansions above that of
            the best path, in nats.
        worst: Name of that text.
        rounding: Loss that rounding of the logits can explain, in nats.
        own_excess: Largest such loss by the router's own float32 numbers, before they are rounded to logits.
        own_worst: Name of that text.
        own_rounding: Loss that rounding in float32 can explain, in nats.
    """

    texts: int
    longest: int
    excess: float
    worst: str
    rounding: float
    own_excess: float
    own_worst: str
    own_rounding: float


@dataclass(frozen=True)
class ShutGates:
    """Logits against the base's, at tokens of the prompts before any gate has opened.

    Attributes:
        tokens: Number of these tokens.
        is_bit_equal: True if their logits equal the base model's bit for bit.
        drift: Largest absolute difference of those.
    """

    tokens: int
    is_bit_equal: bool
    drift: float


@dataclass(frozen=True)
class Numbers(LogitDrift):
    """Comparison of an expanded model and its paths with the base on the probe prompts.

    Attributes:
        longest: Tokens of the longest prompt.
        is_text: True if prompts are text; False for seeded random ids, if no tokenizer of the base loads.
        attention: Attention kernel of all models.
        base_logits_bit_equal: True if head times base stream equals the base model's, bit for bit; for a routed model,
            the base stream of its first path.
        base_logits_drift: Largest absolute difference of those.
        layers: The same base stream layer by layer; layer -1 is the embedding.
        generation_equal: True if greedy continuation with KV cache gives the base's tokens; None if not run.
        uncached_equal: The same without KV cache, for the longest and the shortest prompt and at most two tokens.
        new_tokens: Tokens generated for each prompt with KV cache.
        paths: The base's path, and that of each expansion; empty if the model has one path.
        mixture: Loss of its router's mixture; None without a router.
        kept_state: State of a token-reading router with a KV cache; None without such a router.
        shut: Logits before any gate opens; None without gates, or with a router.
        load_problems: Tensors that were missing, unexpected or re-initialised on load.
        token_problems: Prompts whose token ids differ between the two tokenizers.
    """

    longest: int
    is_text: bool
    attention: str
    base_logits_bit_equal: bool
    base_logits_drift: float
    layers: tuple[Layer, ...]
    generation_equal: bool | None
    uncached_equal: bool | None
    new_tokens: int
    paths: tuple[PathNumbers, ...]
    mixture: MixtureLoss | None
    kept_state: KeptState | None
    shut: ShutGates | None
    load_problems: tuple[str, ...]
    token_problems: tuple[str, ...]


@dataclass(frozen=True)
class PathRun:
    """Logits of a model or a path on a batch, without padding, and its continuations; on the CPU."""

    logits: Tensor
    cached: Tensor | None
    uncached: Tensor | None


@dataclass(frozen=True)
class ModelRun:
    """Results of a loaded model on a batch: logits, those of its base stream, and that stream after each layer.

    `shut` is True at tokens before any gate has opened; None without gates.
    """

    logits: Tensor
    base_logits: Tensor
    hidden: tuple[Tensor, ...]
    shut: Tensor | None
    cached: Tensor | None
    uncached: Tensor | None
    attention: str


def probe(
    folder: Folder,
    base: Path,
    probes: Probes,
    run: RunOptions,
    track: Track,
    renamed: Mapping[str, str],
) -> Numbers:
    """Run the base, the model of each path alone, and the expanded model on the same prompts, and compare."""
    manifest = folder.manifest
    encoded, sizes = encode_prompts(base, probes, run), manifest.first_plan.sizes
    tokens = token_problems(encoded, load_tokenizer(folder.path, run), sizes.vocabulary)
    batch, names = encoded.batch, tuple(manifest.expansions)
    # a model without a router has one path, and a fused one cannot choose a path
    names = names if manifest.routing is not None and manifest.fused is None else ()
    real = batch.mask.bool()
    # the base and the model; each expansion alone, each path by name, and the mixture
    with track("probe prompts", 2 + (2 * len(names) + 2) * bool(names)) as advance:
        if sum(info.bytes for info in folder.tensors.values()) >= LARGE:
            advance(0, forecast(2 + len(names), batch, probes))
        with loaded(base, run, name=manifest.base_name, renamed=renamed) as (model, known):
            stock = run_model(model, batch, sizes, probes.max_new_tokens, run.device)
            del model
        advance(1)
        alone = [PathRun(stock.logits[real], stock.cached, stock.uncached)]
        for run_of_path in run_alone(folder, names, batch, probes.max_new_tokens, run, known):
            alone.append(run_of_path)
            advance(1)
        with loaded(folder, run) as (model, problems), translated(*RUNNING):
            problems = _unlike_base(model, problems, known)
            expanded = run_model(model, batch, sizes, probes.max_new_tokens, run.device)
            advance(1)
            paths, mixture, kept_state = list[PathNumbers](), None, None
            if names:
                beside = _beside(model, batch, sizes, run.device)
                largest = stock.logits[real].abs().max()
                for name, path_alone, path_beside in zip((None, *names), alone, beside, strict=True):
                    with model.use_expansion(name):
                        by_name = run_path(model, batch, sizes, probes.max_new_tokens, run.device)
                    paths.append(compare_path(name or BASE_NAME, path_alone, by_name, path_beside))
                    advance(1)
                mixture = measure_mixture(model, batch, run.device, largest, write=bool(probes.max_new_tokens))
                kept_state = measure_kept_state(model, batch.two(), run.device, mixture.rounding)
                advance(1)
    return Numbers(
        **vars(compare_logits(stock.logits, expanded.logits, batch, run.device)),
        longest=batch.ids.shape[1],
        is_text=encoded.tokenizer is not None,
        attention=stock.attention,
        base_logits_bit_equal=torch.equal(stock.base_logits[real], expanded.base_logits[real]),
        base_logits_drift=largest_difference(stock.base_logits[real], expanded.base_logits[real]),
        layers=tuple(
            _compare_layer(layer - 1, before[real], after[real])
            for layer, (before, after) in enumerate(zip(stock.hidden, expanded.hidden, strict=True))
        ),
        generation_equal=_same_tokens(stock.cached, expanded.cached),
        uncached_equal=_same_tokens(stock.uncached, expanded.uncached),
        new_tokens=probes.max_new_tokens,
        paths=tuple(paths),
        mixture=mixture,
        kept_state=kept_state,
        shut=None if expanded.shut is None or names else _compare_shut(stock.logits, expanded, real),
        load_problems=tuple(map(str, problems)),
        token_problems=tokens,
    )


def forecast(models: int, batch: Batch, probes: Probes) -> Finding:
    """Describe the work of the probes, and the options that reduce it."""
    written = probes.max_new_tokens
    read = f"{models} models read {counted(int(batch.mask.sum()), 'token')}"
    prompts, cheaper = counted(len(batch.ids), "prompt"), "--files-only runs no model"
    if written:
        read += f" and go on with {prompts} for {counted(written, 'token')}"
        cheaper = f"--max-new-tokens 0 writes no token, {cheaper}"
    return Finding(f"{read}; cheaper: {cheaper}", f"cheaper: {'--max-new-tokens 0, ' * bool(written)}--files-only")


def _compare_shut(base: Tensor, expanded: ModelRun, real: Tensor) -> ShutGates:
    kept = real if expanded.shut is None else real & expanded.shut.cpu()
    before, after = base[kept], expanded.logits[kept]
    drift = largest_difference(before, after) if len(before) else 0.0
    return ShutGates(len(before), torch.equal(before, after), drift)


@torch.no_grad()
def run_model(model: Any, batch: Batch, sizes: Sizes, new_tokens: int, device: str) -> ModelRun:
    """Run a loaded model: logits, base stream after each layer, base logits, greedy continuation."""
    width, known = sizes.hidden, sizes.vocabulary
    with translated(*RUNNING):
        with keeping_scores(model):
            output = model(**batch.inputs(device), output_hidden_states=True, use_cache=False)
            shut = shut_so_far(model, batch.mask)
        cached, uncached = _continue(model, batch, known, new_tokens, device)
    # only logits of the base's tokens are compared
    return ModelRun(
        logits=output.logits[..., :known].cpu(),
        base_logits=_base_logits(model, output.hidden_states[-1][: len(batch.ids), :, :width])[..., :known].cpu(),
        # with several paths the base's stream comes first: among features, and after the last norm along the batch
        hidden=tuple(state[: len(batch.ids), ..., :width].cpu() for state in base_states(model, output.hidden_states)),
        shut=shut,
        cached=cached,
        uncached=uncached,
        attention=str(model.config._attn_implementation),
    )


@torch.no_grad()
def run_path(model: Any, batch: Batch, sizes: Sizes, new_tokens: int, device: str) -> PathRun:
    """Run a model with its present selection: logits of prompts, and greedy continuation with and without KV cache."""
    logits = model(**batch.inputs(device), use_cache=False).logits[..., : sizes.vocabulary].cpu()
    return PathRun(logits[batch.mask.bool()], *_continue(model, batch, sizes.vocabulary, new_tokens, device))


def _continue(
    model: Any, batch: Batch, known: int, new_tokens: int, device: str
) -> tuple[Tensor | None, Tensor | None]:
    """Continue greedily by tokens of the base: all prompts with KV cache, two prompts without."""
    if not new_tokens:
        return None, None
    cached = continue_greedily(model, batch.inputs(device), new_tokens, known=known)
    # few, since each token costs a whole forward pass, and the logits of all prompts are compared without a KV cache
    few = min(new_tokens, UNCACHED_TOKENS)
    uncached = continue_greedily(model, batch.two().inputs(device), few, known=known, use_cache=False)
    return cached.cpu(), uncached.cpu()


def _base_logits(model: Any, base: Tensor) -> Tensor:
    """Return the logits of a base stream (b, t, d); in a routed model, the stream of its first path."""
    head = model.get_output_embeddings()
    if head.weight.dtype.is_floating_point:
        # some stock models keep their residual stream in float32
        base = base.to(head.weight.dtype)
    if head.weight.shape[-1] > base.shape[-1]:
        # the head of a fused model reads both streams
        logits = functional.linear(base, head.weight[:, : base.shape[-1]], head.bias)
    elif hasattr(head, "capped"):
        # a streamed module has its weights only while it runs
        with model.expansion_disabled():
            logits = head(base.contiguous())
    else:
        logits = head(base.contiguous())
    # some families cap logits after the head
    cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def run_alone(
    folder: Folder,
    names: Sequence[str],
    batch: Batch,
    new_tokens: int,
    run: RunOptions,
    known: Sequence[Problem] = (),
) -> Iterator[PathRun]:
    """Run the model with each expansion alone."""
    has_own_code = bool(folder.manifest.first_plan.architecture.own_code)
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            link_alone(folder.only(name), Path(scratch))
            # without own code of the base, the folder has no code, and this program's code runs
            options = run if has_own_code else replace(run, trust_remote_code=False)
            with loaded(Path(scratch), options, name=name) as (model, problems), translated(*RUNNING):
                if unfit := _unlike_base(model, problems, known):
                    raise CheckpointError(Problem("model-unlike-files", name, *unfit))
                path_run = run_path(model, batch, folder.manifest.first_plan.sizes, new_tokens, run.device)
                # free it before the next one is loaded
                del model
        yield path_run


def _unlike_base(model: Any, problems: Sequence[Problem], known: Sequence[Problem]) -> list[Problem]:
    """Return the problems that keep a user from loading a model; a stock class ignores its base's own problems."""
    return [problem for problem in problems if is_strict(model) or problem not in known]


def link_alone(folder: Folder, scratch: Path) -> None:
    """Make a folder that loads as the model with one expansion alone: links to shards, config.json and an index."""
    manifest = folder.manifest
    own_code = manifest.first_plan.architecture.own_code
    # generation settings and own code are the base's
    beside = [file for file in folder.side_files if file == GENERATION_FILE or (own_code and file.endswith(".py"))]
    for file in (*folder.shards, *beside):
        (scratch / file).parent.mkdir(parents=True, exist_ok=True)
        (scratch / file).symlink_to((folder.path / file).resolve())
    write_index(scratch, folder.tensors.values())
    # made from the record, as the one in the folder may have been changed
    write_config(scratch, folder.manifest)


@torch.no_grad()
def _beside(model: Any, batch: Batch, sizes: Sizes, device: str) -> list[Tensor]:
    """Return the logits of each path, all run in parallel, without padding."""
    inputs = batch.inputs(device)
    logits = model.path_logits(inputs["input_ids"], attention_mask=inputs["attention_mask"])
    return [path_logits[..., : sizes.vocabulary].cpu()[batch.mask.bool()] for path_logits in logits]


def compare_path(name: str, alone: PathRun, chosen: PathRun, beside: Tensor) -> PathNumbers:
    """Compare a path, selected by name and run in parallel, with the model of that expansion alone."""
    return PathNumbers(
        name=name,
        is_bit_equal=torch.equal(alone.logits, chosen.logits) and torch.equal(alone.logits, beside),
        drift=largest_difference(alone.logits, chosen.logits),
        drift_beside=largest_difference(alone.logits, beside),
        generation_equal=_same_tokens(alone.cached, chosen.cached),
        uncached_equal=_same_tokens(alone.uncached, chosen.uncached),
    )


def measure_mixture(model: Any, batch: Batch, device: str, largest: Tensor, *, write: bool) -> MixtureLoss:
    """Measure the loss of a router's mixture on prompts, and on texts that the paths write.

    `largest` is the largest of the base's logits, in their dtype.
    """
    texts = [prompt_texts(batch), *hostile_texts(model, batch, device, write=write)]
    names, *losses = zip(*(loss for text in texts for loss in excess(model, text, device)), strict=True)
    # NaN is the worst, but Python's max does not return it
    (most, worst), (own_most, own_worst) = (
        max(zip(some, names, strict=True), key=lambda loss: math.inf if math.isnan(loss[0]) else loss[0])
        for some in losses
    )
    longest = max(text.ids.shape[1] for text in texts)
    # rounding errors have random signs, so they grow with the square root of the length
    rounding, own_rounding = (
        4 * float(largest) * torch.finfo(dtype).eps * math.sqrt(longest) for dtype in (largest.dtype, torch.float32)
    )
    return MixtureLoss(len(names), longest, most, worst, rounding, own_most, own_worst, own_rounding)


def _compare_layer(layer: int, before: Tensor, after: Tensor) -> Layer:
    mean = float(cosines(before, after).mean())
    return Layer(layer, largest_difference(before, after), mean, torch.equal(before, after))


def _same_tokens(a: Tensor | None, b: Tensor | None) -> bool | None:
    """Return True if two continuations are equal; None if one was not run."""
    return None if a is None or b is None else torch.equal(a, b)
