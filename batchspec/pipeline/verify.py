"""`batchspec verify`: samples the answers of an output, finds their model, and has `audit` judge them."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchspec.audit import Audit, SampledAnswer, audit_rows, choose_rows
from batchspec.config import EngineConfig, InputConfig
from batchspec.engine.model_files import model_identity
from batchspec.errors import BatchspecError, MismatchError, UsageError
from batchspec.io.parser import RowParser, text_forms
from batchspec.io.results import class_column
from batchspec.io.store import Store, open_store, storage_faults
from batchspec.io.writer import METADATA_PREFIX, is_part_name
from batchspec.pipeline.identity import differences
from batchspec.pipeline.logs import set_up_logging
from batchspec.pipeline.models import locate_model
from batchspec.pipeline.plan import Manifest, load_manifest, to_json
from batchspec.stats import DecodeStats
from batchspec.types import Method, Request, SamplingParams
from batchspec.workload import RequestClassifier

logger = logging.getLogger(__name__)

AUDIT_NAME = "_batchspec/audit.json"
NOISE_ROWS = 8
_COUNTERS = {
    "num_target_steps": "num_target_steps",
    "num_draft_steps": "num_draft_steps",
    "num_drafts": "spec_decode_num_drafts",
    "num_draft_tokens": "spec_decode_num_draft_tokens",
    "num_accepted_tokens": "spec_decode_num_accepted_tokens",
    "num_accepted_tokens_per_pos": "spec_decode_num_accepted_tokens_per_pos",
    "num_rejections_per_pos": "num_rejections_per_pos",
    "num_discarded_tokens": "num_discarded_tokens",
    "num_lookup_draft_tokens": "num_lookup_draft_tokens",
    "num_lookup_accepted_tokens": "num_lookup_accepted_tokens",
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an answered row stands."""

    part: str
    row: int
    request_class: str


def verify_output(output: str, sample_rows: int, seed: int = 0, model: str | None = None, device: str = "cpu") -> Audit:
    """Audit `sample_rows` answers of a job's output, evenly from every class and method; kept as `audit.json` there.

    The model is the one that the parts name; `model` overrides where it lies now, not which it is. Raises UsageError
    where there is nothing to audit, and MismatchError for another model.
    """
    started_at = time.monotonic()
    set_up_logging(f"verify {os.getpid()}")
    store = open_store(output)
    with storage_faults(store):
        manifest = load_manifest(store)
        if manifest is None:
            raise UsageError(f"{store.root} is not the output of a batchspec job (it has no manifest)")
        if manifest.identity["engine"] == "fake":
            raise UsageError(f"{store.root} was made by the fake engine: there is no model to audit it with")
        columns = manifest.identity["columns"]
        parts = [name for name in store.names("") if is_part_name(name)]
        strata = _strata(store, parts, columns, sample_rows, seed)
        places = choose_rows(strata, sample_rows)
        if not places:
            raise UsageError(f"{store.root} has no answered rows to audit")
        engine = _engine_of(store, places[0].part)
        answers = list(_answers(store, manifest, places))
    path = _model_path(model or engine["model"], manifest, store)

    # Late: this loads torch.
    from batchspec.engine.reference import Reference

    written = [answer.written for answer, _ in answers]
    logger.info("auditing %d rows with %s (%s) on %s", len(answers), path, engine["dtype"], device)
    reference = Reference(
        path, engine["dtype"], device, written[:NOISE_ROWS], manifest.identity["neutralize_special_tokens"]
    )
    groups, faults = audit_rows(answers, reference)
    audit = Audit(
        output=store.root,
        model=str(path),
        dtype=engine["dtype"],
        acceptance_rule=manifest.identity["acceptance_rule"],
        noise_logits=reference.noise_logits,
        noise_positions=reference.noise_positions,
        device_seconds=time.monotonic() - started_at,
        groups=groups,
        faults=faults,
    )
    _save(store, audit)
    return audit


