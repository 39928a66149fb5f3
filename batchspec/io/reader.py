"""Streams input rows in bounded memory, whatever the row-group shape."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import pyarrow as pa

from batchspec.io.inputs import InputSet


class InputReader:
    """Reads row ranges of an input. One per worker: it keeps the last file open.

    Ranges may come in any order; rising ranges of a file cost one pass over it in all.
    """

    def __init__(self, inputs: InputSet) -> None:
        self._inputs = inputs

    def iter_batches(self, file_index: int, start_row: int, num_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield rows `start_row ... start_row + num_rows` of file `file_index`, in order, in the schema of the whole input.

        Batches hold at most 256 rows and rarely more than a few MB. Exhaust or drop the iterator before the next call.
        Raises InputError where the file is damaged or no longer what was resolved.
        """
        raise NotImplementedError

    def close(self) -> None: ...

    def __enter__(self) -> InputReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
