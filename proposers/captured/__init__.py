"""Drafting without the host, so that a CUDA graph can capture it with the rest of its step."""
