"""What verify says of routed checkpoints, and that it notices when it is not so."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from scale_surgery import (
    CheckpointError,
    CosineRouter,
    PosteriorRouter,
    Probes,
    Request,
    RunOptions,
    Verification,
    expand,
    inspect,
    route_export,
    verify,
)
from scale_surgery.biographies import SHIPPED_MODEL, biography, people
from scale_surgery.evidence import probes
from tests.command import run
from tests.conftest import edited, load, shake
from tests.each import mostly
from tests.evidence.test_verify import promise

ROUTINGS = {
    "mixture": PosteriorRouter(switch_rate=0),
    "switching": PosteriorRouter(),
    "cosine": CosineRouter(threshold=0.9),
    "strict": CosineRouter(threshold=0.9, strict=True),
}
Copy = Callable[[str], Path]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify_routed")
    expand(SHIPPED_MODEL, Request("1-3", variant="adapt", collaborative_layers="2-3"), folder / "fresh")
    shutil.copytree(folder / "fresh", folder / "adapt")
    shake(folder / "adapt")
    texts = [biography(person, 3).replace("\n", " ") for person in people(4)]
    (folder / "known.txt").write_text("\n".join(texts))
    for name, routing in ROUTINGS.items():
        route_export(folder / "adapt", folder / name, routing)
    return folder


@pytest.fixture
def copy(place: Path, tmp_path: Path) -> Copy:
    """Copies of routed folders, to be damaged by a test."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(place / name, tmp_path / name))

    return make


@pytest.fixture(scope="module")
def verified(place: Path) -> Callable[[str], Verification]:
    """What verify says of a routed folder beside its base."""
    return functools.cache(lambda name: verify(place / name, SHIPPED_MODEL))


@pytest.mark.parametrize("name", mostly(ROUTINGS, ("mixture", "cosine").__contains__))
def test_a_routed_model_keeps_what_it_promises(verified: Callable[[str], Verification], place: Path, name: str) -> None:
    result = verified(name)
    assert result.passed and result.routing == ROUTINGS[name].for_expansions(1) and result.state == "trained"
    assert inspect(place / name).expanded.routing == result.routing
    assert inspect(place / "adapt").expanded.routing is None
    claimed = {entry.name for entry in result.promises if entry.claimed}
    always = {"recoverable", "base_stream_always", "paths_as_alone"}
    assert claimed == always | ({"bounded_forgetting"} if name == "mixture" else set())
    assert promise(result, "base_stream_always").evidence.startswith(
        "8 W12 blocks exist, on paths of expansions alone; "
    )
    numbers = result.numbers
    assert numbers is not None and numbers.base_logits_bit_equal and all(layer.is_bit_equal for layer in numbers.layers)
    assert [path.name for path in numbers.paths] == ["base", "default"]
    assert all(path.is_bit_equal and path.generation_equal and path.uncached_equal for path in numbers.paths)
    assert not numbers.is_bit_equal, "the control: what is routed is not the base's output"


def test_the_bound_in_numbers(verified: Callable[[str], Verification]) -> None:
    held = promise(verified("mixture"), "bounded_forgetting")
    assert held.holds and held.evidence.startswith("at most ln 2 = 0.693 nats a text; ")
    switching = promise(verified("switching"), "bounded_forgetting")
    assert not switching.claimed and switching.problems == (
        "each further token adds 0.01 nats to the bound, expected none: switch rate 0.",
    )
    assert switching.evidence.startswith(
        "no bound for all lengths: ln 2 = 0.693 nats a text and 0.01 more a token, by switching; "
    )
    cosine = promise(verified("cosine"), "bounded_forgetting")
    assert not cosine.claimed and cosine.problems == ("the cosine router promises no bound.",)


@torch.no_grad()
def test_without_the_router_the_bound_is_broken(place: Path) -> None:
    """The control of the bound: the adapt path alone loses far more than ln 2 on some prompt."""
    numbers = verify(place / "mixture", probes=Probes(place / "known.txt")).numbers
    assert numbers is not None and (held := numbers.mixture) is not None
    assert 0 < held.excess <= math.log(2) + held.rounding < 1
    model, tokenizer = load(place / "mixture"), AutoTokenizer.from_pretrained(place / "mixture")
    lost = []
    for line in (place / "known.txt").read_text().splitlines():
        ids = tokenizer(line, return_tensors="pt")["input_ids"]
        base, adapt = (
            logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).sum() for logits in model.path_logits(ids)
        )
        lost.append(float(base - adapt))
    assert max(lost) > 10 * math.log(2)


@pytest.mark.parametrize("name", mostly(ROUTINGS, "mixture".__eq__))
def test_before_training_output_and_bound_hold(place: Path, tmp_path: Path, name: str) -> None:
    result = verify(route_export(place / "fresh", tmp_path / name, ROUTINGS[name]).path)
    assert result.passed and "output_at_init" in result.required
    assert result.numbers is not None and result.numbers.is_bit_equal and result.numbers.generation_equal


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, old
    file.write_text(text.replace(old, new))


