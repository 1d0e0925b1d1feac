"""How the file operations of replicas grow with their number: simulated, and with real processes."""
