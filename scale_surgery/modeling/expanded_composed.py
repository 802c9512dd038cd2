"""The mixin before a stock model class: one base, many expansions, switched by name or mixed.

The model is its base. Each expansion is an expanded model on the same weights. One of them alone runs as that model;
several pass through the stock forward side by side, and a posterior mixture, or a choice for each row, makes the
logits. This file needs only torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from .expanded_arranged import Arrangement, compose_layers, prepare, restore
from .expanded_choice import (
    Choice,
    by_row,
    cache_of,
    check_cache,
    check_rows,
    make_mixture,
    number_problems,
    remember,
    tokens_of,
    unknown_name,
)
from .expanded_left_out import (
    LeftOut,
    as_log_probabilities,
    bring_back,
    leave_out,
    left_out_of,
    may_leave_out,
    weigh_next,
)
from .expanded_model import ExpandedPreTrainedModel, find_base_model, refuse_adapter_names, separate
from .expanded_modules import ExpandedModule, expanded_class
from .expanded_posterior import LAG, Features, PathScores

# what transformers' own adapters are called by
ADAPTER_METHODS = (
    *("load_adapter", "add_adapter", "set_adapter", "delete_adapter", "enable_adapters", "disable_adapters"),
    *("active_adapter", "active_adapters", "get_adapter_state_dict"),
)

# ways in which expansions pass through the modules that are remembered: making one takes as long as a token
MOST_ARRANGED = 8


A_NAME_A_ROW = "Give expansion_names=, a name or None for each row."


class ComposedHead(ExpandedModule):
    """The head of a composed model: it is handed the features of all paths, and `answer` makes the logits of them."""

    answer: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(x)


class ComposedModel:
    """Mixin before a stock model class: several expansions of it, each under its name."""

    def become_composed(self, facts: dict[str, Any]) -> None:
        """Begin without an expansion, as the base.

        Args:
            facts: What `build_paths` says of the base.
        """
        self.facts, self.choice, self.arranged = facts, Choice(), ()
        self.problems: dict[str, list[str]] = {}
        self.expanded_models = nn.ModuleDict()
        base_model = find_base_model(self, facts["base_model"])
        layers = base_model.get_submodule(facts["layers"])
        separate(layers)
        self._forget_arrangements()
        prepare(base_model, layers)

    @property
    def expansions(self) -> list[str]:
        """Names of the expansions, in the order in which they were loaded."""
        return list(self.expanded_models)

    @property
    def active_expansion(self) -> str | list[str] | None:
        """What was chosen by `set_expansion`: a name, a list that is mixed, or None for the base."""
        names = list(self.choice.names)
        return names if self.choice.mixture else names[0] if names else None

    def set_expansion(
        self,
        names: str | Sequence[str] | None,
        *,
        prior: Sequence[float] | None = None,
        switch_rate: float = 0.01,
        prune: float = 0.0,
        lag: int = LAG,
    ) -> None:
        """Choose what the model is from now on.

        A KV cache belongs to the choice under which it was filled.

        Args:
            names: A name: the base with that expansion. None: the base. A list: the base and these, each token's
                probability the mean of theirs, weighed by how well each predicted the text so far.
            prior: Weights of the base and of each of a list at the start of a text. Default: all equal.
            switch_rate: Share of its weight that each gives to the others at every token, at least 0 and less than 1.
            prune: Weight below which one of a list is left out while tokens are read one by one; 0 leaves none out.
            lag: Tokens after which those that are out read what they have not.

        Raises:
            ValueError: If there is no such expansion, a name stands twice in a list, several cannot be mixed on this
                architecture, or the numbers are out of range.
        """
        if names is None or isinstance(names, str):
            problems = number_problems(switch_rate, prune, lag)
            if prior is not None:
                problems = [f"prior: weighs the paths of a list, but {names!r} is no list. Leave it out.", *problems]
            if problems:
                raise ValueError("\n".join(problems))
            self.choice = Choice(self._known([] if names is None else [names]))
            return
        known = self._known(names)
        self._check_composable(known)
        self.choice = Choice(known, make_mixture(len(known) + 1, prior, switch_rate, prune, lag))

    @contextmanager
    def use_expansion(self, names: str | Sequence[str] | None, **options: Any) -> Iterator[None]:
        """Choose as `set_expansion` does inside a `with` block."""
        before = self.choice
        self.set_expansion(names, **options)
        try:
            yield
        finally:
            self.choice = before

    def expansion_disabled(self) -> AbstractContextManager[None]:
        """Run the base model alone inside a `with` block."""
        return self.use_expansion(None)

    def trainable_parameters(self) -> dict[str, dict[str, int]]:
        """Count what trains: for each expansion, parameters by group."""
        counts: dict[str, dict[str, int]] = {}
        for name, model in self.expanded_models.items():
            rows = model.trainable_parameters().values()
            groups = {group: None for row in rows for group in row}
            counts[name] = {group: sum(row.get(group, 0) for row in rows) for group in groups}
        return counts

    print_trainable_parameters = ExpandedPreTrainedModel.print_trainable_parameters

    def delete_expansion(self, name: str) -> None:
        """Forget an expansion; where it was chosen, the model is its base from then on.

        Args:
            name: Its name.

        Raises:
            ValueError: If there is none of that name.
        """
        self._known([name])
        self._arrange(())
        self._forget_arrangements()
        del self.expanded_models[name]
        self.problems.pop(name, None)
        if name in self.choice.names:
            self.choice = Choice()

    def add_expanded_model(self, name: str, model: nn.Module, problems: list[str]) -> None:
        """Take up an expanded model on the same weights, and choose it.

        Args:
            name: Its name.
            model: The model; base weights are the very parameters of this one afterwards.
            problems: Why it cannot run beside others, a line each.
        """
        self.lend(model)
        self._forget_arrangements()
        self.expanded_models[name], self.problems[name] = model, problems
        self.set_expansion(name)

    def lend(self, model: nn.Module) -> None:
        """Let an expanded model of this base stand on the weights and buffers of this one."""
        # ours alone, without what other expansions share of it
        all_own = (*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False))
        own = {key: each for key, each in all_own if not _is_inside(key)}
        for path, module in model.named_modules():
            for part in (module._parameters, module._buffers):
                part.update({last: own.get(f"{path}.{last}".strip("."), part[last]) for last in part})
        model.align_copies()

    def _known(self, names: Iterable[str]) -> tuple[str, ...]:
        """Names of a request, refused where one is unknown or stands twice."""
        found = tuple(names)
        problems = [unknown_name(name, self.expansions) for name in found if name not in self.expansions]
        twice = [name for name in dict.fromkeys(found) if found.count(name) > 1]
        problems += [f"{name}: is named {found.count(name)} times, expected once." for name in twice]
        if problems:
            raise ValueError("\n".join(problems))
        return found

    def _check_composable(self, names: tuple[str, ...]) -> None:
        """Refuse what cannot run side by side."""
        problems = [f"{name}: {line}" for name in names for line in self.problems[name]]
        if not names:
            problems = ["A list of no names: expected at least one. None gives the base."]
        elif self.get_output_embeddings() is None:
            problems = [f"{type(self).__name__}: has no head, so nothing mixes its paths. Load the language model."]
        if problems:
            raise ValueError("\n".join(problems))

    def _rows(self, rows: Sequence[str | None]) -> Choice:
        """The choice of each row of a batch."""
        if isinstance(rows, str):
            raise ValueError(f"expansion_names: is {rows!r}, expected a list, a name or None for each row.")
        self._known({name for name in rows if name is not None})
        names = tuple(name for name in self.expansions if name in rows)
        if len(set(rows)) == 1:
            return Choice(names)
        self._check_composable(names)
        return Choice(names, rows=tuple(rows))

    @contextmanager
    def _chosen(self, rows: Sequence[str | None] | None) -> Iterator[None]:
        """Let each row of a batch have its own expansion inside a `with` block, where that is asked for."""
        before = self.choice
        self.choice = before if rows is None else self._rows(rows)
        try:
            yield
        finally:
            self.choice = before

    def save_pretrained(self, *args: Any, **options: Any) -> None:
        """Refuse: each expansion is saved by itself, beside the base that is saved already."""
        raise NotImplementedError(
            "A composed model is not saved as one folder. Save each expansion: model.expanded_models[name]"
            ".save_pretrained(FOLDER), then scale-surgery adopt FOLDER --base MODEL -o EXPANDED, and extract EXPANDED."
        )

    def resize_token_embeddings(self, *args: Any, **options: Any) -> None:
        """Refuse: expansions have parts of embedding and head that stock code does not resize."""
        raise NotImplementedError("Resize the base model's embeddings first, then expand it.")

    def generate(self, *args: Any, expansion_names: Sequence[str | None] | None = None, **options: Any) -> Any:
        """Generate as transformers does; `expansion_names` chooses for each row of the batch, None for the base."""
        refuse_adapter_names(options, A_NAME_A_ROW)
        with self._chosen(expansion_names):
            return super().generate(*args, **options)

    def run(self, **inputs: Any) -> Any:
        """Run what was chosen; `expansion_names` chooses for each row of the batch."""
        refuse_adapter_names(inputs, A_NAME_A_ROW)
        rows = inputs.pop("expansion_names", None)
        check_rows(rows, inputs)
        with self._chosen(rows):
            choice, cache = self.choice, inputs.get("past_key_values")
            check_cache(cache, choice)
            with self._leaving_out(super().forward, inputs):
                output = self._run_choice(super().forward, inputs)
                if choice.mixture is not None and self.choice.mixture is None:
                    output = as_log_probabilities(output)
        cache = cache_of(output) if cache is None else cache
        if cache is not None:
            cache.expansion_choice = choice.key
        return output

    def _run_choice(self, stock: Any, inputs: dict[str, Any]) -> Any:
        """Run what is chosen for all rows."""
        if self.choice.is_composed:
            return self._run_composed(self.choice, stock, inputs)
        if self.choice.names:
            return self.expanded_models[self.choice.names[0]](**inputs)
        self._arrange(())
        return stock(**inputs)

    @contextmanager
    def _leaving_out(self, stock: Any, inputs: dict[str, Any]) -> Iterator[None]:
        """Run those paths of a mixture that weigh enough, where that is asked for, inside a `with` block."""
        choice, cache = self.choice, inputs.get("past_key_values")
        if cache is None or choice.mixture is None or not choice.mixture.prune:
            yield
            return
        left, may = left_out_of(cache), may_leave_out(inputs)
        if left and not (may and 0 < left.get_seq_length() < choice.mixture.lag):
            self._catch_up(stock, left, inputs)
            left = None
        if may and not left:
            self._arrange(choice.names)
            left = leave_out(choice, self.arrangements[choice.names].heads, cache, inputs["input_ids"])
        self.choice = left.inside if left else choice
        try:
            yield
        finally:
            self.choice = choice
        if left:
            left.owe(inputs["input_ids"], inputs.get("position_ids"))

    @torch.no_grad()
    def _catch_up(self, stock: Any, left: LeftOut, inputs: dict[str, Any]) -> None:
        """Let all paths read what some have not; each then weighs in the mixture what it weighed before."""
        cache, mask = inputs["past_key_values"], inputs.get("attention_mask")
        owed, weights = bring_back(left, self.choice, cache)
        if not left.get_seq_length():
            return
        if mask is not None:
            owed["attention_mask"] = mask[:, : left.whole.seen + left.get_seq_length()]
        self._run_composed(self.choice, stock, owed)
        if inputs.get("input_ids") is not None:
            weigh_next(left.whole, weights, left.numbers(self.choice), inputs["input_ids"][:, :1])

    def _run_composed(self, choice: Choice, stock: Any, inputs: dict[str, Any]) -> Any:
        """Run all paths side by side, and make one set of logits of them."""
        tokens = tokens_of(inputs, choice, is_training=self.training)

        def answer(paths: Features) -> Tensor:
            return choice.mixture.logits(paths, tokens) if choice.mixture else by_row(paths.at(tokens.keep), choice)

        with self._answering(answer):
            output = stock(**inputs)
        if tokens.result is not None:
            remember(tokens, inputs.get("past_key_values"), output)
        return output

    @torch.no_grad()
    def path_logits(self, input_ids: Tensor, **inputs: Any) -> list[Tensor]:
        """Logits of each path of a list alone: the base's, and those of each expansion in its order; (b, t, v) each.

        Args:
            input_ids: Token ids (b, t).
            inputs: attention_mask and position_ids, where there are any.
        """
        found: list[Tensor] = []

        def answer(paths: Features) -> Tensor:
            found.extend(paths.logits())
            return found[0]

        with self._answering(answer, mixes=True):
            super().forward(input_ids=input_ids, use_cache=False, **inputs)
        return found

    @torch.no_grad()
    def score_tokens(self, input_ids: Tensor, **inputs: Any) -> PathScores:
        """Log-probability of each token but the first on each path of a list, and what weight each has there.

        Args:
            input_ids: Token ids (b, t).
            inputs: attention_mask and position_ids, where there are any.
        """
        tokens = tokens_of({"input_ids": input_ids, **inputs}, self.choice, is_training=self.training)
        found: list[PathScores] = []

        def answer(paths: Features) -> Tensor:
            found.append(self.choice.mixture.score(paths, tokens))
            return found[0].mixed

        with self._answering(answer, mixes=True):
            super().forward(input_ids=input_ids, use_cache=False, **inputs)
        return found[0]

    @contextmanager
    def _answering(self, answer: Callable[[Features], Tensor], *, mixes: bool = False) -> Iterator[None]:
        """Let all paths run, and the head give what `answer` makes of them, inside a `with` block."""
        if mixes and self.choice.mixture is None:
            raise ValueError("One path runs now. Choose several with set_expansion([...]) first.")
        self._arrange(self.choice.names)
        head, config, key = (
            self.get_output_embeddings(),
            self.config.get_text_config(decoder=True),
            self.facts["softcap"],
        )
        # stock code would cap the mixture; each path is capped before
        cap = getattr(config, key) if key and self.choice.mixture else None
        stock = type(head)
        head.__class__, head.answer = expanded_class(ComposedHead, stock), lambda x: answer(self._features(x, cap))
        if cap is not None:
            setattr(config, key, None)
        try:
            yield
        finally:
            head.__class__ = stock
            del head.answer
            if cap is not None:
                setattr(config, key, cap)

    def _arrange(self, names: tuple[str, ...]) -> None:
        """Let these expansions pass through the modules; without any they are stock ones."""
        if names == self.arranged:
            return
        members, before = {name: self.expanded_models[name] for name in names}, self.arrangements.get(self.arranged)
        restore(self.modules() if before is None else before.told)
        # whatever stops this, all is restored the next time
        self.arranged = None
        if names not in self.arrangements:
            if len(self.arrangements) >= MOST_ARRANGED:
                self._forget_arrangements()
            self.arrangements[names] = Arrangement.of(self, compose_layers(self, members, self.facts))
        else:
            self.arrangements[names].again()
        self.stage, self.arranged = self.arrangements[names].stage, names
        # a token at a time, asking for them costs as much as a product
        self.up_widths = {name: own.config.scale_surgery["widths"]["up_width"] for name, own in members.items()}
        self.path_heads = tuple(own.get_output_embeddings() for own in members.values())

    def _forget_arrangements(self) -> None:
        """Forget how expansions passed through the modules, but for how none does."""
        self.arrangements = {(): Arrangement()}

    def _features(self, features: Tensor, cap: float | None) -> Features:
        """Take apart what leaves the last norm, in the order of the names."""
        hidden, up = self.facts["hidden"], self.up_widths
        whole, *apart = features.chunk(1 + len(self.stage.apart))
        sizes = [hidden, *(up[name] for name in self.stage.shared)]
        base, *shared = whole[..., : sum(sizes)].split(sizes, dim=-1)
        streams = {name: (base, own) for name, own in zip(self.stage.shared, shared, strict=True)}
        for name, own in zip(self.stage.apart, apart, strict=True):
            streams[name] = own[..., :hidden], own[..., hidden : hidden + up[name]]
        found = (base, base[..., :0]), *(streams[name] for name in self.arranged)
        return Features((self.path_heads[0], *self.path_heads), found, whole, cap)


def _is_inside(name: str) -> bool:
    return name.startswith("expanded_models.")


def _refusing(name: str) -> Any:
    def refuse(self: Any, *args: Any, **options: Any) -> None:
        """Refuse: adapters of transformers know nothing of expansions."""
        raise NotImplementedError(
            f"{name}: is of transformers' adapters, and this model has expansions. Use load_expansion(model, EXTRACT, "
            "name=...) of scale_surgery, model.set_expansion, model.use_expansion, model.expansions or "
            "model.delete_expansion."
        )

    refuse.__name__ = name
    return refuse


@cache
def composed_class(stock: type, bases: tuple[type, ...] = (), *, name: str = "", **own: Any) -> type:
    """The composed form of a stock model class; its forward has the signature from which others learn what it takes.

    Args:
        stock: The stock class.
        bases: Those of the class; by default the mixin and the stock class.
        name: Of the class.
        own: Attributes of the class.
    """
    names = list(signature(stock.forward).parameters)[1:]

    @wraps(stock.forward)
    def forward(self, *args, **inputs):
        return self.run(**dict(zip(names, args, strict=False)), **inputs)

    said = {name: _refusing(name) for name in ADAPTER_METHODS if hasattr(stock, name)}
    said |= {"forward": forward, "__module__": __name__, "__doc__": ComposedModel.__doc__, **own}
    return type(name or f"Composed{stock.__name__}", bases or (ComposedModel, stock), said)
