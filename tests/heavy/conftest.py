"""What several heavy tests compare with."""

import pytest

from tests.heavy.runs import Result, train


@pytest.fixture(scope="session")
def hf_run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The default run through rollout=hf."""
    return train(tmp_path_factory.mktemp("hf") / "run", "rollout=hf", "logger=none", "trainer=cpu", timeout=900)
