"""Our wall clock around vLLM against vLLM's own `LLM.generate`, on the same rows, loading left out of both.

    .venv-vllm/bin/python pipelines/benchmarks/vllm_overhead.py --model DIR --input FILE --max-batch 32

Prints one JSON line per run; `ours` is the summary's decode_wall_seconds, from the first row admitted to the last
retired. Runs alternate, each with an engine of its own, so that every one meets a cold prefix cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchspec.config import EngineConfig, InputConfig, OutputConfig, RouteConfig, RunConfig
from batchspec.pipeline.runner import generate
from batchspec.types import Method, SamplingParams


def ours(arguments: argparse.Namespace, source: Path, folder: Path) -> dict[str, Any]:
    config = RunConfig(
        input=InputConfig(inputs=(str(source),)),
        output=OutputConfig(output=str(folder / "out")),
        engine=EngineConfig(
            engine="vllm",
            model=arguments.model,
            dtype="bfloat16",
            max_batch=arguments.max_batch,
            kv_memory_bytes=2**31,
            vllm_arg=(f"max_model_len={arguments.max_model_len}", *arguments.vllm_arg),
        ),
        sampling=SamplingParams(max_new_tokens=arguments.max_new_tokens),
        routes=RouteConfig(method=Method(arguments.method), num_speculative_tokens=4),
    )
    figures = generate(config).as_json()
    return {"seconds": figures["decode_wall_seconds"], "output_tokens": figures["output_tokens"]}


def theirs(arguments: argparse.Namespace, source: Path, results: Any) -> None:
    """Runs in a process group of its own, which the parent ends: vLLM's processes do not always end by themselves. The
    engine core and the threads are as in a worker of ours: by itself vLLM keeps a core free on CPUs."""
    os.setsid()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from vllm import LLM
    from vllm import SamplingParams as VllmSamplingParams

    from batchspec.engine.vllm_load import llm_options
    from batchspec.types import Route

    route = Route(Method(arguments.method), 0 if arguments.method == "target_only" else 4)
    args = (f"max_model_len={arguments.max_model_len}", *arguments.vllm_arg)
    config = EngineConfig(dtype="bfloat16", max_batch=arguments.max_batch, kv_memory_bytes=2**31, vllm_arg=args)
    llm = LLM(arguments.model, **llm_options(config, route, "cpu", 1.0))
    messages = pq.read_table(source, columns=["messages"])["messages"].to_pylist()
    params = VllmSamplingParams(temperature=0, max_tokens=arguments.max_new_tokens)
    started = time.perf_counter()
    outputs = llm.chat(messages, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    results.put({"seconds": seconds, "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--input", required=True, help="Parquet with a messages column")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--method", choices=["target_only", "prompt_lookup"], default="target_only")
    parser.add_argument("--stride", type=int, default=1, help="take every Nth row")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--vllm-arg", action="append", default=[])
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        sys.exit("vLLM is not installed here: run this with .venv-vllm/bin/python (make test-vllm builds it)")
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        table = pq.read_table(arguments.input, columns=["messages"])
        source = Path(folder) / "rows.parquet"
        pq.write_table(table.take(list(range(0, table.num_rows, arguments.stride))), source)
        for repetition in range(arguments.repetitions):
            place = Path(folder) / str(repetition)
            place.mkdir()
            results = context.SimpleQueue()
            process = context.Process(target=theirs, args=(arguments, source, results))
            process.start()
            found = {"theirs": results.get()}
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            found["ours"] = ours(arguments, source, place)
            ratio = found["ours"]["seconds"] / found["theirs"]["seconds"]
            print(json.dumps({"repetition": repetition, **found, "ours_to_theirs": round(ratio, 4)}), flush=True)


if __name__ == "__main__":
    main()
