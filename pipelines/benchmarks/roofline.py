"""The least time that a workload can take on this machine: its products or its bytes, whichever takes longer, at rates
measured here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from batchspec.engine.cpu.modules import PackedLinear
from batchspec.engine.model import PackedModel
from batchspec.engine.plain import torch_multiplies

# Rows that are multiplied to find the rate of large products.
_ROWS = 256


@dataclass(frozen=True)
class Machine:
    """What this machine can do at best: a large read, and products of the model's own shapes at 256 rows."""

    threads: int
    read_bytes_per_second: float
    flops_per_second: float

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def linears_of(model: PackedModel) -> list[PackedLinear]:
    return [module for module in model.module.modules() if isinstance(module, PackedLinear)]


def best(machines: Sequence[Machine]) -> Machine:
    """The best of what was measured of a machine from time to time."""
    return Machine(
        machines[0].threads,
        max(m.read_bytes_per_second for m in machines),
        max(m.flops_per_second for m in machines),
    )


def measure_machine(model: PackedModel, threads: int, repeats: int = 9) -> Machine:
    data = torch.ones(2**28, dtype=torch.float32)
    read = data.numel() * 4 / median_seconds(data.sum, repeats)
    del data
    return Machine(threads, read, max(_product_rates(linears_of(model), repeats)))


def _product_rates(linears: Sequence[PackedLinear], repeats: int) -> Iterator[float]:
    """Multiplications and additions per second of our packed products and of torch's, in the dtypes it is fast in."""
    flops = sum(2 * _ROWS * linear.in_features * linear.out_features for linear in linears)

    def rate(products: Sequence[Callable[[torch.Tensor], torch.Tensor]], dtype: torch.dtype) -> float:
        inputs = [torch.randn(_ROWS, linear.in_features, dtype=dtype) for linear in linears]

        def run() -> None:
            for product, x in zip(products, inputs, strict=True):
                product(x)

        return flops / median_seconds(run, repeats)

    yield rate(linears, torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.float32 or torch_multiplies(dtype):
            weights = [torch.zeros(linear.out_features, linear.in_features, dtype=dtype) for linear in linears]
            yield rate([partial(torch.nn.functional.linear, weight=weight) for weight in weights], dtype)


def step_seconds(
    model: PackedModel, machine: Machine, rows: float, logit_rows: float, pairs: float, kv_tokens: float
) -> float:
    """A forward of `rows` positions, `logit_rows` of which are wanted, attending to `pairs` (query, key) pairs over
    `kv_tokens` tokens of K and V: the reading of weights, K and V (and of logits, which are written, too), or the
    multiplications, the one done under the other."""
    linears = linears_of(model)
    head = [x for x in linears if x.out_features == model.vocab_size]
    body = [x for x in linears if x.out_features != model.vocab_size]
    products = 2 * rows * sum(x.in_features * x.out_features for x in body)
    products += 2 * logit_rows * sum(x.in_features * x.out_features for x in head)
    weight_bytes = sum(x.panels.numel() * 4 for x in (linears if logit_rows else body))
    config = model.module.config
    products += sum(2 * pairs * config.num_attention_heads * (x.key_dim + x.value_dim) for x in model.layers)
    kv_bytes = kv_tokens * model.dtype.itemsize * sum(layer.elements_per_token for layer in model.layers)
    logit_bytes = 2 * logit_rows * model.vocab_size * model.dtype.itemsize
    num_bytes = weight_bytes + kv_bytes + logit_bytes
    return float(max(num_bytes / machine.read_bytes_per_second, products / machine.flops_per_second))


def least_seconds(model: PackedModel, machine: Machine, rows: Sequence[tuple[int, int, int]], batch: int) -> float:
    """The whole workload, target-only, rows given as (input, output, cached input) tokens: prompts once (less what is
    shared), then one token per row and step, `batch` rows a step, each reading its context once (of what rows share,
    one copy)."""
    prompts = [(total, total - shared) for total, _, shared in rows]
    pairs = sum(new * (total - new) + new * (new + 1) / 2 for total, new in prompts)
    prefill = step_seconds(model, machine, sum(new for _, new in prompts), len(prompts), pairs, 0.0)
    steps = sum(o - 1 for _, o, _ in rows)  # the first token comes with the prompt
    if not steps:
        return prefill
    context = sum((i + o / 2) * (o - 1) for i, o, _ in rows) / steps
    shared = sum(cached * (o - 1) for _, o, cached in rows) / steps
    live = min(batch, len(rows))
    kv_tokens = live * (context - shared) + shared
    return prefill + steps / live * step_seconds(model, machine, live, live, live * context, kv_tokens)
