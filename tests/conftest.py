"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("lbbsp", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("lbbsp")
