"""Verification: what it proves, and that it fails and names the tensor when a promise is broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner

from scale_surgery import CheckpointError, PlanError, Probes, Request, RunOptions, Verification, expand, inspect, verify
from scale_surgery.checkpoint.folder import open_checkpoint
from scale_surgery.cli.program import main
from scale_surgery.errors import Problem
from scale_surgery.evidence.verification import says_more
from tests.command import run
from tests.conftest import Bars, edited, flip, problems, refused, shake
from tests.tiny import save_tiny

W21 = "model.layers.1.self_attn.q_proj.expansions.default.w21"
W12 = "model.layers.1.self_attn.q_proj.expansions.default.w12"
SHARD = "expansion-default-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base and its expansions: folder with base, preserve and adapt."""
    folder = tmp_path_factory.mktemp("verify")
    base = save_tiny(folder / "base", "llama")
    expand(base, Request("1-2"), folder / "preserve")
    expand(base, Request("1-2", variant="adapt"), folder / "adapt")
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path):
    """A private copy of one of the expansions, to be spoiled."""
    return lambda name: Path(shutil.copytree(made / name, tmp_path / name))


def promise(result: Verification, name: str):
    return next(promise for promise in result.promises if promise.name == name)


@pytest.mark.parametrize("variant", ["preserve", "adapt"])
def test_an_untrained_expansion_keeps_what_it_claims(made: Path, variant: str) -> None:
    result = verify(made / variant, made / "base", record=False)
    assert result.passed and result.state == "initial" and not result.problems
    assert promise(result, "recoverable").holds and promise(result, "output_at_init").holds
    assert promise(result, "base_stream_always").claimed is (variant == "preserve")
    assert promise(result, "base_stream_always").holds is (variant == "preserve")
    numbers = result.numbers
    assert numbers is not None
    assert numbers.is_bit_equal and numbers.drift == 0 and numbers.kl_divergence == 0 and numbers.top1_agreement == 1
    assert numbers.generation_equal and numbers.uncached_equal
    assert [layer.layer for layer in numbers.layers] == [-1, 0, 1, 2]
    assert all(layer.is_bit_equal and layer.drift == 0 and layer.cosine == pytest.approx(1) for layer in numbers.layers)


def test_what_a_model_showed_is_not_lost_to_files_alone(copy) -> None:
    """As long as the bytes are those that it ran with."""
    path = copy("preserve")

    def recorded() -> dict:
        return json.loads((path / "surgery.json").read_text())["verification"]

    assert verify(path, probes=None).recorded and recorded()["numbers"] is None
    full = verify(path, probes=Probes(max_new_tokens=0)).to_json()
    assert verify(path, probes=None).recorded and recorded() == full
    more = verify(path).to_json()
    assert recorded() == more and more["numbers"]["generation_equal"], "it generated, too"
    assert verify(path, probes=Probes(max_new_tokens=0)).recorded and recorded() == more
    written = (path / "config.json").read_text()
    with edited(path / "config.json") as config:
        config["rms_norm_eps"] = 0.5
    assert not verify(path, probes=None).passed and not recorded()["passed"], "a problem is recorded"
    (path / "config.json").write_text(written)
    verify(path, probes=Probes(max_new_tokens=0))
    with edited(path / SHARD) as tensors:
        tensors[W21] += 1
    changed = verify(path, probes=None)
    assert changed.passed and recorded() == changed.to_json(), "it was another model that ran"


def test_streamed_from_disk_gives_the_same_numbers(made: Path) -> None:
    whole = verify(made / "preserve", record=False)
    streamed = verify(made / "preserve", record=False, run=RunOptions(memory_bytes=60_000))
    assert streamed.numbers == whole.numbers and streamed.passed
    cast = verify(made / "preserve", record=False, run=RunOptions(dtype="bfloat16"))
    assert cast.numbers == whole.numbers, "promises are about weights as they are stored"


def test_what_a_trained_model_still_keeps(copy) -> None:
    path = copy("preserve")
    shake(path)
    result = verify(path)
    assert result.passed and result.state == "trained" and result.trained_tensors > 0
    assert not promise(result, "output_at_init").claimed and not promise(result, "output_at_init").holds
    assert promise(result, "base_stream_always").holds and promise(result, "recoverable").holds
    assert result.numbers is not None and not result.numbers.is_bit_equal and result.numbers.base_logits_bit_equal
    assert not verify(path, required=("output_at_init",)).passed
    # adapt changes its base stream and stays recoverable
    path = copy("adapt")
    shake(path)
    result = verify(path)
    assert result.passed and result.required == ("recoverable",)
    assert result.numbers is not None and not result.numbers.base_logits_bit_equal
    assert [layer.is_bit_equal for layer in result.numbers.layers][:2] == [True, True]
    assert not verify(path, required=("base_stream_always",)).passed


