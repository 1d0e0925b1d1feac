"""The flat batch of tokens that a forward runs, and its segments of one sequence each."""
