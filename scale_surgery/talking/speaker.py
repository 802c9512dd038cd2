"""A model that answers: token ids in, tokens out one by one, each with the weights of its paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_surgery.checkpoint.expansions import BASE_NAME, path_names
from scale_surgery.checkpoint.numbering import CONFIG_KEY
from scale_surgery.errors import PlanError, Problem
from scale_surgery.evidence.eval_targets import Subject, open_subjects
from scale_surgery.fields import problems_of
from scale_surgery.folder.routers import describe_router, router_of, sides_of
from scale_surgery.modeling.expanded_routers import Router
from scale_surgery.progress import Track, no_track
from scale_surgery.routing.token_texts import TextReader
from scale_surgery.routing.watched import watched
from scale_surgery.running.expansion_names import expansion_problems
from scale_surgery.running.freeze import expansion_disabled
from scale_surgery.running.loading import loaded_whole, translated
from scale_surgery.running.options import RunOptions
from scale_surgery.running.own_generation import end_tokens
from scale_surgery.talking.interrupt import StopAtOnce
from scale_surgery.talking.records import Answer, Ending, Token
from scale_surgery.talking.settings import GenerationSettings

# overrides of the model's generation config, which may enable several tokens per forward pass, passes without a
# token, or compiled passes without hooks
ONE_BY_ONE = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "prefill_chunk_size": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": None,
    "speculation_type": None,
    "disable_compile": True,
}


class TokenStreamer:
    """A streamer for transformers' `generate` that passes on each token with its text and the weights of its paths.

    transformers' own TextStreamer holds text back until a word is complete, so its tokens could not be marked one by
    one.
    """

    def __init__(
        self,
        reader: TextReader,
        special: set[int],
        weights: Sequence[tuple[float, ...]] | None,
        on_token: Callable[[Token], None],
    ) -> None:
        self.reader, self.special, self.weights, self.on_token = reader, special, weights, on_token
        self.tokens: list[Token] = []
        self.is_after_prompt = False

    def put(self, value: Any) -> None:
        """Receive the prompt, then one token at a time."""
        if not self.is_after_prompt:
            self.is_after_prompt = True
            return
        for id_ in value.flatten().tolist():
            # on some devices a token arrives after the next forward pass
            weights = None if self.weights is None else self.weights[len(self.tokens)]
            token = Token(id_, "" if id_ in self.special else self.reader.read(id_), weights)
            self.tokens.append(token)
            self.on_token(token)

    def end(self) -> None:
        """Do nothing, because no text is held back."""


@dataclass(frozen=True)
class Speaker:
    """A model in memory that answers one prompt at a time.

    Attributes:
        subject: The model, and its tokenizer.
        network: The loaded model.
        routing: Its router; None if it does not route.
        paths: Names of the router's paths; empty if it does not route.
        choices: Names of the paths that can be requested; empty if its only expansion has no name.
    """

    subject: Subject
    network: Any
    routing: Router | None
    paths: tuple[str, ...]
    choices: tuple[str, ...]

    @property
    def base_name(self) -> str | None:
        """Name of its base; None if it has no separate base."""
        if self.subject.manifest is not None:
            return self.subject.manifest.base_name
        return f"{self.subject.name}, expansion disabled" if self.subject.is_expanded else None

    @property
    def description(self) -> str:
        """Kind of the model, in one line."""
        kind = "fused" if self.subject.is_fused else "expanded" if self.subject.is_expanded else "stock"
        kind = "composed" if len(self.paths) > 2 else kind
        return kind if self.routing is None else f"{kind}, routed: {describe_router(self.routing)}"

    def speak(
        self,
        prompt: str,
        ids: Sequence[int],
        settings: GenerationSettings,
        on_token: Callable[[Token], None] = lambda token: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Answer a prompt, given as `ids`; `is_stopped` is called after each token."""
        tokenizer = self.subject.tokenizer
        ends = self._ends()
        # the continuation of a text is decoded after it, an answer on its own
        reader = TextReader(tokenizer, [] if has_template(self.subject, settings) else ids)
        most = min(settings.max_new_tokens, (self.subject.context or 10**9) - len(ids))
        with watched(self.network) as weights:
            special = set(tokenizer.all_special_ids) | ends
            streamer = TokenStreamer(reader, special, weights, on_token)
            try:
                self._generate(ids, most, settings, streamer, is_stopped)
            except StopAtOnce:
                return Answer(prompt, len(ids), tuple(streamer.tokens), "interrupted")
        last = streamer.tokens[-1].id if streamer.tokens else None
        is_full = len(streamer.tokens) >= most
        ended: Ending = "context" if is_full and most < settings.max_new_tokens else "length" if is_full else "end"
        ended = "end" if last in ends else "interrupted" if is_stopped() else ended
        return Answer(prompt, len(ids), tuple(streamer.tokens), ended)

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Let the base answer inside a `with` block; the model draws with the same random numbers afterwards."""
        with self.isolated_random_state(), expansion_disabled(self.network):
            yield

    @contextmanager
    def as_chosen(self, settings: GenerationSettings) -> Iterator[None]:
        """Let the requested expansion or the base answer inside a `with` block; by default the model."""
        if settings.expansion is None:
            yield
            return
        with self.network.use_expansion(None if settings.expansion == BASE_NAME else settings.expansion):
            yield

    @contextmanager
    def isolated_random_state(self, seed: int | None = None) -> Iterator[None]:
        """Fork the random state inside a `with` block; set a seed if one is given."""
        import torch

        device = self.network.device
        devices = [] if device.type == "cpu" else [device.index or 0]
        with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
            if seed is not None:
                torch.manual_seed(seed)
            yield

    def _generate(
        self,
        ids: Sequence[int],
        most: int,
        settings: GenerationSettings,
        streamer: TokenStreamer,
        is_stopped: Callable[[], bool],
    ) -> None:
        import torch
        from transformers import GenerationConfig

        # older releases of transformers lack some of these options
        known = vars(GenerationConfig())  # type: ignore[no-untyped-call]
        read = torch.tensor([list(ids)], device=self.network.device)
        ends = sorted(self._ends())
        with translated("model-not-run", self.subject.name):
            self.network.generate(
                read,
                attention_mask=torch.ones_like(read),
                max_new_tokens=most,
                eos_token_id=ends or None,
                streamer=streamer,
                # transformers checks this after each token, for each text
                stopping_criteria=[lambda ids, scores: torch.full(ids.shape[:1], is_stopped(), device=ids.device)],
                tokenizer=self.subject.tokenizer,
                **settings.options(),
                **{name: value for name, value in ONE_BY_ONE.items() if name in known},
            )

    def _ends(self) -> set[int]:
        """Return the tokens that end an answer: the model's, and the tokenizer's, which ends the texts of training."""
        return {*end_tokens(self.network)} | {self.subject.tokenizer.eos_token_id} - {None}


def has_template(subject: Subject, settings: GenerationSettings) -> bool:
    """Return True if the prompt is written by a chat template."""
    return not settings.raw and getattr(subject.tokenizer, "chat_template", None) is not None


def open_subject(
    model: str | Path,
    settings: GenerationSettings,
    *,
    compare: bool = False,
    run: RunOptions = RunOptions(),
    revision: str | None = None,
) -> Subject:
    """Open a model and its tokenizer, and check that it can answer with these settings; no weight is read."""
    (subject,) = open_subjects([model], run, revision=revision)
    if problems := [*problems_of(settings), *_problems(subject, settings, compare=compare)]:
        raise PlanError(*problems)
    return subject


@contextmanager
def loaded_speaker(subject: Subject, run: RunOptions = RunOptions(), track: Track = no_track) -> Iterator[Speaker]:
    """Load a model that answers, and free it afterwards."""
    specs = _specs(subject)
    with ExitStack() as stack:
        with track("loading", 1) as advance:
            network = stack.enter_context(loaded_whole(subject.checkpoint, subject.name, run))
            advance(1)
        # a fused model routes in its last norm, and does not expose it
        routing = None if subject.is_fused else router_of(specs)
        paths = () if routing is None else sides_of(routing, specs)
        yield Speaker(subject, network, routing, paths, path_names(specs))


def _specs(subject: Subject) -> Any:
    """Return the expansion's entry in config.json."""
    return subject.checkpoint.config.get(CONFIG_KEY, {})


def _problems(subject: Subject, settings: GenerationSettings, *, compare: bool) -> Iterator[Problem]:
    """Yield a problem for each thing that is asked for and the model does not have."""
    yield from expansion_problems(settings.expansion, path_names(_specs(subject)), subject.name)
    if settings.system is not None and not has_template(subject, settings):
        yield (
            Problem("system-with-raw", "--system")
            if settings.raw
            else Problem("system-without-template", "--system", model=subject.name)
        )
    if compare and subject.is_fused:
        yield Problem("base-fused", "--compare", model=subject.name)
    elif compare and not subject.is_expanded:
        yield Problem("compare-without-base", "--compare", model=subject.name)
