"""Completions that match a schema, an expression or a grammar: masks, forced tokens, thinking budgets."""
