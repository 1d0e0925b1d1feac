"""The draft's side of a round, on a rank of its own or on the target's first."""
