from __future__ import annotations

from pathlib import Path

import pytest
import torch

from castwise._demo import corpus as corpus_module
from castwise._demo.corpus import LIMIT, Corpus, read_text
from castwise._demo.gpt import Size

SIZE = Size(layers=1, heads=1, width=8, context=16, batch=4)


@pytest.fixture
def corpus() -> Corpus:
    return Corpus(bytes(n % 251 for n in range(5000)), SIZE.context)


def test_the_standard_library_is_python_and_the_same_every_time() -> None:
    text = read_text(None)
    assert len(text) == LIMIT
    assert text.count(b"\ndef ") > 1000
    assert text == read_text(None)


def test_a_folder_is_read_in_order_of_names_without_what_is_no_text(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"second ",
        "a.txt": b"first ",
        "c.bin": b"\x7fELF\0",
        "sub/d.txt": b"third",
        ".git/config": b"hidden",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert read_text(tmp_path) == b"first second third"


def test_reading_stops_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"a" * 6)
    (tmp_path / "b").write_bytes(b"b" * 6)
    monkeypatch.setattr(corpus_module, "LIMIT", 10)
    assert read_text(tmp_path) == b"aaaaaabbbb"
    assert read_text(tmp_path / "a") == b"aaaaaa"


def test_a_batch_depends_on_seed_and_step_alone(corpus: Corpus) -> None:
    first = corpus.batch(SIZE, seed=3, step=5)[0]
    torch.rand(7)
    corpus.batch(SIZE, seed=3, step=6)
    assert torch.equal(corpus.batch(SIZE, seed=3, step=5)[0], first)
    assert not torch.equal(corpus.batch(SIZE, seed=3, step=6)[0], first)
    assert not torch.equal(corpus.batch(SIZE, seed=4, step=5)[0], first)


def test_targets_are_the_tokens_that_follow(corpus: Corpus) -> None:
    tokens, targets = corpus.batch(SIZE, seed=0, step=0)
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(targets, (tokens + 1) % 251)


def test_validation_text_is_never_trained_on() -> None:
    text = b"a" * 4750 + b"b" * 250  # the held-out share is a twentieth
    corpus = Corpus(text, SIZE.context)
    trained = [corpus.batch(SIZE, 0, step)[1] for step in range(200)]
    validated = [targets for _, targets in corpus.validation(SIZE, n_batches=3)]
    assert torch.stack(trained).unique().tolist() == [ord("a")]
    assert torch.stack(validated).unique().tolist() == [ord("b")]


def test_the_shortest_text_is_enough() -> None:
    corpus = Corpus(bytes(range(34)), SIZE.context)
    assert corpus.batch(SIZE, 0, 0)[0][0].tolist() == list(range(16))
    ((tokens, targets),) = corpus.validation(SIZE, n_batches=1)
    assert tokens[0].tolist() == list(range(17, 33))
    assert targets[0].tolist() == list(range(18, 34))
