"""How drafters with logits get from logits to drafts."""
