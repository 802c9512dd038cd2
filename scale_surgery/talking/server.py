"""transformers' server for one model, whose paths have names that requests give as their model.

All names share one thread. A path is chosen there around each computation, so that requests at the same time do not
mix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from time import time
from typing import Any

from transformers.cli.serve import Serve
from transformers.cli.serving.utils import GenerateManager, InferenceThread

from scale_surgery.errors import DataError
from scale_surgery.running.context import check_room, context_of

# fields that transformers' server reads, by endpoint; it accepts others and ignores them
EVERYWHERE = frozenset({"generation_config", "model", "seed", "stream", "temperature", "top_p"})
COMPLETIONS = EVERYWHERE | {"frequency_penalty", "max_tokens", "prompt", "stop", "suffix"}
CHAT = EVERYWHERE | {"chat_template_kwargs", "frequency_penalty", "logit_bias", "max_completion_tokens", "max_tokens"}
CHAT |= {"messages", "stop", "tools"}
RESPONSES = EVERYWHERE | {"input", "instructions", "max_output_tokens", "tools"}
# fields that change nothing in an answer
LABELS = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "user"})
# values that ask for what the server does anyway; clients send them unasked
USUAL = {
    "background": False,
    "best_of": 1,
    "echo": False,
    "logprobs": False,
    "n": 1,
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "store": False,
    "stream_options": {"include_usage": True},
    "tool_choice": "auto",
}


class Refusal(Exception):  # noqa: N818
    """A request that is refused, with the fields of an error of OpenAI."""

    def __init__(self, message: str, parameter: str | None, code: str, status: int = 400) -> None:
        super().__init__(message)
        self.parameter, self.code, self.status = parameter, code, status


def check_fields(read: Collection[str], body: Mapping[str, Any]) -> None:
    """Check that a request asks for nothing that the server would ignore."""
    asked = {name for name, value in body.items() if value is not None and not _is_usual(name, value)}
    if ignored := sorted(asked - LABELS - set(read)):
        raise Refusal(
            f"{', '.join(ignored)}: not offered by this server, expected some of {', '.join(sorted(read))}. Leave out "
            "what it does not offer; generation_config takes what transformers' GenerationConfig does.",
            ignored[0],
            "unsupported_parameter",
        )


def _is_usual(name: str, value: Any) -> bool:
    """Whether a field asks for what the server does anyway; 0 is no false: it asks for the logprobs of one token."""
    usual = USUAL.get(name)
    return bool(value == usual) and isinstance(value, bool) == isinstance(usual, bool)


def _check_length(model: Any, inputs: Any) -> None:
    try:
        check_room(inputs["input_ids"].shape[-1], context_of(model.config), "the model")
    except DataError as error:
        raise Refusal(str(error), None, "context_length_exceeded") from error


class OnePath(GenerateManager):
    """Generates by one path of a composed model on a given thread; None is all paths."""

    def __init__(self, thread: InferenceThread, model: Any, path: str | None) -> None:
        self._thread, self.model, self.path = thread, model, path

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute; for a stream."""
        return super().submit(self._by_path(fn), *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute, to be awaited."""
        return super().async_submit(self._by_path(fn), *args, **kwargs)

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Begin a stream, unless the prompt is too long."""
        _check_length(model, inputs)
        return super().generate_streaming(model, processor, inputs, *args, **kwargs)

    async def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute an answer to a prompt that is not too long."""
        _check_length(model, inputs)
        return await super().generate_non_streaming(model, processor, inputs, *args, **kwargs)

    def _by_path(self, run: Callable[..., Any]) -> Callable[..., Any]:
        if self.path is None:
            return run

        def chosen(*args: Any, **options: Any) -> Any:
            with self.model.use_expansion(None if self.path == "base" else self.path):
                return run(*args, **options)

        return chosen


class Server(Serve):
    """The server of transformers, which knows names of paths, trusts no other model, and ends quietly by Ctrl-C."""

    def __init__(self, model: str, paths: Mapping[str, str | None], ready: Callable[[], None], **options: Any) -> None:
        self.paths, self.ready = paths, ready
        self.thread = InferenceThread()  # type: ignore[no-untyped-call]
        super().__init__(model, non_blocking=True, **options)

    def start_server(self) -> None:
        """Serve until Ctrl-C."""
        manager: Any = self._model_manager
        handlers: tuple[Any, ...] = (self._chat_handler, self._completion_handler, self._response_handler)
        for handler, read in zip(handlers, (CHAT, COMPLETIONS, RESPONSES), strict=True):
            handler._validate_request = partial(check_fields, read)
        # a request to /load_model may name any model; its code was not trusted
        manager.trust_remote_code = False
        manager.get_gen_models = self._listed
        for handler in (*handlers, self._systemone_handler):
            handler._resolve_model = partial(self._resolve, handler._resolve_model, handler)
        self.server.config.app.add_exception_handler(Refusal, _refuse)
        self.ready()
        with suppress(KeyboardInterrupt):
            self.server.run()

    def _listed(self) -> list[dict[str, Any]]:
        """The answer of /v1/models."""
        facts = {"object": "model", "created": int(time()), "owned_by": "scale-surgery"}
        return [{"id": name, **facts} for name in self.paths]

    def _resolve(self, stock: Callable[..., Any], handler: Any, body: dict[str, Any]) -> tuple[str, Any, Any]:
        """Name, model and processor of a request; registers the generator of the named path."""
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
        body["model"] = name
        # the server looks up the manager of a model here
        self._generation_state._generate_managers[name] = OnePath(self.thread, model, self.paths[name])
        return name, model, processor


def _refuse(request: Any, error: Refusal) -> Any:
    """An error in the form of OpenAI."""
    from fastapi.responses import JSONResponse

    content = {"message": str(error), "type": "invalid_request_error", "param": error.parameter, "code": error.code}
    return JSONResponse({"error": content}, status_code=error.status)
