"""Published chat templates, which trl ships: each row of each template is learned rightly, or refused by name.

`python -m tests.text.test_published_templates` prints the table of templates, with the reasons of refusals.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from scale_surgery.biographies import SHIPPED_MODEL
from scale_surgery.errors import DataError
from scale_surgery.text.documents import read_documents
from scale_surgery.text.tokenizing import tokenize

SPEC = importlib.util.find_spec("trl")
FOLDER = Path(((SPEC and SPEC.submodule_search_locations) or ["."])[0]) / "chat_templates"
needs_trl = pytest.mark.skipif(not FOLDER.is_dir(), reason="trl is not installed: make test-recipes")
# special tokens as templates write them; tags such as <tool_call> and <think> are special in no tokenizer
SPECIAL = re.compile(
    r"<\|[^<>|\s]+\|>|<\uff5c[^<>\s]+?\uff5c>|<(?:start|end)_of_[a-z]+>|<turn\|>|<\|(?:turn|tool_[a-z]+|channel)>"
)
# tokens at which the models of some templates stop, as their generation_config.json says
ENDS = {
    "glm4moe": ["<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "diffusion_gemma": ["<turn|>", "<|tool_response>"],
}


class Row(NamedTuple):
    """A conversation, and what is to be found in each of its answers."""

    messages: list[dict[str, Any]]
    answers: list[list[str]]
    tools: list[dict[str, Any]] | None = None


def asked(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"USERWORD{number} asks."}


def said(words: str, *calls: tuple[str, Any], **more: Any) -> dict[str, Any]:
    called = [
        {"type": "function", "id": f"c0000000{number}", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls, 1)
    ]
    return {"role": "assistant", "content": words, **({"tool_calls": called} if calls else {}), **more}


TOOL = {"role": "tool", "content": "TOOLWORD says so.", "tool_call_id": "c00000001", "name": "fetch_rain"}
PROPERTIES = {name: {"type": "string", "description": name} for name in ("city", "day")}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city"]}
FUNCTION = {"name": "fetch_rain", "description": "DEFINED rain.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CITY = ("fetch_rain", {"city": "Paris"})
NEXT = ("fetch_rain", {"city": "Oslo", "day": "4 May"})
CALLED = ["fetch_rain", "city", "Paris"]
THOUGHT = {"reasoning_content": "Thought one."}
ROWS = {
    "plain": Row([asked(1), said("Answer one.")], [["Answer one."]]),
    "turns": Row([asked(1), said("Answer one."), asked(2), said("Answer two.")], [["Answer one."], ["Answer two."]]),
    "system": Row(
        [{"role": "system", "content": "SYSTEMWORD rules."}, asked(1), said("Answer one.")], [["Answer one."]]
    ),
    "tools": Row([asked(1), said("Answer one.")], [["Answer one."]], TOOLS),
    "call": Row([asked(1), said("", CITY)], [CALLED], TOOLS),
    "words and call": Row([asked(1), said("Answer one.", CITY)], [["Answer one.", *CALLED]], TOOLS),
    "two calls": Row([asked(1), said("", CITY, NEXT)], [[*CALLED, "Oslo", "day", "4 May"]], TOOLS),
    "JSON text": Row([asked(1), said("", ("fetch_rain", json.dumps(CITY[1])))], [CALLED], TOOLS),
    "call, no tools": Row([asked(1), said("", CITY)], [CALLED]),
    "tool answers": Row([asked(1), said("", CITY), TOOL, said("Answer two.")], [CALLED, ["Answer two."]], TOOLS),
    "thought": Row([asked(1), said("Answer one.", **THOUGHT)], [["Thought one.", "Answer one."]]),
    "thought and call": Row([asked(1), said("", CITY, **THOUGHT)], [["Thought one.", *CALLED]], TOOLS),
    "thoughts": Row(
        [asked(1), said("Answer one.", **THOUGHT), asked(2), said("Answer two.", reasoning_content="Thought two.")],
        [["Thought one.", "Answer one."], ["Thought two.", "Answer two."]],
    ),
}
# sorts in which an answer has words alone
WORDS_ALONE = ("plain", "turns", "system", "tools")
# the sorts in the order of ROWS, + learned, - refused; templates that take the same ones
APPROVED: Mapping[str, str] = {
    "++-----------": "gemma gemma_training",
    "+++----------": (
        "cohere cohere2 cohere2_training cohere_training deepseek_r1_distill "
        "deepseek_r1_distill_training gemma3 gemma3_training idefics3 idefics3_training llama3 "
        "llama3_training llava_next llava_next_training phi3 phi3_5 phi3_5_training phi3_training "
        "qwen2_5_vl qwen2_5_vl_training smolvlm smolvlm_training "
    ),
    "+++-----+----": "deepseekv3 deepseekv3_training",
    "++++---------": "lfm2 lfm2_training",
    "+++++--+++---": "llama3_1 llama3_2",
    "+++++-+++++++": "muse_glimmer muse_glimmer_training",
    "++++++-+++++-": "gptoss gptoss_training",
    "++++++++++---": (
        "gemma4_v2 lfm2_v2 lfm2_v2_training qwen2_5 qwen2_5_training qwen3_instruct_2507 "
        "qwen3_instruct_2507_training qwen3_vl qwen3_vl_training "
    ),
    "++++++++++-+-": "gemma4 gemma4_v3 gemma4_v4",
    "++++++++++++-": (
        "diffusion_gemma diffusion_gemma_training gemma4_v5 glm4moe glm4moe_training qwen3 "
        "qwen3_5_nothink qwen3_5_think "
    ),
    "+++++++++++++": (
        "lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl nemotron_3_5_lightning nemotron_3_5_lightning_training "
        "nemotron_3_nano nemotron_3_nano_training nemotron_3_super nemotron_3_super_training "
        "nemotron_3_ultra nemotron_3_ultra_training qwen3_5_nothink_training qwen3_5_think_training "
        "qwen3_6 qwen3_6_training qwen3_8 qwen3_8_training qwen3_training "
    ),
}


def load_tokenizer(template: Path, folder: Path) -> Any:
    """The shipped tokenizer with a template, its special tokens, and its model's end tokens in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    tokenizer.chat_template = text = template.read_text(encoding="utf-8")
    ends = next((ends for name, ends in ENDS.items() if template.stem.startswith(name)), [])
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*SPECIAL.findall(text), *ends})})
    ids = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(ends)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer.name_or_path = str(folder)
    return tokenizer