def test_one_flipped_byte_of_a_base_tensor_is_named(copy) -> None:
    path = copy("preserve")
    info = open_checkpoint(path).tensors["model.layers.0.mlp.gate_proj.weight"]
    flip(path / info.file, info.offset + 5)
    result = verify(path)
    problems = promise(result, "recoverable").problems
    assert not result.passed and not promise(result, "recoverable").holds
    assert any(problem.startswith("model.layers.0.mlp.gate_proj.weight: sha256") for problem in problems)
    assert not any(problem.startswith("model.layers.0.mlp.up_proj.weight") for problem in problems)


@pytest.mark.parametrize("variant", ["preserve", "adapt"])
def test_a_non_zero_entry_of_a_frozen_w12_is_named(copy, variant: str) -> None:
    """In a preservation layer, and in the part of a collaborative layer that does not collaborate, no W12 exists."""
    path, name = copy(variant), "model.layers.1.mlp.gate_proj.expansions.default.w12"
    with edited(path / SHARD) as tensors, edited(path / "model.safetensors.index.json") as index:
        tensors[name] = torch.zeros(52, 20)
        tensors[name][3, 4] = 1e-3
        index["weight_map"][name] = SHARD
    result = verify(path)
    assert not result.passed
    assert any(problem.startswith(f"{name}: ") and "1 non-zero" in problem for problem in result.problems)
    at_init = promise(result, "output_at_init")
    assert at_init.holds is False
    assert any(problem.startswith(f"{name}: 1 of 1040 entries are not zero") for problem in at_init.problems)


def test_a_non_zero_entry_of_a_collaborative_w12_breaks_output_at_init(copy) -> None:
    path = copy("adapt")
    with edited(path / SHARD) as tensors:
        tensors[W12].view(-1)[0] = 1e-2
    result = verify(path, required=("output_at_init",))
    assert not result.passed
    assert any(problem.startswith(f"{W12}: 1 of ") for problem in promise(result, "output_at_init").problems)


def test_swapped_w12_and_w21_are_named(copy) -> None:
    path = copy("adapt")
    with edited(path / SHARD) as tensors:
        tensors[W12], tensors[W21] = tensors[W21], tensors[W12]
    result = verify(path)
    assert not result.passed and result.numbers is None
    assert {problem.split(":")[0] for problem in result.problems} == {W12, W21}


def test_a_joint_norm_is_caught(copy) -> None:
    """A norm over both streams together changes the base stream; code that does so differs from ours."""
    path = copy("preserve")
    code = (path / "expanded_blocks.py").read_text()
    up = "normalise(up.float(), self.style, self.epsilon, self.up_weight.float(), bias)"
    separate = f"        return y, {up}.to(y.dtype)\n"
    assert code.count(separate) == 1
    joint = "        y = y * base.norm() / torch.cat((base, up), -1).norm()\n"
    (path / "expanded_blocks.py").write_text(code.replace(separate, joint + separate))
    unread = verify(path)
    assert not unread.passed and unread.numbers is None
    assert unread.problems == (
        "expanded_blocks.py: is not the code that the expansion wrote. Read it before you trust it.",
    )
    assert verify(path, probes=None, required=("recoverable",)).passed
    assert inspect(path).expanded.passed is False, "what is recorded is about all that is claimed"
    run = verify(path, run=RunOptions(trust_remote_code=True))
    assert run.numbers is not None and not run.numbers.is_bit_equal and run.numbers.drift > 1e-3
    assert not promise(run, "output_at_init").holds and not promise(run, "base_stream_always").holds
    assert any(
        problem.startswith("base stream after layer 1: drift")
        for problem in promise(run, "base_stream_always").problems
    )


