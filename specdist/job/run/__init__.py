"""What is checked and written before a replica starts: manifest, promised work, preflight."""
