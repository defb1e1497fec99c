"""Handwritten digits, five nodes, two of them malicious."""
