"""transformers' server for one model, of whose paths each has a name that requests give as their model.

All names share one thread. A path is chosen there, around each computation, so requests that come at once take nothing
of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from time import time
from typing import Any

from transformers.cli.serve import Serve
from transformers.cli.serving.utils import GenerateManager, InferenceThread

from scale_surgery.errors import ServingError


class OnePath(GenerateManager):
    """Computes by one path of a composed model, on the thread that is given; the path None is all of them."""

    def __init__(self, thread: InferenceThread, model: Any, path: str | None) -> None:
        self._thread, self.model, self.path = thread, model, path

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute; for a stream."""
        return super().submit(self._by_path(fn), *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute, to be awaited."""
        return super().async_submit(self._by_path(fn), *args, **kwargs)

    def _by_path(self, run: Callable[..., Any]) -> Callable[..., Any]:
        if self.path is None:
            return run

        def chosen(*args: Any, **options: Any) -> Any:
            with self.model.use_expansion(None if self.path == "base" else self.path):
                return run(*args, **options)

        return chosen


class Server(Serve):
    """The server of transformers, which knows names of paths, trusts no other model, and ends quietly by Ctrl-C.

    Args:
        model: Name by which the server finds the model.
        paths: What requests can name as their model, and which path then answers; None for all, mixed.
        ready: Called once the model is loaded.
        options: Those of transformers' server.
    """

    def __init__(self, model: str, paths: Mapping[str, str | None], ready: Callable[[], None], **options: Any) -> None:
        self.paths, self.ready = paths, ready
        self.thread = InferenceThread()  # type: ignore[no-untyped-call]
        super().__init__(model, non_blocking=True, **options)

    def start_server(self) -> None:
        """Serve until Ctrl-C."""
        manager: Any = self._model_manager
        handlers: tuple[Any, ...] = (self._chat_handler, self._completion_handler, self._response_handler)
        # a request to /load_model may name any model; its code was not trusted
        manager.trust_remote_code = False
        manager.get_gen_models = self._listed
        for handler in (*handlers, self._systemone_handler):
            handler._resolve_model = partial(self._resolve, handler._resolve_model)
        self.server.config.app.add_exception_handler(ServingError, _refuse)
        self.ready()
        with suppress(KeyboardInterrupt):
            self.server.run()

    def _listed(self) -> list[dict[str, Any]]:
        """What /v1/models says."""
        facts = {"object": "model", "created": int(time()), "owned_by": "scale-surgery"}
        return [{"id": name, **facts} for name in self.paths]

    def _resolve(self, stock: Callable[..., Any], body: dict[str, Any]) -> tuple[str, Any, Any]:
        """The name that a request gives, model and processor, with what computes by that name's path."""
        own = self._model_manager.force_model
        name = own if body.get("model") is None else body["model"]
        # JSON may hold what cannot be looked up
        if name not in tuple(self.paths):
            raise ServingError(f"The model {name!r} is not served here, expected {' or '.join(self.paths)}.")
        _, model, processor = stock({"model": own})
        body["model"] = name
        # where the server looks for what computes for a model
        self._generation_state._generate_managers[name] = OnePath(self.thread, model, self.paths[name])
        return name, model, processor


def _refuse(request: Any, error: ServingError) -> Any:
    """An error in the form of OpenAI."""
    from fastapi.responses import JSONResponse

    said = {"message": str(error), "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    return JSONResponse({"error": said}, status_code=404)
