"""Drafting that needs nothing of the host, so that it can be captured with the step it belongs to."""
