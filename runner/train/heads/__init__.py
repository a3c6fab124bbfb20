"""Draft heads: one file each, in training form and in the layout in which it is published."""
