"""Settings of prompts and of sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from scale_surgery.errors import counted
from scale_surgery.fields import NO_OPTION, Count, Range, Seed

# any of these turns sampling on, unless the temperature is 0
DRAWING = ("temperature", "top_p", "top_k")

# transformers' defaults if neither model nor user sets a value
USUAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "repetition_penalty": 1.0}
# values that change nothing
WITHOUT = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of prompts and of sampling; unset ones come from the model's own generation_config.json.

    Attributes:
        system: System message of the chat template. Default: none.
        raw: Continue the prompt as plain text, without the tokenizer's chat template.
        max_new_tokens: Maximum number of tokens in an answer.
        temperature: Sampling temperature. 0 always takes the most likely token. Default: the model's own.
        top_p: Sample from the most likely tokens with this total probability. Default: the model's own.
        top_k: Sample from this number of most likely tokens, or from all with 0. Default: the model's own.
        repetition_penalty: Divisor of the logits of earlier tokens. 1 changes nothing. Default: the model's own.
        seed: Seed of sampling.
        expansion: Expansion of a composed folder that answers alone, or base for its base. Default: all, weighted by
            the router.
    """

    system: str | None = None
    raw: bool = False
    max_new_tokens: Count = 512
    temperature: Annotated[float, Range(least=0)] | None = None
    top_p: Annotated[float, Range(above=0, most=1)] | None = None
    top_k: Annotated[int, Range(least=0)] | None = None
    repetition_penalty: Annotated[float, Range(above=0)] | None = field(default=None, metadata=NO_OPTION)
    seed: Seed = 0
    expansion: str | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of transformers' `generate`, besides the length; unset ones stay the model's own."""
        drawing = {name: getattr(self, name) for name in DRAWING if getattr(self, name) is not None}
        penalty = {} if self.repetition_penalty is None else {"repetition_penalty": float(self.repetition_penalty)}
        if self.temperature == 0:
            return {"do_sample": False, **penalty}
        return {"do_sample": True, **drawing, **penalty} if drawing else penalty

    def describe(self, config: Any) -> str:
        """Describe the sampling in one line, given the model's generation config."""
        options = {"do_sample": bool(config.do_sample)} | self.options()
        names = (*DRAWING, "repetition_penalty") if options["do_sample"] else ("repetition_penalty",)
        values = {name: options.get(name, getattr(config, name, None)) for name in names}
        values = {name: USUAL[name] if value is None else value for name, value in values.items()}
        shown = {name: value for name, value in values.items() if value != WITHOUT.get(name)}
        written = [f"{name.replace('_', '-')} {value:g}" for name, value in shown.items()]
        how = "drawn with" if options["do_sample"] else "the most likely token each time,"
        whose = [] if self.expansion is None else [f"by {self.expansion} alone"]
        most = f"at most {counted(self.max_new_tokens, 'token')}"
        return f"{how} {', '.join([*written, most, *whose])}"