def test_a_router_that_gives_the_base_no_weight_is_caught(place: Path, copy: Copy) -> None:
    path = copy("mixture")
    mixed = "lead.log1p_().add_(anchor)"
    change(path / "expanded_routing.py", mixed, "rest[0]")
    assert not verify(path, probes=None).passed
    run = verify(path, run=RunOptions(trust_remote_code=True), probes=Probes(place / "known.txt"))
    assert not run.passed and not promise(run, "bounded_forgetting").holds
    assert any(problem.startswith("a text (prompt ") for problem in promise(run, "bounded_forgetting").problems)
    assert promise(run, "base_stream_always").problems == run.problems, "the paths are what they were"


def test_in_half_precision_the_routers_own_numbers_are_judged(place: Path, tmp_path: Path) -> None:
    """Rounding of logits may cost more than the bound itself, so the router is judged before it."""
    load(SHIPPED_MODEL, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(SHIPPED_MODEL).save_pretrained(tmp_path / "base")
    shake(narrow := expand(tmp_path / "base", Request("1-3", variant="adapt"), tmp_path / "wide").path)
    path = route_export(narrow, tmp_path / "mixture", ROUTINGS["mixture"]).path
    held = verify(path, record=False)
    assert held.passed and held.numbers is not None and (mixture := held.numbers.mixture) is not None
    assert mixture.rounding > math.log(2) > 100 * mixture.own_rounding
    assert 0 < mixture.own_excess <= math.log(2) + mixture.own_rounding
    # a prior that is not the one in the record: the base begins with a tenth
    change(path / "expanded_routers.py", "self.prior, self.switch_rate)", "(0.1, 0.9), self.switch_rate)")
    run = verify(path, run=RunOptions(trust_remote_code=True), record=False)
    assert run.numbers is not None and (worse := run.numbers.mixture) is not None
    assert worse.excess < math.log(2) + worse.rounding, "its logits alone would pass"
    assert any("by the router's own numbers" in problem for problem in promise(run, "bounded_forgetting").problems)


def test_a_router_that_finds_no_state_is_caught(place: Path, copy: Copy) -> None:
    """As code does that knows the KV cache by a name which transformers gave up; the control keeps its state."""
    kept = verify(place / "switching", record=False).numbers
    assert kept is not None and (state := kept.kept_state) is not None
    assert state.tokens == state.read > 20 and state.weight_difference <= 1e-6 < state.rounding == 1e-3
    cosine = verify(place / "cosine", record=False).numbers
    assert cosine is not None and cosine.kept_state is None, "it reads no tokens"
    path = copy("switching")
    change(path / "expanded_routing.py", 'input_ids"), find_cache(inputs)', 'input_ids"), inputs.get("a_former_name")')
    with pytest.raises(CheckpointError, match="no KV cache holds the router's state for its beginning"):
        verify(path, run=RunOptions(trust_remote_code=True), record=False)
    change(path / "expanded_routing.py", "reads_tokens and not past and goes_on(", "False and goes_on(")
    run = verify(path, run=RunOptions(trust_remote_code=True), record=False)
    assert not run.passed and run.numbers is not None and not promise(run, "bounded_forgetting").claimed
    assert any(f"its state holds 1 token of {state.read}, so generate" in problem for problem in run.problems)


def test_a_router_whose_state_is_another_is_caught(copy: Copy) -> None:
    """Its weights after each token are lost, and the count of tokens is right."""
    path = copy("switching")
    change(path / "expanded_routing.py", "weights.transpose(1, 2)", "weights.transpose(1, 2) * 0")
    run = verify(path, run=RunOptions(trust_remote_code=True), record=False)
    assert not run.passed
    assert any(problem.startswith("router: weights of the paths with and without") for problem in run.problems)


def test_a_preserve_path_with_w12_is_caught(copy: Copy) -> None:
    path = copy("cosine")
    change(path / "expanded_modules.py", "added(base, up, y, group.has_w12)", "added(base, up, y, True)")
    run = verify(path, run=RunOptions(trust_remote_code=True))
    assert run.numbers is not None and not run.numbers.base_logits_bit_equal
    assert any("base stream after layer" in problem for problem in promise(run, "base_stream_always").problems)


def test_the_command_names_the_router(place: Path) -> None:
    done = run("verify", place / "mixture", "--max-new-tokens", "0")
    assert "verified adapt, routed (posterior, all paths alike, switch rate 0), trained" in " ".join(
        done.output.split()
    )


def test_paths_generate_as_the_base_says_that_is_done(tmp_path: Path) -> None:
    """A base that asks for a repetition penalty: the model that a path is alone has it too."""
    base = Path(shutil.copytree(SHIPPED_MODEL, tmp_path / "base"))
    with edited(base / "generation_config.json") as settings:
        settings["repetition_penalty"] = 3.0
    wide = expand(base, Request("3", variant="adapt", collaborate="both"), tmp_path / "wide").path
    shake(wide)
    result = verify(route_export(wide, tmp_path / "routed", PosteriorRouter(switch_rate=0)).path)
    assert result.passed and result.numbers is not None
    assert all(path.generation_equal and path.uncached_equal for path in result.numbers.paths)


def test_a_loss_that_is_no_number_is_the_worst(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter((0.1, math.nan, *[0.2] * 30))
    monkeypatch.setattr(
        probes, "excess", lambda model, texts, device: [(name, next(losses), 0.0) for name in texts.names]
    )
    held = promise(verify(place / "mixture", record=False), "bounded_forgetting")
    assert not held.holds and any("loses nan nats against the base" in problem for problem in held.problems)
    assert "at most nan against" in held.evidence
