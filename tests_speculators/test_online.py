"""Hidden states from the server: speculators asks for them, reads the file and deletes it, and trains on them."""

from __future__ import annotations

import fcntl
import math
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
from datasets import Dataset
from hs_connectors import FileTransfer
from speculators.data_generation.offline import check_hidden_states
from speculators.data_generation.vllm_client import generate_hidden_states
from speculators.train.data import ArrowDataset
from stock_model import LAYERS, StockModel
from training import losses, train

from hybridkv.demo import demo_model

HYBRIDKV = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "hybridkv"
"""The server runs in our own environment, with another version of transformers than speculators has."""
PATIENCE_S = 300.0
NUM_SAMPLES = 6
EPOCHS = 3
MESSAGES = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A small hybrid model."}]


class Serving(NamedTuple):
    endpoint: str
    model: str
    folder: Path
    """Where the server writes hidden states."""

    def ask(self, item: dict[str, Any]) -> Path:
        """The file that the server names in its answer."""
        with openai.OpenAI(base_url=self.endpoint, api_key="EMPTY", max_retries=0) as client:
            handle, params = generate_hidden_states(client, self.model, item, max_retries=0)
        assert params["hidden_states_path"] == handle
        return Path(handle)


@pytest.fixture(scope="module")
def serving(verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Named as the verifier's path: speculators refuses a server whose model has another name.

    The server is killed when patience ends: clients then fail instead of waiting.
    """
    folder = tmp_path_factory.mktemp("served")
    command = [str(HYBRIDKV), "serve", str(demo_model()), f"--served-model-name={verifier}", "--port=0"]
    states = [f"--hidden-states-dir={folder}", f"--hidden-layers={','.join(map(str, LAYERS))}"]
    options = ["--memory=256MiB", "--device=cpu", "--log-level=error"]
    process = subprocess.Popen(
        [*command, *states, *options], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    deadline = threading.Timer(PATIENCE_S, process.kill)
    deadline.start()
    try:
        yield Serving(f"{address_of(process)}/v1", str(verifier), folder)
    finally:
        deadline.cancel()
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Serving at "):
            return line.split()[2]
    raise AssertionError("the server ended before it served")


def lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def assert_read_and_gone(path: Path, ids: list[int], stock: StockModel) -> None:
    """speculators waits for the lock, reads and checks the file, and leaves nothing behind."""
    transfer = FileTransfer(path.parent)
    data = transfer.get_generated({"hidden_states_path": str(path)})
    assert data is not None
    check_hidden_states(data, ids)
    assert data["hidden_states"].dtype == torch.bfloat16
    assert_close(data["hidden_states"], stock.hidden_states(ids))
    transfer.delete(str(path))
    assert not path.exists()
    assert not lock_of(path).exists()


def assert_close(states: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for bfloat16's rounding, which grows over the layers: compared with the length of each row."""
    assert states.shape == expected.shape
    wrong = (states.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    assert wrong.max() < 0.05


def test_completions(serving: Serving, stock: StockModel) -> None:
    for ids in stock.samples(2):
        assert_read_and_gone(serving.ask({"input_ids": ids}), ids, stock)
    assert list(serving.folder.iterdir()) == []


def test_chats(serving: Serving, stock: StockModel) -> None:
    ids = stock.chat_ids(MESSAGES)
    assert_read_and_gone(serving.ask({"input_ids": ids, "messages": MESSAGES}), ids, stock)
    assert list(serving.folder.iterdir()) == []


def test_the_same_prompt_again_has_all_its_rows(serving: Serving, stock: StockModel) -> None:
    """The second one is in the prefix cache."""
    ids = stock.samples(3)[2]
    first, again = serving.ask({"input_ids": ids}), serving.ask({"input_ids": ids})
    assert first != again
    for path in (first, again):
        assert_read_and_gone(path, ids, stock)


def test_the_lock_is_there_before_the_answer(serving: Serving, stock: StockModel) -> None:
    """As soon as the lock can be had, the file is whole. The server leaves the lock to its reader."""
    ids = stock.samples(4)[3]
    path = serving.ask({"input_ids": ids})
    assert path.parent == serving.folder
    assert path.is_absolute()
    with lock_of(path).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert path.is_file()
        assert lock_of(path).exists()
    assert_read_and_gone(path, ids, stock)


@pytest.fixture
def dataset(stock: StockModel, tmp_path: Path) -> Path:
    """Without any hidden states: the loader asks the server for them."""
    rows = [{"input_ids": ids, "loss_mask": [1] * len(ids), "seq_len": len(ids)} for ids in stock.samples(NUM_SAMPLES)]
    Dataset.from_list(rows).with_format("torch").save_to_disk(tmp_path / "data")
    return tmp_path / "data"


def test_its_loader_asks_for_every_sample(serving: Serving, stock: StockModel, dataset: Path) -> None:
    data = ArrowDataset(
        max_len=1024,
        datapath=dataset,
        vllm_endpoint=serving.endpoint,
        model=serving.model,
        max_retries=0,
        generation_validation_retries=0,
    )
    for index, ids in enumerate(stock.samples(NUM_SAMPLES)):
        sample = data[index]
        expected = stock.hidden_states(ids)
        assert sample["input_ids"].tolist() == ids
        assert_close(sample["hidden_states"].unflatten(1, (-1, stock.hidden_size)), expected[:, :-1])
        assert_close(sample["verifier_last_hidden_states"], expected[:, -1])
    assert list(serving.folder.iterdir()) == []


def test_its_trainer_learns_from_the_server(serving: Serving, verifier: Path, dataset: Path) -> None:
    once = ["--max-retries=0", "--generation-validation-retries=0", "--max-consecutive-generation-failures=1"]
    steps = train(dataset, verifier, f"--vllm-endpoint={serving.endpoint}", *once, epochs=EPOCHS)
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert all(step["error_records"] == 0 for step in steps)
    by_epoch = losses(steps)
    assert len(by_epoch) == EPOCHS
    assert by_epoch[-1] < by_epoch[0]
    assert list(serving.folder.iterdir()) == []
