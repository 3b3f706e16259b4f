"""Records arrive whole, stay where they are, and are never overwritten while a step uses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hybridkv.memory import Uploader
from tests.devices import DEVICES

CPU = torch.device("cpu")
each_device = pytest.mark.parametrize("device", DEVICES)
either = pytest.mark.parametrize("persistent", [False, True])


@either
@each_device
def test_columns_of_any_kind_arrive_flat(device: str, persistent: bool) -> None:
    columns: dict[str, Any] = {
        "list": [3, 1, 2],
        "matrix": np.arange(6, dtype=np.int32).reshape(2, 3),
        "empty": [],
        "flags": np.array([True, False]),
        "range": range(4),
    }
    sent = Uploader(torch.device(device), persistent=persistent).send("record", **columns)
    assert {name: column.tolist() for name, column in sent.items()} == {
        "list": [3, 1, 2],
        "matrix": [0, 1, 2, 3, 4, 5],
        "empty": [],
        "flags": [1, 0],
        "range": [0, 1, 2, 3],
    }
    assert all(column.dtype == torch.int64 and column.device.type == device for column in sent.values())


@each_device
def test_a_record_keeps_its_addresses_until_it_grows(device: str) -> None:
    uploader = Uploader(torch.device(device), persistent=True)

    def send(count: int) -> dict[str, torch.Tensor]:
        uploader.begin()
        sent = uploader.send("record", src=range(count), dst=range(count, 2 * count))
        uploader.send("other", src=range(7 * count))
        assert sent["src"].tolist() == list(range(count))
        assert sent["dst"].tolist() == list(range(count, 2 * count))
        return sent

    first = {name: column.data_ptr() for name, column in send(20).items()}
    assert {name: column.data_ptr() for name, column in send(20).items()} == first
    assert send(3)["src"].data_ptr() == first["src"]
    assert send(500)["src"].data_ptr() != first["src"]
    grown = send(500)["src"].data_ptr()
    assert send(20)["src"].data_ptr() == grown


@either
def test_records_of_a_step_do_not_overwrite_each_other(persistent: bool) -> None:
    uploader = Uploader(CPU, persistent=persistent)
    first = uploader.send("a", rows=[1, 2, 3])["rows"]
    uploader.send("b", rows=[4, 5, 6])
    with pytest.raises(ValueError, match="'a' was already sent"):
        uploader.send("a", rows=[7])
    assert first.tolist() == [1, 2, 3]
    uploader.begin()
    assert uploader.send("a", rows=[7])["rows"].tolist() == [7]


@each_device
def test_buffers_serve_steps_and_what_is_between_them(device: str) -> None:
    """Steps run in inference mode, copies of pages do not: neither may own the buffers."""
    uploader = Uploader(torch.device(device), persistent=True)
    for is_step in (True, False, True):
        uploader.begin()
        with torch.inference_mode(is_step):
            assert uploader.send("a", rows=[1, 2])["rows"].tolist() == [1, 2]


@each_device
def test_rooms_stay_like_records(device: str) -> None:
    uploader = Uploader(torch.device(device), persistent=True)

    def rooms(*shape: int) -> list[int]:
        uploader.begin()
        made = [uploader.room("mask", shape, torch.float32), uploader.room("other", shape, torch.bool)]
        assert [tuple(one.shape) for one in made] == [shape, shape]
        assert [one.dtype for one in made] == [torch.float32, torch.bool]
        return [one.data_ptr() for one in made]

    first = rooms(3, 5)
    assert rooms(3, 5) == rooms(2, 1) == first
    assert rooms(100, 5) != first


@either
def test_a_room_is_taken_once_a_step(persistent: bool) -> None:
    uploader = Uploader(CPU, persistent=persistent)
    flags = uploader.flags("a", uploader.send("record", column=[0, 1, 2])["column"])
    assert flags.tolist() == [False, True, True]
    with pytest.raises(ValueError, match="'a' was already sent"):
        uploader.room("a", (3,), torch.bool)
