"""Tasks by name: how a completion is read and scored."""