def test_the_wrong_base_is_refused_by_tensor(copy, made: Path, tmp_path: Path) -> None:
    """It is said first, it is no fault of the folder, and no model is run to say the same."""
    path, other_base = copy("preserve"), save_tiny(tmp_path / "other", "llama")
    with edited(other_base / "model.safetensors") as tensors:
        tensors["model.norm.weight"] += 1
    fresh = (path / "surgery.json").read_bytes()
    other_config = Path(shutil.copytree(made / "base", tmp_path / "other_config"))
    with edited(other_config / "config.json") as config:
        config["rms_norm_eps"] *= 2
    result = verify(path, other_config)
    assert (result.passed, result.not_run, result.numbers) == (False, "the given base is another one", None)
    assert result.findings == (f"config.json: rms_norm_eps differs from that of the base model {other_config}.",)
    result = verify(path, other_base)
    assert not result.passed and not result.recorded
    verify(path, other_base, probes=None)
    assert (path / "surgery.json").read_bytes() == fresh
    problems = promise(result, "recoverable").problems
    assert len(problems) == 2 and problems[1].startswith("model.norm.weight: ") and str(other_base) in problems[1]
    assert problems[0] == (
        f"{other_base}: is not the base of {path}, 1 of 51 tensors is another. Give the one that it was made on, base, "
        "or leave --base out."
    )
    assert result.not_run == "the given base is another one" and result.numbers is None
    shown = run("verify", path, "--base", other_base, code=1)
    assert " ".join(shown.output.split()).partition("problem: ")[2].startswith(f"{other_base}: is not the base of ")
    assert "not recorded" not in shown.output


def test_a_base_that_is_none_is_refused(made: Path) -> None:
    with refused("base-is-verified", "--base", CheckpointError):
        verify(made / "preserve", made / "preserve")
    with refused("form-expanded-not-base", made / "adapt", CheckpointError):
        verify(made / "preserve", made / "adapt")


def test_a_base_of_another_shape_or_dtype_is_another_base(made: Path, tmp_path: Path) -> None:
    other_base = save_tiny(tmp_path / "other", "llama", vocab_size=101)
    result = verify(made / "preserve", other_base, record=False)
    assert not result.passed and result.numbers is None, "no model is run"
    assert any("model.embed_tokens.weight" in problem for problem in promise(result, "recoverable").problems)
    # over the same bytes
    cast = Path(shutil.copytree(made / "base", tmp_path / "cast"))
    content = (cast / "model.safetensors").read_bytes()
    (cast / "model.safetensors").write_bytes(content.replace(b'"F32"', b'"I32"'))
    result = verify(made / "preserve", cast, probes=None, record=False)
    assert any("F32" in problem and "I32" in problem for problem in promise(result, "recoverable").problems)


def test_names_of_code_elsewhere_are_warned_of(made: Path, tmp_path: Path) -> None:
    """The base's tokenizer may be of another repository, and its file is kept."""
    base = Path(shutil.copytree(made / "base", tmp_path / "base"))
    (base / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["org/other--tok.Tok", null]}}')
    result = verify(expand(base, Request("1"), tmp_path / "wide").path, probes=None)
    (warning,) = [line for line in result.warnings if "org/other--tok.Tok" in line]
    assert warning.startswith("tokenizer_config.json: auto_map") and result.passed
    assert not any("elsewhere" in line or "--" in line for line in verify(made / "adapt", probes=None).warnings)


def test_code_and_config_that_the_expansion_did_not_write_are_named(copy) -> None:
    path = copy("preserve")
    (path / "evil.py").write_text("class X: ...")
    with edited(path / "config.json") as config:
        config["auto_map"]["AutoModelForCausalLM"] = "evil.X"
        config["rope_theta"] = 5.0
    result = verify(path)
    assert not result.passed and result.numbers is None
    assert set(result.problems) == {
        "evil.py: unknown code file. Read it before you trust it.",
        "config.json: auto_map is not what the expansion wrote.",
        "config.json: rope_theta is not what the expansion wrote.",
    }


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer.model"])
def test_a_tokenizer_file_that_the_base_has_not_is_named(tmp_path: Path, name: str) -> None:
    """Where the base has a tokenizer; to one that has none a user may add one."""
    base = save_tiny(tmp_path / "base", "llama")
    bare = expand(base, Request("1"), tmp_path / "bare").path
    (bare / name).write_text("{}")
    (bare / "tokenizer_config.json").write_text('{"backend": "tokenizers", "model_max_length": 64}')
    assert verify(bare, probes=None).passed, "the control"
    (bare / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.X", null]}}')
    other_code = Problem("tokenizer-key-changed", "tokenizer_config.json: auto_map")
    assert verify(bare, probes=None).problems == (str(other_code),)
    (base / "tokenizer.json").write_text("{}")
    path = expand(base, Request("1"), tmp_path / "wide").path
    (path / "README.md").write_text("Notes.")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "default.jinja").write_text("{{ messages }}")
    result = verify(path, probes=None)
    assert result.passed
    assert result.warnings == tuple(
        f"{file}: the base has none. It changes how the model is asked, and no promise is about it."
        for file in ("chat_template.jinja", "additional_chat_templates/default.jinja")
    )
    (path / name).write_text("{}")
    result = verify(path, probes=None)
    assert not result.passed
    assert result.problems == (str(Problem("tokenizer-file-added", name)),)


