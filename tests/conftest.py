"""What several tests share."""

from pathlib import Path

import pytest

from batchspec.engine.demo_model import demo_model_dir


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's directory; fetched where `make setup` has not done so yet."""
    return demo_model_dir()
