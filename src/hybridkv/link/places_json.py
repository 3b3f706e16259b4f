"""The JSON form of tables and groups. It comes from another process: each value is checked for its type and range."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from hybridkv.cache import Role
from hybridkv.link.errors import LinkMismatch
from hybridkv.link.places import LARGEST, FieldPlace, GroupGeometry, LayerPlace, PartKind, RowPlace, Table
from hybridkv.sight import Sight
from hybridkv.spec import DType
from hybridkv.stream.boxes import PageGrid
from hybridkv.stream.form import Share

_MOST_ENTRIES = 1 << 16
"""Entries of a list or an object; no model comes near."""
_MOST_AXES = 8
T = TypeVar("T")
Kind = TypeVar("Kind", bound=StrEnum)


def table_json(table: Table) -> dict[str, Any]:
    return {"grid": list(table.grid), "role": table.role.value, "pages_per_item": table.pages_per_item}


def group_json(group: GroupGeometry) -> dict[str, Any]:
    return {
        "role": group.role.value,
        "window": group.sight.window,
        "chunk": group.sight.chunk,
        "slices": group.slices,
        "share": list(group.share),
        "is_writer": group.is_writer,
        "rows": [
            {
                "table": row.table,
                "page": row.page,
                "offset_bytes": row.offset_bytes,
                "nbytes": row.nbytes,
                "layers": [_layer_json(layer) for layer in row.layers],
            }
            for row in group.rows
        ],
    }


def _layer_json(layer: LayerPlace) -> dict[str, Any]:
    return {
        "layer": layer.layer,
        "num_pieces": layer.num_pieces,
        "parts": [
            {"name": part.name, "dtype": part.dtype.value, "length": part.length, "inner": list(part.inner)}
            for part in layer.parts
        ],
        "fields": [list(field) for field in layer.fields],
    }


def read_table(value: Reader) -> Table:
    return Table(PageGrid(*value.integers("grid", 3)), value.choice("role", Role), value.integer("pages_per_item"))


def read_group(name: str, value: Reader) -> GroupGeometry:
    window, chunk = value.optional_integer("window"), value.optional_integer("chunk")
    if 0 in (window, chunk) or None not in (window, chunk):
        raise _wrong(f"{value.what}.window, .chunk", (window, chunk), "one of them, at least 1, or none")
    return GroupGeometry(
        name,
        value.choice("role", Role),
        Sight(window, chunk),
        value.integer("slices"),
        Share(*value.integers("share", 2)),
        value.boolean("is_writer"),
        tuple(value.each("rows", _row)),
    )


def _row(value: Reader) -> RowPlace:
    return RowPlace(
        value.text("table"),
        value.integer("page"),
        value.integer("offset_bytes"),
        value.integer("nbytes"),
        tuple(value.each("layers", _layer)),
    )


def _layer(value: Reader) -> LayerPlace:
    fields = [FieldPlace(*_integers(one, f"{value.what}.fields", 4)) for one in value.items("fields")]
    return LayerPlace(
        value.integer("layer"), value.integer("num_pieces"), tuple(value.each("parts", _part)), tuple(fields)
    )


def _part(value: Reader) -> PartKind:
    inner = tuple(_integers(value.items("inner"), f"{value.what}.inner"))
    if len(inner) > _MOST_AXES:
        raise _wrong(f"{value.what}.inner", inner, f"at most {_MOST_AXES} sizes")
    return PartKind(value.text("name"), value.choice("dtype", DType), value.integer("length"), inner)


class Reader:
    """An object of JSON. `what`: its place, for errors."""

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, Mapping) or len(value) > _MOST_ENTRIES:
            raise _wrong(what, value, "an object")
        self.value, self.what = value, what

    def _get(self, key: str) -> tuple[Any, str]:
        if key not in self.value:
            raise LinkMismatch(f"{self.what} has no {key!r}: run the same version of hybridkv on both sides")
        return self.value[key], f"{self.what}.{key}"

    def integer(self, key: str) -> int:
        return _integer(*self._get(key))

    def optional_integer(self, key: str) -> int | None:
        value, what = self._get(key)
        return None if value is None else _integer(value, what)

    def integers(self, key: str, count: int) -> list[int]:
        return _integers(*self._get(key), count)

    def boolean(self, key: str) -> bool:
        value, what = self._get(key)
        if not isinstance(value, bool):
            raise _wrong(what, value, "true or false")
        return value

    def text(self, key: str) -> str:
        value, what = self._get(key)
        if not isinstance(value, str) or len(value) > 1024:
            raise _wrong(what, value, "a text of at most 1024 characters")
        return value

    def choice(self, key: str, kind: type[Kind]) -> Kind:
        text = self.text(key)
        if text not in [one.value for one in kind]:
            raise _wrong(f"{self.what}.{key}", text, "one of " + ", ".join(one.value for one in kind))
        return kind(text)

    def items(self, key: str) -> list[Any]:
        return _items(*self._get(key))

    def each(self, key: str, read: Callable[[Reader], T]) -> list[T]:
        return [read(Reader(one, f"{self.what}.{key}[{i}]")) for i, one in enumerate(self.items(key))]

    def entries(self, key: str) -> list[tuple[str, Reader]]:
        value = Reader(*self._get(key))
        return [(str(name), Reader(one, f"{value.what}.{name}")) for name, one in value.value.items()]


def _items(value: object, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MOST_ENTRIES:
        raise _wrong(what, value, "a list")
    return value


def _integers(value: object, what: str, count: int | None = None) -> list[int]:
    found = [_integer(one, what) for one in _items(value, what)]
    if count is not None and len(found) != count:
        raise _wrong(what, value, f"{count} numbers")
    return found


def _integer(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
        raise _wrong(what, value, f"a whole number from 0 to {LARGEST}")
    return value


def _wrong(what: str, value: object, wanted: str) -> LinkMismatch:
    return LinkMismatch(f"{what} is {repr(value)[:80]}, not {wanted}: run the same version of hybridkv on both sides")
