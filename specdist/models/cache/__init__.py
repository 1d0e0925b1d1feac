"""The paged cache of keys and values, its block tables, branches and windows."""
