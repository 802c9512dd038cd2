"""The mixin before a stock model class: one base, any number of named expansions, and a choice of paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .expanded_blocks import Blocks
from .expanded_modules import (
    ExpandedAttention,
    expand_attention,
    expand_module,
    expanded_modules,
    make_blocks,
    new_heads,
)
from .expanded_paths import BASE, ActiveExpansions, Context, Fork, Path, Paths, fork_before, memo, streams_of_groups
from .expanded_releases import count_tokens, find_cache, is_filled, is_quantised, warn
from .expanded_routers import Router, make_router
from .expanded_routing import Features, RouterContext, TokenScores, route, score_tokens, select
from .expanded_stock import (
    MOST_NAMED,
    Hook,
    StrictlyLoaded,
    View,
    adds_features,
    find_base_model,
    find_module,
    specs_of,
    twin,
    wide_features,
)

A_NAME_A_ROW = "Give expansion_names=, a name or None for each row."


class PathChoice(NamedTuple):
    """A choice of the paths to run."""

    names: tuple[str, ...] = ()  # active expansions; none for the base
    router: Router | None = None  # weighs the base and these expansions
    # the expansion of each row of a batch, None for the base; empty if all rows run the same path
    rows: tuple[str | None, ...] = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return the chosen paths."""
        if self.router is not None:
            return self.router.paths(self.names)
        return (BASE, *map(Path, self.names)) if self.rows or not self.names else (Path(self.names[0]),)

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the part of the key under which a KV cache is valid."""
        return self.names, bool(self.rows), self.router


class ExpandedPreTrainedModel(StrictlyLoaded):
    """Mixin before a stock model class: several expansions of it, each under its name.

    `config.scale_surgery` has the base's modules through which paths pass, the additions of each expansion, and the
    router. See `configuration_scale`.
    """

    # set if a quantised base was expanded in memory
    is_base_quantised = False

    def __init__(self, config, *args, **kwargs):
        with stock_values(config):
            super().__init__(config, *args, **kwargs)
        self._read_vocabulary()
        self.let_paths_through()
        for plan in config.scale_surgery["expansions"]:
            self._add_blocks(plan["name"], plan)
        self.post_init()
        self.enable_expansion()
        self.freeze_base()

    def let_paths_through(self) -> None:
        """Let paths pass through the modules of a stock model, which has no expansion yet."""
        facts = self.config.scale_surgery["base"]
        self.facts, self.plans = facts, {}
        # the number of each expansion, in the order in which they were added: a name may be given again
        self.numbers: dict[str, int] = {}
        self.added = 0
        self.with_new_tokens = ""  # the expansion that adds tokens, if there is one
        # of the base stream, under the empty name, and of the up stream of each expansion; before the first layer, some
        # up streams have not entered
        self.stream_widths, self.entering_widths = {"": facts["hidden"]}, {"": facts["hidden"]}
        self.known_paths: dict[tuple[tuple[Path, ...], bool], Paths] = {}
        # strengths other than 1 by expansion; see `scale_surgery.set_strength`
        self.strengths: dict[str, float] = {}
        self.known_forks: dict[Paths, list[Fork | None]] = {}
        base_model = find_base_model(self, facts["base_model"])
        layers = base_model.get_submodule(facts["layers"])
        self.layer_count = len(layers)
        self.active = ActiveExpansions(self._context(PathChoice()), self)
        for module in self.modules():
            if (checkpoint := vars(module).get("_gradient_checkpointing_func")) is not None:
                module._gradient_checkpointing_func = partial(self.active.checkpointed, checkpoint)
        separate(layers)
        for index, layer in enumerate(layers):
            specs = specs_of(facts, index)
            for name, spec in specs["modules"].items():
                self._expand(layer, name, spec, index)
            for name, heads in specs["attention"].items():
                expand_attention(layer.get_submodule(name), heads, self.active, index)
            layer.register_forward_pre_hook(Hook(self, "_rearrange", index), with_kwargs=True)
        self._expand(base_model, facts["last"], {"kind": "last"}, len(layers)).stream_widths = self.stream_widths
        head = self.get_output_embeddings()
        if head is not None:
            expand_module(head, "head", self.active, len(layers))
            head.softcap = facts["softcap"]
        if adds_features(base_model):
            base_model.register_forward_pre_hook(Hook(self, "_widen"), with_kwargs=True)

    def _expand(self, parent: nn.Module, name: str, spec: dict[str, Any], place: int) -> nn.Module:
        """Let paths pass through a module."""
        module = find_module(parent, name)
        expand_module(module, spec["kind"], self.active, place)
        if "axis" in spec:
            module.head_axis, module.base_heads = spec["axis"], spec["heads"]
        sections = spec.get("sections") or [base for base, _ in spec.get("out_features", ())]
        if len(sections) > 1:
            module.sections = tuple(sections)
        return module

    def add_expansion(self, name: str, plan: dict[str, Any]) -> None:
        """Add an expansion and choose it; its tensors are zero until they are loaded.

        A router of the config is removed, since its numbers are for fewer paths.

        Args:
            name: Its name.
            plan: Its entry in config.json.

        Raises:
            ValueError: If the model has an expansion of that name.
        """
        if name in self.plans:
            raise ValueError(f"{name}: is an expansion of this model already. Choose another name, or delete it first.")
        self._add_blocks(name, plan)
        self.config.scale_surgery["expansions"].append({**plan, "name": name})
        self.config.scale_surgery.pop("router", None)
        if new := plan["head"].get("new_tokens"):
            text = self.config.get_text_config(decoder=True)
            self.config.scale_surgery["stock"] = {"vocab_size": text.vocab_size}
            text.vocab_size += new
            self._read_vocabulary()
        self.set_expansion(name)

    def _add_blocks(self, name: str, plan: dict[str, Any]) -> None:
        self._forget()
        base_model = find_base_model(self, self.facts["base_model"])
        layers = base_model.get_submodule(self.facts["layers"])
        last = self.facts["last"]
        for module_name, spec in plan["model"].items():
            self._add(base_model, module_name, name, plan, spec, {}, [], len(layers) if module_name == last else -1)
        head = self.get_output_embeddings()
        if head is not None and plan["head"]:
            head.expansions[name] = make_blocks(head, plan, plan["head"], {}, [])
            if plan["head"].get("is_tied"):
                embedding = self.get_input_embeddings().expansions[name]
                head.expansions[name].__dict__["embedding"] = embedding
        if plan["head"].get("new_tokens"):
            self.with_new_tokens = name
        for index, layer in enumerate(layers):
            specs = specs_of(plan, index)
            is_expanded = index in plan["expanded_layers"]
            w12_groups = plan["collaborative"]["groups"] if index in plan["collaborative"]["layers"] else []
            attention = specs["attention"] if is_expanded else {}
            for module_name, spec in specs["expanded" if is_expanded else "passing"].items():
                self._add(layer, module_name, name, plan, spec, attention, w12_groups, index)
            for module_name, spec in attention.items():
                layer.get_submodule(module_name).new_heads[name] = new_heads(plan, spec)
        self.plans[name] = plan
        self.added += 1
        self.numbers[name] = self.added
        width = plan["widths"]["up_width"]
        self.stream_widths[name], self.entering_widths[name] = width, 0 if plan.get("enter") == "hook" else width
        if plan["dtype"] == "float32":
            # new tensors stay in float32 if the base is loaded in half precision, as do those that the stock class
            # keeps
            in_float32 = self._keep_in_fp32_modules_strict or ()
            # a pattern that is searched for: the names of others may begin alike
            self._keep_in_fp32_modules_strict = {*in_float32, rf"expansions\.{name}(?=\.)"}

    def _read_vocabulary(self) -> None:
        """Update the number of tokens in a stock class that stores it for its loss."""
        if "vocab_size" in vars(self):
            self.vocab_size = self.config.get_text_config(decoder=True).vocab_size

    def _add(self, parent, module_name, name, plan, spec, attention, w12_groups, place) -> None:
        module = self._expand(parent, module_name, spec, place)
        module.expansions[name] = make_blocks(module, plan, spec, attention, w12_groups)

    def _forget(self) -> None:
        """Clear all memos of streams, since an expansion was added or deleted."""
        self.known_paths.clear()
        self.known_forks.clear()
        for module in expanded_modules(self):
            module.layouts.clear()
        for module in self.modules():
            if isinstance(module, ExpandedAttention):
                module.parts_of.clear()

    # ---- choice of paths

    @property
    def expansions(self) -> list[str]:
        """Return the names of the expansions, in the order in which they were added."""
        return list(self.plans)

    @property
    def choice(self) -> PathChoice:
        """Return the choice of this thread."""
        chosen: PathChoice = self.active.now().choice
        return chosen

    @property
    def active_expansion(self) -> str | list[str] | None:
        """Return the chosen name, the list of names that a router mixes, or None for the base."""
        names = list(self.choice.names)
        return names if self.choice.router else names[0] if names else None

    def find_paths(self, paths: tuple[Path, ...], *, base_learns: bool = False) -> Paths:
        """Return the object for these paths; equal paths give the same object."""
        if (paths, base_learns) not in self.known_paths:
            w12_layers = {name: plan["collaborative"]["layers"] for name, plan in self.plans.items()}
            first_w12_layers = {name: min(layers, default=None) for name, layers in w12_layers.items()}
            made = Paths(paths, first_w12_layers, self.layer_count, self.with_new_tokens, base_learns=base_learns)
            self.known_paths[paths, base_learns] = made
        return self.known_paths[paths, base_learns]

    def set_expansion(self, names: str | Sequence[str] | None, **router: Any) -> None:
        """Choose the active expansions for all threads.

        A KV cache is valid only under the choice that filled it.

        Args:
            names: A name for the base with that expansion, None for the base, or a list for a router's mixture of the
                base and these expansions.
            router: Settings of the router; by default the posterior one with equal initial weights.

        Raises:
            ValueError: If there is no such expansion, a list has a name twice, several expansions cannot run side by
                side on this architecture, or a setting is out of range.
        """
        self._set_choice(self.make_choice(names, **router))

    def _set_choice(self, choice: PathChoice) -> None:
        self.active.chosen = self._context(choice)

    def _context(self, choice: PathChoice) -> Context:
        return Context(self.find_paths(choice.paths), choice)

    def make_choice(self, names: str | Sequence[str] | None, **router: Any) -> PathChoice:
        """Make the choice for `set_expansion`; see there."""
        if names is None or isinstance(names, str):
            if router:
                raise ValueError(
                    f"{', '.join(router)}: is for a list of expansions, but {names!r} is none. Leave it out."
                )
            return PathChoice(self._known([] if names is None else [names]))
        if not isinstance(names, Sequence):
            raise ValueError(f"{names!r}: is no choice of expansions, expected a name, a list of names, or None.")
        known = self._known(names)
        self._check_beside(known)
        return PathChoice(known, make_router(router, len(known)))

    def use_choice(self, choice: PathChoice) -> AbstractContextManager[None]:
        """Run another choice in this thread inside a `with` block."""
        return self.active.within(self._context(choice))

    def use_expansion(self, names: str | Sequence[str] | None, **router: Any) -> AbstractContextManager[None]:
        """Choose as `set_expansion` does, for this thread inside a `with` block."""
        return self.use_choice(self.make_choice(names, **router))

    def expansion_disabled(self) -> AbstractContextManager[None]:
        """Run the base model alone inside a `with` block."""
        return self.use_choice(PathChoice())

    def whole_choice(self) -> PathChoice:
        """Make the choice of a freshly loaded model: its only expansion, or all expansions with its router.

        Exception: of several expansions it is the base if nothing can be routed, without a head or because they cannot
        stand beside each other.
        """
        names, router = self.expansions, self.config.scale_surgery.get("router")
        has_head = self.get_output_embeddings() is not None
        is_by_name = router is None and any(self.plans[name].get("problems") for name in names)
        if not has_head or is_by_name or (len(names) < 2 and router is None):
            return self.make_choice(names[0] if len(names) == 1 else None)
        self._check_beside(tuple(names))
        return PathChoice(tuple(names), make_router(router or {}, len(names), "config.json: scale_surgery.router"))

    def enable_expansion(self, is_enabled: bool = True) -> None:
        """Run the choice of a freshly loaded model, or its base alone."""
        self._set_choice(self.whole_choice() if is_enabled else PathChoice())

    @property
    def is_expansion_enabled(self) -> bool:
        """Return whether an expansion is active."""
        return bool(self.choice.names)

    def enable_routing(self, is_enabled: bool = True) -> None:
        """Let the router weigh all paths, or run the only expansion without it."""
        self._set_choice(self._routed() if is_enabled else self.make_choice(self._only()))

    @property
    def is_routing_enabled(self) -> bool:
        """Return whether a router makes the logits from several paths."""
        return self.choice.router is not None

    def routing_enabled(self) -> AbstractContextManager[None]:
        """Let the router weigh all paths inside a `with` block."""
        return self.use_choice(self._routed())

    def routing_disabled(self) -> AbstractContextManager[None]:
        """Run the only expansion alone inside a `with` block."""
        return self.use_expansion(self._only())

    def _routed(self) -> PathChoice:
        if self.config.scale_surgery.get("router") is None:
            raise ValueError("This model has no router. Write one that has: scale-surgery route-export.")
        if self.get_output_embeddings() is None:
            raise ValueError("This model has no head, so there is nothing to route. Load it as AutoModelForCausalLM.")
        return self.whole_choice()

    def _only(self) -> str:
        if len(self.expansions) != 1:
            raise ValueError(
                f"The model has {len(self.expansions)} expansions ({', '.join(self.expansions)}). Say which is to run: "
                "model.set_expansion(NAME), or model.use_expansion(NAME) in a with block."
            )
        return self.expansions[0]

    def delete_expansion(self, name: str) -> None:
        """Delete an expansion and the config's router; if it was chosen, the base is chosen from then on."""
        self._known([name])
        if (context := self.active.thread.context) is not None and name in context.choice.names:
            raise ValueError(
                f"{name}: runs inside a with block, expected none that chooses it. Delete it behind the block."
            )
        for module in expanded_modules(self):
            if name in module.expansions:
                del module.expansions[name]
        for module in self.modules():
            if isinstance(module, ExpandedAttention):
                module.new_heads.pop(name, None)
        del self.plans[name], self.numbers[name], self.stream_widths[name], self.entering_widths[name]
        self.strengths.pop(name, None)
        entry = self.config.scale_surgery
        if name == self.with_new_tokens:
            self.with_new_tokens = ""
            set_values(self.config, entry.pop("stock"))
            self._read_vocabulary()
        entry["expansions"] = [plan for plan in entry["expansions"] if plan["name"] != name]
        entry.pop("router", None)
        self._forget()
        before: PathChoice = self.active.chosen.choice
        self._set_choice(PathChoice() if name in before.names else before)

    def _known(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return names as a tuple; refuse unknown and repeated ones."""
        known = tuple(names)
        problems = [unknown_name(name, self.expansions) for name in known if name not in self.plans]
        twice = [name for name in dict.fromkeys(known) if known.count(name) > 1]
        problems += [f"{name}: is named {known.count(name)} times, expected once." for name in twice]
        if problems:
            raise ValueError("\n".join(problems))
        return known

    def _check_beside(self, names: tuple[str, ...]) -> None:
        """Refuse expansions that cannot run side by side."""
        problems = [f"{name}: {line}" for name in names for line in self.plans[name].get("problems", ())]
        if not names:
            problems = ["A list of no names: expected at least one. None gives the base."]
        elif super().get_output_embeddings() is None:
            problems = [f"{type(self).__name__}: has no head, so nothing mixes its paths. Load the language model."]
        if problems:
            raise ValueError("\n".join(problems))

    def choice_of_rows(self, names: Sequence[str | None]) -> PathChoice:
        """Make a choice of one expansion for each row of a batch."""
        if isinstance(names, str):
            raise ValueError(f"expansion_names: is {names!r}, expected a list, a name or None for each row.")
        self._known(list({name for name in names if name is not None}))
        known = tuple(name for name in self.expansions if name in names)
        if len(set(names)) == 1:
            return PathChoice(known)
        self._check_beside(known)
        return PathChoice(known, rows=tuple(names))

    # ---- a forward

    def run(self, **inputs: Any) -> Any:
        """Run the active expansions; `expansion_names` overrides them for each row of the batch."""
        refuse_adapter_names(inputs, A_NAME_A_ROW)
        rows = inputs.pop("expansion_names", None)
        if rows is not None:
            ids, embedded = inputs.get("input_ids"), inputs.get("inputs_embeds")
            choice, read = self.choice_of_rows(rows), embedded if ids is None else ids
            if read is not None and len(rows) != len(read):
                raise number_of_names(len(rows), len(read))
            context = self._context(choice)
        else:
            context = self.active.now()
        # this forward keeps its context even if another thread chooses for the model meanwhile
        with self.active.within(self._learning(context, inputs)):
            return self._run(inputs)

    def _learning(self, context: Context, inputs: dict[str, Any]) -> Context:
        """Let gradients pass through the base stream if inputs or weights of the base train."""
        if not (torch.is_grad_enabled() and (self._inputs_train(inputs) or self.base_trains())):
            return context
        return context._replace(paths=self.find_paths(context.paths.paths, base_learns=True))

    def _inputs_train(self, inputs: dict[str, Any]) -> bool:
        """Return whether embeddings, or the states of a cache such as the prefixes of PEFT, have a gradient."""
        layers = getattr(find_cache(inputs), "layers", ())
        states = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        return any(
            isinstance(given, Tensor) and given.requires_grad for given in (inputs.get("inputs_embeds"), *states)
        )

    def base_trains(self) -> bool:
        """Return whether a user lets weights of the base train."""
        return any(weight.requires_grad for name, weight in self.named_parameters() if ".expansions." not in name)

    def _run(self, inputs: dict[str, Any]) -> Any:
        choice, cache = self.choice, find_cache(inputs)
        key = (*choice.key, *(self.numbers[name] for name in choice.names), tuple(sorted(self.strengths.items())))
        check_cache(cache, choice, key)
        if is_quantised(cache) and self._joins_heads():
            warn(
                "The KV cache is quantised: heads of the base and of expansions may share a scale, so the base's path "
                "may be rounded otherwise than in the base. No promise about logits holds with this cache."
            )
        is_alone = choice.router is None and not choice.rows and not self._lacks_new_tokens(choice)
        output = self._run_stock(inputs) if is_alone else self._run_beside(inputs)
        cache = find_cache(output) if cache is None else cache
        if cache is not None:
            cache.expansion_choice = key
        return output

    def _joins_heads(self) -> bool:
        """Return whether an attention has more heads than the base's."""
        paths = self.active.now().paths
        return any(isinstance(module, ExpandedAttention) and module.make_parts(paths) for module in self.modules())

    def _lacks_new_tokens(self, choice: PathChoice) -> bool:
        """Return whether the head has tokens of an expansion that is not active."""
        has_head = super().get_output_embeddings() is not None
        return has_head and self.with_new_tokens != "" and self.with_new_tokens not in choice.names

    def _run_stock(self, inputs: dict[str, Any]) -> Any:
        """Run the stock forward, which caps the logits of some models after the head.

        That is too late if the head combines several paths. Then the head caps the logits of each path itself, and the
        stock forward sees a config without the cap.
        """
        self._check_width(inputs.get("inputs_embeds"))
        stock, key = super().forward, self.facts["softcap_key"]
        if key is None or self.active.now().answer is None:
            return stock(**inputs)
        return stock.__func__(twin(self, config=without(self.config, key)), **inputs)

    def _check_width(self, embeddings: Tensor | None) -> None:
        """Refuse embeddings of another width than the model's own for the active paths."""
        width = sum(width for _, width in self.streams_after(self.active.now().paths, -1))
        if embeddings is not None and embeddings.shape[-1] != width:
            raise ValueError(
                f"inputs_embeds: are {embeddings.shape[-1]} wide, expected {width}, the base stream and the up streams "
                "of what runs. Take them from model.get_input_embeddings()(ids)."
            )

    def _run_beside(self, inputs: dict[str, Any]) -> Any:
        """Run several paths side by side, and combine their logits."""
        router, choice = self.choice.router, self.choice
        keep, reads_tokens = inputs.pop("logits_to_keep", 0), router is not None and router.reads_tokens
        context = RouterContext.of(inputs, keep, reads_tokens=reads_tokens, is_training=self.training)

        def answer(features: Features) -> Tensor:
            context.move(features.unsplit.device)
            if router is None:
                return logits_of_rows(features.at(context.keep), choice)
            return route(router, features, context)

        with self.answering(answer):
            output = self._run_stock(inputs)
        cache = find_cache(inputs)
        context.remember(find_cache(output) if cache is None else cache)
        return output

    @contextmanager
    def answering(self, answer: Callable[[Features], Tensor], paths: tuple[Path, ...] = ()) -> Iterator[None]:
        """Let the head of this thread return the result of `answer` inside a `with` block.

        Args:
            answer: Makes the output of the head, such as logits, from the features of all paths.
            paths: Paths that run; by default those of the choice.
        """
        # the head itself, not the matrix that `get_output_embeddings` returns to a replaced forward
        head, base_learns = super().get_output_embeddings(), self.active.now().paths.base_learns
        found = self.find_paths(paths or self.choice.paths, base_learns=base_learns)

        def answer_features(features: Tensor) -> Tensor:
            return answer(Features.of(head, features, found, self.stream_widths))

        with self.active.within(Context(found, self.choice, answer_features)):
            yield

    def _find_router(self) -> Router:
        if self.choice.router is None:
            raise ValueError("One path runs now. Choose several with set_expansion([...]) first.")
        return self.choice.router

    def path_logits(self, input_ids: Tensor, **inputs: Any) -> list[Tensor]:
        """Compute the logits of the base and of each active expansion separately, each (b, t, v), without a router.

        Args:
            input_ids: Token ids (b, t).
            inputs: attention_mask and position_ids, if any.
        """
        names, logits = self.choice.names, list[Tensor]()
        if names:
            self._check_beside(names)

        def answer(features: Features) -> Tensor:
            logits.extend(features.logits())
            return logits[0]

        with self.answering(answer, (BASE, *map(Path, names))):
            self._run_stock({"input_ids": input_ids, "use_cache": False, **inputs})
        return logits

    @torch.no_grad()
    def score_tokens(self, input_ids: Tensor, **inputs: Any) -> TokenScores:
        """Compute the log-probability of each token but the first on each path, and its routing weights.

        Args:
            input_ids: Token ids (b, t).
            inputs: attention_mask and position_ids, if any.
        """
        router, scores = self._find_router(), []
        inputs = {"input_ids": input_ids, "use_cache": False, **inputs}
        context = RouterContext.of(inputs, 0, reads_tokens=router.reads_tokens, is_training=False)

        def answer(features: Features) -> Tensor:
            context.move(features.unsplit.device)
            scores.append(score_tokens(router, features, context))
            return scores[0].routed

        with self.answering(answer):
            self._run_stock(inputs)
        return scores[0]

    def generate(self, *args: Any, expansion_names: Sequence[str | None] | None = None, **options: Any) -> Any:
        """Generate as transformers does; `expansion_names` has an expansion for each row, or None for the base."""
        refuse_adapter_names(options, A_NAME_A_ROW)
        if expansion_names is None:
            return super().generate(*args, **options)
        prompts = [*args[:1], *(options.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
        rows = next((len(prompt) for prompt in prompts if prompt is not None), len(expansion_names))
        if rows != len(expansion_names):
            raise number_of_names(len(expansion_names), rows)
        with self.use_choice(self.choice_of_rows(expansion_names)):
            return super().generate(*args, **options)

    def init_continuous_batching(self, *args: Any, **options: Any) -> Any:
        """Start continuous batching as transformers does: in a thread of its own, which runs the choice of the model.

        Raises:
            ValueError: If a `with` block or `expansion_names` chooses, which that thread does not see.
        """
        if self.active.thread.context is not None:
            raise ValueError(
                "Continuous batching computes in a thread of its own, which does not see this with block. Choose by "
                "model.set_expansion(NAME), or None for the base."
            )
        return super().init_continuous_batching(*args, **options)

    def generate_batch(self, *args: Any, **options: Any) -> Any:
        """Generate by continuous batching as transformers does; all prompts run the choice of the model."""
        if options.get("expansion_names") is not None:
            raise ValueError(
                "expansion_names: continuous batching runs one choice for all prompts. Choose by "
                "model.set_expansion(NAME), or give generate the names."
            )
        return super().generate_batch(*args, **options)

    def _get_static_cache_init_shape(self) -> None:
        """Return no common shape: layers with new heads need more, so each takes the shape of its first states."""

    def _set_gradient_checkpointing(self, enable: bool = True, **options: Any) -> None:
        """Enable checkpointing as transformers does; the second forward runs the paths of the first."""
        checkpoint = options.pop("gradient_checkpointing_func", torch.utils.checkpoint.checkpoint)
        # no closure, since a copy of the model has to copy it
        checkpoint = partial(self.active.checkpointed, checkpoint)
        super()._set_gradient_checkpointing(enable=enable, gradient_checkpointing_func=checkpoint, **options)
        if enable:
            self.enable_input_require_grads()

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Run the model, and mark this thread while a replaced forward runs: see `get_output_embeddings`.

        Hooks of accelerate also replace the forward. They call the model's own, which uses the head itself.
        """
        if "forward" not in vars(self):
            return super().__call__(*args, **inputs)
        thread = self.active.thread
        before, thread.is_replaced = thread.is_replaced, True
        try:
            with self.active.within(self._learning(self.active.now(), inputs)):
                return super().__call__(*args, **inputs)
        finally:
            thread.is_replaced = before

    def get_output_embeddings(self) -> Any:
        """Return the head; inside a forward that replaces the model's, return one matrix over both streams.

        Stock forwards do not call this. The trainers of TRL replace the forward and multiply the base model's output by
        the weight of the head, to avoid the logits of a whole batch in memory.
        """
        head = super().get_output_embeddings()
        if not (hasattr(self, "active") and self.active.thread.is_replaced):
            return head
        if self.choice.router is not None or self.choice.rows:
            raise ValueError(
                "This model routes: no weight of a head gives its logits, which a trainer wants to compute itself. "
                "Train before you route, or train one expansion alone: model.set_expansion(NAME)."
            )
        blocks = [head.expansions[name] for name in self.choice.names if name in head.expansions]
        if blocks and blocks[0]._parameters.get("gate") is not None:
            raise ValueError(
                "The head of this model reads its up stream through a gate: no weight of a head gives its logits, "
                "which a trainer wants to compute itself. Train it with the Trainer of transformers."
            )
        return head.whole(blocks[0]) if blocks else head

    # ---- hidden states

    def _make_forks(self, paths: Paths) -> list[Fork | None]:
        """Make the fork before each layer; None if the streams do not change there."""
        return [
            fork_before(paths, layer, self.entering_widths if layer == 0 else self.stream_widths, self.stream_widths)
            for layer in range(self.layer_count)
        ]

    def _rearrange(self, index: int, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Fork streams in a hook before a layer, so that no stock forward is changed."""
        change = memo(self.known_forks, self.active.now().paths, self._make_forks)[index]
        if change is None:
            return None
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    def _widen(self, base_model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Widen features that stock code adds between layers, in a hook before the base model.

        Only base streams get them. Models that see images may add features of the images again between layers.
        """
        paths = self.active.now().paths
        if paths.is_base:
            return None

        def wide(features: Tensor, layer: int) -> Tensor:
            streams = self.streams_after(paths, layer)
            zeros = features.new_zeros
            return torch.cat([features if is_base else zeros(*features.shape[:-1], w) for is_base, w in streams], -1)

        return args, wide_features(kwargs, wide)

    def streams_after(self, paths: Paths, layer: int) -> list[tuple[bool, int]]:
        """List the streams after a layer: whether each is a base stream, and its width."""
        widths = self.entering_widths if layer == -1 else self.stream_widths
        return [(not up, widths[up]) for _, up in streams_of_groups(paths.groups(layer))]

    # ---- loading, training, saving

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load as `StrictlyLoaded` does, and choose the active expansions. No linear can be quantised.

        `expansion_enabled=False` runs the base model, `routing_enabled=False` the only expansion without the router.
        """
        refuse_quantisation(kwargs)
        is_enabled, is_routed = kwargs.pop("expansion_enabled", True), kwargs.pop("routing_enabled", True)
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.align()
        if not is_enabled:
            model.enable_expansion(False)
        elif not is_routed:
            model.enable_routing(False)
        return loaded

    def expansion_blocks(self) -> list[Blocks]:
        """List the blocks of all expansions."""
        return [module for module in self.modules() if isinstance(module, Blocks)]

    def freeze_base(self) -> None:
        """Let only the tensors of the expansions train."""
        super().freeze_base()
        for blocks in self.expansion_blocks():
            scaled = vars(blocks).get("learned", {})
            for name, parameter in blocks.named_parameters():
                parameter.requires_grad_(name not in scaled)

    def align(self) -> None:
        """Align blocks in memory as the base's weights are; see `Blocks.align`."""
        for blocks in self.expansion_blocks():
            blocks.align()

    def expansion_parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Iterate over the tensors of all expansions, frozen ones too: name, group, tensor."""
        for path, blocks in self.named_modules():
            if isinstance(blocks, Blocks):
                for name, parameter in blocks.named_parameters():
                    yield f"{path}.{name}", blocks.group_of[name], parameter

    def trainable_parameters(self) -> dict[str, dict[str, int]]:
        """Count the parameters that train, by expansion and group."""
        counts: dict[str, dict[str, int]] = {name: {} for name in self.expansions}
        for name, group, parameter in self.expansion_parameters():
            row = counts[name.rpartition(".expansions.")[2].partition(".")[0]]
            row[group] = row.get(group, 0) + parameter.numel() * parameter.requires_grad
        return counts

    def print_trainable_parameters(self) -> None:
        """Print the number of parameters that train, with a row per expansion and a column per group."""
        counts = self.trainable_parameters()
        groups = sorted({group for row in counts.values() for group in row})
        width = max([10, *(len(name) + 1 for name in counts)])
        print(" " * width + "".join(f"{group:>12}" for group in groups))
        for name, row in counts.items():
            print(f"{name:<{width}}" + "".join(f"{row.get(group, 0):>12,}" for group in groups))
        total = sum(parameter.numel() for parameter in self.parameters())
        trained = sum(sum(row.values()) for row in counts.values())
        print(f"trains {trained:,} of {total:,} parameters ({trained / total:.2%})")

    def save_pretrained(self, *args, **options):
        """Save as transformers does; on a quantised base, save only the tensors of expansions.

        The quantised tensors are not those of the base's files.

        Raises:
            ValueError: If an expansion has another strength than 1, and so not the tensors that it learned.
        """
        if self.strengths:
            raise ValueError(
                f"{', '.join(self.strengths)}: has another strength than 1, at which what it learned is not in the "
                "model. Set 1 and save, or write a model of this strength: scale-surgery merge --strength."
            )
        if self.is_base_quantised:
            tensors = options.get("state_dict") or self.state_dict()
            options["state_dict"] = {name: tensor for name, tensor in tensors.items() if ".expansions." in name}
        super().save_pretrained(*args, **options)

    def resize_token_embeddings(self, *args, **kwargs):
        """Refuse, since stock code would not resize the up parts of embedding and head."""
        raise NotImplementedError("Resize the base model's embeddings first, then expand it.")

    @torch.no_grad()
    def initialize_weights(self):
        """Initialise as the stock model does; expansion tensors that no file has stay zero.

        transformers initialises the modules of the base model by its stock class, which knows no expansion tensors.
        """
        missing = [
            parameter
            for blocks in self.expansion_blocks()
            if not getattr(blocks, "_is_hf_initialized", False)
            for parameter in blocks.parameters()
            if not getattr(parameter, "_is_hf_initialized", False)
        ]
        super().initialize_weights()
        for parameter in missing:
            parameter.zero_()


def logits_of_rows(features: Features, choice: PathChoice) -> Tensor:
    """Compute the logits of the path of each row, or of a single path; beams of one row are adjacent."""
    if not choice.rows:
        return features.logits()[0]
    batch, rows = len(features.bases[0]), len(choice.rows)
    if batch % rows:
        raise number_of_names(rows, batch)
    numbers = [0 if name is None else 1 + choice.names.index(name) for name in choice.rows]
    chosen = torch.tensor(numbers, device=features.unsplit.device).repeat_interleave(batch // rows)[:, None, None]
    return select(features.logits(), chosen)


@contextmanager
def stock_values(config: Any) -> Iterator[None]:
    """Put the base's own values into the config of a language model inside a `with` block."""
    text, values = config.get_text_config(decoder=True), config.scale_surgery.get("stock", {})
    wide = {key: getattr(text, key) for key in values}
    set_values(config, values)
    try:
        yield
    finally:
        set_values(config, wide)


def set_values(config: Any, values: dict[str, Any]) -> None:
    """Set values of the language model in a config."""
    text = config.get_text_config(decoder=True)
    for key, value in values.items():
        setattr(text, key, value)


def refuse_quantisation(given: dict[str, Any]) -> None:
    """Refuse options of from_pretrained that would quantise linears, of which an expanded model has none."""
    config = given.get("quantization_config")
    is_asked = config is not None and not getattr(config, "dequantize", False)
    if is_asked or given.get("load_in_4bit") or given.get("load_in_8bit"):
        raise ValueError(
            "quantization_config: would leave every widened linear as it is. Expand a quantised base in memory: "
            "scale_surgery.load_expansion(BASE, EXTRACT, quantization_config=...), with the folder that "
            "scale-surgery extract writes."
        )


def check_cache(cache: Cache | None, choice: PathChoice, key: tuple[Any, ...]) -> None:
    """Refuse a cache that was filled under another choice or strength, since it holds other heads, values or states.

    Exception: a cache that another model filled is taken for a single path.
    """
    if is_filled(cache) and getattr(cache, "expansion_choice", key if len(choice.paths) == 1 else None) != key:
        raise ValueError(
            f"The KV cache holds {count_tokens(cache) or 'states of'} tokens that were not read under this choice and "
            f"strength of expansions ({', '.join(choice.names) or 'the base'}{', routed' if choice.router else ''}), "
            "expected a cache that was filled under it. Begin with an empty one."
        )


def without(config: Any, key: str) -> View:
    """Make a view of a config in which one value of the language model is None."""
    text = config.get_text_config(decoder=True)
    part = View(text, {key: None})
    replaced = {name: part for name, value in vars(config).items() if value is text}
    whole = part if text is config else View(config, replaced)
    whole.get_text_config = lambda **_: part
    return whole


def number_of_names(names: int, rows: int) -> ValueError:
    """Make the error for a number of names that is not the number of rows."""
    return ValueError(f"expansion_names: {names} names for {rows} rows, expected one for each, None for the base.")


def unknown_name(name: Any, known: list[str]) -> str:
    """Describe the problem of a name that no expansion has, with the nearest names or all."""
    near = get_close_matches(str(name), known, 3, 0.5) or known[:MOST_NAMED]
    return f"{name}: is no expansion of this model, expected {' or '.join(near) or 'none, it has none yet'}."


def separate(layers: nn.Module) -> None:
    """Copy activations that several layers share, since each layer has a layout of its own."""
    seen: set[nn.Module] = set()
    for name, module in list(layers.named_modules(remove_duplicate=False)):
        if module in seen and not (module._modules or module._parameters or module._buffers):
            parent, _, last = name.rpartition(".")
            setattr(layers.get_submodule(parent), last, deepcopy(module))
        seen.add(module)


def refuse_adapter_names(inputs: dict[str, Any], instead: str) -> None:
    """Refuse PEFT's name for `expansion_names`, which stock code would accept and ignore."""
    if "adapter_names" in inputs:
        raise ValueError(f"adapter_names: is PEFT's, and this model has expansions. {instead}")


def refusing(name: str) -> Any:
    """Make a method that replaces one of transformers' adapter methods, which know nothing of expansions."""

    def refuse(self: Any, *args: Any, **options: Any) -> None:
        """Refuse: adapters of transformers know nothing of expansions."""
        raise NotImplementedError(
            f"{name}: is of transformers' adapters, and this model has expansions. Use load_expansion(model, EXTRACT, "
            "name=...) of scale_surgery, model.set_expansion, model.use_expansion, model.expansions or "
            "model.delete_expansion."
        )

    refuse.__name__ = name
    return refuse
