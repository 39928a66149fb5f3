"""The result columns: one explicit Arrow schema, the same for answered, failed and empty parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.config import InputConfig
from batchspec.errors import BatchspecError, InputError
from batchspec.stats import ratio
from batchspec.types import Completion, Outcome, RowFailure, StepTimes

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ResultRow:
    """An outcome and where it was made: what a part shows of one row beside the input's columns.

    `worker` and `attempt` are numbers; `price_per_hour` is that of the attempt (USD per device-hour, None: unknown).
    `request_class` is the class the run gave the row: it is shown where the input has no class column.
    """

    outcome: Outcome
    worker: int
    attempt: int
    price_per_hour: float | None = None
    request_class: str | None = None
    est_target_only_device_seconds: float | None = None

    @property
    def cost_usd(self) -> float | None:
        """What the row's share of metered device time costs; None without a price."""
        if self.price_per_hour is None:
            return None
        return self.outcome.times.device_seconds / 3600 * self.price_per_hour


class Column(NamedTuple):
    """A result column; `value` is None for those that depend on more than the ResultRow."""

    name: str
    type: pa.DataType
    unit: str
    value: Callable[[ResultRow], Any] | None
    description: str


def _of_answer(value: Callable[[Completion], Any]) -> Callable[[ResultRow], Any]:
    """Null for an error row: nobody knows what it would have been."""
    return lambda row: value(row.outcome) if isinstance(row.outcome, Completion) else None


def _of_failure(value: Callable[[RowFailure], Any]) -> Callable[[ResultRow], Any]:
    return lambda row: value(row.outcome) if isinstance(row.outcome, RowFailure) else None


def _of_times(value: Callable[[StepTimes], float | None]) -> Callable[[ResultRow], float | None]:
    """Device time counts for error rows too: it was spent (0 where the row never got so far)."""
    return lambda row: value(row.outcome.times)


def _time_per_output_token(answer: Completion) -> float | None:
    decode_seconds = answer.times.e2e_seconds - answer.times.first_token_seconds
    return ratio(decode_seconds, answer.output_tokens - 1)


_TEXT, _COUNT, _COUNTS = pa.string(), pa.int32(), pa.list_(pa.int32())
_INDEX, _NUMBER = pa.int64(), pa.float64()

