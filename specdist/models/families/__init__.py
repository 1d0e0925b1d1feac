"""What a model's family is like, found without its weights: attention rules, layers, refusals."""
