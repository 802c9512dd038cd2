"""transformers' server for one model; requests can choose its paths by name.

All names share one thread. The thread selects a path for each computation, so that concurrent requests do not mix.

transformers has no public way to name paths, to refuse fields or to cut at a stop text, so these private members of it
are read or replaced here, and nowhere else in the package:

Serve                   _model_manager, _generation_state, and the handlers _chat, _completion, _response, _systemone
model manager           trust_remote_code, list_models (before 5.24 get_gen_models): no other model is loaded or listed
handlers                _validate_request: refuses fields that nothing would read; _resolve_model: finds the path of a
                        name, and gives a tokenizer that fills a chat template whole;
                        get_processor_inputs_from_messages, _normalize_input: errors that name the message
generation state        _generate_managers: takes the generator of each name
streamer                _decode_stream: decodes after the prompt; _enqueue: cuts the text at a stop
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from time import time
from types import SimpleNamespace
from typing import Any

import torch
from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers.cli.serve import Serve
from transformers.cli.serving.utils import GenerateManager, InferenceThread, Modality, get_response_template

from scale_surgery.errors import DataError
from scale_surgery.running.context import check_room, context_of
from scale_surgery.running.own_generation import end_tokens
from scale_surgery.running.tokenizer import check_token_ids
from scale_surgery.talking.request_fields import CHAT, COMPLETIONS, RESPONSES, Refusal, check_fields
from scale_surgery.text.beginnings import form_of
from scale_surgery.text.conversations import THOUGHTS, Message
from scale_surgery.text.tokenizing import without_frame

# types of a message's parts that are text
TEXT_PARTS = ("text", "input_text", "output_text")
# how a tokenizer shows bytes that are no whole character
HALF = "\ufffd"
# most tokens of an answer if neither request nor model sets them, as in transformers' server
DEFAULT_TOKENS = 1024
# options with which the server fills a chat template, which are no variables of it
FILLING = frozenset({"add_generation_prompt", "load_audio_from_video", "return_dict", "return_tensors", "tokenize"})


@contextmanager
def _refused(code: str) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise Refusal(str(error), None, code) from error


def _trim(processor: Any, inputs: Any) -> None:
    """Take away a second start token, and an end token that the tokenizer puts after every text, as `generate` does."""
    given = inputs["input_ids"]
    ids = without_frame(given.flatten().tolist(), getattr(processor, "tokenizer", processor))
    inputs["input_ids"] = given.new_tensor([ids])
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])


def _fit(model: Any, processor: Any, inputs: Any, config: Any) -> list[int]:
    """Check the tokens of a prompt, limit the answer to the model's context, and end it where `generate` does."""
    ids: list[int] = inputs["input_ids"].flatten().tolist()
    if config.eos_token_id in (None, model.generation_config.eos_token_id):
        # training ends plain text with the tokenizer's token
        ends = {*end_tokens(model), getattr(processor, "tokenizer", processor).eos_token_id} - {None}
        config.eos_token_id = sorted(ends) or None
    if not ids:
        raise Refusal("The prompt has no token, expected at least one.", None, "invalid_value")
    context = context_of(model.config)
    with _refused("invalid_value"):
        check_token_ids("The model", max(ids), model.config.get_text_config().vocab_size)
    with _refused("context_length_exceeded"):
        check_room(len(ids), context, "the model")
    # the server expects a plain tensor with one sequence, even if generation_config.json says otherwise
    config.return_dict_in_generate, config.num_return_sequences = False, 1
    most = config.max_new_tokens
    # transformers' server sets this only for requests without their own generation config
    if most is None and config.max_length is None:
        most = max(DEFAULT_TOKENS, model.generation_config.max_new_tokens or 0)
    elif most is None:
        most = config.max_length - len(ids)
    config.max_new_tokens = most if context is None else min(most, context - len(ids))
    return ids