# fmt: off
RESULT_COLUMNS = (
    Column("row_index", _INDEX, "", None, "place of the row in the whole input, from 0"),
    Column("source_file", _TEXT, "", None, "the input file"),
    Column("source_row", _INDEX, "", None, "place of the row in its file, from 0"),
    Column("request_id", _TEXT, "", None, "the input's id, in its own type; null where it has none"),
    Column("request_class", _TEXT, "", None, "the input's class, in its own type; else the class that the run gave"),
    Column("method", _TEXT, "", _of_answer(lambda a: a.method),
           "the drafter that was used in any step, else target_only"),
    Column("num_speculative_tokens", _COUNT, "tokens", _of_answer(lambda a: a.num_speculative_tokens),
           "draft length of the route"),
    Column("num_route_changes", _COUNT, "changes", _of_answer(lambda a: a.num_route_changes),
           "how often the route changed"),
    Column("route_reason", _TEXT, "", _of_answer(lambda a: a.route_reason), "why this route"),
    Column("output_text", _TEXT, "", _of_answer(lambda a: _valid(a.text)),
           "decode of all output tokens at once, cut before the ending EOS or the stop string"),
    Column("output_token_ids", _COUNTS, "", _of_answer(lambda a: a.token_ids), "with the ending EOS"),
    Column("finish_reason", _TEXT, "", _of_answer(lambda a: a.finish_reason), "stop or length; null for an error row"),
    Column("error_type", _TEXT, "", _of_failure(lambda f: f.error_type), "what kind of error row; null for an answer"),
    Column("error_message", _TEXT, "", _of_failure(lambda f: _valid(f.error_message)), "what is wrong with the row"),
    Column("input_tokens", _COUNT, "tokens", lambda row: row.outcome.input_tokens,
           "prompt tokens, template included; null where the row failed before it had any"),
    Column("cached_input_tokens", _COUNT, "tokens", _of_answer(lambda a: a.cached_input_tokens),
           "prompt tokens that were not computed for this row"),
    Column("output_tokens", _COUNT, "tokens", _of_answer(lambda a: a.output_tokens), "length of output_token_ids"),
    Column("num_target_steps", _COUNT, "steps", _of_answer(lambda a: a.stats.num_target_steps),
           "target forwards that gave the row a token, the one that ends its prefill included"),
    Column("num_draft_steps", _COUNT, "steps", _of_answer(lambda a: a.stats.num_draft_steps),
           "draft-model forwards for the row"),
    Column("spec_decode_num_drafts", _COUNT, "steps", _of_answer(lambda a: a.stats.num_drafts),
           "steps in which tokens were proposed"),
    Column("spec_decode_num_draft_tokens", _COUNT, "tokens", _of_answer(lambda a: a.stats.num_draft_tokens),
           "proposed tokens"),
    Column("spec_decode_num_accepted_tokens", _COUNT, "tokens", _of_answer(lambda a: a.stats.num_accepted_tokens),
           "proposed tokens that were accepted; the target's own token after them is not counted"),
    Column("spec_decode_num_accepted_tokens_per_pos", _COUNTS, "tokens",
           _of_answer(lambda a: a.stats.num_accepted_tokens_per_pos), "accepted tokens by position in the proposal"),
    Column("num_rejections_per_pos", _COUNTS, "tokens", _of_answer(lambda a: a.stats.num_rejections_per_pos),
           "rejected tokens by position; those after a rejection are not judged"),
    Column("num_lookup_draft_tokens", _COUNT, "tokens", _of_answer(lambda a: a.stats.num_lookup_draft_tokens),
           "the part of the proposed tokens that came from prompt lookup"),
    Column("num_lookup_accepted_tokens", _COUNT, "tokens", _of_answer(lambda a: a.stats.num_lookup_accepted_tokens),
           "the part of the accepted tokens that came from prompt lookup"),
    Column("num_discarded_tokens", _COUNT, "tokens", _of_answer(lambda a: a.stats.num_discarded_tokens),
           "computed tokens that came after the row's end"),
    Column("acceptance_rate", _NUMBER, "accepted / proposed", _of_answer(lambda a: a.stats.acceptance_rate),
           "null where nothing was proposed"),
    Column("mean_acceptance_length", _NUMBER, "tokens per drafting step",
           _of_answer(lambda a: a.stats.mean_acceptance_length), "1 + accepted / drafts; null without drafts"),
    Column("tokens_per_target_step", _NUMBER, "tokens per step",
           _of_answer(lambda a: a.stats.tokens_per_target_step(a.output_tokens)), "output tokens over target steps"),
    Column("mean_live_sequences", _NUMBER, "sequences", _of_answer(lambda a: a.mean_live_sequences),
           "mean number of sequences in the row's steps"),
    Column("queue_seconds", _NUMBER, "seconds", _of_answer(lambda a: a.times.queue_seconds),
           "wait before admission"),
    Column("first_token_seconds", _NUMBER, "seconds", _of_answer(lambda a: a.times.first_token_seconds),
           "from admission to the first token"),
    Column("e2e_seconds", _NUMBER, "seconds", _of_answer(lambda a: a.times.e2e_seconds), "from admission to the end"),
    Column("time_per_output_token_seconds", _NUMBER, "seconds per token", _of_answer(_time_per_output_token),
           "(e2e - first token) / (output tokens - 1); null below two tokens"),
    Column("prefill_seconds", _NUMBER, "seconds", _of_times(lambda t: t.prefill_seconds), "share of prefill"),
    Column("draft_seconds", _NUMBER, "seconds", _of_times(lambda t: t.draft_seconds),
           "share of drafting; null where the engine does not part it from verifying"),
    Column("verify_seconds", _NUMBER, "seconds", _of_times(lambda t: t.verify_seconds),
           "share of target steps after the prefill"),
    Column("overhead_seconds", _NUMBER, "seconds", _of_times(lambda t: t.overhead_seconds),
           "share of everything else in the row's steps"),
    Column("device_seconds", _NUMBER, "seconds", _of_times(lambda t: t.device_seconds), "sum of the four"),
    Column("cost_usd", _NUMBER, "USD", lambda row: row.cost_usd, "device_seconds at the price; null without a price"),
    Column("est_target_only_device_seconds", _NUMBER, "seconds", lambda row: row.est_target_only_device_seconds,
           "device time that the profile expects without speculation; null without a profile"),
    Column("worker", _COUNT, "", lambda row: row.worker, "number of the worker that finished the row"),
    Column("attempt", _COUNT, "", lambda row: row.attempt, "number of the attempt that finished the row"),
)
# fmt: on


