"""What the engine does with a round: acceptance, log-probabilities, failures and statistics."""
