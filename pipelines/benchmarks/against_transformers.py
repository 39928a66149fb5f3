"""Count the rows whose ids differ from `transformers.generate(do_sample=False)`, in float32.

  python pipelines/benchmarks/against_transformers.py INPUT --model DIR --rows 24

Exits with 1 where a row differs.
"""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchspec.accounting.cost import StepAttributionRule
from batchspec.config import EngineConfig, InputConfig, RouteConfig, RunConfig
from batchspec.engine import load_engine
from batchspec.pipeline.measuring import readable_rows
from batchspec.profile.policy import static_policy
from batchspec.profile.scope import ListSource
from batchspec.types import Completion, Method, SamplingParams


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    sampling = SamplingParams(max_new_tokens=args.max_new_tokens)
    rows = readable_rows(RunConfig(input=InputConfig(inputs=(args.input,)), sampling=sampling))
    rows = [row for row in rows if row.messages is not None]
    requests = rows[:: max(1, len(rows) // args.rows)][: args.rows]

    config = EngineConfig(model=args.model, dtype="float32", max_batch=args.batch)
    engine = load_engine(config, "cpu", 2, 1.0, StepAttributionRule())
    found = {}
    for method, k in ((Method.TARGET_ONLY, 0), (Method.PROMPT_LOOKUP, 4)):
        outcomes = engine.run(ListSource(requests), static_policy(RouteConfig(method, k)))
        found[method] = {o.row_index: list(o.token_ids) for o in outcomes if isinstance(o, Completion)}

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    differing = 0
    for request in requests:
        ids = tokenizer.apply_chat_template(request.messages, add_generation_prompt=True, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(**ids, max_new_tokens=args.max_new_tokens, do_sample=False)
        expected = output[0, ids["input_ids"].shape[1] :].tolist()
        differing += any(by_row[request.row_index] != expected for by_row in found.values())
    print(f"{differing} of {len(requests)} rows differ from transformers.generate in float32")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
