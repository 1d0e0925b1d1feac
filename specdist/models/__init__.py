"""Models over a paged cache: loading, sharding, quantised weights, attention, forwards and graphs."""
