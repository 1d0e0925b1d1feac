"""Files on a disk or in an object store, read and written whole."""
