"""lm-evaluation-harness loads an expanded folder as it is, and sees what `measure` sees, expansion on and off."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest

from scale_surgery import Request, expand
from scale_surgery.running.loss import measure
from scale_surgery.text.documents import Document
from scale_surgery.text.sequences import IGNORED, Sequences
from scale_surgery.text.tokenizing import tokenize
from tests.conftest import load, shake
from tests.evidence.test_evaluate import with_tokenizer
from tests.text.test_tokenizing import letters
from tests.tiny import save_tiny

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="not installed: pip install lm-eval"),
    # that of lm_eval and of what it stands on
    pytest.mark.filterwarnings("ignore"),
]
DOCUMENTS = [Document("ab?", " cd", ""), Document("where is it?", " there", ""), Document("q?", "z", "")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and its expansion, after what stands for a training."""
    place = tmp_path_factory.mktemp("harness")
    base = with_tokenizer(save_tiny(place / "base", "llama"))
    shake(expand(base, Request("0-2", variant="adapt", collaborate="both"), place / "wide").path)
    return place


def harness(folder: Path, **options: Any) -> list[tuple[float, bool]]:
    """Log-likelihood of each answer, and whether it is the model's own, as the harness finds them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM

        model = HFLM(pretrained=str(folder), device="cpu", batch_size=2, **options)
        pairs = [(document.prompt, document.text) for document in DOCUMENTS]
        asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
        return model.loglikelihood(asked, disable_tqdm=True)


def ours(model: Any) -> list[float]:
    """The same by `measure`; the harness does not score the end of the text."""
    log_likelihoods = []
    for document in DOCUMENTS:
        sequences = tokenize([document], letters())
        labels = sequences.labels.clone()
        labels[-1] = IGNORED
        log_likelihoods.append(-measure(model, Sequences(sequences.ids, labels, sequences.starts), 1).nats)
    return log_likelihoods


def test_expansion_on_and_off(place: Path) -> None:
    enabled = harness(place / "wide", trust_remote_code=True)
    disabled = harness(place / "wide", trust_remote_code=True, expansion_enabled=False)
    assert [value for value, _ in enabled] == pytest.approx(ours(load(place / "wide")), rel=1e-5)
    assert [value for value, _ in disabled] == pytest.approx(ours(load(place / "base")), rel=1e-5)
    assert disabled == harness(place / "base"), "the base's, to the last bit"
    assert enabled != disabled
