"""Compiled indices of the draft-free methods: what was said before, and where. They know no request and no engine."""
