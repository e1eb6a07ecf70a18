"""The fixtures of the manager's tests."""

from tests.manager.conftest import moved, shared_world, world, write_programs

__all__ = ["moved", "shared_world", "world", "write_programs"]
