"""Conformance suites, rank runners and strategies for tests; only tests import this."""
