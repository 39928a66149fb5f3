"""A worker's way to import transformers, each time in a fresh interpreter."""

import subprocess
import sys

import pytest
import transformers.models

USES = {
    "names are those of transformers": """
from transformers.models import LlamaConfig, AutoTokenizer
assert LlamaConfig is transformers.LlamaConfig and AutoTokenizer is transformers.AutoTokenizer
""",
    "modules are found": """
import transformers.models.qwen3.modeling_qwen3 as module
from transformers.models import qwen3
assert transformers.models.qwen3 is qwen3 and qwen3.modeling_qwen3 is module
""",
    "modules that nobody has imported are found": "assert transformers.models.llama.LlamaConfig",
    "classes are found by a configuration": """
config = transformers.LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
assert type(transformers.AutoModelForCausalLM.from_config(config)).__name__ == "LlamaForCausalLM"
""",
    "what is not there is not": "assert not hasattr(transformers.models, 'nothing')",
    "it may be done twice": "import_transformers(); assert transformers.models is models",
}


@pytest.mark.parametrize("use", USES)
def test_the_package_of_models_works_without_having_been_run(use: str) -> None:
    code = f"""
import sys
from batchspec.engine.transformers_import import import_transformers
import_transformers()
import transformers
models = sys.modules["transformers.models"]
{USES[use]}
assert type(models) is type(sys)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_transformers_has_every_name_of_its_package_of_models() -> None:
    assert type(transformers.models) is type(transformers)  # the one that was run
    names = {name for name in transformers.models.__all__ if name[0].isupper()}
    assert len(names) > 100
    assert names <= set(dir(transformers))
