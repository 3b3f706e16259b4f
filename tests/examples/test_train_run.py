"""A run of training: it saves, resumes, starts from a published model, and publishes."""

from __future__ import annotations

import ast
import lzma
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import train
from model import Trainer, Weights, initial_weights, linear, rms_norm
from publish import TOKENIZER_FILES, draw_losses, publish
from safetensors.torch import load_file, save_file
from tokens import Rows, Stage, save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.reference import by_torch

SHORT = (Stage(1.0, 128, {"text": 1.0}),)
MakePiece = Callable[..., train.Piece]


@pytest.fixture(scope="module")
def weights(rows: Rows) -> Weights:
    torch.manual_seed(0)
    drawn = initial_weights(rows.bpe.get_vocab_size(), seed=5)
    return {name: w if w.any() else torch.randn(w.shape) * 0.1 for name, w in drawn.items()}


@pytest.fixture(scope="module")
def published(rows: Rows, weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    save_tokenizer(rows.bpe, run)
    publish(weights, rows.bpe, run)
    return run / "model"


@pytest.fixture
def make_piece(rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePiece]:
    """Pieces of one run on a small corpus and short rows."""
    monkeypatch.setattr(train, "STAGES", SHORT)
    monkeypatch.setattr(train, "NEXT_STAGES", SHORT)
    (tmp_path / "corpus-00.xz").write_bytes(lzma.compress("\n\0\n".join(rows.documents).encode()))
    save_tokenizer(rows.bpe, tmp_path)
    options: dict[str, Any] = {
        "data": tmp_path,
        "run": tmp_path,
        "start": None,
        "steps": 300,
        "minutes": 5,
        "batch_tokens": 128,
    }
    options |= {"workers": 1, "probes": 0, "no_compile": True}
    options |= {"matrix_rate": 0.02, "embed_rate": 0.03, "head_rate": 0.004, "small_rate": 0.005}
    made: list[train.Piece] = []

    def make(**changes: Path) -> train.Piece:
        made.append(train.Piece(Namespace(**options | changes), started=0.0))
        return made[-1]

    yield make
    for piece in made:
        piece.batches.close()


def take_steps(piece: train.Piece, count: int) -> None:
    for (tokens, importance), _ in zip(piece.batches, range(count), strict=False):
        piece._take(tokens, importance)
        piece.step += 1


def test_a_piece_goes_on_where_the_last_one_was_saved(make_piece: MakePiece) -> None:
    first = make_piece()
    take_steps(first, 2)
    first._save()
    second = make_piece()
    assert second.step == second.resumed_at == 2
    before = initial_weights(first.rows.bpe.get_vocab_size(), train.SEED)
    for name, weight in first.weights.items():
        torch.testing.assert_close(second.weights[name], weight, rtol=2**-15, atol=1e-7)
    assert not torch.equal(second.weights["lm_head.weight"], before["lm_head.weight"])
    for saved, resumed in (
        (first.optimizer.first, second.optimizer.first),
        (first.optimizer.second, second.optimizer.second),
    ):
        for name, moment in saved.items():
            error = (resumed[name] - moment).norm() / moment.norm().clamp_min(1e-20)
            assert error < 0.1, name
    tokens, _ = next(iter(second.batches))
    assert (tokens == first.rows.batch(2)[0]).all()
    take_steps(second, 1)
    assert all(weight.isfinite().all() for weight in second.weights.values())


def test_a_save_that_is_cut_off_leaves_the_last_state(make_piece: MakePiece, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = make_piece()
    piece._save()
    piece.step = 7
    saved: list[Path] = []

    def save_one(shard: Weights, path: Path) -> None:
        if saved:
            raise KeyboardInterrupt
        saved.append(path)
        save_file(shard, path)

    monkeypatch.setattr(train, "save_file", save_one)
    with pytest.raises(KeyboardInterrupt):
        piece._save()
    assert train.load_state(piece.options.run)["step"] == 0


def test_a_published_model_is_what_was_trained(published: Path, rows: Rows, weights: Weights) -> None:
    stored = load_file(published / "model.safetensors")
    assert all(torch.equal(stored[name], weight.bfloat16()) for name, weight in weights.items())
    assert (published / "model.safetensors").stat().st_mode & 0o777 == 0o644
    stock = by_torch(AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32))
    tokenizer = AutoTokenizer.from_pretrained(published)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "It was a long road."}], tokenize=False)
    assert tokenizer.encode(text) == rows.encode(text)
    tokens = torch.tensor([(rows.encode(text) * 64)[:64]])
    with torch.no_grad():
        rounded = {name: weight.float() for name, weight in stored.items()}
        x = Trainer(compiled=False, dtype=torch.float32).hidden(rounded, tokens)
        mine = linear(rms_norm(x, rounded["model.norm.weight"]), rounded["lm_head.weight"])
        theirs = stock(tokens).logits
    assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max()
    assert stock.generation_config.eos_token_id == rows.bpe.token_to_id("<|im_end|>")


def test_losses_are_drawn_or_their_absence_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, picture = tmp_path / "log.jsonl", tmp_path / "loss.png"
    log.write_text('{"step": 100, "text_loss": 3, "chat_loss": 2, "exact_accuracy": 0.5}\n')
    draw_losses(log, picture)
    assert picture.is_file() or "no matplotlib" in capsys.readouterr().out


def test_a_run_starts_from_a_published_model(published: Path, make_piece: MakePiece, weights: Weights) -> None:
    piece = make_piece(start=published)
    assert piece.step == 0
    for name, weight in weights.items():
        assert torch.equal(piece.weights[name], weight.bfloat16().float()), name
    take_steps(piece, 1)
    piece._save()
    resumed = make_piece(start=published)
    assert resumed.step == 1
    torch.testing.assert_close(resumed.weights["lm_head.weight"], piece.weights["lm_head.weight"], rtol=2**-15, atol=0)


def test_a_start_brings_its_tokenizer_and_no_other_is_taken(published: Path, tmp_path: Path) -> None:
    train.take_tokenizer(published, tmp_path)
    train.take_tokenizer(published, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(TOKENIZER_FILES)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        SystemExit, match=r"tokenizer\.json is not the tokenizer\.json of --start .+: name an empty --run"
    ):
        train.take_tokenizer(published, tmp_path)
    with pytest.raises(SystemExit, match=r"has no tokenizer\.json: name the directory of a published model"):
        train.take_tokenizer(tmp_path.parent, tmp_path)


def test_a_start_of_another_shape_is_refused(published: Path, weights: Weights, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no model\.safetensors"):
        train.load_start(tmp_path, weights)
    for changed in ({"lm_head.weight": torch.zeros(3, 3)}, {"extra": torch.zeros(1)}):
        with pytest.raises(SystemExit, match=f"shape that model.py has: see {next(iter(changed))}"):
            train.load_start(published, weights | changed)


def test_the_kernel_has_no_annotation_that_triton_cannot_read() -> None:
    """Triton evaluates annotations inside its own names: anything but `tl.` fails on a GPU, where no test runs."""
    source = Path(train.__file__).with_name("triangular.py").read_text(encoding="utf-8")
    [kernel] = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    annotations = [argument.annotation for argument in kernel.args.args if argument.annotation]
    assert [ast.unparse(annotation) for annotation in annotations] == ["tl.constexpr"]
    assert kernel.returns is None
