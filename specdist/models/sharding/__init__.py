"""How layers and experts are cut over tensor-parallel ranks."""
