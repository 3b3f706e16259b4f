"""The format of objects: what was encoded is read back, and nothing else is ever accepted."""

from __future__ import annotations

import itertools
import struct
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from hybridkv.store import CorruptObject, Header, ObjectName, StoredRow, StoreError, UnknownFormat
from hybridkv.store.objects import MOST_HEADER_BYTES, MOST_OBJECT_BYTES, MOST_ROWS, encode_header, layout, read_header
from tests.store.samples import NAMESPACE, name_of
from tests.store.versions import written_by_hand

NAME = name_of(1)
SIZES = (5000, 1, 4096)
VERSION_BYTES = range(8, 12)


def header_of(name: ObjectName = NAME, sizes: tuple[int, ...] = SIZES, value: float = 2.5) -> Header:
    offsets = layout(name.group, sizes).offsets
    rows = tuple(StoredRow(offset, size, 7) for offset, size in zip(offsets, sizes, strict=True))
    return Header(name, value, 512, rows)


def reader_of(raw: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: raw[offset : offset + length]


def blob_of(header: Header) -> bytes:
    return encode_header(header).ljust(header.nbytes, b"\0")


def sealed(raw: bytes) -> bytes:
    """With the right checksum, as anyone can make it."""
    return raw + struct.pack("<Q", xxh3_64_intdigest(raw))


def check_refused(
    raw: bytes, nbytes: int | None = None, kind: type[StoreError] | tuple[type[StoreError], ...] = CorruptObject
) -> None:
    with pytest.raises(kind, match=NAME.key):
        read_header(NAME, len(raw) if nbytes is None else nbytes, reader_of(raw))


@given(
    sizes=st.lists(st.integers(1, 2**29), min_size=1, max_size=300),
    group=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True),
    value=st.floats(0, 1e300),
)
def test_headers_come_back(sizes: list[int], group: str, value: float) -> None:
    header = header_of(name_of(1, group), tuple(sizes), value)
    assert read_header(header.name, header.nbytes, reader_of(encode_header(header))) == header


def test_rows_begin_at_multiples_of_4096_and_do_not_overlap() -> None:
    rows = header_of(sizes=(1, 4096, 4097, 9999) * 60).rows
    assert all(row.offset % 4096 == 0 for row in rows)
    assert all(one.offset + one.nbytes <= two.offset for one, two in itertools.pairwise(rows))
    assert rows[0].offset >= len(encode_header(header_of(sizes=(1,) * 240)))


@given(st.binary(max_size=300))
def test_random_bytes_are_no_object(raw: bytes) -> None:
    check_refused(raw)


@given(st.binary(max_size=300))
def test_random_bytes_after_a_true_beginning_are_no_object(raw: bytes) -> None:
    check_refused(blob_of(header_of())[:16] + raw)


