"""The draft heads of the family: one file a head, in training form and in the layout it is published in."""
