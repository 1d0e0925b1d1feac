"""The check at a start that a loaded model computes what its checkpoint says."""
