"""What all tests share: the folder of facts and models beside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine makes no case wrong: neither the time to make examples nor that to try one is a failure.
settings.register_profile("dovetail", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dovetail")


def shared_dir() -> Path:
    """The folder `shared` beside the repository; skips the test (or, at import, the module) where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("the shared facts and models (../shared) are not here", allow_module_level=True)
    return folder


@pytest.fixture
def shared() -> Path:
    """`shared_dir()` as a fixture."""
    return shared_dir()
