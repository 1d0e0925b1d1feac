"""A run's folder: manifest, part logs of open shards, published shards, and the merged dataset."""
