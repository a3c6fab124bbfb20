"""Draft heads: their models, and the published layouts they are read from."""
