"""Tests of `jlora.verify`."""