def _strata(
    store: Store, parts: Sequence[str], columns: Mapping[str, str], num_rows: int, seed: int
) -> dict[tuple[str, str], list[_Place]]:
    """Answered rows by class and method, at most `num_rows` of each, chosen by a seeded number per row."""
    prefix, label = columns["output_prefix"], RequestClassifier().label
    found: defaultdict[tuple[str, str], list[tuple[float, _Place]]] = defaultdict(list)
    for number, name in enumerate(parts):
        with store.open(name) as file, pq.ParquetFile(file) as part:
            classes_name = class_column(part.schema_arrow, columns)
            table = part.read(columns=[classes_name, f"{prefix}method"])
        classes = text_forms(table.column(classes_name).combine_chunks())
        methods = table.column(f"{prefix}method").to_pylist()
        keys = np.random.default_rng([seed, number]).random(len(methods)).tolist()
        for row, (request_class, method, key) in enumerate(zip(classes, methods, keys, strict=True)):
            if method is not None:
                place = _Place(name, row, label(request_class))
                found[place.request_class, method].append((key, place))
        for stratum in found.values():
            stratum.sort(key=lambda item: item[0])
            del stratum[num_rows:]
    return {key: [place for _, place in stratum] for key, stratum in found.items()}


def _answers(store: Store, manifest: Manifest, places: Sequence[_Place]) -> Iterator[tuple[SampledAnswer, str | None]]:
    """The sampled rows with what their counters have against them, if anything."""
    columns = manifest.identity["columns"]
    names = {f"{name}_column": columns[name] for name in ("prompt", "messages", "request_id", "request_class")}
    parser = RowParser(InputConfig(**names), _sampling(manifest.identity["sampling"]))
    for name in dict.fromkeys(place.part for place in places):
        with store.open(name) as file:
            table = pq.read_table(file)
        for place in places:
            if place.part == name:
                yield _answer(table.slice(place.row, 1), place, manifest, parser)


def _answer(row: pa.Table, place: _Place, manifest: Manifest, parser: RowParser) -> tuple[SampledAnswer, str | None]:
    from batchspec.engine.reference import WrittenRow

    prefix = manifest.identity["columns"]["output_prefix"]
    own = [f"{prefix}{name}" for name in ("row_index", "method", "output_token_ids", "output_text", "finish_reason")]
    row_index, method, token_ids, text, finish_reason = (row.column(name)[0].as_py() for name in own)
    input_tokens, output_tokens = (row.column(f"{prefix}{name}_tokens")[0].as_py() for name in ("input", "output"))
    request = parser.parse(row.combine_chunks().to_batches()[0], row_index)[0]
    if not isinstance(request, Request):
        raise MismatchError(f"{place.part}, row_index {row_index}: its input cannot be read: {request.error_type}")
    rule = manifest.identity["acceptance_rule"]
    written = WrittenRow(
        request=request,
        token_ids=tuple(token_ids),
        text=text,
        finish_reason=finish_reason,
        input_tokens=input_tokens,
        draws_its_tokens=rule != "rejection" or request.sampling.greedy or method == Method.TARGET_ONLY,
    )
    counters: dict[str, Any] = {name: row.column(f"{prefix}{column}")[0].as_py() for name, column in _COUNTERS.items()}
    per_pos = {name: tuple(value) for name, value in counters.items() if name.endswith("_per_pos")}
    stats = DecodeStats(**{**counters, **per_pos})
    answer = SampledAnswer(row_index, place.request_class, method, written)
    try:
        stats.check(output_tokens)
    except ValueError as error:
        return answer, str(error)
    return answer, None if output_tokens == len(token_ids) else "output_tokens is not the number of its ids"


def _sampling(values: Mapping[str, Any]) -> SamplingParams:
    """The run's settings as the manifest has them, lists turned back into tuples."""
    bias = tuple((int(token), float(value)) for token, value in values["logit_bias"])
    return replace(SamplingParams(**values), stop=tuple(values["stop"]), logit_bias=bias)


def _engine_of(store: Store, part: str) -> Mapping[str, Any]:
    """What the part says of the engine that made it."""
    with store.open(part) as file:
        metadata = pq.read_schema(file).metadata or {}
    try:
        engine: Mapping[str, Any] = json.loads(metadata[f"{METADATA_PREFIX}engine".encode()])
    except (KeyError, ValueError) as error:
        raise MismatchError(f"{store.root}/{part} does not say which engine made it") from error
    return engine


def _model_path(model: str, manifest: Manifest, store: Store) -> Path:
    path = locate_model(EngineConfig(model=model))
    lines = differences(manifest.identity["model"], model_identity(path) or {}, "model.")
    if lines:
        raise MismatchError("\n  ".join([f"{model} is not the model that wrote {store.root}:", *lines]))
    assert path is not None
    return path


def _save(store: Store, audit: Audit) -> None:
    """Keep the audit beside the output. One that cannot be written there is no fault of what was audited."""
    try:
        with storage_faults(store):
            store.write(AUDIT_NAME, to_json(audit.as_json()).encode())
    except BatchspecError as error:
        logger.warning("the audit could not be kept: %s", error)
