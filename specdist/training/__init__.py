"""Training on what runs recorded: examples, heads, drafts."""