class AnswerText:
    """The text of an answer, received in pieces and cut at a stop text; a possible start of a stop is held back.

    transformers would also stop at a stop text that begins in the prompt, so it is not told of them.
    """

    def __init__(self, config: Any) -> None:
        stops, config.stop_strings = config.stop_strings or (), None
        self.config, self.stops = config, (stops,) if isinstance(stops, str) else tuple(stops)
        self.held, self.is_over = "", False

    def is_stopped(self, ids: Tensor, _: Any) -> Tensor:
        """Return for each row whether generation ends, as transformers' stopping criteria do."""
        return torch.full(ids.shape[:1], self.is_over, device=ids.device)

    def note_end(self, tokens: Tensor) -> None:
        """Note that an answer is whole: the server would report one of the greatest length as cut."""
        ends = self.config.eos_token_id
        if tokens.numel() and int(tokens.flatten()[-1]) in (ends if isinstance(ends, list) else [ends]):
            self.config.max_new_tokens = None

    def take(self, piece: str, *, is_last: bool = False) -> str:
        """Return the text that can be shown after the next piece."""
        if self.is_over:
            return ""
        text = self.held + piece
        if (known := cut(text, self.stops)) != text:
            self.is_over = True
            # the server would report that an answer of this length was cut
            self.config.max_new_tokens = None
            return known
        begun = (place for place in range(len(text)) if any(stop.startswith(text[place:]) for stop in self.stops))
        end = len(text) if is_last else next(begun, len(text))
        self.held = text[end:]
        return text[:end]

    def hand_on(self, enqueue: Callable[[Any], None], item: Any) -> None:
        """Put the next item of a stream into its queue; only pieces of the text are changed."""
        # reasoning is a subclass of str
        is_piece = type(item) is str
        if text := self.take(item) if is_piece else self.take("", is_last=True):
            enqueue(text)
        if not is_piece:
            enqueue(item)


