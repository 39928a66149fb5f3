"""Parquet footers, read in pieces.

pyarrow's parsed footer takes about 1 kB for each column of each row group: gigabytes for a file of a million one-row
groups. So a footer of many row groups is cut, as bytes, into footers of a few thousand, parsed one at a time.
The bytes are `FileMetaData` of parquet.thrift in Thrift's compact encoding.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.errors import InputError

ROW_GROUPS_PER_SEGMENT = 2000
_MAGIC = b"PAR1"
_BYTE, _I16, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 3, 4, 6, 7, 8, 9, 10, 12
_ROW_GROUPS = 4  # field id in FileMetaData
_NUM_ROWS = 3  # field id in RowGroup


class Segment(NamedTuple):
    """A run of row groups. `metadata` is of these alone, with offsets into the whole file; row group i has the rows
    from `bounds[i]` to before `bounds[i + 1]` of the file."""

    metadata: pq.FileMetaData
    bounds: list[int]


class _Span(NamedTuple):
    """Where a run of row groups lies: in the rows of the file, and in the bytes of its footer."""

    first_row: int
    num_groups: int
    start: int
    end: int


class Footer:
    """The footer of one open Parquet file, called `name` in errors. Raises InputError where there is none."""

    def __init__(self, file: pa.NativeFile, name: str) -> None:
        self._name = name
        self.size_bytes: int = file.size()
        self._raw = _read_footer(file, self.size_bytes, name)
        try:
            self._cut()
            first = self._parse(self._spans[0])
            self.num_rows: int = first.num_rows  # of the whole file: a cut footer keeps it
            self.schema: pa.Schema = first.schema.to_arrow_schema().remove_metadata()
        except (IndexError, ValueError, RecursionError, OSError, pa.ArrowException) as error:
            raise _not_parquet(name, "its footer cannot be parsed") from error

    @property
    def fingerprint(self) -> str:
        """A hash of the footer and the file's size: what stands for its content."""
        digest = hashlib.sha256(self._raw)  # not joined first: a large footer would be copied
        digest.update(struct.pack("<q", self.size_bytes))
        return digest.hexdigest()

    @property
    def uncompressed_bytes(self) -> int:
        """The size of the data pages before compression, all columns and rows together."""
        parsed = (self._parse(span) for span in self._spans)
        return sum(m.row_group(i).total_byte_size for m in parsed for i in range(m.num_row_groups))

    def segment(self, row: int) -> Segment:
        """The run of row groups that `row` is in. Raises InputError where the row groups end before it."""
        index = bisect_right(self._spans, row, key=lambda span: span.first_row) - 1
        metadata = self._parse(self._spans[index])
        sizes = (metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        bounds = list(accumulate(sizes, initial=self._spans[index].first_row))
        if row >= bounds[-1]:
            raise InputError(f"{self._name} is damaged: its row groups end at row {bounds[-1]}")
        return Segment(metadata, bounds)

    def _cut(self) -> None:
        """Find the row groups, in one span unless they are many."""
        raw, pos, field_id = self._raw, 0, 0
        while raw[pos]:
            field_id, kind, pos = _field_header(raw, pos, field_id)
            if field_id == _ROW_GROUPS:
                break
            pos = _skip(raw, pos, kind)
        self._list_start = pos
        self.num_row_groups, _, pos = _list_header(raw, pos)
        if self.num_row_groups <= ROW_GROUPS_PER_SEGMENT:
            self._spans = [_Span(0, self.num_row_groups, pos, pos)]
        else:
            self._spans, self._list_end = _walk_row_groups(raw, pos, self.num_row_groups)

    def _parse(self, span: _Span) -> pq.FileMetaData:
        footer = self._raw
        if span.num_groups < self.num_row_groups:
            groups = _encode_list_header(span.num_groups) + footer[span.start : span.end]
            footer = footer[: self._list_start] + groups + footer[self._list_end :]
        return pq.read_metadata(pa.BufferReader(_MAGIC + footer + struct.pack("<I", len(footer)) + _MAGIC))


def _not_parquet(name: str, why: str) -> InputError:
    return InputError(f"{name} is not a Parquet file, or is damaged: {why}")


def _read_footer(file: pa.NativeFile, size_bytes: int, name: str) -> bytes:
    if size_bytes < 12:
        raise _not_parquet(name, f"it has {size_bytes} bytes")
    file.seek(size_bytes - 8)
    length_bytes, magic = struct.unpack("<I4s", file.read(8))
    if magic == b"PARE":
        raise _not_parquet(name, "its footer is encrypted")
    if magic != _MAGIC or length_bytes > size_bytes - 12:
        raise _not_parquet(name, "it does not end in a Parquet footer")
    file.seek(size_bytes - 8 - length_bytes)
    return bytes(file.read(length_bytes))


def _walk_row_groups(raw: bytes, pos: int, num_groups: int) -> tuple[list[_Span], int]:
    """Cut the list of RowGroup structs at `pos` into spans; also returns where it ends."""
    spans, first_row, row = [], 0, 0
    start = pos
    for count in range(1, num_groups + 1):
        field_id = 0
        while raw[pos]:
            field_id, kind, pos = _field_header(raw, pos, field_id)
            if field_id == _NUM_ROWS:
                value, pos = _varint(raw, pos)
                row += _unzigzag(value)
            else:
                pos = _skip(raw, pos, kind)
        pos += 1
        if count % ROW_GROUPS_PER_SEGMENT == 0 or count == num_groups:
            spans.append(_Span(first_row, (count - 1) % ROW_GROUPS_PER_SEGMENT + 1, start, pos))
            first_row, start = row, pos
    return spans, pos


def _skip(raw: bytes, pos: int, kind: int) -> int:
    """Where the value of type `kind` at `pos` ends. Written for speed: some footers hold tens of millions."""
    if _I16 <= kind <= _I64:
        while raw[pos] & 0x80:
            pos += 1
        return pos + 1
    if kind == _BINARY:
        length, pos = _varint(raw, pos)
        return pos + length
    if kind == _STRUCT:
        while header := raw[pos]:
            pos += 1
            if header < 16:  # the field id follows in full
                pos = _skip(raw, pos, _I16)
            kind = header & 15
            if _I16 <= kind <= _I64:
                while raw[pos] & 0x80:
                    pos += 1
                pos += 1
            elif kind >= _BYTE:  # a boolean is its own header
                pos = _skip(raw, pos, kind)
        return pos + 1
    if kind in (_LIST, _SET):
        length, kind, pos = _list_header(raw, pos)
        if kind <= _BYTE:
            return pos + length
        for _ in range(length):
            pos = _skip(raw, pos, kind)
        return pos
    if kind <= _BYTE:
        return pos + (kind == _BYTE)
    if kind == _DOUBLE:
        return pos + 8
    raise ValueError(f"unknown Thrift type {kind}")


def _field_header(raw: bytes, pos: int, last_id: int) -> tuple[int, int, int]:
    """The field at `pos` as (id, type, where its value starts)."""
    header = raw[pos]
    if header >= 16:
        return last_id + (header >> 4), header & 15, pos + 1
    field_id, pos = _varint(raw, pos + 1)
    return _unzigzag(field_id), header & 15, pos


def _list_header(raw: bytes, pos: int) -> tuple[int, int, int]:
    """The list at `pos` as (length, type of its items, where they start)."""
    header = raw[pos]
    if header >> 4 < 15:
        return header >> 4, header & 15, pos + 1
    length, pos = _varint(raw, pos + 1)
    return length, header & 15, pos


def _encode_list_header(length: int) -> bytes:
    """The header of a list of `length` structs."""
    encoded = bytearray([0xF0 | _STRUCT])
    while length >= 0x80:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded)


def _varint(raw: bytes, pos: int) -> tuple[int, int]:
    """The unsigned number at `pos`, and where it ends."""
    value = shift = 0
    while True:
        byte = raw[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos
        shift += 7


def _unzigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)
