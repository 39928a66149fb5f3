"""From the command to the first row: what a job pays before it decodes, and what `--help` takes.

  python pipelines/benchmarks/start_up.py INPUT --model DIR [--repeats 5]

Beside it, in turns, plain transformers: imports, tokenizer, model, one token. The first repetition meets cold caches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PLAIN = """
import sys, torch, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
model.generate(**tokenizer("a", return_tensors="pt"), max_new_tokens=1)
"""


def seconds_of(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *command], capture_output=True, check=True)
    return time.perf_counter() - started


def first_row_seconds(source: str, model: str, folder: str) -> float:
    """From the command to the first row that is admitted, by the job's own record."""
    output = Path(folder) / "out"
    command = ["-m", "batchspec", "generate", source, "--model", model, "--profile", "none", "--method", "target-only"]
    command += ["--limit", "4", "--max-new-tokens", "8", "--output", str(output), "--overwrite"]
    started_at = time.time()
    seconds_of(command)
    (record,) = (output / "_batchspec" / "attempts").iterdir()
    return float(json.loads(record.read_text())["first_admitted_at"]) - started_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input")
    parser.add_argument("--model", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, list[float]] = {"first row": [], "plain transformers": [], "--help": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeats):
            found["first row"].append(first_row_seconds(args.input, args.model, folder))
            found["plain transformers"].append(seconds_of(["-c", PLAIN, args.model]))
            found["--help"].append(seconds_of(["-m", "batchspec", "--help"]))
            print(json.dumps({name: round(seconds[-1], 2) for name, seconds in found.items()}), flush=True)
    for name, seconds in found.items():
        print(f"{name}: median {statistics.median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f})")


if __name__ == "__main__":
    main()
