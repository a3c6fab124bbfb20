"""Every op in plain torch: the definition, and the CPU path."""
