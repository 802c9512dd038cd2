"""What verify says of folders with several expansions, and that it notices when it is not so."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scale_surgery import (
    CheckpointError,
    Probes,
    RunOptions,
    Verification,
    compose,
    extract,
    verify,
)
from scale_surgery.checkpoint.hashes import hash_tensors
from scale_surgery.evidence.probes import compare_path, run_alone
from scale_surgery.folder.check import check_integrity
from scale_surgery.folder.folder import open_folder
from scale_surgery.folder.record import read_manifest
from scale_surgery.running.prompts import Batch
from tests.command import run
from tests.composed import LLAMA, Made, mixed
from tests.conftest import Bars, digests, edited, flip, load
from tests.each import mostly
from tests.evidence.test_verify import promise
from tests.routed import padded, random_ids

NAMES = ("medicine", "law", "chess")
CLAIMED = ("recoverable", "base_stream_always", "paths_as_alone", "bounded_forgetting")


@pytest.fixture(scope="module")
def llama(made_of: Callable[..., Made]) -> Made:
    return made_of("llama", LLAMA)


@pytest.fixture(scope="module")
def folder(llama: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verified") / "all"
    extracts = {name: llama.extracts[name] for name in NAMES}
    return compose(llama.base, extracts, path, routing=mixed(switch_rate=0)).path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged by a test."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def broken(result: Verification) -> set[str]:
    assert not result.passed
    return {entry.name for entry in result.promises if entry.holds is False}


def test_it_keeps_what_it_promises(llama: Made, folder: Path) -> None:
    before = digests(folder)
    result = verify(folder, llama.base)
    assert result.passed and result.required == CLAIMED and result.recorded
    numbers = result.numbers
    assert numbers is not None and [path.name for path in numbers.paths] == ["base", *NAMES]
    assert all(path.is_bit_equal and path.generation_equal and path.uncached_equal for path in numbers.paths)
    # four prompts, two texts of each of four paths, and two halves of each of three pairs in both orders
    mixture = numbers.mixture
    assert mixture is not None and mixture.texts == 4 + 2 * 4 + 2 * 2 * 3
    assert 0.5 < mixture.excess <= math.log(4) + mixture.rounding < 1.5
    assert numbers.base_logits_bit_equal and all(layer.is_bit_equal for layer in numbers.layers)
    assert not numbers.is_bit_equal, "the control: the mixture is not the base's output"
    assert promise(result, "bounded_forgetting").evidence.startswith("at most ln 4 = 1.39 nats a text; 24 texts lose")
    assert result.routing == mixed(switch_rate=0).for_expansions(len(NAMES)) and result.expansions == NAMES
    assert result.state == "trained" and result.trained_tensors > 30
    # what is found stands in the record, and in no other file
    after = digests(folder)
    assert {name for name in after if after[name] != before[name]} == {"surgery.json"} and len(after) == len(before)
    assert verify(folder, probes=None).recorded, "which says less, so what the models showed stays"
    assert read_manifest(folder).verification == result.to_json()
    assert extract(folder, folder.parent / "law", name="law").tensors


def test_a_path_that_is_another_model_is_found(llama: Made, folder: Path) -> None:
    """The control of `paths_as_alone`: no two of the models are equal."""
    batch = Batch(random_ids(2, 9), torch.ones(2, 9, dtype=torch.long))
    runs = list(run_alone(open_folder(folder), NAMES, batch, 4, RunOptions("cpu")))
    assert torch.equal(runs[1].logits, llama.alone("law")(batch.ids).logits.flatten(0, 1))
    for first in range(3):
        for second in range(3):
            comparison = compare_path("law", runs[first], runs[second], runs[second].logits)
            assert comparison.is_bit_equal == (first == second) and bool(comparison.problems) == (first != second)
    comparison = compare_path("law", runs[0], runs[0], runs[1].logits)
    assert not comparison.is_bit_equal and comparison.drift == 0
    assert comparison.problems == (
        f"path law: logits drift {comparison.drift_beside:.3g} from the model that law is alone, expected bit-equal.",
    )


@pytest.mark.slow
def test_with_switching_there_is_no_bound_for_all_lengths(llama: Made, tmp_path: Path) -> None:
    extracts = {name: llama.extracts[name] for name in NAMES[:2]}
    result = verify(compose(llama.base, extracts, tmp_path / "out").path, probes=Probes(max_new_tokens=0))
    switching = promise(result, "bounded_forgetting")
    assert result.passed and not switching.claimed and "bounded_forgetting" not in result.required
    assert switching.evidence.startswith(
        "no bound for all lengths: ln 3 = 1.1 nats a text and 0.01 more a token, by switching; 4 texts lose at most "
    )
    assert switching.problems == ("each further token adds 0.01 nats to the bound, expected none: switch rate 0.",)
    assert result.numbers is not None and result.numbers.paths[0].generation_equal is None
    asked = verify(tmp_path / "out", probes=None, required=("bounded_forgetting",))
    assert not asked.passed


@pytest.mark.slow
def test_who_begins_with_less_may_lose_more(llama: Made, tmp_path: Path) -> None:
    """The bound is that of the smallest weight; with all paths alike it would be broken."""
    extracts = {name: llama.extracts[name] for name in NAMES}
    result = verify(
        compose(llama.base, extracts, tmp_path / "out", routing=mixed((0.333, 0.333, 0.001, 0.333), 0)).path
    )
    assert result.passed and result.numbers is not None
    mixture = result.numbers.mixture
    assert mixture is not None and math.log(4) + 1 < mixture.excess <= -math.log(0.001) + mixture.rounding
    assert promise(result, "bounded_forgetting").evidence.startswith("at most 6.91 nats by the prior a text; ")


def shard_of(name: str) -> str:
    return f"expansion-{name}-00001-of-00001.safetensors"


def test_damage_breaks_what_it_concerns(copy: Path) -> None:
    """Headers are right, a byte of a tensor is not; a tensor of an expansion has another shape."""
    assert verify(copy, probes=None).passed, "the control"
    law = copy / shard_of("law")
    whole = law.read_bytes()
    with edited(law) as tensors:
        name = next(iter(tensors))
        tensors[name] = torch.zeros(3, 2)
    result = verify(copy)
    assert "paths_as_alone" in broken(result) and result.not_run == "tensors are missing or damaged"
    assert any(line.startswith(f"{name}: shape (3, 2)") for line in promise(result, "paths_as_alone").problems)
    law.write_bytes(whole)
    flip(copy / "model-00001-of-00001.safetensors")
    result = verify(copy, probes=None)
    assert broken(result) == {"recoverable", "base_stream_always"}
    assert any("differ from the base's model.saf" in line for line in promise(result, "recoverable").problems)


def test_a_damaged_record_and_shards_that_were_swapped_or_lost_are_refused(copy: Path) -> None:
    law, chess = copy / shard_of("law"), copy / shard_of("chess")
    flip(copy / "surgery.json", -2)
    with pytest.raises(CheckpointError, match=r"surgery\.json"):
        verify(copy)
    flip(copy / "surgery.json", -2)
    law.rename(copy / "kept")
    with pytest.raises(CheckpointError, match=shard_of("law")):
        verify(copy)
    chess.rename(law)
    (copy / "kept").rename(chess)
    with pytest.raises(CheckpointError, match="expansion-"):
        verify(copy)


def test_another_plan_in_the_config_makes_a_path_another_model(copy: Path) -> None:
    """Its tensors are as they were; nothing is run before that is asked for."""
    with edited(copy / "config.json") as config:
        chess = next(entry for entry in config["scale_surgery"]["expansions"] if entry["name"] == "chess")
        spec = next(entry for entry in chess["expanded"].values() if "share" in entry)
        spec["share"] /= 2
    assert verify(copy).not_run == "code or config.json is not what was written"
    result = verify(copy, run=RunOptions(trust_remote_code=True))
    assert result.problems == ("config.json: scale_surgery is not what the expansion wrote.",)
    assert result.numbers is not None
    assert [path.name for path in result.numbers.paths if not path.is_bit_equal] == ["chess"]
    assert "paths_as_alone" in broken(result)


def test_another_prior_in_the_config_breaks_the_bound(copy: Path) -> None:
    with edited(copy / "config.json") as config:
        config["scale_surgery"]["router"]["prior"] = [0.333, 0.333, 0.001, 0.333]
    result = verify(copy, run=RunOptions(trust_remote_code=True))
    assert any(
        " against its best path, expected at most 1.3" in line
        for line in promise(result, "bounded_forgetting").problems
    )


def test_another_base_is_found(llama: Made, folder: Path, tmp_path: Path) -> None:
    """What cannot be said of the folder is not said."""
    other_base = Path(shutil.copytree(llama.base, tmp_path / "other"))
    flip(other_base / "model.safetensors")
    result = verify(folder, other_base, record=False)
    assert broken(result) == {"recoverable", "base_stream_always"} and result.numbers is None
    assert result.not_run == "the given base is another one"
    assert promise(result, "bounded_forgetting").holds is None


@pytest.mark.slow
def test_it_is_streamed_where_memory_is_small(folder: Path) -> None:
    """Every model by itself and the composed one: the same bits, in as much memory as is given."""
    result = verify(folder, record=False, run=RunOptions("cpu", memory_bytes=60_000))
    assert result.passed and result.numbers == verify(folder, record=False).numbers


def test_each_byte_is_read_once(folder: Path) -> None:
    bars = Bars()
    result = verify(folder, probes=None, record=False, track=bars)
    assert result.trained_tensors > 30
    total, read = bars["check of files"]
    # headers of shards are read as they are in the extract, which names tensors shorter
    assert 0.9 * total < read <= total
    opened = open_folder(folder)
    assert check_integrity(opened).hashes == hash_tensors(opened, opened.manifest.base_tensors)


@pytest.mark.slow
def test_the_command(copy: Path, llama: Made, tmp_path: Path) -> None:
    file = tmp_path / "certificate.json"
    shown = run("verify", copy, "--max-new-tokens", 2, "-o", file)
    assert "verified  composed, routed (posterior, all paths alike" in shown.output
    assert "medicine       bit-equal         bit-equal         the same" in shown.output
    # names of files are never broken
    assert max(len(line) for line in shown.output.splitlines() if "/" not in line) <= 80
    content = json.loads(file.read_text())
    assert content["passed"] and content["routing"]["switch_rate"] == 0
    assert [path["name"] for path in content["numbers"]["paths"]] == ["base", *NAMES]
    asked = run("verify", copy, "--promise", "output_at_init", code=1)
    assert "BROKEN" in asked.output, "a mixture of what has learned is not the base's output"
    alone = verify(llama.folders["law"], required=("paths_as_alone",))
    assert not alone.passed and promise(alone, "paths_as_alone").evidence == "this model has one path"


@pytest.mark.parametrize(
    ("family", "names", "dtype"),
    mostly(
        [
            # tied and sharded, in half precision; experts that are put together on load; capped logits; parts that are
            # stock inside
            ("gemma3_text", ("music", "late"), "bfloat16"),
            ("qwen3_moe", ("whole", "late"), "float32"),
            ("gemma2", ("music", "late"), "float32"),
            ("gptj", ("medicine", "whole"), "float32"),
        ],
        lambda case: False,
    ),
)
@torch.no_grad()
def test_other_architectures(
    made_of: Callable[..., Made], tmp_path: Path, family: str, names: tuple[str, ...], dtype: str
) -> None:
    made, prompt = made_of(family, names, dtype), padded(random_ids(3, 13), (5, 2, 0))
    composed, known = compose(made.base, made.extracts, tmp_path / "out", routing=mixed(switch_rate=0)), made.composed()
    known.set_expansion(list(names), switch_rate=0)
    assert torch.equal(load(composed.path)(**prompt).logits, known(**prompt).logits)
    result = verify(composed.path)
    assert result.passed and result.required == CLAIMED
    assert result.numbers is not None and result.numbers.dtype == dtype
    assert all(path.is_bit_equal and path.generation_equal for path in result.numbers.paths)