def read(row: Row, tokenizer: Any, folder: Path) -> list[list[int]]:
    """The token ids that are learned, of each answer."""
    file = folder / "row.jsonl"
    file.write_text(json.dumps({"messages": row.messages, "tools": row.tools}) + "\n")
    spans: list[list[int]] = [[]]
    for label in tokenize(read_documents([file]), tokenizer).labels.tolist():
        if label >= 0:
            spans[-1].append(label)
        elif spans[-1]:
            spans.append([])
    return [span for span in spans if span]


def check(sort: str, learned: Sequence[Sequence[int]], tokenizer: Any) -> None:
    """The rule: the words, the token that ends them, and nothing else."""
    row = ROWS[sort]
    assert len(learned) == len(row.answers)
    special = set(tokenizer.all_special_ids)
    for ids, expected in zip(learned, row.answers, strict=True):
        text = tokenizer.decode(ids)
        for words in expected:
            assert words in text
        assert ids[-1] in special, text
        assert not re.search("USERWORD|SYSTEMWORD|TOOLWORD|DEFINED", text), text
        if sort in WORDS_ALONE:
            words, *ends = (token for token in re.split(r"(<[^<>]+>)", text) if token.strip())
            assert words.strip() == expected[0] and ends and all(end.startswith("<") for end in ends), text


def take(template: Path, folder: Path) -> tuple[str, dict[str, str]]:
    """Which rows of a template are learned, all of them rightly, and why the others are refused."""
    tokenizer = load_tokenizer(template, folder)
    signs, reasons = "", {}
    for sort, row in ROWS.items():
        try:
            learned = read(row, tokenizer, folder)
        except DataError as error:
            assert all(problem.where.startswith(f"{folder}/row.jsonl, line 1") for problem in error.problems)
            reasons[sort] = f"{error}".partition("line 1: ")[2]
            signs += "-"
        else:
            check(sort, learned, tokenizer)
            signs += "+"
    return signs, reasons


@needs_trl
@pytest.mark.filterwarnings("ignore")
def test_the_approved_templates_are_those_that_there_are() -> None:
    listed = sorted(name for names in APPROVED.values() for name in names.split())
    assert set(listed) <= {file.stem for file in FOLDER.glob("*.jinja")} and len(listed) == len(set(listed))


@needs_trl
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("template", sorted(FOLDER.glob("*.jinja")), ids=lambda file: file.stem)
def test_each_row_is_learned_rightly_or_refused(template: Path, tmp_path: Path) -> None:
    signs, reasons = take(template, tmp_path)
    approved = next((signs for signs, names in APPROVED.items() if template.stem in names.split()), None)
    # of a template that a later release adds, only the rule is checked
    if approved is not None:
        assert signs == approved, reasons


if __name__ == "__main__":
    table: dict[str, list[str]] = defaultdict(list)
    why: dict[str, set[str]] = defaultdict(set)
    for file in sorted(FOLDER.glob("*.jinja")):
        with tempfile.TemporaryDirectory() as place:
            signs, reasons = take(file, Path(place))
        table[signs].append(file.stem)
        why[signs] |= {f"{sort}: {reason.partition('. ')[0]}" for sort, reason in reasons.items()}
    print("   ", ", ".join(ROWS))
    for signs, names in sorted(table.items(), reverse=True):
        print(f'    "{signs}": "{" ".join(names)}",')
        for reason in sorted(why[signs]):
            print("       ", reason)
