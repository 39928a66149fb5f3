"""What several tests share."""

import os
import tempfile
from pathlib import Path

import pytest

from batchspec.config import cache_dir
from batchspec.engine.demo_model import demo_model_dir

FOUND_HERE = {"profiles", "checked"}


def pytest_configure(config: pytest.Config) -> None:
    """Tests see the user's cache without what was found on this machine: profiles would route their jobs, and what
    passed the checks would be kept there by them."""
    if os.environ.get("PYTEST_XDIST_WORKER") is None:
        demo_model_dir()
        own = Path(tempfile.mkdtemp(prefix="batchspec-tests-"))
        for entry in cache_dir().iterdir():
            if entry.name not in FOUND_HERE:
                (own / entry.name).symlink_to(entry)
        os.environ["BATCHSPEC_CACHE"] = str(own)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's directory; fetched where `make setup` has not done so yet."""
    return demo_model_dir()