def cut(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first stop text in it."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


class OnePath(GenerateManager):
    """A generator that runs one path of a composed model on a given thread; None selects all paths."""

    def __init__(
        self, thread: InferenceThread, model: Any, path: str | None, *, continues_prompt: bool = False
    ) -> None:
        """Set the path; an answer that continues its prompt is decoded after it, which decides about a space."""
        self._thread, self.model, self.path = thread, model, path
        self.continues_prompt = continues_prompt

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a computation on the path, for a stream."""
        return super().submit(self._by_path(fn), *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a computation on the path, to be awaited."""
        return super().async_submit(self._by_path(fn), *args, **kwargs)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Start a stream."""
        if self.continues_prompt:
            _trim(processor, inputs)
        ids = _fit(model, processor, inputs, gen_config)
        # beam search yields no token before the end
        gen_config.num_beams = 1
        answer = AnswerText(gen_config)

        def generate(*, streamer: Any, **options: Any) -> None:
            # DecodeStream cannot begin behind half a character
            if self.continues_prompt and not processor.decode(ids).endswith(HALF):
                streamer._decode_stream = DecodeStream(ids, skip_special_tokens=True)
            streamer._enqueue = partial(answer.hand_on, streamer._enqueue)
            put = streamer.put

            def note(tokens: Tensor) -> None:
                if tokens.dim() == 1:  # not the prompt
                    answer.note_end(tokens)
                put(tokens)

            streamer.put = note
            try:
                model.generate(streamer=streamer, stopping_criteria=[answer.is_stopped], **options)
            except Exception as error:
                # the server puts the message between quotes without escapes
                error.args = (" ".join(str(error).replace("\\", "/").replace('"', "'").split()),)
                raise

        # the server makes the streamer, and passes it only to generate
        stand_in: Any = SimpleNamespace(generate=generate)
        return super().generate_streaming(stand_in, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute an answer."""
        if self.continues_prompt:
            _trim(processor, inputs)
        ids = _fit(model, processor, inputs, gen_config)
        answer = AnswerText(gen_config)
        decode = partial(processor.decode, clean_up_tokenization_spaces=False)
        before = ids if self.continues_prompt else []
        known = decode(before, skip_special_tokens=True)

        def text_of(made: Tensor) -> str:
            return str(decode([*before, *made.tolist()], skip_special_tokens=True)[len(known) :])

        def is_stopped(tokens: Tensor, _: Any) -> Tensor:
            has_stop = any(stop in text_of(tokens[0, len(ids) :]) for stop in answer.stops)
            return torch.full(tokens.shape[:1], has_stop, device=tokens.device)

        stand_in: Any = SimpleNamespace(generate=partial(model.generate, stopping_criteria=[is_stopped]))
        _, length, made = await super().generate_non_streaming(stand_in, processor, inputs, gen_config, *args, **kwargs)
        answer.note_end(made)
        text = answer.take(text_of(made), is_last=True)
        if answer.is_over and get_response_template(processor, model) is not None:
            # here the server decodes the tokens, and ignores the text
            rest = cut(decode(made), answer.stops)
            made = made.new_tensor(processor(rest, add_special_tokens=False)["input_ids"])
        return text, length, made

    def _by_path(self, run: Callable[..., Any]) -> Callable[..., Any]:
        if self.path is None:
            return run

        def chosen(*args: Any, **options: Any) -> Any:
            with self.model.use_expansion(None if self.path == "base" else self.path):
                return run(*args, **options)

        return chosen


class Server(Serve):
    """A server of transformers that knows names of paths, trusts no other model, and ends quietly on Ctrl-C."""

    def __init__(
        self,
        model: str,
        paths: Mapping[str, str | None],
        readers: Mapping[str, Any],
        ready: Callable[[], None],
        **options: Any,
    ) -> None:
        """Load the model; `readers` are the tokenizers of names that a composed model has."""
        self.paths, self.readers, self.ready = paths, readers, ready
        self.thread = InferenceThread()  # type: ignore[no-untyped-call]
        super().__init__(model, non_blocking=True, **options)

    def start_server(self) -> None:
        """Serve until Ctrl-C."""
        from fastapi.exceptions import RequestValidationError
        from starlette.exceptions import HTTPException

        manager: Any = self._model_manager
        handlers: tuple[Any, ...] = (self._chat_handler, self._completion_handler, self._response_handler)
        for handler, read in zip(handlers, (CHAT, COMPLETIONS, RESPONSES), strict=True):
            handler._validate_request = partial(check_fields, read)
            handler.get_processor_inputs_from_messages = partial(_read, handler.get_processor_inputs_from_messages)
        responses = handlers[-1]
        responses._normalize_input = partial(_read, responses._normalize_input)
        # a request to /load_model may name any model, and the user has not trusted its code
        manager.trust_remote_code = False
        # transformers before 5.24 uses the second name
        manager.list_models = manager.get_gen_models = self._listed
        for handler in (*handlers, self._systemone_handler):
            handler._resolve_model = partial(self._resolve, handler._resolve_model, handler)
        # transformers and chat templates refuse requests with exceptions that would be reported as internal errors
        for kind in (
            Refusal,
            HTTPException,
            RequestValidationError,
            TemplateError,
            TypeError,
            ValueError,
            RuntimeError,
        ):
            self.server.config.app.add_exception_handler(kind, _refuse)
        self.ready()
        with suppress(KeyboardInterrupt):
            self.server.run()

    def _listed(self, *_: Any) -> list[dict[str, Any]]:
        """Return the answer of /v1/models."""
        facts = {"object": "model", "created": int(time()), "owned_by": "scale-surgery"}
        return [{"id": name, **facts} for name in self.paths]

    def _resolve(self, stock: Callable[..., Any], handler: Any, body: dict[str, Any]) -> tuple[str, Any, Any]:
        """Return name, model and processor of a request; register the generator of the named path."""
        served = self._model_manager.force_model
        name = served if body.get("model") is None else body["model"]
        # JSON may hold unhashable values
        if name not in tuple(self.paths):
            raise Refusal(
                f"The model {name!r} is not served here, expected {' or '.join(self.paths)}.",
                "model",
                "model_not_found",
                404,
            )
        _, model, processor = stock({"model": served})
        if handler is self._chat_handler and not getattr(processor, "chat_template", None):
            raise Refusal(
                "This model's tokenizer has no chat template, which writes a conversation. Ask /v1/completions.",
                "messages",
                "no_chat_template",
            )
        _fit_bias(model, body)
        body["model"] = name
        # the server looks up the manager of a model here
        self._generation_state._generate_managers[name] = OnePath(
            self.thread, model, self.paths[name], continues_prompt=handler is self._completion_handler
        )
        tokenizer = self.readers.get(name, processor)
        reader = copy(tokenizer)
        # a processor of images reads parts alone
        if hasattr(tokenizer, "get_chat_template"):
            reader.apply_chat_template = partial(_fill_template, tokenizer)
        return name, model, reader


def _fill_template(tokenizer: Any, messages: Sequence[Message], *, tools: Any = None, **options: Any) -> Any:
    """Write a conversation by the chat template; refuse it if the template leaves out a part of it."""
    variables = {name: value for name, value in options.items() if name not in FILLING}
    try:
        form = form_of(tokenizer, messages, tools or (), variables)
    except DataError as error:
        raise Refusal(str(error), "messages", "invalid_value") from error
    return tokenizer.apply_chat_template(list(map(form.shape, messages)), tools=tools, **options)


def _fit_bias(model: Any, body: dict[str, Any]) -> None:
    """Check that the model has the tokens of a request's logit_bias."""
    bias, vocabulary = body.get("logit_bias", {}), model.config.get_text_config().vocab_size
    if missing := [token for token in bias if int(token) >= vocabulary]:
        raise Refusal(
            f"logit_bias names the token {missing[0]}, expected token ids below {vocabulary}, the size of the model's "
            "embedding.",
            "logit_bias",
            "invalid_value",
        )
    # transformers rejects whole numbers
    bias.update({token: float(value) for token, value in bias.items()})


def _read(stock: Callable[..., Any], *args: Any) -> Any:
    """Let the server read the parts of a conversation; a model of text would be asked without all others."""
    is_text = len(args) > 1 and args[1] is Modality.LLM
    if is_text:
        contents = [message.get("content") for message in args[0] if isinstance(message, Mapping)]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        kinds = [part.get("type") for part in parts if isinstance(part, Mapping)]
        if unread := [kind for kind in kinds if kind not in TEXT_PARTS]:
            raise Refusal(
                f"A message has a part of type {unread[0]}, which this model does not read, expected "
                f"{' or '.join(TEXT_PARTS)}.",
                "messages",
                "invalid_value",
            )
    try:
        read = stock(*args)
        return list(map(_whole, args[0], read)) if is_text else read
    except (AttributeError, LookupError) as error:
        message = f"The conversation cannot be read ({error!r}), expected messages as OpenAI's documentation has them."
        raise Refusal(message, None, "invalid_value") from error


def _whole(given: Mapping[str, Any], read: dict[str, Any]) -> dict[str, Any]:
    """Return a message with what the server drops: its name, its thought, and its text beside calls."""
    content = given.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return {**read, **{key: given[key] for key in ("name", *THOUGHTS) if given.get(key)}, "content": text}


def _refuse(request: Any, error: Exception) -> Any:
    """Return an error in the form of OpenAI."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    if isinstance(error, HTTPException):
        error = Refusal(str(error.detail), None, None, error.status_code)
    elif isinstance(error, RequestValidationError):
        found = error.errors()[0]["msg"]
        error = Refusal(f"The body of the request: {found}, expected an object in JSON.", None, "invalid_value")
    elif isinstance(error, RuntimeError):
        # of the computation, such as memory that is short
        error = Refusal(" ".join(str(error).split()), None, None, 500)
    elif not isinstance(error, Refusal):
        error = Refusal(f"The request cannot be answered: {error}", None, "invalid_value")
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    content = {"message": str(error), "type": kind, "param": error.parameter, "code": error.code}
    return JSONResponse({"error": content}, status_code=error.status)
