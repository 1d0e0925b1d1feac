"""Random pairs that agree as often as wanted, for machines and sizes without a trained pair."""