@dataclass(frozen=True)
class ResultSchema:
    """The columns of an output: the input's, untouched and first, then the result columns, `prefix` before each.

    `request_id` and `request_class` are result columns that the input may bring along:
    - the input's own id column has that very name (`prefix` included): it is the result column, and none is added;
    - it has another name (`--request-id-column`, or a prefix is set): the result column repeats it, in the same type;
    - the input has none: a string column, null for ids; for classes what the run gave the row (`ResultRow`).
    So an id keeps every digit and its type, a null stays null, and a class that the run derived is not lost.
    An error row has null in everything that describes an answer, counters included; device time and cost are what it
    took all the same.
    """

    input_schema: pa.Schema
    config: InputConfig
    prefix: str = ""

    @cached_property
    def arrow(self) -> pa.Schema:
        """The schema of every part. Raises InputError on a name clash, or for a type that Parquet cannot write."""
        own = [column for column in RESULT_COLUMNS if not self._is_input_column(column.name)]
        taken = {name.casefold(): name for name in self.input_schema.names}
        clashes = [taken[name] for column in own if (name := (self.prefix + column.name).casefold()) in taken]
        if clashes:
            raise InputError(
                f"the input has columns that the output names too: {', '.join(clashes)}. "
                f"Add --output-prefix to name the result columns apart, or rename these"
            )
        fields = [self._field(column) for column in own]
        schema = pa.schema([*self.input_schema, *fields])
        _check_writable(schema)
        return schema

    def build_table(
        self, input_rows: pa.Table, source_file: str, first_source_row: int, rows: Sequence[ResultRow]
    ) -> pa.Table:
        """A part (or a piece of one): `rows[i]` answers row i of `input_rows`, all from one file.

        Raises BatchspecError, with the row, where a counter identity is broken, or rows and input do not fit.
        """
        if not input_rows.schema.equals(self.input_schema):
            raise BatchspecError(f"{source_file}: rows of another schema: {', '.join(input_rows.schema.names)}")
        _check_rows(input_rows, source_file, first_source_row, rows)
        made = {
            "row_index": pa.array([row.outcome.row_index for row in rows], _INDEX),
            "source_file": pa.repeat(source_file, len(rows)),
            "source_row": pa.array(range(first_source_row, first_source_row + len(rows)), _INDEX),
            "request_id": self._brought("request_id", input_rows, pa.nulls(len(rows), _TEXT)),
            "request_class": self._brought(
                "request_class", input_rows, pa.array((r.request_class for r in rows), _TEXT)
            ),
        }
        columns = list(input_rows.columns)
        for column in RESULT_COLUMNS:
            if column.value is not None:
                columns.append(pa.array([column.value(row) for row in rows], column.type))
            elif not self._is_input_column(column.name):
                columns.append(made[column.name])
        return pa.Table.from_arrays(columns, schema=self.arrow)

    def _source(self, name: str) -> str | None:
        """The input column that holds result column `name`, if the input has one."""
        source = {
            "request_id": self.config.request_id_column,
            "request_class": self.config.request_class_column,
        }.get(name)
        return source if source in self.input_schema.names else None

    def _is_input_column(self, name: str) -> bool:
        return self._source(name) == self.prefix + name

    def _field(self, column: Column) -> pa.Field:
        source = self._source(column.name)
        kind = column.type if source is None else self.input_schema.field(source).type
        metadata = {"unit": column.unit, "description": column.description}
        return pa.field(self.prefix + column.name, kind, metadata=metadata)

    def _brought(self, name: str, input_rows: pa.Table, otherwise: pa.Array) -> pa.Array | pa.ChunkedArray:
        source = self._source(name)
        return otherwise if source is None else input_rows.column(source)


def _check_rows(input_rows: pa.Table, source_file: str, first_source_row: int, rows: Sequence[ResultRow]) -> None:
    if input_rows.num_rows != len(rows):
        raise BatchspecError(f"{source_file}: {len(rows)} outcomes for {input_rows.num_rows} rows")
    for offset, row in enumerate(rows):
        where = f"{source_file}, row {first_source_row + offset}"
        if row.outcome.row_index != rows[0].outcome.row_index + offset:
            raise BatchspecError(f"{where}: outcome of row_index {row.outcome.row_index} is out of order")
        if isinstance(row.outcome, Completion):
            try:
                row.outcome.stats.check(row.outcome.output_tokens)
            except ValueError as error:
                raise BatchspecError(f"{where} (row_index {row.outcome.row_index}): {error}") from error


def _check_writable(schema: pa.Schema) -> None:
    """Write one row of nulls with the real schema, so that no type fails after hours of work."""
    nullable = pa.schema(field.with_nullable(True) for field in schema)
    try:
        row = pa.Table.from_arrays([pa.nulls(1, field.type) for field in nullable], schema=nullable)
        pq.write_table(row, pa.BufferOutputStream())
    except pa.ArrowException as error:
        raise InputError(f"the input has a column that Parquet cannot hold: {error}. Drop it or convert it") from error


def _valid(text: str) -> str:
    """The text as valid Unicode: Arrow refuses lone surrogates."""
    return text.encode(errors="backslashreplace").decode()