@given(st.data())
def test_no_bit_of_a_header_can_be_flipped(data: st.DataObject) -> None:
    raw = bytearray(blob_of(header_of()))
    bit = data.draw(st.integers(0, len(encode_header(header_of())) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    check_refused(bytes(raw), kind=UnknownFormat if bit // 8 in VERSION_BYTES else CorruptObject)


@given(st.data())
def test_no_byte_can_be_cut_off_or_added(data: st.DataObject) -> None:
    raw = blob_of(header_of())
    check_refused(raw[: data.draw(st.integers(0, len(raw) - 1))])
    check_refused(raw + data.draw(st.binary(min_size=1, max_size=5000)))


@given(
    length=st.integers(0, 2**32 - 1),
    count=st.integers(0, 2**32 - 1),
    letters=st.integers(0, 2**16 - 1),
    rows=st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 3), max_size=8),
    nbytes=st.integers(0, 2**63),
)
def test_forged_headers_with_right_checksums_are_refused(
    length: int, count: int, letters: int, rows: list[tuple[int, int, int]], nbytes: int
) -> None:
    fields = struct.pack("<16s32sdQIH", bytes.fromhex(NAMESPACE), bytes.fromhex(NAME.key), 1.0, 0, count, letters)
    table = b"".join(struct.pack("<QQQ", *row) for row in rows)
    raw = sealed(struct.pack("<8sII", b"hybridkv", 1, length) + fields + b"full" + table)
    check_refused(raw, nbytes, kind=(CorruptObject, UnknownFormat))


def forged(**changes: object) -> bytes:
    """A header that is right in all but what is changed."""
    values = {"version": 1, "value": 1.0, "count": 1, "group": b"full", "offset": 4096, "nbytes": 10, **changes}
    group, length = values["group"], 16 + 70 + len(values["group"]) + 24 + 8  # type: ignore[arg-type]
    fields = (bytes.fromhex(NAMESPACE), bytes.fromhex(NAME.key), values["value"], 0, values["count"], len(group))  # type: ignore[arg-type]
    raw = struct.pack("<8sII", b"hybridkv", values["version"], length) + struct.pack("<16s32sdQIH", *fields)
    return sealed(raw + group + struct.pack("<QQQ", values["offset"], values["nbytes"], 0))  # type: ignore[operator]


def test_the_forger_knows_the_format() -> None:
    raw = forged()
    assert read_header(NAME, 4106, reader_of(raw)).rows == (StoredRow(4096, 10, 0),)


@pytest.mark.parametrize(
    "changes",
    [
        {"value": float("nan")},
        {"value": float("inf")},
        {"value": -1.0},
        {"count": 2},
        {"count": 0},
        {"group": b"ful\xff"},
        {"group": b"half"},
        {"offset": 8192},
        {"offset": 0},
        {"offset": 4097},
        {"nbytes": 0},
        {"nbytes": 11},
        {"nbytes": 2**64 - 1},
        {"nbytes": MOST_OBJECT_BYTES + 1},
    ],
    ids=str,
)
def test_one_wrong_field_is_enough(changes: dict[str, object]) -> None:
    check_refused(forged(**changes), 4106)


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_another_version_is_no_damage_and_says_so(version: int) -> None:
    with pytest.raises(UnknownFormat, match=f"version {version}, this program reads version 1; upgrade"):
        read_header(NAME, 4106, reader_of(forged(version=version)))


@given(st.binary(max_size=300))
def test_any_bytes_may_follow_another_version(raw: bytes) -> None:
    check_refused(struct.pack("<8sII", b"hybridkv", 2, 0) + raw, kind=UnknownFormat)


@given(st.binary(min_size=1, max_size=5000))
def test_fields_that_were_added_are_no_damage_and_are_counted(fields: bytes) -> None:
    raw = written_by_hand(NAME, fields=fields)
    with pytest.raises(UnknownFormat, match=f"header has {len(fields):,} bytes of unknown fields"):
        read_header(NAME, len(raw), reader_of(raw))


@given(st.data())
def test_damage_to_added_fields_is_damage(data: st.DataObject) -> None:
    raw = bytearray(written_by_hand(NAME, fields=b"added later"))
    bit = data.draw(st.integers(0, 16 + 70 + 4 + 4 * 24 + 11 + 8 - 1)) * 8 + data.draw(st.integers(0, 7))
    raw[bit // 8] ^= 1 << bit % 8
    check_refused(bytes(raw), kind=UnknownFormat if bit // 8 in VERSION_BYTES else CorruptObject)


@pytest.mark.parametrize("count", [0, 2, MOST_ROWS + 1])
def test_added_fields_do_not_excuse_a_wrong_number_of_rows(count: int) -> None:
    check_refused(forged(count=count), 4106)


def test_an_object_of_a_later_version_under_another_name_is_noticed() -> None:
    raw = written_by_hand(name_of(2), fields=b"added later")
    with pytest.raises(CorruptObject, match="another object"):
        read_header(NAME, len(raw), reader_of(raw))


def test_an_object_under_another_name_is_noticed() -> None:
    raw = blob_of(header_of(name_of(2)))
    with pytest.raises(CorruptObject, match="another object"):
        read_header(NAME, len(raw), reader_of(raw))


@pytest.mark.parametrize("raw", [struct.pack("<8sII", b"hybridkv", 1, 2**32 - 1), forged(nbytes=2**60, count=2**31)])
def test_claims_of_size_allocate_nothing(raw: bytes) -> None:
    asked: list[int] = []

    def read(offset: int, length: int) -> bytes:
        asked.append(length)
        return raw[offset : offset + length]

    tracemalloc.start()
    try:
        with pytest.raises(CorruptObject):
            read_header(NAME, 2**62, read)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert max(asked) <= MOST_HEADER_BYTES


def test_rows_may_not_overlap() -> None:
    header = header_of()
    first, second, third = header.rows
    for rows in ((first._replace(offset=second.offset), second, third), (first, second._replace(offset=2**40), third)):
        check_refused(encode_header(header._replace(rows=rows)).ljust(header.nbytes, b"\0"))


def test_reads_that_come_back_short_are_noticed() -> None:
    raw = encode_header(header_of(sizes=(10,) * 1000))
    with pytest.raises(CorruptObject, match="ends after"):
        read_header(NAME, layout("full", (10,) * 1000).nbytes, lambda at, n: raw[at : at + n // 2])


def test_rows_have_limits() -> None:
    layout("full", [1] * MOST_ROWS)
    for sizes in ([], [1] * (MOST_ROWS + 1), [MOST_OBJECT_BYTES], [0]):
        with pytest.raises(StoreError):
            layout("full", sizes)


@pytest.mark.parametrize("part", ["", "A" * 32, "0" * 31, "0" * 33, "../" + "0" * 29, "0" * 32 + "\n"])
def test_names_are_safe_as_paths(part: str) -> None:
    with pytest.raises(StoreError, match="namespace"):
        ObjectName(part, "full", NAME.key)
    with pytest.raises(StoreError, match="key"):
        ObjectName(NAMESPACE, "full", part + part)


@pytest.mark.parametrize("group", ["", ".", "..", "a/b", "-a", "Full", "a b", "ü", "a" * 65, "a\n", "a\0"])
def test_groups_are_safe_as_paths(group: str) -> None:
    with pytest.raises(StoreError, match="group"):
        ObjectName(NAMESPACE, group, NAME.key)
