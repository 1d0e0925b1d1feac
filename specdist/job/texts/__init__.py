"""Tokenizer, chat template and constraints: from the text of a row to tokens and back."""
