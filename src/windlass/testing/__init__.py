"""Shipped test kit: fakes, faults and conformance suites."""
