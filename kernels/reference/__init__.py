"""Every op in plain torch: the definition, and what runs where no kernel does."""
