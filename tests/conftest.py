"""Settings every test runs under: offline, one thread per process where several run, no usage of a user's cache."""

from __future__ import annotations

import logging
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_ALLOW_CROWDED_REPLICAS", "1")  # some start two, however small the machine is

import pytest
from hypothesis import HealthCheck, settings

from vllm.logger import forget_printed

# Property tests are a pure function of the commit, so that a red run is red everywhere; explore with HYPOTHESIS_PROFILE=explore.
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "explore", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _heard_loggers() -> None:
    """A test that sets logging up (a server, a dictConfig) must not deafen `caplog` in the tests after it."""
    forget_printed()
    root = logging.getLogger("vllm")
    root.propagate = True
    root.setLevel(logging.INFO)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.split(".")[0] == "vllm" and isinstance(logger, logging.Logger):
            logger.disabled = False
