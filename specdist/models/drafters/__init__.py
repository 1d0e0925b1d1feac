"""How a drafter that reads the target's hidden states is loaded and run."""
