"""Input of `hybridkv extract`: lines of JSON, or a dataset folder of Hugging Face's `datasets`.

Prompts are read twice: once to check and to count them, and once more, one at a time, to compute them. So memory does
not grow with their number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from hybridkv.errors import InputError
from hybridkv.files import FileError, check_folder, parse_json, read_lines

_KINDS = ("prompt", "input_ids", "messages")


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt of the input, not tokenized yet."""

    index: int
    where: str
    """For error messages."""
    kind: str
    """One of `_KINDS`."""
    value: Any
    loss_mask: list[int] | None


class Prompts(ABC):
    """The prompts of an input, in order."""

    digest: str
    """Equal for equal prompts."""
    count: int

    @abstractmethod
    def __iter__(self) -> Iterator[Sample]: ...

    def without(self, there: Container[int]) -> Iterator[Sample]:
        """Those whose index is not in `there`."""
        return (sample for sample in self if sample.index not in there)


def open_input(path: Path) -> Prompts:
    """Read and check an input. Raises InputError that names the line and the field."""
    prompts = DatasetPrompts(path) if path.is_dir() else JsonPrompts(path)
    if not prompts.count:
        raise InputError(f"{path} has no prompts: write one a line")
    return prompts


class JsonPrompts(Prompts):
    """A file with a JSON object a line; empty lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        digest, self.count = xxh3_128(), 0
        for sample in self:
            digest.update(repr((sample.kind, sample.value, sample.loss_mask)).encode("utf-8", "surrogatepass"))
            self.count += 1
        self.digest = digest.hexdigest()

    def __iter__(self) -> Iterator[Sample]:
        try:
            for index, (number, line) in enumerate(read_lines(self._path)):
                yield _parsed(index, f"{self._path}, line {number}", line)
        except FileError as error:
            way_out = "name a .jsonl file or a dataset folder"
            raise InputError(f"cannot read {self._path}: {error}; {way_out}") from None


class DatasetPrompts(Prompts):
    """A folder that `datasets.save_to_disk` wrote, with the columns `input_ids` and, optionally, `loss_mask`."""

    def __init__(self, path: Path) -> None:
        try:
            check_folder(path)
        except FileError as error:
            raise InputError(f"cannot read {path}: {error}; remove it, or name another folder") from None
        datasets = import_datasets()
        if datasets is None:
            raise InputError(f"{path} is a folder: to read a dataset, pip install datasets; or name a .jsonl file")
        try:
            self._data = datasets.load_from_disk(str(path)).with_format("numpy")
            columns = self._data.column_names
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise InputError(f"cannot read {path}: {error}; name a folder that a dataset was saved to") from None
        if "input_ids" not in columns:
            raise InputError(f"{path} has no column 'input_ids', but {', '.join(map(str, columns))}")
        self._path = path
        self._has_mask = "loss_mask" in columns
        digest, self.count = xxh3_128(), len(self._data)
        for sample in self:
            digest.update(repr((sample.kind, sample.value, sample.loss_mask)).encode())
        self.digest = digest.hexdigest()

    def __iter__(self) -> Iterator[Sample]:
        for index, row in enumerate(self._data):
            where = f"{self._path}, row {index}"
            fields = {name: row[name].tolist() for name in ("input_ids", *(["loss_mask"] * self._has_mask))}
            yield _checked(index, where, fields)


def import_datasets() -> Any | None:
    """Hugging Face's `datasets`, without its bars. It is optional: None if it is not installed."""
    try:
        import datasets
    except ModuleNotFoundError:
        return None
    datasets.disable_progress_bars()
    return datasets


def _parsed(index: int, where: str, line: str) -> Sample:
    try:
        fields = parse_json(line)
    except FileError as error:
        raise InputError(f"{where}: {error}; write one JSON object a line") from None
    if not isinstance(fields, dict):
        raise InputError(f"{where}: expected an object with one of {_names()}")
    return _checked(index, where, fields)


def _checked(index: int, where: str, fields: dict[str, Any]) -> Sample:
    given = [kind for kind in _KINDS if kind in fields]
    if len(given) != 1:
        raise InputError(f"{where}: expected one of {_names()}, found {' and '.join(given) or 'none of them'}")
    [kind] = given
    value, mask = fields[kind], fields.get("loss_mask")
    if kind == "prompt" and not (isinstance(value, str) and value):
        raise InputError(f"{where}: prompt is {_short(value)}: write a text")
    if kind == "messages" and not (value and isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        raise InputError(f"{where}: messages is {_short(value)}: write a list of objects with 'role' and 'content'")
    if kind == "input_ids" and not (isinstance(value, list) and value and all(type(one) is int for one in value)):
        raise InputError(f"{where}: input_ids is {_short(value)}: write a list of token ids")
    if mask is None:
        return Sample(index, where, kind, value, None)
    if kind != "input_ids":
        raise InputError(f"{where}: loss_mask with {kind}: it belongs to input_ids, one number a token")
    if not isinstance(mask, list) or not all(one in (0, 1) for one in mask) or len(mask) != len(value):
        raise InputError(f"{where}: loss_mask is {_short(mask)}: write a 0 or a 1 for each of {len(value)} tokens")
    return Sample(index, where, kind, value, [int(one) for one in mask])


def _names() -> str:
    return ", ".join(map(repr, _KINDS))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
