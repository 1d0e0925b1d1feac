"""specdist against transformers: same models, prompts and lengths, in one run."""
