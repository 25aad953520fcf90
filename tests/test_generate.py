"""`dovetail generate`: tokenizers, tokens chosen step by step, and the firmware held to them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import dovetail, refused
from dovetail.codegen.emit.project import write_project
from dovetail.compile import Options, compile_model
from dovetail.errors import DovetailError
from dovetail.guests.language.generation import Sampling, first_other, generate, roles_of
from dovetail.guests.language.tokenizers import PieceTokenizer, load_tokenizer
from dovetail.ir.graph import GraphBuilder
from dovetail.ir.types import DType, TensorType
from dovetail.read import load_model
from dovetail.targets import load_target
from test_sequence import EXPORTS, MODELS, export, reference

__all__ = ["reference"]

PIECES = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
PIECES += [bytes([letter]) for letter in b" abcdeh"] + [b" a", b"ab", b" ab", "ä".encode()]


def written(file: Path, pieces: list[bytes]) -> Path:
    scores = [float(len(piece)) for piece in pieces]
    rows = [struct.pack("<fi", score, len(piece)) + piece for score, piece in zip(scores, pieces, strict=True)]
    file.write_bytes(struct.pack("<i", max(map(len, pieces))) + b"".join(rows))
    return file


def test_a_file_of_llama2_c(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(written(tmp_path / "tok.bin", PIECES))
    assert isinstance(tokenizer, PieceTokenizer) and tokenizer.begin == 1
    assert tokenizer.encode("") == []
    assert [PIECES[token] for token in tokenizer.encode("ab")] == [b" ab"]
    assert [PIECES[token] for token in tokenizer.encode("bz")] == [b" ", b"b", b"<0x7A>"]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(text=st.text(max_size=20))
def test_texts_come_back(text: str) -> None:
    tokenizer = PieceTokenizer(tuple(PIECES), tuple(float(len(piece)) for piece in PIECES))
    assert tokenizer.decode([1, *tokenizer.encode(text)]) == text


@pytest.mark.parametrize("damage", [b"", b"\x05\0\0\0\0\0", b"\x05\0\0\0" + struct.pack("<fi", 0, 99) + b"ab"])
def test_files_that_are_no_tokenizers(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "tok.bin"
    file.write_bytes(damage)
    with pytest.raises(DovetailError, match="no tokenizer"):
        load_tokenizer(file)
    with pytest.raises(DovetailError, match="cannot read"):
        load_tokenizer(tmp_path / "none.bin")


def test_tokens_are_drawn_as_the_model_says() -> None:
    logits = np.log(np.array([0.1, 0.6, 0.3]))
    assert Sampling().choose(logits, 0) == 1
    drawn = [Sampling(1.0, 7).choose(logits, step) for step in range(3000)]
    assert drawn == [Sampling(1.0, 7).choose(logits, step) for step in range(3000)]
    np.testing.assert_allclose(np.bincount(drawn) / 3000, [0.1, 0.6, 0.3], atol=0.03)


def test_logits_that_choose_another_token_are_found() -> None:
    outputs = [np.eye(4)[token] for token in (1, 2, 3)]
    assert first_other([0, 1, 2, 3], outputs, 1, Sampling()) is None
    assert first_other([0, 1, 2, 2], outputs, 1, Sampling()) == 3
    assert first_other([0, 3, 2, 3], outputs, 2, Sampling()) is None  # the prompt's own tokens are given


def test_a_model_that_is_no_language_model() -> None:
    builder = GraphBuilder("net")
    image = builder.input("image", TensorType((1, 4), DType.INT8))
    with pytest.raises(DovetailError, match="keeps no states"):
        roles_of(builder.finish([image]))


@pytest.mark.parametrize("which", EXPORTS)
def test_the_greedy_text_is_the_references(reference: Any, which: str) -> None:
    """In float, the mask laid as each export wants it."""
    graph, tokens = load_model(export(which)), reference["greedy"]
    found = [int(tokens[0]), *generate(graph, [int(tokens[0])], 30, Sampling(), frozenset())]
    assert found == tokens[:30].tolist()


def test_the_command_writes_the_story(reference: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The firmware on this computer chooses the same tokens; a prompt that is too long is refused."""
    target = load_target("riscv")
    write_project(compile_model(export("torch"), target, Options(allow_float=True)).project, tmp_path / "build")
    arguments = ["generate", str(tmp_path / "build"), "--tokenizer", str(MODELS / "tok512.bin"), "--sim", "host"]
    assert dovetail(*arguments, "--prompt", "Once upon a time", "--tokens", "24", "--json", "-") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["text"].startswith("Once upon a time, there was a little girl named")
    assert figures["tokens"] == reference["greedy"][:24].tolist() and figures["steps"] == 23
    message = refused(capsys, *arguments, "--prompt", "Once upon a time, there was a cat", "--tokens", "4")
    assert "the text at most 4" in message
