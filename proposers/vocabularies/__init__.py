"""What the tokens of two vocabularies have in common, for drafts of another tokenizer than the target's."""