def test_a_dtype_that_the_base_names_nowhere_is_that_of_its_tensors(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    with edited(base / "config.json") as config:
        for key in ("dtype", "torch_dtype"):
            config.pop(key, None)
    path = expand(base, Request("1"), tmp_path / "wide").path
    assert verify(path, probes=None).passed, "the control"
    with edited(path / "config.json") as config:
        assert config["torch_dtype"] == "float32"
        config["torch_dtype"] = "bfloat16"
    assert verify(path, probes=None).problems == ("config.json: torch_dtype is not what the expansion wrote.",)


def test_a_number_in_place_of_false_is_named_and_another_way_to_write_a_number_is_not(copy) -> None:
    path = copy("preserve")
    with edited(path / "config.json") as config:
        assert config["tie_word_embeddings"] in (True, False) and config["attention_dropout"] == 0.0
        config["attention_dropout"] = 0
    assert verify(path, probes=None, record=False).passed
    with edited(path / "config.json") as config:
        config["tie_word_embeddings"] = int(config["tie_word_embeddings"])
    result = verify(path, probes=None, record=False)
    assert not result.passed
    assert "config.json: tie_word_embeddings is not what the expansion wrote." in str(result.to_json())


def test_a_model_that_computes_nan_keeps_no_promise_and_gives_valid_json(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "llama")
    with edited(base / "model.safetensors") as tensors:
        tensors["model.norm.weight"][0] = float("nan")
    expand(base, Request("1"), tmp_path / "expanded")
    result = verify(tmp_path / "expanded")
    assert not result.passed and not promise(result, "output_at_init").holds
    json.loads(json.dumps(result.to_json(), allow_nan=False))


def test_a_trained_model_that_computes_nan_is_refused(copy) -> None:
    """Without a promise about its logits, too: `adapt` claims none once it is trained."""
    path = shake(copy("adapt"))
    assert verify(path, record=False).passed
    shard = next(path.glob("expansion-*.safetensors"))
    with edited(shard) as tensors:
        name = next(name for name in tensors if name.endswith("w12"))
        tensors[name][0, 0] = float("nan")
    result = verify(path, record=False)
    assert not result.passed and "logits: drift nan from the base's, expected numbers." in result.problems


def test_an_unknown_promise_is_refused(made: Path) -> None:
    with refused("promise-unknown", "--promise", PlanError):
        verify(made / "preserve", required=("base_stream_alwys",))


def test_a_folder_that_cannot_be_written_is_verified_and_not_recorded(copy, refuse_to_write) -> None:
    path = copy("preserve")
    result = verify(path, probes=None)
    assert result.recorded and json.loads((path / "surgery.json").read_text())["verification"] == result.to_json()
    assert not verify(path, probes=None, record=False).recorded
    before = (path / "surgery.json").read_bytes()
    refuse_to_write(path / "surgery.json")
    result = verify(path, probes=None)
    assert result.passed and not result.recorded
    assert (path / "surgery.json").read_bytes() == before
    done = CliRunner().invoke(main, ["verify", str(path), "--files-only"])
    text = " ".join(done.stderr.split())
    assert done.exit_code == 0 and f"{path} cannot be written, or changed meanwhile: the result is not recorded" in text


def test_a_shorter_run_replaces_the_record_if_it_decides_what_that_left_open(copy) -> None:
    """Such as `shut_gates`, for which the documentation asks for prompts of the user's own."""
    folder, longer, shorter = copy("adapt"), Probes(max_new_tokens=4), Probes(max_new_tokens=0)
    recorded = json.loads(json.dumps(verify(folder, probes=longer, record=False).to_json()))
    now = verify(folder, probes=shorter, record=False)
    assert says_more(recorded, now)
    decided = next(entry.name for entry in now.promises if entry.claimed and entry.holds is not None)
    for promise in recorded["promises"]:
        if promise["name"] == decided:
            promise["holds"] = None
    assert not says_more(recorded, now)


def test_what_was_written_meanwhile_stays(copy) -> None:
    """Another command may write while prompts run: its record is not put back to what it was."""
    path = copy("preserve")

    class Written(Bars):
        @contextmanager
        def __call__(self, label: str, total: int) -> Iterator[Callable[..., None]]:
            with edited(path / "surgery.json") as manifest:
                manifest["training"] = [{"steps": 7}]
            with super().__call__(label, total) as advance:
                yield advance

    before = json.loads((path / "surgery.json").read_text())
    assert not verify(path, probes=None, track=Written()).recorded
    assert json.loads((path / "surgery.json").read_text()) == before | {"training": [{"steps": 7}]}


def test_options_that_nothing_would_read_are_refused(made: Path, tmp_path: Path) -> None:
    path = made / "preserve"
    expected = Problem("revision-without-base", "--revision", revision="v1")
    assert problems(verify, path, revision="v1", error=PlanError) == [expected]
    assert json.loads(run("verify", path, "--revision", "v1", "--json", code=1).stdout)["problems"] == [
        expected.to_json()
    ]
    for option, value in (("--prompts", tmp_path / "prompts.txt"), ("--max-new-tokens", 8)):
        shown = " ".join(run("verify", path, "--files-only", option, value, code=2).output.split())
        assert f"{option} with --files-only: no model runs, so none is asked. Leave out one of the two." in shown


def test_files_only_runs_no_model(made: Path) -> None:
    result = verify(made / "preserve", probes=None, record=False)
    assert result.passed and result.numbers is None and result.required == ("recoverable",)
    assert promise(result, "output_at_init").holds is None
    assert "no model was run" in promise(result, "output_at_init").evidence
    assert not verify(made / "preserve", probes=None, required=("output_at_init",), record=False).passed


def test_prompts_of_a_file_and_without_a_tokenizer(made: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    with pytest.raises(CheckpointError, match=r"empty\.txt: holds no prompt, expected one a line"):
        verify(made / "preserve", probes=Probes(empty), record=False)
    result = verify(made / "preserve", record=False, probes=Probes(max_new_tokens=0))
    assert result.numbers is not None and result.numbers.generation_equal is None and result.passed


def test_recorded_facts_that_were_edited_are_named(copy) -> None:
    path = copy("preserve")
    with edited(path / "surgery.json") as record:
        facts = record["expansions"]["default"]["facts"]
        facts["architecture"]["kinds"][0]["blocks"][0].update(mute=[], reason="in other words")
    trusting = RunOptions(trust_remote_code=True)
    for options in (RunOptions(), trusting):
        assert verify(path, probes=None, record=False, run=options).passed, (
            "how a block is treated was proved there and then"
        )
    with edited(path / "surgery.json") as record:
        facts = record["expansions"]["default"]["facts"]
        facts["architecture"].update(model_type="foo", softcap=["final_logit_softcapping", 30.0])
        facts["sizes"]["epsilon"] = 1e-5
    result = verify(path, probes=None, record=False)
    assert not result.passed
    for name in ("architecture.model_type", "architecture.softcap", "sizes.epsilon"):
        assert (
            f"surgery.json: expansions.default.facts.{name} is not what the base's config.json gives. Restore it from "
            "where you got it."
        ) in result.problems


def test_the_text_of_the_base_s_config_that_was_changed_is_named(copy) -> None:
    path = copy("preserve")
    text = json.loads((path / "surgery.json").read_text())["replaced"]["config.json"]

    def problems(changed: str) -> list[str]:
        with edited(path / "surgery.json") as record:
            record["replaced"]["config.json"] = changed
        result = verify(path, probes=None, record=False)
        assert not result.passed
        return [*promise(result, "recoverable").problems, *result.problems]

    assert problems(f"{text}\n") == [str(Problem("base-text-changed", "surgery.json", file="config.json"))]
    # one that transformers no longer reads is a problem and no traceback
    for change, reason in (
        ({"model_type": "unheard_of"}, "model_type is 'unheard_of', expected one that"),
        ({"hidden_act": 3}, "transformers does not read it"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, found"),
    ):
        (line,) = (line for line in problems(json.dumps(json.loads(text) | change)) if reason in line)
        assert line.startswith("surgery.json: its facts of the base model cannot be checked: ")


def test_a_residual_stream_that_stays_in_float32(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
    config = transformers.Mamba2Config(vocab_size=97, pad_token_id=0, **sizes)
    assert config.residual_in_fp32
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    wide = expand(tmp_path / "base", Request("1"), tmp_path / "wide").path
    verification = verify(wide, tmp_path / "base")
    assert verification.passed
    assert {"output_at_init", "base_stream_always"} <= {entry.name for entry in verification.promises if entry.holds}
