"""Drafting without the host, so that it can be captured, or recorded, with the rest of its step."""
