"""Attention over a paged cache: kernels, latents, rotary embeddings."""
