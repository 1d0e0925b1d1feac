"""Both models of a run before they are loaded: their checkpoints, options and memory."""
