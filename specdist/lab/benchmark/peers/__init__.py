"""Other engines beside specdist: each in an environment and a process of its own."""
