"""Which sequences and prompt chunks a round runs, and where a sequence stops."""
