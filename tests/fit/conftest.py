"""The fixtures of the manager's tests."""

from tests.manager.conftest import shared_world, world

__all__ = ["shared_world", "world"]
