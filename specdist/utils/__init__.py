"""What every room may use: errors, tables, JSON, ranges, the host."""
