"""A replica: models loaded on its ranks, costs measured, the cache allocated, an engine built."""
